"""The sequential fit: exact where it can be, better than the parallel one where errors pile up."""

from __future__ import annotations

import pytest
import torch

import lbyl
from lbyl import data
from lbyl.models import zoo
from support.networks import build, example, fingerprint

IN_ORDER = lbyl.methods.Echo(sequential=True)


def digits() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    info = zoo.info("digits")
    batches = data.load("digits", "train").batches(500, info.mean, info.std)
    images = torch.cat([x for x, _ in batches])
    return zoo.create("digits", "shipped"), torch.zeros(1, *info.input_shape), images


def test_it_beats_the_parallel_fit_where_much_is_pruned() -> None:
    model, x, images = digits()
    held = data.load("digits")
    prepared = lbyl.prepare(model, x, data=images)
    parallel = prepared.compress(0.8)
    ordered = prepared.compress(0.8, method=IN_ORDER)
    assert ordered.corrections.sequential == len(ordered.graph.consumers)
    assert parallel.corrections.sequential == 0
    assert ordered.plan.kept.keys() == parallel.plan.kept.keys()
    gain = data.evaluate("digits", ordered.model, held) - data.evaluate(
        "digits", parallel.model, held
    )
    assert gain > 5


@pytest.mark.parametrize("name", ["chain", "basic", "bottleneck"])
def test_nothing_pruned_changes_nothing(name: str) -> None:
    model, x = build(name), example(name)
    images = torch.randn(64, *x.shape[1:])
    before = fingerprint(model)
    result = lbyl.compress(model, x, 0.0, data=images, method=IN_ORDER)
    torch.testing.assert_close(result.model(images), model(images), rtol=1e-5, atol=1e-5)
    assert fingerprint(model) == before


@pytest.mark.parametrize("name", ["chain", "basic", "bottleneck"])
def test_the_fitted_output_has_the_originals_mean(name: str) -> None:
    model, x = build(name), example(name)
    images = torch.randn(256, *x.shape[1:])
    loader = list(images.split(64))  # batches of a loader run at once
    slim = lbyl.compress(model, x, 0.5, data=loader, method=IN_ORDER).model
    plain = lbyl.compress(model, x, 0.5, method="none").model
    wanted = model(images)
    assert slim(images).isfinite().all()
    assert (slim(images) - wanted).norm() < (plain(images) - wanted).norm()


def test_it_needs_images() -> None:
    model, x = build("chain"), example("chain")
    with pytest.raises(lbyl.LbylError, match=r"sequential=True.*data="):
        lbyl.compress(model, x, 0.5, method=IN_ORDER)
