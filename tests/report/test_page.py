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
from lbyl.restoring.forecast import Forecast
from lbyl.result import Row
from lbyl.torchkit.format import percent

VOID = {"meta", "link", "br", "img", "input", "hr"}
EVIL = '"><script>alert(1)</script>'


class Page(HTMLParser):
    """Elements by name, with a check that they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    def count(self, tag: str, **wanted: str) -> int:
        names = {k.rstrip("_"): v for k, v in wanted.items()}
        return sum(
            t == tag and all(v in (a.get(k) or "").split() for k, v in names.items())
            for t, a in self.elements
        )

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_page_nests_and_has_every_part(report: Path, digits: Any) -> None:
    page = Page(report.read_text(encoding="utf-8"))
    units = len(digits[2].rows)
    assert page.count("section", role="tabpanel") == page.count("button", role="tab") == 6
    assert page.count("g", class_="bar") == units
    # error and WARE of four methods, RE, BE and ‖s‖ of the three that write one matrix a unit,
    # a dot a unit each; four methods at three ratios
    assert page.count("g", class_="dot") == (2 * 4 + 3 * 3) * units + 4 * 3
    assert page.count("div", class_="card") == 6
    assert page.count("option") == units


def test_headlines_are_before_and_after(report: Path, digits: Any) -> None:
    text = Page(report.read_text(encoding="utf-8")).text
    assert "97.00 % → 95.50 % −1.50 points" in text
    assert "2.5 ms → 1.25 ms −50.0 % device CPU" in text
    before, after = digits[2].before, digits[2].after
    share = 100 * (after.parameters / before.parameters - 1)
    assert f"{share:+.1f} %".replace("-", "−") in text


def test_without_data_the_first_figure_is_the_accuracy_forecast(
    digits: Any, tmp_path: Path
) -> None:
    result = digits[2]
    page = Page(write_report(result, tmp_path / "r.html").read_text(encoding="utf-8"))
    told = result.forecast
    assert f"Accuracy kept about {percent(told.kept)}" in page.text
    assert f"{percent(told.agreement)} equal answers on {told.inputs} fresh inputs" in page.text
    assert "Predicted error" not in page.text
    page = Page(
        write_report(dataclasses.replace(result, forecast=None), tmp_path / "r.html").read_text(
            "utf-8"
        )
    )
    mean = sum(row.error for row in result.rows) / len(result.rows)
    assert f"Predicted error {mean:.4f}"[:-1] in page.text
    assert "on procedural statistics" in page.text
    assert page.count("button", role="tab") == 4  # no deliveries, nothing compared
    assert page.count("g", class_="dot") == len(result.rows)  # the error alone: echo has no RE


def test_it_asks_for_nothing_from_outside(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    outside = text.replace('src="data:image/png;base64,', "")  # a picture inside of the page
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://""", outside)
    assert "default-src 'none'" in text
    assert report.stat().st_size < 1_000_000


def test_names_cannot_break_out(digits: Any, tmp_path: Path) -> None:
    result = digits[2]
    rows = (Row(EVIL, 8, 4, 0.1, 0.2, 0.3), *result.rows[1:])
    graph = dataclasses.replace(result.graph, unprunable={EVIL: EVIL})
    changed = dataclasses.replace(result, rows=rows, graph=graph, criterion={"name": EVIL})
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
    assert page.count("g", class_="dot") == 2  # BE and WARE; RE is no number, others not given
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
    prepared, _, result = digits
    gathered = gather(prepared, result, ("none", "lbyl"))
    assert list(gathered["errors"]) == ["none", "lbyl", "echo"]
    units = [row.unit for row in result.rows]
    for rows in gathered["errors"].values():
        assert [row["unit"] for row in rows] == units
    assert all(row["norm"] == 0 for row in gathered["errors"]["none"])
    # the closed form minimises the residual that plain pruning leaves whole
    for lbyl_row, none_row in zip(gathered["errors"]["lbyl"], gathered["errors"]["none"]):
        assert lbyl_row["residual"] < none_row["residual"]
    # and the regression on activations is the one that minimises their error
    for echo_row, none_row in zip(gathered["errors"]["echo"], gathered["errors"]["none"]):
        assert 0 < echo_row["ware"] < none_row["ware"] <= 0.5 + 1e-6
        assert 0 < echo_row["error"] < none_row["error"]
    for row in result.rows:
        packed = gathered["delivery"][row.unit]
        assert (packed["channels"], packed["kept"]) == (row.channels, row.kept)
    assert json.loads(json.dumps(gathered)) == gathered  # to write the same report again


