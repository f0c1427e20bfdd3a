"""What the large tables and the constants of the forecast rest on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lbyl
from benchmarks import forecast_fit as fit
from benchmarks import unseen
from benchmarks.adaptive import MOST, adaptive_ratios
from benchmarks.common.results import stored_rows
from benchmarks.criteria import correlations, methods, spearman, table
from lbyl.app.sources import zoo


def cells(**accuracy: float) -> dict[str, Any]:
    return {
        name.replace("_", "-"): {"accuracy": a, "re": -a, "be": 0.0, "ware": -a, "real ware": -a}
        for name, a in accuracy.items()
    }


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # Ties share their mean rank: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    runs = {"n/l2": {"0.1": cells(none=50.0, echo=70.0), "0.3": cells(none=20.0, echo=60.0)}}
    ranks = correlations(runs, "n")
    assert ranks.pop("settings") == 4
    assert all(value == pytest.approx(1) for value in ranks.values())


def test_random_runs_are_shown_as_their_mean_beside_the_paper() -> None:
    runs = {f"vgg16_cifar10/random-{i}": {"0.1": cells(none=50.0 + i)} for i in (1, 2, 3)}
    runs["vgg16_cifar10/own"] = {"0.1": cells(fold=7.0)}
    line = table(runs, "vgg16_cifar10")["random 10 %"]
    assert line["none"] == pytest.approx(52) and line["fold"] == 7.0
    assert line["paper: lbyl"] == 88.05


def test_hyperparameters_are_those_of_the_cell() -> None:
    drawn = {name: method for name, method, _ in methods("resnet50_cifar100", "random-2", 0.4)}
    assert (drawn["lbyl"].lambda1, drawn["lbyl"].lambda2) == (8e-6, 7e-4)
    merging = drawn["neuron-merging"]
    assert (merging.threshold, merging.balance, merging.variant) == (0.4, 0.9, "released")


def test_ratios_grow_while_the_error_allows() -> None:
    model, example = zoo.create("digits", "shipped"), torch.zeros(1, 1, 8, 8)
    prepared = lbyl.prepare(model, example, data=64)
    strict, loose, none = (adaptive_ratios(prepared, "echo", most) for most in (0.05, 0.3, 0.0))
    assert set(none.values()) == {0.0}
    assert all(strict[name] <= loose[name] <= MOST for name in prepared.graph.names)
    assert sum(loose.values()) > sum(strict.values())


def test_the_constants_of_the_forecast_are_what_the_script_makes_of_the_stored_rows() -> None:
    rows, shipped = stored_rows(fit.ROWS), json.loads(Path(fit.SHIPPED).read_text())
    assert fit.document(rows) == shipped
    for source, told in shipped["maps"].items():
        mine = fit.used(rows, source)
        names = {row["network"] for row in mine}
        assert len(names) == told["networks"] and min(row["kept"] for row in mine) >= 0.5
        for side, bound in ((1, told["below"]), (-1, told["above"])):
            scores = []  # the bound is the second largest score of networks left out
            for name in names:
                others = fit.calibration(rows, source, without=name)
                own = [row for row in mine if row["network"] == name]
                x, y = fit.scales(own, source)
                missed = others.constant + others.slope * x - y
                scores.append(np.quantile(side * missed, 0.9))
            assert sorted(scores)[-2] == pytest.approx(bound, abs=1e-3)


def test_the_settings_for_unseen_networks_are_those_of_the_protocol() -> None:
    assert [setting.name for setting in unseen.settings()] == [
        *("30% as it comes", "30% l2", "30% echo"),
        *("50% as it comes", "50% l2", "50% echo"),
        *("MACs 0.8 chosen", "MACs 0.8 uniform", "MACs 0.6 chosen", "MACs 0.6 uniform"),
        *("MACs 0.4 chosen", "MACs 0.4 uniform"),
    ]
