"""The constants of the forecast follow from the rows that are stored, by the rule alone."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from benchmarks import forecast_fit as fit
from benchmarks.common.results import stored_rows
from lbyl.restoring.forecast import CALIBRATIONS, logit
from lbyl.torchkit.files import read_json

ROWS = stored_rows(fit.ROWS)


def test_what_ships_is_what_the_script_makes_of_the_stored_rows() -> None:
    shipped = read_json(fit.SHIPPED)
    assert fit.document(ROWS) == shipped
    assert {name: asdict(own) for name, own in CALIBRATIONS.items()} == shipped["maps"]


def test_twelve_networks_stand_behind_the_map_and_only_rows_that_keep_half() -> None:
    for source, count in (("fresh", 12), ("own", 12), ("folded", 7)):
        mine = fit.used(ROWS, source)
        assert len({row["network"] for row in mine}) == count == CALIBRATIONS[source].networks
        assert min(row["kept"] for row in mine) >= 0.5


@pytest.mark.parametrize("source", CALIBRATIONS)
def test_bounds_are_the_second_largest_score_of_networks_left_out(source: str) -> None:
    mine, shipped = fit.used(ROWS, source), CALIBRATIONS[source]
    for side, bound in ((1, shipped.below), (-1, shipped.above)):
        scores = []
        for name in {row["network"] for row in mine}:
            others = fit.calibration(ROWS, source, without=name)
            errors = [
                side * (others.constant + others.slope * logit(row[source]) - logit(row["kept"]))
                for row in mine
                if row["network"] == name
            ]
            scores.append(np.quantile(errors, 0.9))
        assert sum(score > bound + 1e-3 for score in scores) == 1
        assert sorted(scores)[-2] == pytest.approx(bound, abs=1e-3)


def test_the_curve_is_that_of_equal_weights_for_networks() -> None:
    def rows(name: str, constant: float, count: int) -> list[fit.Row]:
        agreements = np.linspace(0.5, 0.9, count)
        kept = 1 / (1 + np.exp(-constant - np.log(agreements / (1 - agreements))))
        return [
            fit.entry(name, str(i), float(k), fresh=float(a))
            for i, (a, k) in enumerate(zip(agreements, kept))
        ]

    constant, slope = fit.line(rows("one", 1.0, 9) + rows("two", 2.0, 90), "fresh")
    assert constant == pytest.approx(1.5, abs=0.05) and slope == pytest.approx(1, abs=0.06)


def test_rows_that_were_measured_replace_none_but_their_own() -> None:
    row = {"network": "n", "key": "k", "base": 0.8, "accuracy": 0.4, "agreement": 0.7}
    assert fit.of_measured({**row, "fresh": 0.6}) == {
        "network": "n", "setting": "k", "kept": 0.5, "fresh": 0.6, "own": 0.7,
    }  # fmt: skip
    assert fit.of_measured({**row, "features": {"painted": {"finite": 0.0}}}) is None
