"""What is lost by trying fewer allocations."""

from __future__ import annotations

import math

import pytest

from benchmarks.candidates import best_of, by_count, left_out, loss, names

ROWS = [
    {"net": "one", "tried": {"uniform": 4.0, "predicted 1": 2.0, "measured 1": 1.0}},
    {"net": "one", "tried": {"uniform": 1.0, "predicted 1": 2.0, "measured 1": 3.0}},
    {"net": "other", "tried": {"uniform": 4.0, "predicted 1": 1.0, "measured 1": 2.0}},
]


def test_a_loss_is_told_beside_the_best_of_all() -> None:
    assert loss(ROWS[0], ["measured 1"]) == 0.0
    assert loss(ROWS[0], ["predicted 1"]) == pytest.approx(math.log(2))
    assert loss(ROWS[0], []) == pytest.approx(math.log(4))
    assert loss(ROWS[1], ["predicted 1"]) == 0.0  # the uniform one is always tried
    assert loss(ROWS[0], ["predicted 0.5"]) == pytest.approx(math.log(4))  # was equal to another


def test_sets_are_compared_by_their_mean_loss() -> None:
    rows = [{"tried": dict.fromkeys(names(), 2.0) | r["tried"]} for r in ROWS]
    assert best_of(rows, 2) == ("predicted 1", "measured 1")
    counts, sets, means, worst = zip(*by_count(rows))
    assert counts == (1, 2, 3, 4) and sets[1] == "predicted 1, measured 1"
    assert means[0] > 0 and means[1] == worst[1] == 0.0


def test_a_network_is_measured_by_what_is_best_on_the_others() -> None:
    rows = [{**r, "tried": dict.fromkeys(names(), 4.0) | r["tried"]} for r in ROWS]
    table = left_out(rows, 1)
    assert [row[:2] for row in table] == [["one", "predicted 1"], ["other", "measured 1"]]
    assert table[0][2:] == [pytest.approx(50 * math.log(2)), pytest.approx(100 * math.log(2))]
    assert table[1][2:] == [pytest.approx(100 * math.log(2))] * 2
