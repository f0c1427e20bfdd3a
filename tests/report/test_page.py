"""The page as text: what it says, that nothing can break out of it, that it is whole."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import lbyl
from lbyl.report import gather, write_report
from lbyl.result import Row

VOID = {"meta", "link", "br", "img", "input", "hr"}
EVIL = '"><script>alert(1)</script>'


class Page(HTMLParser):
    """Elements by name, with a check that they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    def count(self, tag: str, **wanted: str) -> int:
        names = {k.rstrip("_"): v for k, v in wanted.items()}
        return sum(
            t == tag and all(v in (a.get(k) or "").split() for k, v in names.items())
            for t, a in self.found
        )

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_page_nests_and_has_every_part(report: Path, digits: Any) -> None:
    page = Page(report.read_text(encoding="utf-8"))
    units = len(digits[2].rows)
    assert page.count("section", role="tabpanel") == page.count("button", role="tab") == 6
    assert page.count("g", class_="bar") == units
    # four methods in four charts of errors, a dot a unit; four methods at three ratios
    assert page.count("g", class_="dot") == 4 * 4 * units + 4 * 3
    assert page.count("div", class_="card") == 5
    assert page.count("option") == units


def test_headlines_are_before_and_after(report: Path, digits: Any) -> None:
    text = Page(report.read_text(encoding="utf-8")).text
    assert "97.00 % → 95.50 % −1.50 points" in text
    assert "2.5 ms → 1.25 ms −50.0 % device CPU" in text
    before, after = digits[2].before, digits[2].after
    share = 100 * (after.parameters / before.parameters - 1)
    assert f"{share:+.1f} %".replace("-", "−") in text


def test_without_data_the_error_is_predicted(digits: Any, tmp_path: Path) -> None:
    result = digits[2]
    page = Page(write_report(result, tmp_path / "r.html").read_text(encoding="utf-8"))
    gone = [(r.channels - r.kept, r.residual) for r in result.rows]
    mean = sum(n * v for n, v in gone) / sum(n for n, _ in gone)
    assert f"Predicted error {mean:.2f}"[:-1] in page.text
    assert page.count("button", role="tab") == 4  # no deliveries, nothing compared
    assert page.count("g", class_="dot") == 3 * len(result.rows)


