"""The page as text: what it says, that nothing can break out of it, that it is whole."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import lbyl
from lbyl.app.report import gather, write_report

VOID = {"meta", "link", "br", "img", "input", "hr"}
EVIL = '"><script>alert(1)</script>'


class Page(HTMLParser):
    """Elements by name and the words between them, with a check that they nest."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        assert not self.open, f"never closed: {self.open}"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    def count(self, tag: str, name: str = "") -> int:
        """Elements of a kind, of those with this class or role."""
        return sum(
            t == tag and (not name or name in f"{a.get('class')} {a.get('role')}".split())
            for t, a in self.elements
        )

    def matrices(self) -> list[dict[str, Any]]:
        found = re.search(r'id="matrices">(.*?)</script>', self.html, re.S)
        return json.loads(found[1]) if found else []


def test_the_page_nests_has_every_part_and_headlines_before_and_after(
    report: Path, digits: Any
) -> None:
    page, units = Page(report), len(digits[2].rows)
    assert page.count("section", "tabpanel") == page.count("button", "tab") == 6
    assert (
        page.count("g", "bar") == page.count("option") == units and page.count("div", "card") == 6
    )
    # the error of four methods, a dot a unit each; four methods at three ratios
    assert page.count("g", "dot") == 4 * units + 4 * 3
    assert "97.00 % → 95.50 % −1.50 points" in page.text
    assert "2.5 ms → 1.25 ms −50.0 % device CPU" in page.text
    share = 100 * (digits[2].after.parameters / digits[2].before.parameters - 1)
    assert f"{share:+.1f} %".replace("-", "−") in page.text
    # nothing is asked for from outside
    own = page.html.replace('src="data:image/png;base64,', "")  # a picture inside of the page
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://""", own)
    assert "default-src 'none'" in page.html and report.stat().st_size < 1_000_000


def test_without_data_the_first_figure_is_the_accuracy_forecast(
    digits: Any, tmp_path: Path
) -> None:
    prepared, _, result = digits
    told = result.forecast
    page = Page(write_report(result, tmp_path / "r.html"))
    assert f"Accuracy kept about {100 * told.kept:.0f} %" in page.text
    assert f"equal answers on {told.inputs} fresh inputs" in page.text
    assert "Predicted error" not in page.text and "What to know" not in page.text
    assert result.story in page.text and "No training." in page.text
    page = Page(write_report(dataclasses.replace(result, forecast=None), tmp_path / "r.html"))
    mean = sum(row.error for row in result.rows) / len(result.rows)
    assert f"Predicted error {mean:.4f}"[:-1] in page.text
    assert "on procedural statistics" in page.text
    assert page.count("button", "tab") == 4  # no deliveries, nothing compared
    assert page.count("g", "dot") == len(result.rows)
    given = prepared.compress(result.plan, method="none")
    page = Page(write_report(given, tmp_path / "g.html"))
    assert given.story in page.text and given.chosen_by in page.text
    assert "corrected" not in page.text


def test_names_cannot_break_out(digits: Any, tmp_path: Path) -> None:
    result = digits[2]
    rows = (dataclasses.replace(result.rows[0], unit=EVIL), *result.rows[1:])
    graph = dataclasses.replace(result.graph, unprunable={EVIL: EVIL})
    told = dataclasses.replace(result.forecast, kept=None, one_answer=True)
    notes = tuple(f"layer {i}: {EVIL} alone" for i in range(10))
    named = {"rows": rows, "graph": graph, "criterion": {"name": EVIL}, "fallbacks": notes}
    path = write_report(
        dataclasses.replace(result, **named, forecast=told),
        tmp_path / "r.html",
        errors={EVIL: [dataclasses.asdict(rows[0])]},
        comparison=[{"method": EVIL, "criterion": EVIL, "ratio": r, "accuracy": 1} for r in (0, 1)],
        delivery={EVIL: torch.ones(2, 2), "</script>": torch.ones(1, 1)},
        latency={"before": 1, "after": 1, EVIL: EVIL},
        command=EVIL,
        loader=EVIL,
    )
    page = Page(path)
    assert EVIL not in page.html and EVIL in page.text
    assert page.count("script") == 2  # the page's own and its data
    assert "What to know" in page.text and "And 2 more" in page.text
    shown = Page(write_report(dataclasses.replace(result, forecast=told), tmp_path / "o.html"))
    assert "cannot be told" in shown.text and "answers all inputs alike" in shown.text


