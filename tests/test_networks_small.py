"""Small networks of other packages, one at a time: cut exactly, saved, loaded afresh, trained."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import foreign
from support.foreign.check import Elsewhere, examine

ROWS = Path(__file__).parents[1] / "docs" / "results" / "coverage-small.jsonl"
ATTENTION = ("transformers/", "diffusers/")


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    """A process that loads what this one saves."""
    process = Elsewhere()
    yield process
    process.close()


def rows() -> list[dict[str, Any]]:
    """What was measured of each network; the last row is the newest."""
    found = [json.loads(line) for line in ROWS.read_text().splitlines()]
    return list({row["name"]: row for row in found}.values())


def test_at_least_fifteen_of_each_of_five_packages_are_measured() -> None:
    names = [row["name"] for row in rows()]
    counts = Counter(name.partition("/")[0] for name in names)
    assert set(names) <= set(foreign.every())
    assert sum(counts.values()) >= 150
    assert sum(count >= 15 for count in counts.values()) >= 5


def test_no_row_of_the_page_has_a_problem() -> None:
    assert not {row["name"]: row["problems"] for row in rows() if row["problems"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", foreign.every())
def test_network(
    name: str, tmp_path: Path, elsewhere: Elsewhere, record_property: Callable[[str, object], None]
) -> None:
    pytest.importorskip(name.partition("/")[0])
    row = examine(name, tmp_path / "slim", elsewhere)
    record_property("row", json.dumps(row))
    assert not row["problems"]
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in foreign.every() if n.startswith(ATTENTION)])
def test_attention_of(name: str, tmp_path: Path, elsewhere: Elsewhere) -> None:
    pytest.importorskip(name.partition("/")[0])
    assert not examine(name, tmp_path / "slim", elsewhere, attention=True)["problems"]
    gc.collect()
