"""Inverted images agree with BatchNorm's memory, and cost the network nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import lbyl
from lbyl.inputs.batches import InputBatches, inverted, procedural
from lbyl.inputs.inversion import NormInputs, disagreement, invert
from lbyl.inputs.procedural import procedural_images
from lbyl.models import zoo
from lbyl.restoring.recalibrate import batch_moments, recalibrate
from lbyl.surgery.indices import kept_indices
from lbyl.torchkit.tensors import tensors
from support.networks import fingerprint


def apart(model: torch.nn.Module, images: torch.Tensor) -> float:
    """How far all BatchNorms' inputs are from their running statistics."""
    watch = NormInputs()
    with torch.no_grad(), watch:
        model(images)
    return sum(float(disagreement(seen)) for seen in watch.seen)


def test_steps_bring_images_nearer_to_what_batchnorm_remembers() -> None:
    model = zoo.create("digits", "shipped")
    images = procedural_images(64, zoo.info("digits").input_shape)
    before = fingerprint(model)
    better = invert(model, [images], steps=25)[0]
    assert apart(model, better) < 0.3 * apart(model, images)
    assert fingerprint(model) == before and not better.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_compress_takes_them_by_name() -> None:
    model = zoo.create("digits", "shipped")
    x = torch.zeros(1, *zoo.info("digits").input_shape)
    with pytest.raises(lbyl.LbylError, match="inversion"):
        lbyl.compress(model, x, 0.5, data="inverted")
    with pytest.raises(lbyl.LbylError, match="BatchNorm"):
        plain = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Conv2d(4, 2, 3))
        lbyl.compress(plain, torch.zeros(1, 1, 8, 8), 0.5, data="inversion")


def test_a_compression_on_inverted_images_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lbyl.inputs.batches.invert", partial(invert, steps=2))
    monkeypatch.setattr("lbyl.inputs.batches.image_count", lambda shape: 64)
    model = zoo.create("digits", "shipped")
    x = torch.zeros(1, *zoo.info("digits").input_shape)
    before = fingerprint(model)
    prepared = lbyl.prepare(model, x, data="inversion")
    result = prepared.compress(0.5)
    assert result.data == "inversion" and "inversion" in result.story
    assert {"images", "inversion", "collect"} <= result.seconds.keys()
    assert result.corrections.recalibrated == len(result.graph.norms)  # a second run needs no data
    assert fingerprint(model) == before
    plain = lbyl.compress(model, x, 0.5)
    assert any(
        not torch.equal(a, b) for a, b in zip(plain.model.parameters(), result.model.parameters())
    )


def test_inverted_batches_keep_their_form_and_move_towards_batchnorm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = zoo.create("digits", "shipped")
    x = torch.zeros(1, *zoo.info("digits").input_shape)
    drawn = procedural(model, x, count=48)
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr("lbyl.inputs.batches.invert", partial(invert, steps=20))
    changed = inverted(model, drawn, lambda *step: told.append(step))
    assert changed.source == "inversion" and not changed.batch_statistics
    assert changed.count == drawn.count == len(list(changed.batches))
    assert told[-1] == ("inverting", 20, 20)
    for before, after in zip(drawn.batches, changed.batches):
        assert after.shape == before.shape and after.dtype == before.dtype
        assert apart(model, after) < apart(model, before)


def test_only_networks_of_one_image_tensor_are_inverted() -> None:
    text = InputBatches([torch.ones(2, 5, dtype=torch.long)], 1, True, "procedural")
    lists = InputBatches([([torch.zeros(3, 8, 8)],)], 1, True, "procedural")
    for inputs in (text, lists):
        with pytest.raises(lbyl.LbylError, match="one image tensor"):
            inverted(torch.nn.Identity(), inputs)


def test_an_objective_of_the_output_is_pursued_too() -> None:
    model = zoo.create("digits", "shipped")
    images = procedural_images(32, zoo.info("digits").input_shape)

    def unlike_three(output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, torch.full((32,), 3))

    (changed,) = invert(model, [images], steps=25, objective=unlike_three)
    with torch.no_grad():
        before = unlike_three(model(images))
        after = unlike_three(model(changed))
    assert float(after) < 0.5 * float(before)


def test_recalibration_moves_batchnorm_by_what_changed() -> None:
    model = zoo.create("digits", "shipped")
    x = torch.zeros(1, *zoo.info("digits").input_shape)
    graph = lbyl.trace(model, x)
    passes = procedural(model, x, count=64)
    result = lbyl.compress(model, x, 0.5, method="none")
    indices = kept_indices(graph, result.plan.kept)
    recalibrate(model, result.model, graph, indices, passes, step=1)
    before, after = batch_moments(model, passes), batch_moments(result.model, passes)
    old, new = tensors(model), tensors(result.model)
    for norm in graph.norms:
        keep = indices.get((norm.mean, 0), torch.arange(len(old[norm.mean])))
        moved = after[norm.mean][0] - before[norm.mean][0][keep]
        torch.testing.assert_close(
            new[norm.mean].double(), old[norm.mean].double()[keep] + moved, rtol=1e-4, atol=1e-4
        )
