"""The report of a sweep: the Pareto front, and a page that shows every point with its command."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lbyl.app.cli.app import app
from lbyl.app.sweep import Store


def row(amount: float, accuracy: float | None, **more: Any) -> dict[str, Any]:
    return {
        "model": "lbyl:digits", "weights": None, "kind": "ratio", "amount": amount, "seed": 0,
        "criterion": None, "chosen": "l2", "method": "echo", "accuracy": accuracy,
        "accuracy_before": None if accuracy is None else 97.0, "divergence": amount,
        "macs": 100 * (1 - amount), "macs_before": 100, "parameters": 50 * (1 - amount),
        "parameters_before": 50, "failed": None, "setting": "{}",
        "command": f"lbyl compress lbyl:digits --ratio {amount:g}",
    } | more  # fmt: skip


def page(folder: Path, rows: list[dict[str, Any]], code: int = 0) -> str:
    """The page of a sweep with these rows, or what is said instead."""
    path = folder / f"s{len(list(folder.iterdir()))}.db"
    with Store(path) as store:
        for i, each in enumerate(rows):
            store.add(str(i), each)
    ran = CliRunner().invoke(app, ["report", str(path)])
    assert ran.exit_code == code, ran.output
    return ran.stderr if code else path.with_suffix(".html").read_text()


FRONT = 'title="on the front"'


def test_every_point_its_command_and_what_failed_are_shown(tmp_path: Path) -> None:
    rows = [row(0.2, 96.0), row(0.5, 90.0), row(0.4, 89.0), row(0.9, None, failed="no <budget>")]
    text = page(tmp_path, rows)
    for amount in (0.2, 0.4, 0.5):
        assert f"<code>lbyl compress lbyl:digits --ratio {amount:g}</code>" in text
    assert text.count(FRONT) == 2 * 2  # 0.4 costs more than 0.5 and is worse
    assert text.count('class="dot"') == 2 * 3  # a chart by MACs and one by parameters
    assert "no &lt;budget&gt;" in text and "no <budget>" not in text and "original 97" in text
    assert "no finished row" in page(tmp_path, rows[3:], code=2)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_point_is_on_the_front_unless_another_beats_it(labelled: bool, tmp_path: Path) -> None:
    for seed in range(4):
        draw = random.Random(seed)
        points = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(10)]
        sign = 1 if labelled else -1
        beaten = {
            (c, v)
            for c, v in points
            if any(a <= c and sign * b >= sign * v and (a, b) != (c, v) for a, b in points)
        }
        best = {*points} - beaten
        rows = [
            row(i / 20, 10.0 * v if labelled else None, macs=c, parameters=c, divergence=v)
            for i, (c, v) in enumerate(points)
        ]
        assert page(tmp_path, rows).count(FRONT) == 2 * len(best)  # of equal ones one stands


def test_what_is_recommended_is_the_cheapest_that_keeps_enough(tmp_path: Path) -> None:
    kept = [row(0.3, None, kept=0.97), row(0.6, None, kept=0.9), row(0.5, None, kept=0.8)]
    text = page(tmp_path, kept)
    assert "Accuracy kept as forecast" in text and "97.00</td>" in text
    assert text.count(FRONT) == 2 * 2  # 0.5 costs more than 0.6 and keeps less
    assert "The smallest that keeps 95 % of the accuracy: <b>echo, ratio 0.3</b>" in text
    measured = [row(0.3, 93.0, kept=0.5), row(0.6, 92.5, kept=0.5), row(0.7, 90.0, kept=0.99)]
    assert "<b>echo, ratio 0.6</b>" in page(tmp_path, measured)  # what was measured counts first


def test_without_labels_the_divergence_is_drawn_and_time_where_it_was_measured(
    tmp_path: Path,
) -> None:
    timed = {"latency": 0.001, "latency_before": 0.002, "kept": 0.9}
    rows = [row(0.3, None, **timed), row(0.6, None, **timed | {"kept": None})]
    text = page(tmp_path, rows)
    assert "Divergence from the original" in text and "Accuracy kept" not in text
    assert text.count('<svg class="chart') == 3
    assert "Measured time of a pass, % of the original" in text
