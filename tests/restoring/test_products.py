"""Queries, keys, values and heads that go: what is written is the optimum, equals stay equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.methods import Echo
from support.attention import HEADS, SIZE, block
from support.by_hand import plan_of


def definite(*shape: int, seed: int) -> Tensor:
    rows = torch.randn(*shape, shape[-1], generator=torch.Generator().manual_seed(seed)).double()
    return rows @ rows.mT


def with_products(kind: str, seed: int = 0) -> tuple[nn.Module, lbyl.Prepared, dict[str, Tensor]]:
    """An attention and second moments of its queries, keys and products, drawn at random."""
    model, x = block(kind)
    prepared = lbyl.prepare(model, x, include="*:qk", data=x)
    found = prepared.statistics()
    old = found.products["attention:qk"]
    parts = {
        name: definite(*getattr(old, name).shape[:2], seed=seed + i)
        for i, name in enumerate(("query", "key", "gram"))
        if getattr(old, name).dim() == 3
    }
    data = replace(found, products={"attention:qk": replace(old, **parts)})
    return model, lbyl.prepare(model, x, include="*:qk", data=data), parts


def test_mixtures_of_queries_and_keys_are_the_best_of_their_rank() -> None:
    """No product of so few channels misses less of q·k than the singular vectors do."""
    model, prepared, parts = with_products("kernel")
    result = prepared.compress(
        plan_of(
            prepared.graph, {"attention:qk": [h * SIZE + i for h in range(HEADS) for i in (0, 1)]}
        )
    )
    missed = total = 0.0
    for head in range(HEADS):
        query, key = parts["query"][head], parts["key"][head]
        p, q = (
            torch.linalg.lstsq(
                getattr(model.attention, n).weight[head * SIZE : (head + 1) * SIZE].T,
                getattr(result.model.attention, n).weight[2 * head : 2 * head + 2].T,
            ).solution
            for n in ("q", "k")
        )  # what the new rows make of the old ones, (channels, 2)
        off = torch.eye(SIZE).double() - p @ q.T
        here = float(torch.trace(off.T @ query @ off @ key))
        roots = [torch.linalg.cholesky(m) for m in (query, key)]
        values = torch.linalg.svdvals(roots[0].T @ roots[1])
        assert here == pytest.approx(float(values[2:].square().sum()), rel=1e-6)
        missed, total = missed + here, total + float((query * key).sum())
    assert result.rows[0].error == pytest.approx(missed / total, rel=1e-6)


def test_factors_and_turns_of_rotary_pairs_are_least_squares() -> None:
    model, prepared, parts = with_products("rotary")
    result = prepared.compress(plan_of(prepared.graph, {"attention:qk": [0, 3]}))
    old, new = model.attention.q.weight, result.model.attention.q.weight
    for head in range(4):
        place = 0 if head < 2 else 1
        pair = head * SIZE + place + torch.tensor([0, SIZE // 2])
        a, b = (torch.complex(*w) for w in (old[pair], new[2 * head : 2 * head + 2]))
        ratio = (b * a.conj()).sum() / a.abs().square().sum()
        assert torch.allclose(ratio * a, b)  # one factor and one turn for the pair
        gram, at = parts["gram"][head], [place, 2 + place]
        inner = gram[at][:, at]
        ridge = 0.01 * inner.diagonal().mean() * torch.eye(2).double()
        straight = torch.tensor([1.0, 0.0]).double()
        right = gram[at][:, :2].sum(1) + ridge @ straight
        found = torch.linalg.solve(inner + ridge, right)
        assert torch.allclose(torch.view_as_real(ratio), found, atol=1e-6), (ratio, found)


def test_products_of_half_the_rank_need_half_the_channels() -> None:
    model, x = block("kernel")
    with torch.no_grad():
        for tensor in (model.attention.q.weight, model.attention.q.bias):
            by_head = tensor.view(HEADS, SIZE, -1)
            by_head[:, 2], by_head[:, 3] = by_head[:, 0] - by_head[:, 1], 2 * by_head[:, 0]
    result = lbyl.compress(model, x, {"*:qk": 0.5}, data=x, criterion="l2")
    with torch.no_grad():
        assert torch.allclose(result.model(x), model(x), atol=1e-4)


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
    exact = Echo(ridge=1e-9)
    result = lbyl.compress(model, x, {f"*:{unit}": ratio}, data=x, criterion="echo", method=exact)
    with torch.no_grad():
        assert torch.allclose(result.model(x), model(x), atol=1e-4)
    assert result.after.parameters < result.before.parameters


def test_equally_many_channels_of_every_block_are_kept() -> None:
    model, x = block("kernel")
    for criterion in ("l2", "echo", "random"):
        plan = lbyl.prepare(model, x, include="*:v", data=x).plan(0.5, criterion=criterion)
        kept = plan.kept["attention:v"]
        assert torch.bincount(kept // SIZE).tolist() == [2] * HEADS
