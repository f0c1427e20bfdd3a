"""Every published network, one at a time: found, cut exactly, and still a model afterwards."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import published
import reference
from lbyl.surgery import weightless_copy

pytestmark = pytest.mark.slow
pytest.importorskip("torchvision")
pytest.importorskip("timm")

DOUBLE_LIMIT = 60_000_000  # parameters up to which float64 is affordable
SECONDS = 30  # of one core, for tracing and planning any network

# Capturing a graph takes longest of all and does not depend on widths: one network of each kind.
# Those of timm and transformers are of a kind of their own each.
CAPTURED = """
alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t
mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnet50
resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_0 swin_t swin_v2_t vgg11 vgg11_bn vit_b_32
wide_resnet50_2 deeplabv3_mobilenet_v3_large fcn_resnet50 lraspp_mobilenet_v3_large r3d_18
r2plus1d_18 mc3_18 s3d fasterrcnn_mobilenet_v3_large_320_fpn fcos_resnet50_fpn
keypointrcnn_resnet50_fpn maskrcnn_resnet50_fpn retinanet_resnet50_fpn ssd300_vgg16
ssdlite320_mobilenet_v3_large
""".split()

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
        assert any(NONE[name] in reason for reason in graph.left_alone.values())
        record_property("row", json.dumps(reference.summary(model, graph, seconds)))
        return
    assert len(graph), f"nothing to prune: {graph}"
    if sum(p.numel() for p in model.parameters()) <= DOUBLE_LIMIT:
        model, inputs = reference.in_double(model, inputs)
    fresh = weightless_copy(model, {})  # as built: nothing has run in it yet
    proof = reference.prove_cut(model, inputs, graph)
    record_property("row", json.dumps(reference.summary(model, graph, seconds, proof)))
    reference.assert_exact(proof, graph)
    library, _, short = name.partition("/")
    untried = [] if library in ("timm", "transformers") or short in CAPTURED else ["compile"]
    directory = tmp_path / "out"
    missed = reference.assert_survives(model, proof.result, inputs, fresh, directory, untried)
    record_property("missed", json.dumps(missed))
    gc.collect()
