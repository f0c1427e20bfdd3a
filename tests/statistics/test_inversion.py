"""Inverted images agree with BatchNorm's memory, and cost the network nothing."""

from __future__ import annotations

import pytest
import torch

import lbyl
from lbyl import zoo
from lbyl.statistics.inversion import Disagreement, invert
from lbyl.statistics.recalibrate import batch_moments, recalibrate
from lbyl.statistics.sources import procedural
from lbyl.statistics.synthetic import procedural_images
from lbyl.surgery import surviving_indices, tensors
from networks import fingerprint


def disagreement(model: torch.nn.Module, images: torch.Tensor) -> float:
    listener = Disagreement()
    with torch.no_grad(), listener:
        model(images)
    return float(torch.stack(listener.terms).sum())


def test_steps_bring_images_nearer_to_what_batchnorm_remembers() -> None:
    model = zoo.create("digits", "shipped")
    images = procedural_images(64, zoo.info("digits").input_shape)
    before = fingerprint(model)
    better = invert(model, images, steps=25)
    assert disagreement(model, better) < 0.3 * disagreement(model, images)
    assert fingerprint(model) == before and not better.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_compress_takes_them_by_name() -> None:
    model = zoo.create("digits", "shipped")
    x = torch.zeros(1, *zoo.info("digits").input_shape)
    with pytest.raises(lbyl.LbylError, match="inversion"):
        lbyl.compress(model, x, 0.5, images="inverted")
    with pytest.raises(lbyl.LbylError, match="BatchNorm"):
        plain = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Conv2d(4, 2, 3))
        lbyl.compress(plain, torch.zeros(1, 1, 8, 8), 0.5, images="inversion")


def test_recalibration_moves_batchnorm_by_what_changed() -> None:
    model = zoo.create("digits", "shipped")
    x = torch.zeros(1, *zoo.info("digits").input_shape)
    graph = lbyl.trace(model, x)
    passes = procedural(model, x, count=64)
    result = lbyl.compress(model, x, 0.5, method="none", graph=graph)
    indices = surviving_indices(graph, result.plan.kept)
    recalibrate(model, result.model, graph, indices, passes, share=1)
    before, after = batch_moments(model, passes), batch_moments(result.model, passes)
    old, new = tensors(model), tensors(result.model)
    for norm in graph.norms:
        keep = indices.get((norm.mean, 0), torch.arange(len(old[norm.mean])))
        moved = after[norm.mean][0] - before[norm.mean][0][keep]
        torch.testing.assert_close(
            new[norm.mean].double(), old[norm.mean].double()[keep] + moved, rtol=1e-4, atol=1e-4
        )
