"""Every published network, one at a time: found, cut exactly, and still a model afterwards."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lbyl.surgery.cut import weightless_copy
from support import published, reference

pytestmark = pytest.mark.slow
pytest.importorskip("torchvision")
pytest.importorskip("timm")

DOUBLE_LIMIT = 60_000_000  # parameters up to which float64 is affordable
SECONDS = 30  # of one core, for tracing and planning any network

# Networks without a channel that could go alone, and the words that say so.
NONE = {
    "timm/convnextv2_atto": "mixes its channels",  # responses are normalised over all channels
    "timm/mambaout_femto": "unequal pieces",  # the hidden layer is split at fixed places
    "timm/nf_resnet26": "computed in the forward pass",  # weights are standardised
}


@pytest.mark.parametrize("name", published.every())
def test_network(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    if name.startswith("transformers/"):
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs = published.every()[name]()
    published.stir(model)
    graph, seconds = reference.traced(model, inputs)
    assert seconds < SECONDS, "tracing and planning take too long"
    if name in NONE:
        assert not len(graph)
        assert any(NONE[name] in reason for reason in graph.unprunable.values())
        record_property("row", json.dumps(reference.summary(model, graph, seconds)))
        return
    assert len(graph), f"nothing to prune: {graph}"
    if sum(p.numel() for p in model.parameters()) <= DOUBLE_LIMIT:
        model, inputs = reference.in_double(model, inputs)
    fresh = weightless_copy(model)  # as built: nothing has run in it yet
    cut = reference.prove_cut(model, inputs, graph)
    record_property("row", json.dumps(reference.summary(model, graph, seconds, cut)))
    reference.assert_exact(cut, graph)
    missed = reference.assert_survives(model, cut.result, inputs, fresh, tmp_path / "out")
    record_property("missed", json.dumps(missed))
    gc.collect()