def test_errors_may_hold_no_number_and_one_ratio_is_drawn_as_bars(
    digits: Any, tmp_path: Path
) -> None:
    unit = digits[2].rows[0].unit
    errors = {"echo": [{"unit": unit, "error": float("nan")}, {"unit": "other", "error": 0.25}]}
    rows = [{"method": "lbyl", "criterion": "l2", "ratio": 0.3, "error": "the solve failed"}]
    given = {"errors": errors, "comparison": rows, "alone": {"stem.0": float("nan")}}
    page = Page(write_report(digits[2], tmp_path / "r.html", **given))
    assert page.count("g", "dot") == 1 and "the solve failed" in page.text
    assert not re.search(r"\bnan\b", page.text)
    assert "Which layers hurt most" not in page.text
    rows = [
        {"method": m, "criterion": "l2", "ratio": 0.5, "accuracy": a}
        for m, a in (("none", 40), ("echo", 90))
    ]
    page = Page(write_report(digits[2], tmp_path / "r.html", comparison=rows))
    assert "Accuracy, % by method" in page.text and "width:90.0%" in page.html


def test_a_page_is_written_whole(digits: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")
    with pytest.raises(lbyl.LbylError, match="must be a matrix"):
        write_report(digits[2], path, delivery={"stem.0": torch.ones(3)})
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(lbyl.LbylError, match="is a directory"):
        write_report(digits[2], tmp_path)


def test_gather_compares_methods_under_one_plan(digits: Any) -> None:
    prepared, _, result = digits
    gathered = gather(prepared, result, ("none", "lbyl"))
    errors, units = gathered["errors"], [row.unit for row in result.rows]
    assert list(errors) == ["none", "lbyl", "echo"]
    assert all([row["unit"] for row in rows] == units for rows in errors.values())
    for none, closed, echo, own in zip(*errors.values(), result.rows):
        assert 0 < echo["error"] < none["error"] and echo["error"] == own.error
        assert echo["error"] < closed["error"]
        packed = gathered["delivery"][own.unit]
        assert (packed["channels"], packed["kept"]) == (own.channels, own.kept)
    assert json.loads(json.dumps(gathered)) == gathered  # to write the same report again
    made = prepared.compress(0.5, method=lbyl.methods.LBYL(lambda2=0.5))
    given = gather(prepared, made, ("lbyl",))["delivery"]  # with the settings it had
    assert given.keys() == gathered["delivery"].keys() and given != gathered["delivery"]
    assert list(gather(prepared, made, ())["errors"]) == ["lbyl"]


def test_the_layers_that_hurt_most_and_the_next_step_are_told(digits: Any, tmp_path: Path) -> None:
    prepared, _, result = digits
    mild = prepared.alone(prepared.plan({"stem.0": 0.1, "plain1.0": 0.8}, criterion="l2"))
    assert mild.keys() == {"stem.0", "plain1.0"} and 0 < mild["stem.0"] < mild["plain1.0"]
    gathered = gather(prepared, result, ())
    assert gathered["alone"].keys() == {row.unit for row in result.rows}
    further = gathered["further"]
    assert 0 < further["macs"] < result.after.macs and further["kept"] < result.forecast.kept
    text = Page(write_report(result, tmp_path / "r.html", **gathered)).text
    listed = text[text.index("Which layers hurt most") : text.index("What the next step")]
    worst = sorted(gathered["alone"], key=lambda unit: -gathered["alone"][unit])
    assert sorted(worst, key=listed.index) == worst
    assert "of the accuracy forecast to be kept instead of" in text


def test_outliers_make_axes_logarithmic_and_large_matrices_shrink_to_their_strongest_entries(
    digits: Any, tmp_path: Path
) -> None:
    matrix = torch.zeros(300, 200)
    matrix[299, 199], matrix[0, 1] = -5.0, 2.0
    for last, logarithmic in ((0.9, 0), (90.0, 1)):
        values = (0.0, 0.2, 0.3, 0.4, last)
        errors = {"echo": [{"unit": f"u{i}", "error": v} for i, v in enumerate(values)]}
        given = {"errors": errors, "delivery": {"x": matrix}}
        page = Page(write_report(digits[2], tmp_path / "r.html", **given))
        assert page.text.count("on a logarithmic scale") == logarithmic
    (held,) = page.matrices()
    assert (held["rows"], held["columns"], held["scale"]) == (100, 100, 5.0)
    levels = torch.frombuffer(bytearray(base64.b64decode(held["data"])), dtype=torch.int8)
    assert levels.nonzero().flatten().tolist() == [0, 9999] and levels[9999] == -127
