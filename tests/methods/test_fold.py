"""`fold`: clusters, averages and sums, read from the slim network."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from support.delivery import Layer, close, layer, some_kept
from support.networks import Beside, randomise

Fold = lbyl.methods.Fold


def features(of: Layer) -> Tensor:
    """What clusters are sought among: filters over σ, γ and β, or filters and bias; the reader."""
    if hasattr(of.model[1], "running_var"):
        gamma, beta, *_, sigma = of.norm
        return torch.cat(
            [of.filters / sigma[:, None], gamma[:, None], beta[:, None], of.reader.T], 1
        )
    return torch.cat([of.rows, of.reader.T], 1)


def distances(points: Tensor, label: Tensor) -> Tensor:
    means = torch.stack([points[label == c].mean(0) for c in range(int(label.max()) + 1)])
    return torch.cdist(points, means).square()


def cost(points: Tensor, label: Tensor) -> float:
    return float(distances(points, label).gather(1, label[:, None]).sum())


def gain(filters: Tensor) -> float:
    """N/√(N + (N² − N)·E[corr]), E[corr] the mean cosine between a cluster's filters."""
    n = len(filters)
    unit = F.normalize(filters, dim=1)
    pairs = [float(a @ b) for a, b in itertools.permutations(unit, 2)]
    alike = min(max(sum(pairs) / max(1, len(pairs)), 0), 1)
    return n / (n + (n * n - n) * alike) ** 0.5


def assert_folded(of: Layer, result: lbyl.Result) -> Tensor:
    """Readers are summed, all else is averaged, γ gets its gain; (channels,): the clusters."""
    kept, slim = result.plan.kept["0"], result.model
    members = of.carried(result)
    label = members.argmax(1)
    close(members, F.one_hot(label, len(kept)).double())
    assert label[kept].tolist() == list(range(len(kept)))
    for c in range(len(kept)):
        of_cluster = label == c

        def mean(tensor: Tensor, of_cluster: Tensor = of_cluster) -> Tensor:
            return tensor.detach()[of_cluster].mean(0)

        for name, value in slim[0].named_parameters():
            close(value.detach()[c], mean(getattr(of.model[0], name)))
        if not hasattr(slim[1], "running_var"):
            continue
        for name in ("bias", "running_mean", "running_var"):
            close(getattr(slim[1], name).detach()[c], mean(getattr(of.model[1], name)))
        scaled = mean(of.model[1].weight) * gain(of.filters[of_cluster])
        close(slim[1].weight.detach()[c], scaled)
    return label


@pytest.mark.parametrize("kind", ["conv", "linear", "bare conv"])
@pytest.mark.parametrize("seed", range(3))
def test_clusters_are_averaged_and_their_readers_summed(kind: str, seed: int) -> None:
    """Every channel is nearest to the mean of its own cluster, as its representative is most."""
    of = layer(kind, seed, 12, repeats=False)
    result = of.cut(7, Fold())
    label, points = assert_folded(of, result), features(of)
    found = distances(points, label)
    close(found.gather(1, label[:, None])[:, 0], found.amin(1))
    for c, kept in enumerate(result.plan.kept["0"].tolist()):
        assert float(found[kept, c]) <= float(found[label == c, c].min()) + 1e-9
    assert torch.equal(of.cut(7, Fold()).plan.kept["0"], result.plan.kept["0"])


@pytest.mark.parametrize("seed", range(6))
def test_of_many_starts_the_best_clusters_of_all_are_found(seed: int) -> None:
    of = layer("linear", seed, 7, repeats=False)
    points = features(of)
    label = assert_folded(of, of.cut(3, Fold(restarts=30, seed=seed)))
    every = (torch.tensor(each) for each in itertools.product(range(3), repeat=7))
    best = min(cost(points, each) for each in every if len(each.unique()) == 3)
    assert cost(points, label) == pytest.approx(best, rel=1e-9)


def test_clusters_far_from_the_origin_and_of_any_number_are_found() -> None:
    of = layer("bare linear", 1, 12)
    with torch.no_grad():
        centres = 50 * torch.eye(4, 7).double() + 1e4
        of.model[0].weight.copy_(centres.repeat(3, 1) + torch.randn(12, 7).double())
    label = assert_folded(of, of.cut(4, Fold(restarts=1)))
    assert torch.equal(label.reshape(3, 4), label[:4].expand(3, 4)) and len(label.unique()) == 4
    for count in (1, 2, 11):
        assert len(assert_folded(of, of.cut(count, Fold())).unique()) == count


def doubled(kind: str, seed: int, readers: bool) -> Layer:
    """Channels 5…9 are 0…4 once more, and are read alike or not."""
    of = layer(kind, seed, repeats=False)
    with torch.no_grad():
        for part in (of.model[0], of.model[1]):
            for tensor in part.state_dict().values():
                if tensor.dim():
                    tensor[5:] = tensor[:5]
        if readers:
            of.model[3].weight[:, 5:] = of.model[3].weight[:, :5]
    return of


