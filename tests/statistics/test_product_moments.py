"""Moments of queries' and keys' products against their definition, sum by sum."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import lbyl
from lbyl.statistics import products
from lbyl.statistics.products import ProductSums, allowed_keys, pairs_of, query_and_key
from support.attention import HEADS, SIZE, block

SINGLE = torch.tensor([[[0], [1], [2], [3]], [[2], [0], [3], [1]]])  # (heads, channels, 1)
TURNED = torch.tensor([[[0, 2], [1, 3]], [[3, 1], [0, 2]]])  # (heads, channels, 2)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def added(
    pairs: Tensor, *calls: tuple[Tensor, Tensor, Tensor | None], scale: float = 0.7
) -> Tensor:
    sums = ProductSums(pairs, plain=False)
    for q, k, mask in calls:
        sums.add(q, k, mask, scale, torch.Generator().manual_seed(0))
    moments = sums.moments()
    assert moments is not None
    return moments.gram


def defined(pairs: Tensor, q: Tensor, k: Tensor, logits: Tensor) -> Tensor:
    """The mean over sequences of the weighted scatter of products about their mean."""
    batch, heads, queries, keys = logits.shape
    features = pairs.shape[1] * pairs.shape[2]
    gram = torch.zeros(heads, features, features).double()
    for b, h, i in _places(batch, heads, queries):
        row = logits[b, h, i].double()
        is_open = row > -1e8
        even = is_open.double() / max(1, int(is_open.sum()))
        looked = torch.softmax(row, -1).nan_to_num()
        weight = (looked + even) / 2
        made = torch.stack([_features(pairs[h], q[b, h, i], k[b, h, j]) for j in range(keys)])
        off = made - weight @ made
        gram[h] += off.T @ torch.diag(weight) @ off / batch
    return gram


def _places(*sizes: int) -> Iterator[list[int]]:
    yield from torch.cartesian_prod(*(torch.arange(n) for n in sizes)).tolist()


def _features(pairs: Tensor, q: Tensor, k: Tensor) -> Tensor:
    q, k = q.double(), k.double()
    straight = [sum(float(q[p] * k[p]) for p in places) for places in pairs.tolist()]
    if pairs.shape[1] == 1:
        return torch.tensor(straight).double()
    across = [float(q[a] * k[b] - q[b] * k[a]) for a, b in pairs.tolist()]
    return torch.tensor(straight + across).double()


@pytest.mark.parametrize("pairs", [SINGLE, TURNED], ids=["single", "turned"])
def test_products_scatter_as_defined(pairs: Tensor) -> None:
    q, k = drawn(3, 2, 5, 4), drawn(3, 2, 6, 4, seed=1)
    logits = 0.7 * q @ k.mT
    assert torch.allclose(added(pairs, (q, k, None)), defined(pairs, q, k, logits), rtol=1e-4)


@pytest.mark.parametrize("closed", [-torch.inf, -1.5e8])
def test_keys_that_may_not_be_looked_at_do_not_count(closed: float) -> None:
    q, k = drawn(2, 2, 4, 4), drawn(2, 2, 4, 4, seed=1)
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), closed)
    logits = 0.7 * q @ k.mT + mask
    found = added(TURNED, (q, k, mask))
    assert torch.allclose(found, defined(TURNED, q, k, logits), rtol=1e-4, atol=1e-6)
    other = k.clone()
    other[:, :, -1] += 1  # seen by the last query alone, which is left out
    some = [added(SINGLE, (q[:, :, :3], keys, mask[:3])) for keys in (k, other)]
    assert torch.equal(*some)


def test_a_query_that_may_look_at_nothing_adds_nothing() -> None:
    q, k = drawn(1, 2, 3, 4), drawn(1, 2, 5, 4, seed=1)
    mask = torch.zeros(3, 5)
    mask[1] = -torch.inf
    assert torch.allclose(
        added(SINGLE, (q, k, mask)), added(SINGLE, (q[:, :, [0, 2]], k, None)), rtol=1e-4
    )


def test_parts_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = drawn(6, 2, 5, 4), drawn(6, 2, 5, 4, seed=1)
    mask = torch.where(drawn(6, 1, 5, 5, seed=2) > 1, -torch.inf, 0.0)
    mask[..., 0] = 0
    whole = added(SINGLE, (q, k, mask))
    assert torch.allclose(whole, defined(SINGLE, q, k, 0.7 * q @ k.mT + mask), rtol=1e-4)
    assert torch.allclose(
        added(SINGLE, (q[:2], k[:2], mask[:2]), (q[2:], k[2:], mask[2:])), whole, rtol=1e-4
    )
    sizes: list[int] = []
    made = ProductSums.features
    monkeypatch.setattr(
        ProductSums, "features", lambda s, a, b: sizes.append(len(a)) or made(s, a, b)
    )
    for at_once, together in ((1, 1), (2 * 2 * 5 * 5 * 4, 2)):
        sizes.clear()
        monkeypatch.setattr(products, "AT_ONCE", at_once)
        assert torch.allclose(added(SINGLE, (q, k, mask)), whole, rtol=1e-4)
        assert set(sizes) == {together}


def test_of_many_sequences_some_are_looked_at_each_with_its_own_mask() -> None:
    """The scatter does not depend on the order of keys: so all sequences here have the same."""
    q, k = drawn(1, 2, 3, 4), drawn(1, 2, 6, 4, seed=1)
    mask = torch.tensor([0.0, 0.0, -torch.inf, 0.0, -torch.inf, 0.0])[None, None, None]
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(i)) for i in range(50)]
    many = torch.cat([k[:, :, order] for order in orders])
    masks = torch.cat([mask[..., order] for order in orders])
    sums = ProductSums(SINGLE, plain=False)
    for part in (slice(0, 20), slice(20, 45), slice(45, 50)):
        generator = torch.Generator().manual_seed(0)
        sums.add(q.expand(50, -1, -1, -1)[part], many[part], masks[part], 0.7, generator)
        assert sums.seen == min(products.SEQUENCES, part.stop) and sums.count == part.stop
    moments = sums.moments()
    assert moments is not None
    assert torch.allclose(moments.gram, added(SINGLE, (q, k, mask)), rtol=1e-4)


def test_of_many_queries_some_are_looked_at_each_with_its_own_keys() -> None:
    q, k = drawn(1, 2, 1, 4), drawn(1, 2, 6, 4, seed=1)
    one = added(SINGLE, (q, k, None))
    many = added(SINGLE, (q.expand(-1, -1, 2 * products.QUERIES, -1), k, torch.zeros(1, 6)))
    assert torch.allclose(many, products.QUERIES * one, rtol=1e-4)
    # A query that may look at the first key alone has no scatter, wherever it stands.
    mask = torch.zeros(30, 6)
    mask[::2, 1:] = -torch.inf
    queries = q.expand(-1, -1, 30, -1).clone()
    queries[:, :, ::2] *= 100
    sums = ProductSums(SINGLE, plain=False)
    sums.add(queries, k, mask, 0.7, torch.Generator().manual_seed(0))
    assert sums.gram is not None
    ratio = sums.gram / one
    assert torch.allclose(ratio, ratio[0, 0, 0].round(), rtol=1e-3)
    assert 0 < ratio[0, 0, 0] < products.QUERIES


@pytest.mark.parametrize("plain", [True, False])
def test_second_moments_are_those_of_all_sequences(plain: bool) -> None:
    q, k = drawn(40, 2, 5, 4), 3 + drawn(40, 2, 7, 4, seed=1)
    sums = ProductSums(SINGLE, plain)
    assert sums.moments() is None
    sums.add(q[:10], k[:10], None, 1.0, torch.Generator())
    sums.add(q[10:], k[10:], None, 1.0, torch.Generator())
    moments = sums.moments()
    assert moments is not None and (moments.gram.numel() == 0) == plain
    for head in range(2):
        rows = q[:, head].flatten(0, 1).double()
        centred = (k[:, head] - k[:, head].mean(1, keepdim=True)).flatten(0, 1).double()
        assert torch.allclose(moments.query[head], rows.T @ rows / len(rows), rtol=1e-4, atol=1e-6)
        expected = centred.T @ centred / len(centred)
        assert torch.allclose(moments.key[head], expected, rtol=1e-4, atol=1e-6)


def test_what_other_processes_saw_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = drawn(3, 2, 5, 4), drawn(3, 2, 5, 4, seed=1)
    sums, idle = ProductSums(SINGLE, plain=False), ProductSums(SINGLE, plain=False)
    sums.add(q, k, None, 1.0, torch.Generator())
    alone = sums.moments()
    monkeypatch.setattr(products, "gathered", lambda value: [value, value])
    sums.sum_over_processes()
    both = sums.moments()
    assert alone is not None and both is not None and (sums.seen, sums.count) == (6, 6)
    for name in ("gram", "query", "key"):
        assert torch.allclose(getattr(alone, name), getattr(both, name))
    monkeypatch.setattr(
        products, "gathered", lambda value: [value, sums.gram if value is None else 6]
    )
    idle.sum_over_processes()
    assert idle.seen == 6 and idle.gram is not None and torch.equal(idle.gram, sums.gram)


def spelled(kind: str, q: Tensor, k: Tensor) -> tuple[str, tuple[object, ...], dict[str, object]]:
    """One product of queries (b, h, i, d) and keys, written another way."""
    kernel = "scaled_dot_product_attention"
    flat = q.flatten(0, 1), k.mT.flatten(0, 1)
    turned = q.transpose(1, 2), k.transpose(1, 2)
    ways: dict[str, tuple[str, tuple[object, ...], dict[str, object]]] = {
        "kernel": (kernel, (q, k, k), {}),
        "by name": (kernel, (), {"query": q, "key": k, "value": k}),
        "half by name": (kernel, (q,), {"key": k, "value": k}),
        "matmul": ("matmul", (q, k.mT), {}),
        "bmm": ("bmm", flat, {}),
        "baddbmm": ("baddbmm", (torch.zeros(1), *flat), {}),
        "einsum": ("einsum", ("bhid,bhjd->bhij", q, k), {}),
        "turned": ("einsum", ("b i h d, b j h d -> b h i j", *turned), {}),
        "swapped": ("einsum", ("hbid,bdhj->bhij", q.transpose(0, 1), k.permute(0, 3, 1, 2)), {}),
    }
    return ways[kind]


WAYS = ["kernel", "by name", "half by name", "matmul", "bmm", "baddbmm", "einsum", "turned"]


@pytest.mark.parametrize("kind", WAYS)
def test_queries_and_keys_are_found_however_they_are_multiplied(kind: str) -> None:
    q, k = drawn(2, 3, 5, 4), drawn(2, 3, 6, 4, seed=1)
    found = query_and_key(*spelled(kind, q, k), heads=3, width=4)
    assert found is not None and torch.equal(found[0], q) and torch.equal(found[1], k)


def test_shared_axes_of_einsum_come_in_the_order_of_the_queries() -> None:
    q, k = drawn(2, 3, 5, 4), drawn(2, 3, 6, 4, seed=1)
    found = query_and_key(*spelled("swapped", q, k), heads=2, width=4)
    assert found is not None
    assert torch.equal(found[0], q.transpose(0, 1)) and torch.equal(found[1], k.transpose(0, 1))


def test_fewer_keys_serve_several_queries() -> None:
    q, k = drawn(2, 6, 5, 4), drawn(2, 2, 7, 4, seed=1)
    found = query_and_key("matmul", (q, k.mT), {}, heads=6, width=4)
    assert found is not None and torch.equal(found[1], k[:, [0, 0, 0, 1, 1, 1]])
    one = query_and_key("matmul", (q, k[:1, :1].mT), {}, heads=6, width=4)
    assert one is not None and torch.equal(one[1], k[:1, :1].expand(2, 6, 7, 4))


def test_other_products_are_not_taken_for_logits() -> None:
    q, k = drawn(2, 3, 5, 4), drawn(2, 3, 6, 4, seed=1)
    assert query_and_key("matmul", (q, k.mT), {}, heads=3, width=5) is None
    assert query_and_key("matmul", (q[..., :3], k.mT), {}, heads=3, width=4) is None
    assert query_and_key("matmul", (q, k[..., :3].mT), {}, heads=3, width=4) is None
    assert query_and_key("matmul", (q[0, 0], k[0, 0].mT), {}, heads=1, width=4) is None
    assert query_and_key("bmm", (q[0], k[0].mT), {}, heads=2, width=4) is None
    assert query_and_key("bmm", (q[0], k[0].mT), {}, heads=3, width=4) is not None


def test_masks_of_every_kind_become_what_is_added() -> None:
    shape = torch.Size((3, 4))
    triangle = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]).bool()
    causal = torch.zeros(3, 4).masked_fill(triangle, -torch.inf)
    q, added_mask = torch.zeros(1, 1, 1, 1), drawn(3, 4).double()
    assert allowed_keys((q, q, q), {}, shape, 1) is None
    assert allowed_keys((q, q, q, None, 0.0, False), {}, shape, 1) is None
    for found in (
        allowed_keys((q, q, q), {"is_causal": True}, shape, 1),
        allowed_keys((q, q, q, None, 0.0, True), {}, shape, 1),
        allowed_keys((q, q, q, ~triangle), {}, shape, 1),
        allowed_keys((q, q, q), {"attn_mask": ~triangle}, shape, 1),
    ):
        assert found is not None and torch.equal(found, causal)
    found = allowed_keys((q, q, q, added_mask), {}, shape, 1)
    assert found is not None and torch.equal(found, added_mask.float())


def test_places_of_channels_are_single_or_turned_pairs() -> None:
    model, x = block("kernel")
    graph = lbyl.trace(model, x, include="*:qk")
    assert torch.equal(
        pairs_of(graph, graph.units[0]), torch.arange(SIZE)[None, :, None].expand(HEADS, -1, -1)
    )
    model, x = block("rotary")
    graph = lbyl.trace(model, x, include="*:qk")
    places = torch.tensor([[0, SIZE // 2], [1, SIZE // 2 + 1]])
    assert torch.equal(pairs_of(graph, graph.units[0]), places.expand(4, -1, -1))


def test_each_sequence_is_looked_at_in_places_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "QUERIES", 2)
    length = 40
    seen: set[float] = set()
    q = torch.arange(float(length))[None, None, :, None].repeat(8, 2, 1, 4)  # a query is its place
    monkeypatch.setattr(
        ProductSums, "_products", lambda s, q, k, m, scale: seen.update(q.flatten().tolist())
    )
    sums = ProductSums(SINGLE, plain=False)
    sums.add(q, torch.randn(8, 2, length, 4), None, 1.0, torch.Generator().manual_seed(0))
    assert len(seen) > 8