def test_it_asks_for_nothing_from_outside(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://""", text)
    assert "default-src 'none'" in text
    assert report.stat().st_size < 1_000_000


def test_names_cannot_break_out(digits: Any, tmp_path: Path) -> None:
    result = digits[2]
    rows = (Row(EVIL, 8, 4, 0.1, 0.2, 0.3), *result.rows[1:])
    graph = dataclasses.replace(result.graph, left_alone={EVIL: EVIL})
    changed = dataclasses.replace(result, rows=rows, graph=graph, criterion=EVIL)
    path = write_report(
        changed,
        tmp_path / "r.html",
        accuracy={"original": 1.0, "slim": 1.0, EVIL: 1.0},
        comparison=[{"method": EVIL, "criterion": EVIL, "ratio": r, "accuracy": 1} for r in (0, 1)],
        errors={EVIL: [dataclasses.asdict(rows[0])]},
        delivery={EVIL: torch.ones(2, 2), "</script>": torch.ones(1, 1)},
        latency={"before": 1, "after": 1, EVIL: EVIL},
        command=EVIL,
        loader=EVIL,
    )
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert EVIL not in text
    assert page.count("script") == 2  # the page's own and its data
    assert EVIL in page.text


def test_errors_may_hold_no_number(digits: Any, tmp_path: Path) -> None:
    unit = digits[2].rows[0].unit
    errors = {"echo": [{"unit": unit, "residual": float("nan"), "bias": 1.0, "ware": 0.25}]}
    rows = [{"method": "lbyl", "criterion": "l2", "ratio": 0.3, "error": "the solve failed"}]
    page = Page(
        write_report(digits[2], tmp_path / "r.html", errors=errors, comparison=rows).read_text(
            encoding="utf-8"
        )
    )
    assert page.count("g", class_="dot") == 2  # BE and WARE; RE is no number, ‖s‖ not given
    assert "Reconstruction error" in page.text
    assert "the solve failed" in page.text
    assert not re.search(r"\bnan\b", page.text)


def test_one_ratio_is_drawn_as_bars(digits: Any, tmp_path: Path) -> None:
    figures = {"none": 40, "echo": 90}
    rows = [
        {"method": m, "criterion": "l2", "ratio": 0.5, "accuracy": a} for m, a in figures.items()
    ]
    text = write_report(digits[2], tmp_path / "r.html", comparison=rows).read_text(encoding="utf-8")
    assert "Accuracy, % by method" in Page(text).text
    assert "width:90.0%" in text


def test_a_page_is_written_whole(digits: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")
    with pytest.raises(lbyl.LbylError, match="must be a matrix"):
        write_report(digits[2], path, delivery={"stem.0": torch.ones(3)})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(lbyl.LbylError, match="is a directory"):
        write_report(digits[2], tmp_path)


def test_gather_compares_methods_under_one_plan(digits: Any) -> None:
    model, example, result = digits
    found = gather(model, example, result, ("none", "lbyl"))
    assert list(found["errors"]) == ["none", "lbyl", "echo"]
    units = [row.unit for row in result.rows]
    for rows in found["errors"].values():
        assert [row["unit"] for row in rows] == units
    assert all(row["norm"] == 0 for row in found["errors"]["none"])
    # the closed form minimises the residual that plain pruning leaves whole
    for lbyl_row, none_row in zip(found["errors"]["lbyl"], found["errors"]["none"]):
        assert lbyl_row["residual"] < none_row["residual"]
    # and the regression on activations is the one that minimises their error
    for echo_row, none_row in zip(found["errors"]["echo"], found["errors"]["none"]):
        assert 0 < echo_row["ware"] < none_row["ware"] <= 0.5 + 1e-6
    for row in result.rows:
        assert found["delivery"][row.unit].shape == (row.channels, row.kept)


def test_a_plan_made_for_another_method_is_told_apart(digits: Any) -> None:
    model, example, _ = digits
    settings = lbyl.LBYL(lambda2=0.5)
    planned = lbyl.compress(model, example, 0.5, method=settings)
    assert gather(model, example, planned, ())["errors"].keys() == {"lbyl"}
    rows = gather(model, example, planned, ("lbyl",))["errors"]["lbyl"]
    assert [row["norm"] for row in rows] == pytest.approx([row.norm for row in planned.rows])
    other = lbyl.compress(model, example, method="none", plan=planned.plan)
    assert list(gather(model, example, other, ())["errors"]) == ["none"]


def test_methods_from_weights_alone_need_no_run(digits: Any) -> None:
    model, example, _ = digits
    result = lbyl.compress(model, example, 0.5, method="moments")
    found = gather(model, example, result, ("none",))
    assert list(found["errors"]) == ["none", "moments"]
    assert "ware" not in found["errors"]["none"][0]
    assert any(row["norm"] > 0 for row in found["errors"]["moments"])


def test_one_outlier_makes_the_axis_logarithmic() -> None:
    from lbyl.report.charts import fitting_scale

    plain = fitting_scale([0.0, 0.5, 0.9])
    assert not plain.logarithmic
    assert (plain.low, plain.high) == (0.0, 1.0)
    steep = fitting_scale([0.0, 0.2, 0.3, 0.4, 90.0])
    assert steep.logarithmic
    assert (steep.low, steep.high) == (0.1, 100.0)
    assert steep.ticks == pytest.approx((0.1, 1, 10, 100))
    assert steep.share(0.0) == 0
    assert steep.share(1.0) == pytest.approx(1 / 3)
    same = fitting_scale([0.0, 0.0])
    assert 0 <= same.share(0.0) <= 1


def test_large_deliveries_shrink_to_their_strongest_entries() -> None:
    from lbyl.report.heatmap import downsample, packed

    matrix = torch.zeros(300, 200)
    matrix[299, 199], matrix[0, 1] = -5.0, 2.0
    small = downsample(matrix)
    assert small.shape == (100, 100)
    assert float(small[99, 99]) == -5.0
    assert float(small[0, 0]) == 2.0
    held = packed({"x": matrix})[0]
    assert (held["rows"], held["columns"], held["scale"]) == (100, 100, 5.0)
    json.dumps(held)