@pytest.mark.parametrize("kind", ["conv", "linear", "bare linear"])
@pytest.mark.parametrize("seed", range(2))
def test_duplicates_fold_exactly(kind: str, seed: int) -> None:
    of = doubled(kind, seed, readers=True)
    result = of.cut(5, Fold(seed=seed))
    assert sorted(k % 5 for k in result.plan.kept["0"].tolist()) == [0, 1, 2, 3, 4]
    close(result.model(of.x).detach(), of.model(of.x).detach())
    # More clusters than different channels: none is empty.
    result = of.cut(7, Fold())
    assert len(result.plan.kept["0"]) == 7
    close(result.model(of.x).detach(), of.model(of.x).detach())
    # Under a plan made otherwise, whatever the readers are.
    of = doubled(kind, seed, readers=False)
    slim = of.cut(torch.tensor([0, 2, 3, 6, 9]), "fold").model
    close(slim(of.x).detach(), of.model(of.x).detach())
    # Where the method chose them, clusters go by readers as well.
    assert_folded(of, of.cut(8, "fold"))


@pytest.mark.parametrize("kind", ["conv", "bare linear"])
def test_under_a_plan_of_another_criterion_each_joins_the_nearest_in_front(kind: str) -> None:
    of = layer(kind, 4, repeats=False)
    kept, gone = some_kept(10)
    label = assert_folded(of, of.cut(kept, "fold"))
    nearest = torch.cdist(of.folded, of.folded[kept]).argmin(1)
    assert torch.equal(label[gone], nearest[gone])


@pytest.mark.parametrize("scale", [1e-12, 1.0])
def test_opposite_filters_do_not_blow_up(scale: float) -> None:
    of = layer(channels=3)
    with torch.no_grad():
        of.model[0].weight[1] = -of.model[0].weight[0]
        of.model[0].weight[2] = 0
        of.model[0].weight.mul_(scale)
    result = of.cut(1, "fold")
    assert_folded(of, result)
    average = of.model[1].weight.mean().detach()
    close(result.model[1].weight.detach()[0], 3**0.5 * average)


def chain(middle: list[nn.Module]) -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), *middle,
        nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 11, 1),
    )  # fmt: skip
    return randomise(model, 3).double()


def members_of(old: Tensor, new: Tensor) -> Tensor:
    return torch.linalg.lstsq(old.detach().flatten(1), new.detach().flatten(1)).solution


def test_depthwise_layers_between_are_averaged_too() -> None:
    model, x = chain([nn.Conv2d(8, 8, 3, padding=1, groups=8)]), torch.randn(2, 3, 6, 6).double()
    slim = lbyl.compress(model, x, 0.4, method="fold").model
    members = members_of(model[6].weight, slim[6].weight)
    merge = (members / members.sum(0)).T
    close(merge.sum(1), torch.ones(len(merge)).double())
    for i in (0, 3):
        close(slim[i].weight.detach().flatten(1), merge @ model[i].weight.detach().flatten(1))
    # The gain belongs to the normalisation of the merged filters, not to the one behind.
    close(slim[4].weight.detach(), merge @ model[4].weight.detach())
    gains = [gain(model[0].weight.detach().flatten(1)[m > 0.5]) for m in members.T]
    wanted = (merge @ model[1].weight.detach()) * torch.tensor(gains).double()
    close(slim[1].weight.detach(), wanted)


def test_layers_that_read_and_make_are_summed_and_averaged_both() -> None:
    model, x = chain([nn.Conv2d(8, 8, 3)]), torch.randn(2, 3, 6, 6).double()
    plan = lbyl.compress(model, x, 0.4, method="fold").plan
    whole, only = lbyl.compress(model, x, plan, method="fold").model, []
    for unit in ("0", "3"):
        part = lbyl.Plan({unit: plan.kept[unit]}, {unit: 8})
        only.append(lbyl.compress(model, x, part, method="fold", include=unit).model)
    summed = only[0][3].weight.detach()  # (8, t, 3, 3)
    members = members_of(model[6].weight, whole[6].weight)
    merge = (members / members.sum(0)).T
    close(whole[3].weight.detach(), torch.einsum("to,oikl->tikl", merge, summed))
    close(
        only[1][3].weight.detach(), torch.einsum("to,oikl->tikl", merge, model[3].weight.detach())
    )


def test_where_channels_differ_in_size_readers_are_summed_and_nothing_is_averaged() -> None:
    model, x = randomise(Beside(), 2).double(), torch.randn(4, 6).double()
    with torch.no_grad():
        model.last.weight.copy_(torch.randn(3, 12))
    result = lbyl.compress(model, x, 0.5, method="fold", residual=True)
    (unit,) = (u for u in result.graph if u.channels == 12)
    kept = result.plan.kept[unit.name]
    assert 0 < len(kept) < 12
    close(result.model.sum.weight.detach(), model.sum.weight.detach()[kept])
    close(result.model.last.weight.detach().sum(1), model.last.weight.detach().sum(1))


def test_without_restarts_is_refused() -> None:
    with pytest.raises(lbyl.LbylError, match="restarts"):
        Fold(restarts=0)
