"""Criteria against their definitions, written out filter by filter and refit by refit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lbyl
from support.attention import HEADS, SIZE, block
from support.by_hand import sampled, statistics_of
from support.networks import Beside, build, example


def kept(model: nn.Module, x: Tensor, criterion: object, count: int, unit: str = "0") -> list[int]:
    graph = lbyl.trace(model, x)
    ratio = 1 - (count + 0.5) / graph[unit].channels
    prepared = lbyl.prepare(model, x, include=unit, data=None)
    found: list[int] = prepared.plan(ratio, criterion=criterion, method="none").kept[unit].tolist()
    assert len(found) == count and found == sorted(set(found))
    return found


def top(scores: Tensor, count: int) -> list[int]:
    """The largest, of equals the earlier."""
    return sorted(sorted(range(len(scores)), key=lambda i: -float(scores[i]))[:count])


@pytest.mark.parametrize(
    ("name", "seed", "count"), [("chain", 1, 3), ("dense", 2, 7), ("chain", 5, 1)]
)
def test_scores_are_those_of_the_filters(name: str, seed: int, count: int) -> None:
    """Of neurons the bias is part of them, of convolutions it is not."""
    model, x = build(name, seed), example(name)
    filters = model[0].weight.detach().double().flatten(1)
    if name == "dense":
        filters = torch.cat([filters, model[0].bias.detach().double()[:, None]], 1)
    apart = torch.stack([(filters - f).norm(dim=1).sum() for f in filters])
    scores = {"l1": filters.abs().sum(1), "l2": filters.norm(dim=1), "l2-gm": apart}
    size = len(filters)
    scores |= {"random-2": torch.arange(size), "random-3": -torch.arange(size)}
    digits = [str(row.sum().numpy()) for row in model[0].weight.detach().flatten(1)]
    last = [next(int(c) for c in reversed(d) if c.isdigit()) for d in digits]
    scores["random-1"] = -torch.tensor(last)
    for criterion, values in scores.items():
        assert kept(model, x, criterion, count) == top(values, count)
        assert lbyl.criteria.resolve(lbyl.criteria.resolve(criterion).to_dict()).name == criterion
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        if name == "dense":
            model[0].bias.fill_(1.0)
    for criterion in ("l1", "l2", "l2-gm"):  # of equal filters the later goes
        assert kept(model, x, criterion, count) == [*range(count)]


def test_random_is_seeded_and_differs_between_units() -> None:
    model, x = build("chain", 1), example("chain")
    first, again = ([kept(model, x, lbyl.criteria.Random(s), 5) for s in range(8)] for _ in "ab")
    assert first == again and len({tuple(f) for f in first}) > 4
    other = [kept(model, x, lbyl.criteria.Random(s), 5, "3") for s in range(8)]
    assert [[i for i in f if i < 8] for f in first] != other


def order_of(prepared: lbyl.Prepared, criterion: object, unit: str) -> list[int]:
    """Channels in the order they go, from the plans of every width."""
    size, left, order = prepared.graph[unit].channels, None, []
    blocks = prepared.graph[unit].blocks
    for count in range(size, 0, -blocks):
        ratio = max(0.0, 1 - (count + 0.5) / size)
        found = {
            *prepared.plan({unit: ratio}, criterion=criterion, method="none").kept[unit].tolist()
        }
        assert len(found) == count and (left is None or found < left)
        order += sorted((left or found) - found)
        left = found
    return order


def error(covariance: Tensor, gram: Tensor, gone: list[int]) -> float:
    """What is missed when these inputs are refitted on the rest, ridge included."""
    full = covariance + 0.01 * covariance.diagonal().mean() * torch.eye(len(gram)).double()
    stay = [i for i in range(len(gram)) if i not in gone]
    cross = full[gone][:, stay]
    left = full[gone][:, gone] - cross @ torch.linalg.solve(full[stay][:, stay], cross.T)
    return float((gram[gone][:, gone] * left).sum()) if gone else 0.0


def greedy(
    covariance: Tensor, gram: Tensor, importance: Tensor, groups: list[list[int]], of: int = 1
) -> list[int]:
    """Whoever costs least goes next; of `of` blocks each loses one before any loses another."""
    gone: list[int] = []
    each = len(groups) // of

    def inputs(some: list[int]) -> list[int]:
        return [i for j in some for i in groups[j]]

    while len(gone) < len(groups) - of:
        lost = [sum(i // each == b for i in gone) for b in range(of)]
        free = [i for i in range(len(groups)) if i not in gone and lost[i // each] == min(lost)]
        now = error(covariance, gram, inputs(gone))
        costs = {i: error(covariance, gram, inputs([*gone, i])) - now for i in free}
        gone.append(min(costs, key=lambda i: float(importance[i]) * costs[i]))
    return gone


@pytest.mark.parametrize(
    ("name", "unit", "layer", "power"),
    [("chain", "0", "3", 4.0), ("chain", "3", "8", 2.0), ("dense", "0", "3", 4.0),
     ("dense", "3", "6", 0.0), ("biased", "0", "2", 4.0), ("bottleneck", "conv1", "conv2", 4.0)],
)  # fmt: skip
def test_each_channel_goes_that_costs_least_to_refit(
    name: str, unit: str, layer: str, power: float
) -> None:
    """Norms count only behind BatchNorm; taps of a kernel are added up."""
    model, x = build(name, 3).double(), example(name, 24).double()
    prepared = lbyl.prepare(model, x[:2], data=statistics_of(model, x))
    size, covariance = prepared.graph[unit].channels, sampled(model, layer, x)[1]
    taps = len(covariance) // size
    weight = model.get_submodule(layer).weight.detach().flatten(1).unflatten(1, (size, taps))
    rows = weight.transpose(1, 2).flatten(0, 1)
    channels = covariance.reshape(size, taps, size, taps).diagonal(dim1=1, dim2=3).mean(-1)
    norms = model.get_submodule(unit).weight.detach().flatten(1).norm(dim=1)
    if name == "dense" and unit == "3":  # of neurons the bias is part of them
        norms = torch.cat([model[3].weight, model[3].bias[:, None]], 1).detach().norm(dim=1)
    free = (name, unit) in (("dense", "0"), ("biased", "0"))
    importance = torch.ones(size) if free else (norms / norms.max()) ** power
    expected = greedy(channels, rows.T @ rows, importance, [[i] for i in range(size)])
    criterion = replace(lbyl.criteria.resolve("echo"), power=power)  # type: ignore[type-var]
    assert order_of(prepared, criterion, unit) == expected


def test_a_unit_wider_than_what_is_worked_out_at_once() -> None:
    """Removals one by one, by updates of the inverse; two readers, of which both count."""

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(160, 150)
            self.left, self.right = nn.Linear(150, 3), nn.Linear(150, 90)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return torch.cat([self.left(x), self.right(x)], 1)

    model, x = Read().double().eval(), torch.randn(400, 160).double()
    prepared = lbyl.prepare(model, x[:2], data=statistics_of(model, x))
    covariance = sampled(model, "left", x)[1]
    rows = torch.cat([model.left.weight, model.right.weight]).detach()
    gram, left = rows.T @ rows, torch.ones(150, dtype=torch.bool)
    inverse = torch.linalg.inv(covariance + 0.01 * covariance.diagonal().mean() * torch.eye(150))
    order, costs, total = [], [], float((gram * covariance).sum())
    while len(order) < 149:
        j = int((gram.diagonal() / inverse.diagonal()).masked_fill(~left, torch.inf).argmin())
        order.append(j)
        costs.append(float(gram[j, j] / inverse[j, j]) / total)
        part, column = inverse[j] / inverse[j, j], gram[:, j].clone()
        gram = gram - torch.outer(part, column) - torch.outer(column, part)
        gram += column[j] * torch.outer(part, part)
        inverse = inverse - torch.outer(inverse[j], part)
        inverse[j, j], left[j] = 1.0, False
    for count in (100, 86, 22, 1):
        plan = prepared.plan({"first": 1 - (count + 0.5) / 150}, criterion="echo", method="none")
        assert plan.kept["first"].tolist() == sorted({*range(150)} - {*order[: 150 - count]})
    for limit in (0.05, 0.3):
        plan = prepared.compress(lbyl.Budget(max_error=limit), method="none").plan
        gone = sum(error <= limit for error in itertools.accumulate(costs))
        assert len(plan.kept["first"]) == max(15, 150 - gone) > 15


@pytest.mark.parametrize("damage", ["nothing", "indefinite", "no numbers"])
def test_every_channel_is_named_once_whatever_the_covariance(damage: str) -> None:
    model, x = build("dense", 3).double(), example("dense", 24).double()
    data = statistics_of(model, x)
    old = data.moments["3"]
    values = 1e4 * torch.tensor([3.0, 2.0, 1.0, -2.0] * 4).double()
    basis = torch.linalg.qr(old.covariance)[0]
    broken = {
        "nothing": 0 * old.covariance,
        "indefinite": basis @ torch.diag(values) @ basis.T,
        "no numbers": torch.full_like(old.covariance, torch.nan),
    }[damage]
    moments = {**data.moments, "3": replace(old, covariance=broken)}
    prepared = lbyl.prepare(model, x[:2], data=replace(data, moments=moments, orders={}, totals={}))
    order = order_of(prepared, "echo", "0")
    assert len({*order}) == 15
    if damage == "indefinite":  # the positive part is what counts, with the same ridge
        rows = model[3].weight.detach()
        ridge = 0.01 * broken.diagonal().mean()
        positive = basis @ torch.diag(values.clamp(min=0) + ridge) @ basis.T
        positive -= 0.01 / 1.01 * positive.diagonal().mean() * torch.eye(16).double()
        costs = rows.T @ rows
        inverse = torch.linalg.inv(basis @ torch.diag(values.clamp(min=0) + ridge) @ basis.T)
        assert order[0] == int((costs.diagonal() / inverse.diagonal()).argmin())


@pytest.mark.parametrize("kind", ["heads", "v", "qk"])
def test_channels_of_attention_go_by_all_that_is_made_of_them(kind: str) -> None:
    """Heads own several inputs; values and products go from every head alike."""
    model, x = block("kernel")
    unit, name = f"attention:{kind}", f"*:{kind}"
    prepared = lbyl.prepare(model, x, include=name, data=x)
    found = prepared.statistics()
    if kind == "qk":
        rows = torch.randn(2, HEADS, 9, SIZE).double()
        query, key = (r.mT @ r for r in rows)
        products = {unit: replace(found.products[unit], query=query, key=key)}
        data = replace(found, products=products)
        covariance = torch.block_diag(*(query * key))
        gram = torch.block_diag(*[torch.ones(SIZE, SIZE).double()] * HEADS)
    else:
        out = model.attention.out.weight.detach()
        rows = torch.randn(40, HEADS * SIZE).double() / 99
        covariance, gram = rows.T @ rows / 40, out.T @ out
        moments = {**found.moments, "attention.out": replace(
            found.moments["attention.out"], covariance=covariance, mixed=None)}  # fmt: skip
        data = replace(found, moments=moments)
    prepared = lbyl.prepare(model, x, include=name, data=replace(data, orders={}, totals={}))
    groups = [[i] for i in range(HEADS * SIZE)]
    blocks = HEADS
    if kind == "heads":
        groups, blocks = torch.arange(HEADS * SIZE).reshape(HEADS, SIZE).tolist(), 1
    order = order_of(prepared, "echo", unit)
    if kind == "qk":
        expected = sorted_by_head(covariance, gram)
    else:
        expected = greedy(covariance, gram, torch.ones(len(groups)), groups, blocks)
    steps = [{*order[i : i + blocks]} for i in range(0, len(order), blocks)]
    assert steps == [{*expected[i : i + blocks]} for i in range(0, len(order), blocks)]
    if kind == "heads":  # and no more of them than the error allows
        gone = [[i for j in expected[:n] for i in groups[j]] for n in range(HEADS)]
        errors = [error(covariance, gram, some) / float((gram * covariance).sum()) for some in gone]
        for count, limits in enumerate(itertools.pairwise(errors)):
            found = prepared.compress(lbyl.Budget(max_error=sum(limits) / 2), method="none").plan
            assert len(found.kept[unit]) == HEADS - count


def sorted_by_head(covariance: Tensor, gram: Tensor) -> list[int]:
    """Heads know nothing of each other: each loses its own cheapest, one a round."""
    each = []
    for head in range(HEADS):
        part = slice(head * SIZE, (head + 1) * SIZE)
        order = greedy(
            covariance[part, part], gram[part, part], torch.ones(SIZE), [[i] for i in range(SIZE)]
        )
        each.append([head * SIZE + i for i in order])
    return list(itertools.chain.from_iterable(zip(*each)))


def test_where_nothing_is_measured_the_norm_decides() -> None:
    model, x = build("chain", 0).double(), example("chain").double()
    data = statistics_of(model, x)
    without = {name: m for name, m in data.moments.items() if name != "3"}
    noted = replace(data, moments=without, orders={}, totals={}, fallbacks=("3: not measured",))
    prepared = lbyl.prepare(model, x, data=noted)
    norms = model[0].weight.flatten(1).norm(dim=1)
    assert order_of(prepared, "echo", "0") == norms.argsort().tolist()[:-1]


def test_the_channel_that_a_layer_needs_is_the_one_with_the_largest_filters() -> None:
    model = Beside()
    with torch.no_grad():
        for layer in (model.left, model.right, model.sum):
            layer.weight.fill_(1.0)
        model.left.weight[2] *= 5  # of those that `left` makes
        model.sum.weight[7] *= 0.1  # and of all others the least
    prepared = lbyl.prepare(model, torch.zeros(2, 6), residual=True)
    plan = prepared.plan(1 - 5.5 / 12, method="none", criterion="random-2")
    assert [k.tolist() for k in plan.kept.values()] == [[2, 8, 9, 10, 11]]
