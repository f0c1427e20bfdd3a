"""Attention in the architectures of Transformers: found, cut exactly, trained, saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import lbyl
from support import architectures, reference
from support.attention import silenced
from support.published import stir

pytest.importorskip("transformers")

FAST = ("llama", "gpt2", "t5", "phi3", "vit")
# Without an attention that can be followed, and the words that say so.
NONE = ("longformer", "squeezebert")
SINGLE = ("xglm",)  # its code needs float32

CASES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in architectures.NAMES
    if name not in NONE
]


def test_at_least_forty_architectures_are_tried() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_attention_of(name: str, tmp_path: Path) -> None:
    model, x = architectures.build(name)
    stir(model)
    if name not in SINGLE:
        model, x = reference.in_double(model, x)
    fresh = copy.deepcopy(model)
    graph = lbyl.trace(model, x, include="*:*")
    assert {unit.kind for unit in graph} & {"heads", "v"}, f"no attention: {graph}"
    result = lbyl.Prepared(model, x, graph).compress(0.5, method="none", criterion="random")
    with torch.no_grad():
        slim, original = result.model(x), model(x)
        exact = silenced(model, graph, result.plan.kept)(x)
    assert reference.distance(slim, exact) < (1e-4 if name in SINGLE else 1e-10)
    assert reference.distance(slim, original) > 1e-3
    assert result.after.parameters < result.before.parameters
    reference.assert_reloads(result, x, fresh, tmp_path / "out")
    reference.assert_trains(result.model, x)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in NONE])
def test_what_cannot_be_followed_is_refused_in_one_sentence(name: str) -> None:
    model, x = architectures.build(name)
    with pytest.raises(lbyl.LbylError, match="fits no attention"):
        lbyl.trace(model, x, include="*:*")
