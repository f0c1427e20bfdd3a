"""The page in a real browser: every tab is opened, and what is drawn is counted.

Needs Chromium and the playwright package; skipped, saying so, where either is missing. Pictures
are left in tests/artefacts for people to look at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


OVERFLOWING = """() => [...document.querySelectorAll("section:not([hidden]) svg.chart")].flatMap(
    chart => { const box = chart.getBoundingClientRect();
        return [...chart.querySelectorAll(".tick, .bar, .dot, .line")]
            .map(part => [part, part.getBoundingClientRect()])
            .filter(([, at]) => at.width && (at.left < box.left - 10 || at.right > box.right + 10))
            .map(([part]) => part.textContent || part.getAttribute("class")); })"""
LETTERS = """() => { const all = [...document.querySelectorAll("section:not([hidden]) .tick")];
    return Math.min(...all.map(t => parseFloat(getComputedStyle(t).fontSize) * t.getCTM().d
        * (t.dataset.turn ? 1 / Math.cos(42 * Math.PI / 180) : 1))); }"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_every_tab_opens_and_fits_with_letters_of_full_size(
    visit: Any, width: int, theme: str
) -> None:
    PICTURES.mkdir(exist_ok=True)
    page = visit(width, theme=theme)
    for name in TABS:
        page.click(f"#tab-{name}")
        shown = page.eval_on_selector_all(
            "section", "all => all.filter(s => s.offsetHeight > 0).map(s => s.id)"
        )
        assert shown == [name]
        # nothing but the boxes that are meant to scroll is wider than the screen
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if name in ("overview", "errors", "compare"):
            page.wait_for_selector(f"#{name} svg.chart[data-room]")
            assert page.evaluate(OVERFLOWING) == []
            assert page.evaluate(LETTERS) == pytest.approx(12, abs=0.5)
        page.screenshot(path=str(PICTURES / f"{width}-{theme}-{name}.png"), full_page=True)


def test_charts_are_drawn_and_methods_can_be_hidden(visit: Any, digits: Any) -> None:
    page, rows = visit(), digits[2].rows
    heights = page.eval_on_selector_all(
        ".kept .part", "all => all.map(r => r.getBoundingClientRect().height)"
    )
    wanted = [row.kept / max(row.kept for row in rows) for row in rows]
    assert [height / max(heights) for height in heights] == pytest.approx(wanted, abs=0.01)
    page.click("#tab-errors")
    assert page.locator("#errors .series:visible").count() == 4
    page.locator("#errors .key", has_text="lbyl").click()
    assert page.locator("#errors .series:visible").count() == 3
    page.click("#tab-compare")
    assert page.locator("svg.ratios .dot").count() == 12


def test_the_heat_map_is_painted_and_follows_the_choice(visit: Any, digits: Any) -> None:
    page, rows = visit(), digits[2].rows
    page.click("#tab-delivery")
    for index, row in enumerate(rows):
        page.select_option("#unit", str(index))
        size = page.eval_on_selector("#heat", "c => [c.height, c.width]")
        assert size == [row.kept, row.channels]
        assert f"{row.channels} channels, {row.kept} kept" in page.inner_text("#cell")
    page.focus("#heat")
    page.keyboard.press("ArrowDown")
    assert "channel 0 from kept channel number 1" in page.inner_text("#cell")


def test_tabs_go_by_keyboard_and_by_address_and_tables_are_sorted(visit: Any, report: Path) -> None:
    page = visit()
    page.focus("#tab-overview")
    page.keyboard.press("ArrowLeft")
    assert page.get_attribute("#tab-repeat", "aria-selected") == "true"
    page.click("#tab-layers")
    page.click("#units th:nth-child(5) button")
    cells = page.eval_on_selector_all(
        "#units tbody td:nth-child(5)", "all => all.map(c => parseFloat(c.textContent))"
    )
    assert cells == sorted(cells) != []
    page.goto(report.as_uri() + "#delivery")
    assert page.locator("#delivery").is_visible()
