"""`fold`: clusters, averages and sums, against the definitions written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lbyl
from lbyl.graph.weights import unit_weights
from lbyl.methods import fold
from lbyl.methods.fold import (
    _distances,
    _filled,
    _gain,
    _gram,
    _lloyd,
    _made,
    _spread_starts,
    k_means,
)
from lbyl.planning.plan import Plan
from support.networks import NETWORKS, build, example, randomise


def gram_of(points: Tensor) -> Tensor:
    return points @ points.T


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------------- k-means


@given(st.integers(1, 12), st.integers(0, 1000))
def test_every_cluster_has_a_member(count: int, seed: int) -> None:
    torch.manual_seed(seed)
    points = torch.randn(12, 5, dtype=torch.float64)
    points[6:] = points[0]  # only seven different ones
    label = k_means(gram_of(points), count, 2, generator(seed))
    assert label.unique().tolist() == list(range(count))


def test_distances_are_those_to_the_means() -> None:
    points = torch.randn(9, 4, dtype=torch.float64)
    label = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 3])  # the last is a cluster of its own
    means = torch.stack([points[label == c].mean(0) for c in range(4)])
    expected = torch.cdist(points, means) ** 2
    torch.testing.assert_close(_distances(gram_of(points), label, 4), expected)
    empty = points.square().sum(1, keepdim=True)  # the mean of nothing counts as the origin
    found = _distances(gram_of(points), label, 5)
    torch.testing.assert_close(found, torch.cat([expected, empty], 1))


def test_far_apart_clusters_are_found() -> None:
    centres = 50 * torch.eye(4, dtype=torch.float64)
    points = centres.repeat_interleave(6, 0) + torch.randn(24, 4, dtype=torch.float64)
    label = k_means(gram_of(points), 4, 4, generator()).reshape(4, 6)
    assert bool((label == label[:, :1]).all()) and len(label[:, 0].unique()) == 4


def test_no_point_is_nearer_to_another_cluster() -> None:
    points = torch.randn(40, 6, dtype=torch.float64)
    gram = gram_of(points)
    label = k_means(gram, 7, 3, generator(1))
    distance = _distances(gram, label, 7)
    own = distance.gather(1, label[:, None])[:, 0]
    torch.testing.assert_close(own, distance.amin(1))


# ------------------------------------------------------------------------------- the method


def doubled(seed: int) -> nn.Sequential:
    """A chain in which channels 5…9 of the first layer are 0…4 once more, readers too."""
    model = build("chain", seed)
    assert isinstance(model, nn.Sequential)
    with torch.no_grad():
        tensors = [model[0].weight, *model[1].parameters(), model[1].running_mean]
        for tensor in [*tensors, model[1].running_var]:
            tensor[5:] = tensor[:5]
        model[3].weight[:, 5:] = model[3].weight[:, :5]
    return model


@given(st.integers(0, 1000))
def test_duplicates_fold_exactly(seed: int) -> None:
    model, x = doubled(seed), example("chain", 4)
    result = lbyl.compress(model, x, 0.5, method="fold", include="0")
    assert sorted(k % 5 for k in result.plan.kept["0"].tolist()) == [0, 1, 2, 3, 4]
    torch.testing.assert_close(result.model(x), model(x), rtol=1e-4, atol=1e-4)


@given(st.integers(0, 1000))
def test_duplicates_fold_exactly_under_a_foreign_plan(seed: int) -> None:
    """Whatever the readers are."""
    model, x = doubled(seed), example("chain", 4)
    with torch.no_grad():
        model[3].weight.copy_(torch.randn_like(model[3].weight) / 5)
    plan = Plan({"0": torch.tensor([0, 2, 3, 6, 9])}, {"0": 10})
    slim = lbyl.compress(model, x, plan, method="fold").model
    torch.testing.assert_close(slim(x), model(x), rtol=1e-4, atol=1e-4)


def test_duplicates_fold_exactly_where_the_plan_is_that_of_other_clusters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clusters by unlike consumers may keep the channels of a plan and join others to them."""
    model, x = doubled(3), example("chain", 4)
    with torch.no_grad():
        model[3].weight.copy_(torch.randn_like(model[3].weight) / 5)
    kept = torch.tensor([0, 2, 3, 6, 9])
    label = torch.tensor([0, 0, 1, 2, 1, 4, 3, 3, 2, 4])
    monkeypatch.setattr(lbyl.methods.Fold, "_clusters", lambda *given: (kept, label))
    slim = lbyl.compress(model, x, Plan({"0": kept}, {"0": 10}), method="fold").model
    torch.testing.assert_close(slim(x), model(x), rtol=1e-4, atol=1e-4)


