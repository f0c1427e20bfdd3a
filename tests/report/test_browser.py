"""The page in a real browser: every tab is opened, and what is drawn is counted.

Needs Chromium and the playwright package; skipped, saying so, where either is missing. Pictures
are left in tests/artefacts for people to look at.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lbyl.report import Run, write_several, write_tradeoff

PICTURES = Path(__file__).resolve().parents[1] / "artefacts"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
TABS = ["overview", "layers", "errors", "delivery", "compare", "repeat"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    paths = [os.environ.get("CHROMIUM"), *map(shutil.which, ("chromium", "chromium-browser"))]
    program = next((path for path in paths if path), None)
    if program is None:
        pytest.skip("chromium is not installed (on Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def visit(browser: Any, report: Path) -> Iterator[Any]:
    """Opens the report; whatever the console complains about fails the test."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def opened(width: int = 1200, height: int = 900, theme: str = "light") -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda r: None if r.url.startswith("file:") else complaints.append(f"asks for {r.url}"),
        )
        page.goto(report.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def colours(page: Any, canvas: str) -> int:
    """How many different colours a canvas holds."""
    return page.evaluate(  # type: ignore[no-any-return]
        """id => { const c = document.getElementById(id);
        const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height)
            .data.buffer);
        return new Set(d).size; }""",
        canvas,
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("size", "width", "height"), [("desktop", 1200, 900), ("phone", 390, 844)])
def test_every_tab_opens_and_fits(
    visit: Any, size: str, width: int, height: int, theme: str
) -> None:
    PICTURES.mkdir(exist_ok=True)
    page = visit(width, height, theme)
    for name in TABS:
        page.click(f"#tab-{name}")
        shown = page.eval_on_selector_all(
            "section", "all => all.filter(s => s.offsetHeight > 0).map(s => s.id)"
        )
        assert shown == [name]
        # nothing but the boxes that are meant to scroll is wider than the screen
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=str(PICTURES / f"{size}-{theme}-{name}.png"), full_page=True)


OVERFLOWING = """() => [...document.querySelectorAll("section:not([hidden]) svg.chart")].flatMap(
    chart => { const box = chart.getBoundingClientRect();
        return [...chart.querySelectorAll(".tick, .bar, .dot, .line")]
            .map(part => [part, part.getBoundingClientRect()])
            .filter(([, at]) => at.width && (at.left < box.left - 10 || at.right > box.right + 10))
            .map(([part]) => part.textContent || part.getAttribute("class")); })"""
LETTERS = """() => { const all = [...document.querySelectorAll("section:not([hidden]) .tick")];
    return Math.min(...all.map(t => parseFloat(getComputedStyle(t).fontSize) * t.getCTM().d
        * (t.dataset.turn ? 1 / Math.cos(42 * Math.PI / 180) : 1))); }"""


@pytest.mark.parametrize("width", [390, 1200])
def test_charts_fit_the_width_with_letters_of_full_size(visit: Any, width: int) -> None:
    page = visit(width)
    for tab in ("overview", "errors", "compare"):
        page.click(f"#tab-{tab}")
        page.wait_for_selector(f"#{tab} svg.chart[data-room]")
        assert page.evaluate(OVERFLOWING) == []
        assert page.evaluate(LETTERS) == pytest.approx(12, abs=0.5)
        for box in page.query_selector_all(f"#{tab} .fitted"):
            assert box.evaluate("b => b.scrollWidth <= b.clientWidth")


def test_names_along_an_axis_are_left_out_before_they_touch(visit: Any, digits: Any) -> None:
    names = len(digits[2].rows)
    shown = {}
    for width in (200, 1200):
        page = visit(width)
        page.wait_for_selector("svg.kept[data-room]")
        boxes = page.eval_on_selector_all(
            ".kept .along", "all => all.map(t => t.getBoundingClientRect()).filter(b => b.width)"
            ".map(b => [b.left, b.right])",
        )  # fmt: skip
        assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(boxes))
        shown[width] = len(boxes)
    assert 0 < shown[200] < shown[1200] == names


