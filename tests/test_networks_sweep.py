"""Every published network, one at a time: found, cut exactly, and still a model afterwards."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch

import lbyl
import published
import reference

pytestmark = pytest.mark.slow
pytest.importorskip("torchvision")
pytest.importorskip("timm")

SURVIVAL_LIMIT = 30_000_000  # parameters up to which saving and exporting are tried too
DOUBLE_LIMIT = 60_000_000

# Networks without a channel that could go alone, and the words that say so.
NONE = {
    "timm/convnextv2_atto": "mixes its channels",  # responses are normalised over all channels
    "timm/mambaout_femto": "unequal pieces",  # the hidden layer is split at fixed places
    "timm/nf_resnet26": "computed in the forward pass",  # weights are standardised
}


@pytest.mark.parametrize("name", published.every())
def test_network(name: str, tmp_path: Path) -> None:
    if name.startswith("transformers/"):
        pytest.importorskip("transformers")
    build = published.every()[name]
    torch.manual_seed(0)
    model, inputs = build()
    published.stir(model)
    start = time.perf_counter()
    graph = lbyl.trace(model, inputs)
    assert time.perf_counter() - start < 60, "tracing takes too long"
    if name in NONE:
        assert not len(graph)
        assert any(NONE[name] in reason for reason in graph.left_alone.values())
        return
    assert len(graph), f"nothing to prune: {graph}"
    size = sum(p.numel() for p in model.parameters())
    if size <= DOUBLE_LIMIT:
        model, inputs = reference.in_double(model, inputs)
    proof = reference.prove_cut(model, inputs, graph)
    reference.assert_exact(proof, graph)
    if size <= SURVIVAL_LIMIT:
        del model
        fresh = build()[0].double()
        reference.assert_survives(proof.result, inputs, fresh, tmp_path / "out")
    gc.collect()
