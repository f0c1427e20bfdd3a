"""The published table on LeNet-300-100 and FashionMNIST, every cell to the second decimal."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import lenet_fashionmnist as benchmark

pytestmark = pytest.mark.slow

# ratio → (none, neuron-merging released, lbyl released) with L2, geometric median and L1 each.
# The published table prints 87.86 at 50 % (merging, L2) and 77.63 at 80 % (lbyl, GM); its own
# weights give what stands here.
TABLE = {
    0.5: ((87.86, 88.08, 88.40), (88.38, 88.57, 88.69), (88.83, 88.69, 89.03)),
    0.6: ((83.03, 85.82, 85.17), (88.07, 88.10, 86.92), (87.75, 88.15, 87.55)),
    0.7: ((71.21, 78.38, 71.26), (83.27, 86.39, 82.75), (83.92, 85.92, 84.57)),
    0.8: ((63.90, 64.19, 66.76), (77.11, 77.49, 80.02), (78.05, 77.60, 80.55)),
}


def test_all_36_cells(shared: Path) -> None:
    case = benchmark.load()
    assert f"{case.accuracy(case.network.model):.2f}" == "89.80"
    methods = ("none", "neuron-merging", "lbyl")
    wanted = {
        (ratio, criterion, method): f"{TABLE[ratio][row][column]:.2f}"
        for ratio in TABLE
        for row, method in enumerate(methods)
        for column, criterion in enumerate(benchmark.CRITERIA)
    }
    cells = {
        (ratio, criterion, method): f"{ours:.2f}"
        for ratio, criterion, method, _, ours in benchmark.published_cells(case)
    }
    assert len(cells) == 36 and cells == wanted