def test_filters_are_averaged_and_readers_summed() -> None:
    model, x = build("chain", 3), example("chain")
    graph = lbyl.trace(model, x)
    weights = unit_weights(graph, model)["0"]
    method = lbyl.methods.Fold()
    kept = method.select(weights, 6)
    assert torch.equal(kept, method.select(weights, 6)) and bool((kept.diff() > 0).all())
    delivery = method.deliver(weights, kept, None)
    members, gain = delivery.matrix.bool(), delivery.gain
    assert gain is not None and bool((members.sum(1) == 1).all())
    assert bool(members[kept, torch.arange(6)].all())
    plan = Plan({"0": kept}, {"0": 10})
    slim = lbyl.compress(model, x, plan, method=method).model
    for c in range(6):
        of = members[:, c]
        torch.testing.assert_close(slim[0].weight[c], model[0].weight[of].mean(0))
        torch.testing.assert_close(slim[1].running_var[c], model[1].running_var[of].mean())
        torch.testing.assert_close(slim[1].bias[c], model[1].bias[of].mean())
        wanted = model[1].weight[of].mean() * float(gain[c])
        torch.testing.assert_close(slim[1].weight[c], wanted)
        torch.testing.assert_close(slim[3].weight[:, c], model[3].weight[:, of].sum(1))


def test_layers_that_read_and_make_are_summed_and_averaged_both() -> None:
    model, x = build("chain", 3), example("chain")
    graph = lbyl.trace(model, x)
    weights, method = unit_weights(graph, model), lbyl.methods.Fold()
    result = lbyl.compress(model, x, 0.5, method=method)
    kept = {name: torch.as_tensor(k) for name, k in result.plan.kept.items()}
    first = method.deliver(weights["0"], kept["0"], None)
    second = method.deliver(weights["3"], kept["3"], None)
    assert second.merge is not None
    wanted = torch.einsum("to,oikl,ic->tckl", second.merge, model[3].weight.double(), first.matrix)
    torch.testing.assert_close(result.model[3].weight.double(), wanted, rtol=1e-5, atol=1e-6)


@given(st.integers(2, 6), st.integers(0, 100))
def test_the_gain_undoes_what_averaging_takes(size: int, seed: int) -> None:
    """White inputs, filters of one norm: variance of the average times gain² is that of one."""
    torch.manual_seed(seed)
    filters = torch.nn.functional.normalize(torch.rand(size, 20).double(), dim=1)
    gain = _gain(filters, torch.ones(size, 1, dtype=torch.float64))
    assert float(filters.mean(0).square().sum() * gain[0] ** 2) == pytest.approx(1)


def test_opposite_filters_do_not_blow_up() -> None:
    filters = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]).double()
    gain = _gain(filters, torch.ones(3, 1, dtype=torch.float64))
    assert float(gain[0]) == pytest.approx(3**0.5)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("criterion", ["l2", "random-2"])
def test_a_plan_of_another_criterion_works(name: str, criterion: str) -> None:
    model, x = build(name), example(name, 3)
    plan = lbyl.compress(model, x, 0.5, method="none", criterion=criterion).plan
    result = lbyl.compress(model, x, plan, method="fold")
    assert bool(result.model(x).isfinite().all())
    assert all(torch.equal(result.plan.kept[n], k) for n, k in plan.kept.items())


