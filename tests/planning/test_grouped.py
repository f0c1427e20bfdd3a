"""Elimination of channels with several inputs each, in several views, against refitting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lbyl
from lbyl.graph.weights import unit_weights
from lbyl.planning.grouped import GroupView, eliminate_groups, group_views
from lbyl.statistics.moments import Statistics
from lbyl.statistics.products import ProductMoments
from support.attention import HEADS, SIZE, WIDTH, block


def definite(size: int, seed: int) -> Tensor:
    rows = torch.randn(3 * size, size, generator=torch.Generator().manual_seed(seed)).double()
    return rows.T @ rows


def view(inputs: list[list[int]], channels: list[int], seed: int) -> GroupView:
    size = 1 + max(max(row) for row in inputs)
    weight = definite(size, seed + 100)
    return GroupView(definite(size, seed), weight, torch.tensor(inputs), torch.tensor(channels))


def error_after(some: GroupView, gone: list[int], ridge: float) -> float:
    """What a view misses when these channels' inputs are refitted on the rest."""
    size = len(some.covariance)
    full = some.covariance + ridge * some.covariance.diagonal().mean() * torch.eye(size).double()
    rows = zip(some.channels.tolist(), some.inputs.tolist())
    out = sorted(i for channel, places in rows if channel in gone for i in places)
    stay = [i for i in range(size) if i not in out]
    if not out:
        return 0.0
    cross = full[out][:, stay]
    left = full[out][:, out] - cross @ torch.linalg.solve(full[stay][:, stay], cross.T)
    return float((some.weight[out][:, out] * left).sum())


VIEWS = {
    "one input each": [view([[0], [1], [2], [3], [4]], [0, 1, 2, 3, 4], 0)],
    "pairs": [view([[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]], [0, 1, 2, 3, 4], 1)],
    "some inputs stay": [view([[0, 5], [1, 6], [2, 7], [3, 8], [4, 11]], [0, 1, 2, 3, 4], 2)],
    "two that see different channels": [
        view([[0, 1], [2, 3], [4, 5]], [0, 2, 4], 3),
        view([[0], [1], [2]], [1, 3, 4], 4),
    ],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("blocks", [None, [0, 0, 1, 1, 1]])
def test_each_goes_that_costs_least_to_refit(name: str, blocks: list[int] | None) -> None:
    views = VIEWS[name]
    block_of = None if blocks is None else torch.tensor(blocks)
    order = eliminate_groups(views, 5, ridge=0.02, block=block_of)
    gone: list[int] = []
    total = 0.0
    for step, (j, cost) in enumerate(order):
        lost = [sum((blocks or [0] * 5)[i] == b for i in gone) for b in (0, 1)]
        free = [i for i in range(5) if i not in gone]
        if blocks is not None:
            free = [i for i in free if lost[blocks[i]] == min(lost)] or free
        errors = {i: sum(error_after(v, [*gone, i], 0.02) for v in views) for i in free}
        if blocks is None or step < 4:
            assert j == min(errors, key=lambda i: errors[i])
        gone.append(j)
        total += cost
        assert total == pytest.approx(sum(error_after(v, gone, 0.02) for v in views), rel=1e-7)
    assert sorted(set(gone)) == sorted(gone) and len(order) == 4


def test_of_a_covariance_that_is_nothing_the_weights_decide() -> None:
    weight = torch.diag(torch.tensor([3.0, 1.0, 2.0]).double())
    none = GroupView(torch.zeros(3, 3).double(), weight, torch.arange(3)[:, None], torch.arange(3))
    assert [j for j, _ in eliminate_groups([none], 3)] == [1, 2]
    damaged = GroupView(torch.full((3, 3), torch.nan).double(), weight, none.inputs, none.channels)
    assert eliminate_groups([damaged], 3) == [(1, 1.0), (2, 2.0)]


def test_a_price_that_is_no_number_is_dear() -> None:
    weight = torch.diag(torch.tensor([torch.nan, 1.0, torch.inf]).double())
    some = GroupView(torch.eye(3).double(), weight, torch.arange(3)[:, None], torch.arange(3))
    assert eliminate_groups([some], 3, ridge=0.0)[0][0] == 1


def test_the_power_of_a_view_is_that_of_what_it_makes() -> None:
    rows, weight = torch.randn(50, 4).double(), torch.randn(3, 4).double()
    covariance = rows.T @ rows / 50
    some = GroupView(covariance, weight.T @ weight, torch.arange(4)[:, None], torch.arange(4))
    assert some.total == pytest.approx(float((rows @ weight.T).square().sum()) / 50)


@pytest.mark.parametrize("kind", ["heads", "v"])
def test_consumers_see_the_columns_of_heads_and_values(kind: str) -> None:
    model, x = block("kernel")
    prepared = lbyl.prepare(model, x, include=f"*:{kind}", data=x)
    unit = prepared.graph.units[0]
    views = group_views(unit_weights(prepared.graph, model)[unit.name], prepared.statistics())
    assert len(views) == 1
    columns = torch.arange(WIDTH).reshape(HEADS, SIZE)
    assert torch.equal(views[0].inputs, columns if kind == "heads" else columns.reshape(-1, 1))
    assert torch.equal(views[0].channels, torch.arange(unit.channels))
    out = model.attention.out.weight.detach()
    torch.testing.assert_close(views[0].weight, out.T @ out)


@pytest.mark.parametrize("kind", ["kernel", "rotary"])
def test_logits_sum_the_straight_products_of_their_head(kind: str) -> None:
    model, x = block(kind)
    graph = lbyl.trace(model, x, include="*:qk")
    unit = graph.units[0]
    weights = unit_weights(graph, model)[unit.name]
    assert group_views(weights, Statistics({}, "own")) == []
    heads = HEADS if kind == "kernel" else 4
    query, key, gram = (
        torch.stack([definite(SIZE, i + n) for i in range(heads)]) for n in (0, 9, 5)
    )
    statistics = Statistics({}, "own", products={unit.name: ProductMoments(gram, query, key)})
    views = group_views(weights, statistics)
    assert len(views) == heads
    for head, some in enumerate(views):
        if kind == "kernel":
            torch.testing.assert_close(some.covariance, query[head] * key[head])
            assert torch.equal(some.inputs, torch.arange(SIZE)[:, None])
            assert torch.equal(some.channels, head * SIZE + torch.arange(SIZE))
            assert torch.equal(some.weight, torch.ones(SIZE, SIZE).double())
        else:
            torch.testing.assert_close(some.covariance, gram[head])
            assert torch.equal(some.inputs, torch.tensor([[0, 2], [1, 3]]))
            assert torch.equal(some.channels, head // 2 * 2 + torch.arange(2))
            target = torch.tensor([1.0, 1.0, 0.0, 0.0]).double()
            assert torch.equal(some.weight, torch.outer(target, target))
