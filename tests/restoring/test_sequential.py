"""The sequential fit: exact where it can be, better than the parallel one where errors pile up."""

from __future__ import annotations

import pytest
import torch

import lbyl
from lbyl.app import data
from lbyl.app.sources import zoo
from lbyl.methods import Echo
from support.by_hand import repeated
from support.networks import build, example, fingerprint

IN_ORDER = Echo(sequential=True)


@pytest.mark.slow
def test_it_beats_the_parallel_fit_where_much_is_pruned() -> None:
    info, held = zoo.info("digits"), data.load("digits")
    batches = data.load("digits", "train").batches(500, info.mean, info.std)
    images = torch.cat([x for x, _ in batches])
    network = zoo.create("digits", "shipped")
    prepared = lbyl.prepare(network, torch.zeros(1, *info.input_shape), data=images)
    parallel, ordered = prepared.compress(0.8), prepared.compress(0.8, method=IN_ORDER)
    assert ordered.corrections.sequential == len(ordered.graph.consumers)
    assert parallel.corrections.sequential == 0
    assert ordered.plan.kept.keys() == parallel.plan.kept.keys()
    right = [data.evaluate("digits", r.model, held) for r in (parallel, ordered)]
    assert right[1] - right[0] > 5


@pytest.mark.parametrize("name", ["chain", "basic", "bottleneck"])
def test_nothing_pruned_changes_nothing_and_pruned_it_beats_the_cut(name: str) -> None:
    model, x = build(name), example(name)
    images = torch.randn(256, *x.shape[1:])
    before, wanted = fingerprint(model), model(images)
    prepared = lbyl.prepare(model, x, data=list(images.split(64)))
    whole = prepared.compress(0.0, method=IN_ORDER).model
    torch.testing.assert_close(whole(images), wanted, rtol=1e-5, atol=1e-5)
    slim, cut = (prepared.compress(0.5, method=m).model for m in (IN_ORDER, "none"))
    assert (slim(images) - wanted).norm() < (cut(images) - wanted).norm()
    assert fingerprint(model) == before


def test_every_layer_gives_the_mean_that_it_gave() -> None:
    model, x = build("dense").double(), example("dense", 64).double()
    prepared = lbyl.prepare(model, x[:2], data=repeated(x))
    slim = prepared.compress({"*": 0.5}, method=IN_ORDER).model
    torch.testing.assert_close(slim(x).mean(0), model(x).mean(0), rtol=1e-6, atol=1e-6)


def test_it_needs_images() -> None:
    model, x = build("chain"), example("chain")
    with pytest.raises(lbyl.LbylError, match=r"sequential=True.*data="):
        lbyl.compress(model, x, 0.5, method=IN_ORDER)
