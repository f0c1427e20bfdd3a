"""Collecting: moments equal those of activations caught by hooks, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import lbyl
from lbyl.inputs.batches import FreshInputs, procedural
from lbyl.inputs.loader import own_batches
from lbyl.statistics.collect import collect, collect_moments
from lbyl.statistics.moments import Moments, Statistics
from support import quick
from support.measure import moments_of
from support.networks import NETWORKS, build, consumer_samples, example, fingerprint

CONSUMERS = [
    ("chain", "3"),
    ("chain", "8"),
    ("biased", "2"),
    ("bottleneck", "conv2"),
    ("dense", "3"),
]


@pytest.mark.parametrize(("name", "consumer"), CONSUMERS)
def test_moments_on_own_inputs_equal_those_of_hooks(name: str, consumer: str) -> None:
    model, x = build(name, 1).double(), example(name, 60).double()
    statistics = quick.own_statistics(model, x[:2], x)
    found = statistics.get(consumer)
    assert found is not None and statistics.source == "own"
    mean, covariance = moments_of(consumer_samples(model, consumer, x)[0])
    torch.testing.assert_close(found.mean.flatten(), mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-9, atol=1e-9)


def procedural_pass(model: torch.nn.Module, x: Tensor, seed: int = 0) -> Moments:
    """Moments as they are measured, before running statistics correct them."""
    graph = lbyl.trace(model, x)
    passes = procedural(model, x, count=48, seed=seed)
    return collect_moments(model, graph, passes, seed=seed).moments["3"]


def test_procedural_moments_are_those_under_batch_statistics() -> None:
    model, x = build("chain", 1).double(), example("chain").double()
    found = procedural_pass(model, x, seed=2)
    images = next(iter(procedural(model, x, count=48, seed=2).batches))
    twin = build("chain", 1).double().train()
    mean, covariance = moments_of(consumer_samples(twin, "3", images)[0])
    torch.testing.assert_close(found.mean.flatten(), mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-9, atol=1e-9)


def test_channels_remember_what_batchnorm_says() -> None:
    """With batch statistics each channel has mean β and deviation |γ| before the activation."""
    model, x = build("chain", 1), example("chain")
    model[2] = torch.nn.Identity()
    model[3].padding = (0, 0)  # padded zeros are no part of what the norm saw
    model[3].weight = torch.nn.Parameter(torch.randn(8, 10, 1, 1))
    model[3].kernel_size = (1, 1)
    found = procedural_pass(model, x)
    torch.testing.assert_close(found.mean[:, 0].float(), model[1].bias.detach(), rtol=0, atol=1e-4)
    deviation = found.covariance.diagonal().sqrt().float()
    torch.testing.assert_close(deviation, model[1].weight.detach().abs(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_model_is_not_changed(name: str) -> None:
    model, x = build(name, 1), example(name)
    model.train()
    next(iter(model.children())).eval()
    before = fingerprint(model)
    quick.statistics(model, x)
    quick.statistics(model, x, example(name, 20))
    assert fingerprint(model) == before


@pytest.mark.parametrize("name", ["chain", "flattened", "dense"])
@pytest.mark.parametrize("method", ["echo", "none"])
def test_statistics_are_reusable(name: str, method: str) -> None:
    model, x = build(name, 1), example(name, 4)
    statistics = quick.statistics(model, x, 64)
    for ratio in (0.25, 0.5):
        correcting = quick.correcting(method, "mean+variance")
        fresh = lbyl.compress(model, x, ratio, data=64, method=correcting)
        reused = lbyl.compress(model, x, ratio, data=statistics, method=correcting)
        assert torch.equal(fresh.model(x), reused.model(x))


@pytest.mark.parametrize("name", ["chain", "flattened"])
@pytest.mark.parametrize("taps", ["auto", "channels"])
def test_save_and_load(tmp_path: Path, name: str, taps: str) -> None:
    model, x = build(name, 1), example(name, 4)
    statistics = quick.statistics(model, x, 64, taps=taps)
    path = tmp_path / "statistics.safetensors"
    statistics.save(path)
    again = Statistics.load(path)
    assert again.source == statistics.source and list(tmp_path.iterdir()) == [path]
    assert b"pickle" not in path.read_bytes() and path.read_bytes()[:2] != b"PK"
    one, two = (lbyl.compress(model, x, 0.5, data=s).model(x) for s in (statistics, again))
    assert torch.equal(one, two)


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(lbyl.LbylError, match="no statistics file"):
        Statistics.load(tmp_path / "absent")
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(lbyl.LbylError, match="holds no statistics"):
        Statistics.load(tmp_path / "other.safetensors")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "found.safetensors"
    quick.statistics(build("chain"), example("chain"), 16).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(lbyl.LbylError, match=r"found.safetensors.*again"):
        Statistics.load(path)


@pytest.mark.parametrize("kind", ["tensor", "pairs", "lists", "loader", "generator"])
def test_own_data_come_in_any_form_and_labels_are_ignored(kind: str) -> None:
    model, x = build("chain", 1), example("chain", 40)
    labels = torch.arange(40)
    data = torch.utils.data.TensorDataset(x, labels)
    sources = {
        "tensor": x,
        "pairs": [(x[:20], labels[:20]), (x[20:], labels[20:])],
        "lists": [[x[:20], labels[:20]], [x[20:], labels[20:]]],
        "loader": torch.utils.data.DataLoader(data, batch_size=20),
        "generator": (batch for batch in x.split(20)),
    }
    # A criterion is named: between two, judged on a first batch, the sizes of batches may decide.
    found = lbyl.compress(model, x[:2], 0.5, criterion="l2", data=sources[kind]).model(x)
    wanted = lbyl.compress(model, x[:2], 0.5, criterion="l2", data=[x[:20], x[20:]]).model(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_data_without_a_batch_is_refused() -> None:
    model, x = build("chain", 1), example("chain")
    with pytest.raises(lbyl.LbylError, match="no batch"):
        lbyl.compress(model, x, 0.5, data=[])
    with pytest.raises(lbyl.LbylError, match="batches of data= must be"):
        lbyl.compress(model, x, 0.5, data=["image.png"])


def test_statistics_of_another_model_are_refused() -> None:
    model, x = build("chain", 1), example("chain")
    foreign = quick.statistics(build("dense", 1), example("dense"), 16)
    with pytest.raises(lbyl.LbylError, match="belong to another model"):
        lbyl.compress(model, x, 0.5, data=foreign)
    unknown = quick.statistics(build("basic", 1), x, 16)
    with pytest.raises(lbyl.LbylError, match="none of its layers"):
        lbyl.compress(model, x, 0.5, data=unknown)


def test_seeds_decide_the_images_and_nothing_else_does() -> None:
    model, x = build("chain", 1), example("chain")
    first = [quick.statistics(model, x, 16, seed=seed).get("3") for seed in (0, 0, 1)]
    torch.randn(7)
    assert first[0] is not None and first[1] is not None and first[2] is not None
    assert torch.equal(first[0].covariance, first[1].covariance)
    assert not torch.equal(first[0].covariance, first[2].covariance)
    state = torch.random.get_rng_state()
    quick.statistics(model, x, 16)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("count", [20, 300])
def test_few_own_inputs_are_blended_with_data_free_ones_by_their_number(count: int) -> None:
    """C = w C_own + (1 − w) C_free with w = n / (n + 64), the mean likewise."""
    model, x = build("chain", 1), example("chain", count)
    graph = lbyl.trace(model, x[:2])
    own, free = own_batches(model, x), FreshInputs(model, x[:2]).collection()
    blended = collect(model, graph, own, prior=free)
    assert blended.source == "own and procedural"
    weight = count / (count + 64)
    apart = collect(model, graph, own), collect(model, graph, free)
    for name, found in blended.moments.items():
        mine, theirs = (statistics.moments[name] for statistics in apart)
        for part in ("mean", "covariance"):
            a, b = getattr(mine, part), getattr(theirs, part)
            torch.testing.assert_close(getattr(found, part), weight * a + (1 - weight) * b)
        assert found.mixed is None  # what the weight makes of it is not known any more


def test_own_inputs_that_are_many_speak_for_themselves() -> None:
    model, x = build("dense", 1), example("dense", 1400)
    prepared = lbyl.prepare(model, x[:2], data=x)
    statistics = prepared.statistics()
    assert statistics.source == "own"
    assert prepared.own_parts is not None and prepared.own_parts.fitted.examples == 1050
    alone = collect(model, prepared.graph, prepared.own_parts.fitted)
    assert all(
        torch.equal(m.covariance, alone.moments[n].covariance)
        for n, m in statistics.moments.items()
    )


def test_what_is_a_feature_does_not_depend_on_how_few_inputs_are_own() -> None:
    """Two images would not have their taps told apart; with the others beside them they have."""
    model, x = build("chain", 1), example("chain", 2)
    moments = lbyl.prepare(model, x, data=x).statistics().moments
    free = lbyl.prepare(model, x).statistics().moments
    assert {n: m.taps for n, m in moments.items()} == {n: m.taps for n, m in free.items()}
