"""Numbers connected by pairs, and dimensions along which labels change, against plain loops."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lbyl.tracing.labels import compact, connected, varying


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), pairs_of(n))))
def test_connected_numbers_have_the_smallest_of_them_as_their_root(
    case: tuple[int, list[list[tuple[int, int]]]],
) -> None:
    count, several = case
    root = list(range(count))
    for a, b in [pair for pairs in several for pair in pairs]:
        low, high = sorted((root[a], root[b]))
        root = [low if r == high else r for r in root]
    given_pairs = [torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T for pairs in several]
    assert connected(count, given_pairs).tolist() == root


def pairs_of(count: int) -> st.SearchStrategy[list[list[tuple[int, int]]]]:
    number = st.integers(0, count - 1)
    return st.lists(st.lists(st.tuples(number, number), max_size=30), max_size=3)


@given(st.lists(st.booleans(), min_size=1, max_size=4), st.integers(0, 2))
def test_labels_vary_along_the_dimensions_that_they_were_laid_along(
    along: list[bool], odd: int
) -> None:
    labels = torch.zeros([3] * len(along), dtype=torch.long)
    for d, varies in enumerate(along):
        if varies:  # only the middle differs, or the last, or the first
            view = [1] * len(along)
            view[d] = 3
            labels = labels + (torch.arange(3) == odd).long().reshape(view) * 7 ** (d + 1)
    changing = [d for d, varies in enumerate(along) if varies]
    assert varying(labels) == changing
    assert torch.equal(compact(labels).expand_as(labels), labels)
    assert compact(labels).shape == tuple(3 if d in changing else 1 for d in range(len(along)))