@pytest.fixture(scope="module")
def others(digits: Any, tmp_path_factory: Any) -> dict[str, Path]:
    """The pages about several compressions and about a sweep, with a command that is long."""
    prepared, _, half = digits
    folder = tmp_path_factory.mktemp("others")
    command = "lbyl compress lbyl:digits --weights /a/very/long/way/to/" + "some/" * 20 + "weights"
    runs = [Run("half", half, command=command), Run("less", prepared.compress(0.3), 90, 95)]
    row = {
        "model": "lbyl:digits", "weights": "/a/" + "way/" * 30, "kind": "ratio", "seed": 0,
        "method": "echo", "criterion": "l2", "macs_before": 10.0, "parameters_before": 10.0,
        "divergence": 0.1, "failed": None, "command": command,
    }  # fmt: skip
    rows = [row | {"amount": r, "macs": 10 * r, "parameters": 5, "kept": r} for r in (0.5, 0.97)]
    return {
        "several": write_several(runs, folder / "several.html"),
        "sweep": write_tradeoff(rows, folder / "sweep.html"),
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_pages_about_several_compressions_fit_too(
    visit: Any, others: dict[str, Path], width: int, theme: str
) -> None:
    for name, path in others.items():
        page = visit(width, theme=theme)
        page.goto(path.as_uri())
        for tab in page.eval_on_selector_all("[role=tab]", "all => all.map(t => t.id)"):
            page.click(f"#{tab}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(OVERFLOWING) == []
            page.screenshot(path=str(PICTURES / f"{name}-{width}-{theme}-{tab}.png"))


def test_charts_are_drawn(visit: Any, digits: Any) -> None:
    page, units = visit(), len(digits[2].rows)
    heights = page.eval_on_selector_all(
        ".kept .part", "all => all.map(r => r.getBoundingClientRect().height)"
    )
    assert len(heights) == units
    kept = [row.kept for row in digits[2].rows]
    for height, count in zip(heights, kept):
        assert height / max(heights) == pytest.approx(count / max(kept), abs=0.01)
    page.click("#tab-errors")
    assert page.locator("svg.errors").count() == 5
    # error and WARE of four methods, RE, BE and ‖s‖ of three
    assert page.locator("svg.errors .series").count() == 2 * 4 + 3 * 3
    page.click("#tab-compare")
    assert page.locator("svg.ratios .dot").count() == 12
    assert page.locator("svg.ratios .reference").count() == 1


def test_a_method_can_be_hidden(visit: Any) -> None:
    page = visit()
    page.click("#tab-errors")
    key = page.locator("#errors .key", has_text="lbyl")
    key.click()
    assert key.get_attribute("aria-pressed") == "false"
    assert page.locator("#errors .series:visible").count() == 12
    key.click()
    assert page.locator("#errors .series:visible").count() == 17


def test_the_heat_map_is_painted_and_follows_the_choice(visit: Any, digits: Any) -> None:
    page, rows = visit(), digits[2].rows
    page.click("#tab-delivery")
    size = "c => [c.height, c.width]"
    for index, row in enumerate(rows):
        page.select_option("#unit", str(index))
        assert page.eval_on_selector("#heat", size) == [row.kept, row.channels]
        assert colours(page, "heat") > 3
        assert f"{row.channels} channels, {row.kept} kept" in page.inner_text("#cell")
    page.focus("#heat")
    page.keyboard.press("ArrowDown")
    assert "channel 0 from kept channel number 1" in page.inner_text("#cell")


def test_tabs_go_by_keyboard_and_by_address(visit: Any, report: Path) -> None:
    page = visit()
    page.focus("#tab-overview")
    page.keyboard.press("ArrowLeft")
    assert page.get_attribute("#tab-repeat", "aria-selected") == "true"
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.id") == "tab-overview"
    page.goto(report.as_uri() + "#delivery")
    assert page.locator("#delivery").is_visible()


def test_tips_tables_and_theme(visit: Any, digits: Any) -> None:
    page = visit()
    page.hover(".kept .bar >> nth=0")
    assert digits[2].rows[0].unit in page.inner_text("#tip")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.click("#tab-layers")
    page.click("#units th:nth-child(5) button")
    cells = page.eval_on_selector_all(
        "#units tbody td:nth-child(5)", "all => all.map(c => parseFloat(c.textContent))"
    )
    assert cells == sorted(cells)
    assert len(cells) == len(digits[2].rows)


def test_on_paper_everything_is_open(visit: Any) -> None:
    page = visit(theme="dark")
    page.emulate_media(media="print")
    assert page.locator("section:visible").count() == len(TABS)
    assert page.locator("nav").is_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.screenshot(path=str(PICTURES / "print.png"), full_page=True)