def test_the_layers_that_hurt_most_and_the_next_step_are_told(digits: Any, tmp_path: Path) -> None:
    prepared, _, result = digits
    mild = prepared.alone(prepared.plan({"stem.0": 0.1, "plain1.0": 0.8}, criterion="l2"))
    assert mild.keys() == {"stem.0", "plain1.0"} and 0 < mild["stem.0"] < mild["plain1.0"]
    gathered = gather(prepared, result, ())
    assert gathered["alone"].keys() == {row.unit for row in result.rows}
    further = gathered["further"]
    assert 0 < further["macs"] < result.after.macs
    assert further["kept"] < result.forecast.kept
    text = Page(write_report(result, tmp_path / "r.html", **gathered).read_text("utf-8")).text
    listed = text[text.index("Which layers hurt most") : text.index("What the next step")]
    worst = sorted(gathered["alone"], key=lambda unit: -gathered["alone"][unit])
    places = [listed.index(unit) for unit in worst]
    assert places == sorted(places)
    assert "of the accuracy forecast to be kept instead of" in text
    hostile = {"alone": {"stem.0": float("nan")}, "further": {"macs": "many"}}
    text = write_report(result, tmp_path / "r.html", **hostile).read_text("utf-8")
    assert "Which layers hurt most" not in text and "next step" not in text


def test_what_is_not_one_matrix_has_no_residual(digits: Any) -> None:
    prepared, _, result = digits
    for row, own in zip(gather(prepared, result, ())["errors"]["echo"], result.rows):
        assert not {"residual", "bias", "norm"} & row.keys()
        assert row["error"] == own.error


def test_a_method_is_shown_with_the_settings_it_had(digits: Any) -> None:
    prepared, _, _ = digits
    chosen = lbyl.methods.LBYL(lambda2=0.5)
    made = prepared.compress(0.5, method=chosen)
    assert gather(prepared, made, ())["errors"].keys() == {"lbyl"}
    rows = gather(prepared, made, ("lbyl",))["errors"]["lbyl"]
    assert [row["norm"] for row in rows] == pytest.approx([row.norm for row in made.rows])
    other = prepared.compress(made.plan, method="none")
    assert list(gather(prepared, other, ())["errors"]) == ["none"]


def test_methods_from_weights_alone_need_no_run(digits: Any) -> None:
    prepared = lbyl.prepare(digits[0].model, digits[1])
    result = prepared.compress(0.5, method="moments")
    gathered = gather(prepared, result, ("none",))
    assert list(gathered["errors"]) == ["none", "moments"]
    assert "ware" not in gathered["errors"]["none"][0]
    assert [source for source, _ in prepared._statistics] == ["analytic"]


def test_layers_kept_whole_are_not_listed_as_pruned(digits: Any, tmp_path: Path) -> None:
    prepared, _, _ = digits
    result = prepared.compress({"stem.0": 0.5})
    text = write_report(result, tmp_path / "r.html", **gather(prepared, result)).read_text("utf-8")
    page = Page(text)
    table = text[text.index('id="units"') : text.index("</table>")]
    assert "stem.0" in table and "plain1.0" not in table
    assert "Kept whole: plain1.0 block.conv1" in page.text
    assert page.count("option") == 1  # one matrix to look at


def test_what_was_done_is_told(digits: Any, tmp_path: Path) -> None:
    prepared, _, result = digits
    text = Page(write_report(result, tmp_path / "r.html").read_text("utf-8")).text
    assert result.story in text and "No training." in text
    given = prepared.compress(result.plan, method="none")
    text = Page(write_report(given, tmp_path / "g.html").read_text("utf-8")).text
    assert given.story in text and given.chosen_by in text and "corrected" not in text


def test_what_was_done_otherwise_than_meant_and_what_cannot_be_told_are_told(
    digits: Any, tmp_path: Path
) -> None:
    _, _, result = digits
    assert (
        "What to know"
        not in Page(write_report(result, tmp_path / "r.html").read_text("utf-8")).text
    )
    told = Forecast(1.0, 0.01, None, None, None, 64, "fresh", one_answer=True)
    lines = tuple(f"layer {i}: <left> alone" for i in range(10))
    other = dataclasses.replace(result, fallbacks=lines, forecast=told)
    html = write_report(other, tmp_path / "o.html").read_text("utf-8")
    text = Page(html).text
    assert "What to know" in text and "layer 7: <left> alone" in text and "And 2 more" in text
    assert "<left>" not in html  # nothing of it is taken for markup
    assert "cannot be told" in text and "answers all inputs alike" in text


def test_one_outlier_makes_the_axis_logarithmic() -> None:
    from lbyl.report.charts import fitting_scale

    plain = fitting_scale([0.0, 0.5, 0.9])
    assert not plain.logarithmic
    assert (plain.low, plain.high) == (0.0, 1.0)
    steep = fitting_scale([0.0, 0.2, 0.3, 0.4, 90.0])
    assert steep.logarithmic
    assert (steep.low, steep.high) == (0.1, 100.0)
    assert steep.ticks == pytest.approx((0.1, 1, 10, 100))
    assert steep.fraction(0.0) == 0
    assert steep.fraction(1.0) == pytest.approx(1 / 3)
    same = fitting_scale([0.0, 0.0])
    assert 0 <= same.fraction(0.0) <= 1


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