def test_depthwise_layers_between_are_averaged_too() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.Conv2d(8, 4, 1),
    )
    randomise(model)
    x = torch.randn(2, 3, 6, 6)
    graph = lbyl.trace(model, x)
    weights = unit_weights(graph, model)["0"]
    kept = lbyl.methods.Fold().select(weights, 5)
    merge = lbyl.methods.Fold().deliver(weights, kept, None).merge
    assert merge is not None
    slim = lbyl.compress(model, x, Plan({"0": kept}, {"0": 8}), method="fold").model
    wanted = torch.einsum("tm,m...->t...", merge, model[3].weight.double())
    torch.testing.assert_close(slim[3].weight.double(), wanted, rtol=1e-5, atol=1e-6)
    # The gain belongs to the normalisation of the merged filters, not to the one behind.
    wanted = merge @ model[4].weight.double()
    torch.testing.assert_close(slim[4].weight.double(), wanted, rtol=1e-5, atol=1e-6)
    assert bool(slim(x).isfinite().all())


def test_where_channels_differ_in_size_readers_are_summed_and_nothing_is_averaged() -> None:
    model, x = build("chain", 3), example("chain")
    graph = lbyl.trace(model, x)
    whole = unit_weights(graph, model)["0"]
    some = torch.arange(3) + whole.unit.start  # a parameter that only three channels have
    uneven = replace(whole, graph=replace(graph, axes={**graph.axes, ("extra", 0): some}))
    kept = lbyl.methods.Fold().select(uneven, 5)
    delivery, even = (lbyl.methods.Fold().deliver(w, kept, None) for w in (uneven, whole))
    assert delivery.merge is None and delivery.gain is None and even.merge is not None
    torch.testing.assert_close(delivery.matrix, even.matrix)


def test_without_restarts_is_refused() -> None:
    with pytest.raises(lbyl.LbylError, match="restarts"):
        lbyl.methods.Fold(restarts=0)


def test_features_are_what_makes_and_what_reads_a_channel() -> None:
    """Filters over the deviation, γ and β, or filters with their bias; then the consumers."""
    model = build("chain", 3)
    weights = unit_weights(lbyl.trace(model, example("chain")), model)["0"]
    norm = model[1]
    sigma = (norm.running_var.double() + norm.eps).sqrt()
    wanted = [
        model[0].weight.flatten(1).double() / sigma[:, None],
        norm.weight.double()[:, None],
        norm.bias.double()[:, None],
    ]
    for found, part in zip(_made(weights), wanted, strict=True):
        torch.testing.assert_close(found, part.detach())
    plain = build("biased", 3)
    weights = unit_weights(lbyl.trace(plain, example("biased")), plain)["0"]
    (found,) = _made(weights)
    rows = torch.cat([plain[0].weight.flatten(1), plain[0].bias[:, None]], 1)
    torch.testing.assert_close(found, rows.detach().double())


def test_features_are_centred_before_they_are_multiplied() -> None:
    features = torch.randn(6, 4).double()
    far = _gram(features + 1e3)
    torch.testing.assert_close(far, _gram(features), rtol=0, atol=1e-8)
    centred = features - features.mean(0)
    torch.testing.assert_close(_gram(features), centred @ centred.T)


def cost_of(gram: Tensor, label: Tensor, count: int) -> float:
    return float(_distances(gram, label, count).gather(1, label[:, None]).sum())


def test_of_several_starts_the_best_is_taken() -> None:
    for seed in range(6):
        gram = gram_of(torch.randn(30, 3, generator=generator(seed)).double())
        starts = _spread_starts(gram, 6, 5, generator(seed))
        ends = [_lloyd(gram, start, 6) for start in starts]
        found = k_means(gram, 6, 5, generator(seed))
        assert cost_of(gram, found, 6) == pytest.approx(min(cost_of(gram, e, 6) for e in ends))
        assert all(cost_of(gram, e, 6) <= cost_of(gram, s, 6) for e, s in zip(ends, starts))


