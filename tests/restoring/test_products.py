"""Queries, keys, values and heads that go: what is written is the optimum, equals stay equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lbyl
from lbyl.planning.grouped import GroupView, eliminate_groups
from lbyl.restoring.products import rewritten_products
from lbyl.statistics.products import ProductMoments, ProductSums, pairs_of
from lbyl.torchkit.tensors import tensors
from support import quick
from support.attention import HEADS, SIZE, block


def moments_of(heads: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Second moments (heads, channels, channels) of queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(2, heads, SIZE, SIZE, generator=generator).double()
    products = roots @ roots.mT
    return products[0], products[1]


def test_mixtures_of_queries_and_keys_are_the_best_of_their_rank() -> None:
    model, x = block("kernel")
    graph = lbyl.trace(model, x, include="*:qk")
    unit, state = graph.units[0], tensors(model)
    query, key = moments_of(HEADS)
    kept = torch.tensor([i for i in range(unit.channels) if i % SIZE < 2])
    moments = ProductMoments(torch.zeros(0), query, key)
    new, error = rewritten_products(graph, unit, kept, moments, state)
    names = ("attention.q.weight", "attention.k.weight")
    missed = total = 0.0
    for head in range(HEADS):
        rows = slice(head * SIZE, head * SIZE + SIZE)
        first = slice(head * SIZE, head * SIZE + 2)
        # The product of the new rows as a bilinear form of what the old ones make.
        p, q = (
            torch.linalg.lstsq(state[n][rows].T, new[n][first].T).solution  # (channels, 2)
            for n in names
        )
        missed_here = _missed(p @ q.T, query[head], key[head])
        best = _best_by_descent(query[head], key[head], 2)
        assert missed_here == pytest.approx(best, rel=1e-4)
        missed += missed_here
        total += float((query[head] * key[head]).sum())
    assert error == pytest.approx(missed / total, rel=1e-6)


def _missed(form: Tensor, query: Tensor, key: Tensor) -> float:
    """E[(q·k − qᵀ F k)²] of independent queries and keys."""
    off = torch.eye(SIZE).double() - form
    return float(torch.trace(off.T @ query @ off @ key))


def _best_by_descent(query: Tensor, key: Tensor, rank: int) -> float:
    return min(_descended(query, key, rank, seed) for seed in range(3))


def _descended(query: Tensor, key: Tensor, rank: int, seed: int) -> float:
    torch.manual_seed(seed)
    p = torch.randn(SIZE, rank).double().requires_grad_()
    q = torch.randn(SIZE, rank).double().requires_grad_()
    optimiser = torch.optim.LBFGS([p, q], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        off = torch.eye(SIZE).double() - p @ q.T
        value = torch.trace(off.T @ query @ off @ key)
        torch.autograd.backward(value)
        return value

    optimiser.step(loss)
    return float(loss())


def test_factors_and_turns_of_rotary_pairs_are_least_squares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lbyl.restoring.products.RIDGE", 0.0)
    model, x = block("rotary")
    graph = lbyl.trace(model, x, include="*:qk")
    unit, state = graph.units[0], tensors(model)
    assert unit.attention is not None and not unit.attention.plain
    sums = ProductSums(pairs_of(graph, unit), False)
    torch.manual_seed(0)
    q, k = torch.randn(40, 4, 3, SIZE), torch.randn(40, 4, 9, SIZE)
    sums.add(q, k, None, 0.5, torch.Generator().manual_seed(0))
    moments = sums.moments()
    assert moments is not None
    kept = torch.tensor([0, 3])  # of two groups of two pairs each
    new, _ = rewritten_products(graph, unit, kept, moments, state)
    old, written = state["attention.q.weight"], new["attention.q.weight"]
    for head in range(4):
        pair = head * SIZE + (0 if head < 2 else 1) + torch.tensor([0, SIZE // 2])
        a, b = _complex(old[pair]), _complex(written[pair])
        ratio = (b * a.conj()).sum() / a.abs().square().sum()
        assert torch.allclose(ratio * a, b)  # one factor and one turn for the pair
        gram, place = moments.gram[head], 0 if head < 2 else 1
        at = [place, 2 + place]
        right = gram[at][:, :2].sum(1)
        found = torch.linalg.solve(gram[at][:, at], right)
        assert torch.allclose(torch.view_as_real(ratio), found, atol=1e-6)


def _complex(pair: Tensor) -> Tensor:
    return torch.complex(pair[0].double(), pair[1].double())


def test_products_of_half_the_rank_need_half_the_channels() -> None:
    model, x = block("kernel")
    with torch.no_grad():
        for tensor in (model.attention.q.weight, model.attention.q.bias):
            by_head = tensor.view(HEADS, SIZE, -1)
            by_head[:, 2], by_head[:, 3] = by_head[:, 0] - by_head[:, 1], 2 * by_head[:, 0]
    data = quick.own_statistics(model, x, x, include="*:qk")
    result = lbyl.compress(model, x, {"*:qk": 0.5}, data=data, criterion="l2")
    with torch.no_grad():
        assert torch.allclose(result.model(x), model(x), atol=1e-6)


def test_a_silent_pair_goes_first() -> None:
    model, x = block("rotary")
    with torch.no_grad():
        model.attention.q.weight.view(4, SIZE, -1)[:2, 1::2] = 0  # of the first group
    result = lbyl.compress(model, x, {"*:qk": 0.5}, data=x, criterion="echo")
    assert int(result.plan.kept["attention:qk"][0]) == 0


@pytest.mark.parametrize("unit", ["heads", "v"])
def test_a_head_or_value_channel_like_another_is_restored(unit: str) -> None:
    model, x = block("kernel")
    attention = model.attention
    with torch.no_grad():
        for layer in (attention.q, attention.k, attention.v):
            for tensor in (layer.weight, layer.bias):
                by_head = tensor.view(HEADS, SIZE, -1)
                if unit == "heads":
                    by_head[1] = by_head[0]
                elif layer is attention.v:
                    by_head[:, 1] = by_head[:, 0]
    ratio = 0.3 if unit == "heads" else 0.25
    method = lbyl.methods.registry.resolve("echo")
    exact = type(method)(ridge=1e-9)
    result = lbyl.compress(model, x, {f"*:{unit}": ratio}, data=x, criterion="echo", method=exact)
    with torch.no_grad():
        assert torch.allclose(result.model(x), model(x), atol=1e-4)
    assert result.after.parameters < result.before.parameters


def test_groups_are_eliminated_at_the_price_of_their_least_squares_error() -> None:
    torch.manual_seed(0)
    rows = torch.randn(200, 6).double() @ torch.randn(6, 6).double()
    weight = torch.randn(4, 6).double()
    covariance = rows.T @ rows / len(rows)
    inputs = torch.arange(6).reshape(3, 2)
    view = GroupView(covariance, weight.T @ weight, inputs, torch.arange(3))
    order = eliminate_groups([view], 3, ridge=0.0)
    target, missed = rows @ weight.T, 0.0
    for step in range(2):
        gone = [j for j, _ in order[: step + 1]]
        left = [i for g in range(3) if g not in gone for i in inputs[g].tolist()]
        fitted = rows[:, left] @ torch.linalg.lstsq(rows[:, left], target).solution
        error = float((target - fitted).square().sum()) / len(rows)
        assert order[step][1] == pytest.approx(error - missed, rel=1e-4)
        missed = error


def test_equally_many_channels_of_every_block_are_kept() -> None:
    model, x = block("kernel")
    for criterion in ("l2", "echo", "random"):
        plan = lbyl.prepare(model, x, include="*:v", data=x).plan(0.5, criterion=criterion)
        kept = plan.kept["attention:v"]
        assert torch.bincount(kept // SIZE).tolist() == [2] * HEADS
