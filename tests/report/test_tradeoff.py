"""The report of a sweep: the Pareto front, and a page that shows every point with its command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lbyl
from lbyl.report import write_tradeoff
from lbyl.report.tradeoff import pareto
from lbyl.sweep.recommend import KEEP, kept_of, recommend, recommended_row

numbers = st.integers(0, 5).map(float)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12), st.booleans())
def test_a_point_is_on_the_front_unless_another_beats_it(
    points: list[tuple[float, float]], larger: bool
) -> None:
    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        better = a[1] >= b[1] if larger else a[1] <= b[1]
        return a[0] <= b[0] and better and a != b

    front = pareto(points, larger)
    best = {p for p in points if not any(beats(other, p) for other in points)}
    assert {points[i] for i in front} == best
    assert len(front) == len(best)  # of equal points one stands for all


def row(amount: float, accuracy: float | None, **more: Any) -> dict[str, Any]:
    return {
        "model": "lbyl:digits", "weights": None, "kind": "ratio", "amount": amount, "seed": 0,
        "criterion": None, "chosen": "l2", "method": "echo", "accuracy": accuracy,
        "accuracy_before": 97.0, "divergence": amount, "macs": 100 * (1 - amount),
        "macs_before": 100, "parameters": 50 * (1 - amount), "parameters_before": 50,
        "latency": None, "latency_before": None, "failed": None,
        "command": f"lbyl compress lbyl:digits --ratio {amount:g}",
    } | more  # fmt: skip


def test_the_page_shows_every_point_its_command_and_what_failed(tmp_path: Path) -> None:
    rows = [row(0.2, 96.0), row(0.5, 90.0), row(0.4, 89.0), row(0.9, None, failed="no <budget>")]
    page = write_tradeoff(rows, tmp_path / "sweep.html").read_text()
    for amount in (0.2, 0.4, 0.5):
        assert f"<code>lbyl compress lbyl:digits --ratio {amount:g}</code>" in page
    assert page.count('title="on the front"') == 2 * 2  # 0.4 costs more than 0.5 and is worse
    assert page.count('class="dot"') == 2 * 3  # a chart by MACs and one by parameters
    assert "no &lt;budget&gt;" in page and "no <budget>" not in page
    assert "original 97" in page


def test_without_labels_the_divergence_is_drawn_and_time_where_it_was_measured(
    tmp_path: Path,
) -> None:
    timed = {"latency": 0.001, "latency_before": 0.002}
    page = write_tradeoff([row(0.3, None, **timed), row(0.6, None, **timed)], tmp_path / "s.html")
    text = page.read_text()
    assert "Divergence from the original" in text and "Accuracy" not in text
    assert text.count('<svg class="chart') == 3
    assert "Measured time of a pass, % of the original" in text


def test_without_labels_the_forecast_is_drawn_where_every_row_has_one(tmp_path: Path) -> None:
    rows = [row(0.3, None, kept=0.97), row(0.6, None, kept=0.9), row(0.5, None, kept=0.8)]
    text = write_tradeoff(rows, tmp_path / "s.html").read_text()
    assert "Accuracy kept as forecast" in text and "97.00</td>" in text
    assert text.count('title="on the front"') == 2 * 2  # 0.5 costs more than 0.6 and keeps less
    assert "<b>echo, ratio 0.3</b>" in text  # the smallest that keeps 95 %
    rows[1]["kept"] = None
    assert "Divergence from the original" in write_tradeoff(rows, tmp_path / "s.html").read_text()


@given(st.lists(st.tuples(st.floats(0.01, 1), st.none() | st.floats(0, 1))))
def test_what_is_recommended_keeps_enough_and_nothing_cheaper_does(
    points: list[tuple[float, float | None]],
) -> None:
    index = recommend(points)
    enough = [cost for cost, kept in points if kept is not None and kept >= KEEP]
    if index is None:
        assert not enough
    else:
        assert points[index][0] == min(enough) and (points[index][1] or 0) >= KEEP


def test_measured_accuracy_counts_before_the_forecast() -> None:
    assert kept_of({"accuracy": 45.0, "accuracy_before": 90.0, "kept": 0.99}) == 0.5
    assert kept_of({"accuracy": None, "accuracy_before": None, "kept": 0.99}) == 0.99
    assert recommended_row([{"macs": 5, "kept": 0.99, "failed": "no"}, {"macs": 9}]) is None


def test_a_sweep_without_rows_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(lbyl.LbylError, match="no finished row"):
        write_tradeoff([row(0.9, None, failed="no")], tmp_path / "s.html")
    assert not (tmp_path / "s.html").exists()