def test_starts_are_points_that_differ_as_long_as_there_are_any() -> None:
    points = torch.randn(5, 3, generator=generator(1)).double().repeat(3, 1)
    for label in _spread_starts(gram_of(points), 5, 8, generator()):
        assert bool((label.reshape(3, 5) == label[:5]).all()) and len(label.unique()) == 5
    for label in _spread_starts(gram_of(points), 7, 8, generator()):
        assert len(label.unique()) == 7


def test_far_points_are_drawn_more_often() -> None:
    """By the square of their distance to the centres so far."""
    points = torch.tensor([[0.0], [0.0], [0.0], [1.0], [3.0]]).double()
    first = {0: 0, 3: 0, 4: 0}
    for label in _spread_starts(gram_of(points), 2, 4000, generator()):
        alone = [p for p in (3, 4) if int((label == label[p]).sum()) == 1]
        first[alone[0] if alone else 0] += 1
    # Of 4000: first a zero (3/5), then 3 or 4 by 1 : 9; first the 1, then a zero or the 3 by 1:4
    # each; first the 3, then a zero or the 1 by 9 : 4 each.
    assert first[4] / 4000 == pytest.approx(0.6 * 0.9 + 0.2 + 0.2 * 4 / 7, abs=0.12)


def test_empty_clusters_get_the_farthest_point_of_a_larger_one() -> None:
    distance = torch.tensor([[1.0, 9, 9], [5.0, 9, 9], [9.0, 7, 9]]).double()
    label = _filled(torch.tensor([0, 0, 1]), distance, 3)
    assert label.tolist() == [0, 2, 1]  # the third is farther, but alone
    assert _filled(torch.tensor([0, 1, 2]), distance, 3).tolist() == [0, 1, 2]
    lone = _filled(torch.tensor([0, 0, 0]), distance[:, :1].expand(3, 3), 3)
    assert sorted(lone.tolist()) == [0, 1, 2] and lone[0] == 0


def test_representatives_are_nearest_to_the_means() -> None:
    points = torch.tensor([[0.0], [1.0], [5.0], [6.5], [9.0]]).double()
    centred = points - points.mean(0)
    kept, label = lbyl.methods.Fold()._cluster(gram_of(centred), 2, 0)
    assert kept.tolist() == [1, 3] or kept.tolist() == [0, 3]
    assert label.tolist() == [0, 0, 1, 1, 1]


def test_the_same_question_is_answered_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = unit_weights(lbyl.trace(build("chain", 8), example("chain")), build("chain", 8))["0"]
    asked: list[int] = []
    cluster = lbyl.methods.Fold._cluster

    def told(self: lbyl.methods.Fold, gram: Tensor, count: int, start: int) -> object:
        asked.append(count)
        return cluster(self, gram, count, start)

    monkeypatch.setattr(lbyl.methods.Fold, "_cluster", told)
    monkeypatch.setattr(fold, "_KNOWN", {})
    monkeypatch.setattr(fold, "REMEMBERED", 2)
    for count in (3, 3, 4, 3, 4, 5, 3):  # the third question drops the first answer
        lbyl.methods.Fold().select(weights, count)
    assert asked == [3, 4, 5, 3] and len(fold._KNOWN) == 2
    lbyl.methods.Fold(seed=1).select(weights, 3)
    lbyl.methods.Fold(restarts=2).select(weights, 3)
    assert asked == [3, 4, 5, 3, 3, 3]


def test_the_gain_does_not_depend_on_the_scale_of_filters() -> None:
    filters = torch.rand(5, 8, generator=generator()).double()
    members = torch.tensor([[1.0, 0], [1, 0], [0, 1], [1, 0], [0, 1]]).double()
    gain = _gain(filters, members)
    torch.testing.assert_close(_gain(1e-12 * filters, members), gain)
    alone = _gain(filters, torch.eye(5).double())
    torch.testing.assert_close(alone, torch.ones(5).double())
