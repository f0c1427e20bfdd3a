"""How long the code may be: rooms keep to a number of lines, which may fall and not rise.

A room that must grow says why beside its new number.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "lbyl"
LINES = {
    "app": 8820,
    "tracing": 4750,
    "runtime": 2600,
    "statistics": 2600,
    "inputs": 2400,
    "restoring": 1700,
    "planning": 1600,
    "scoring": 1450,
    "rivals": 1200,
    "graph": 860,
    "surgery": 800,
    "api.py": 690,
    "storage": 575,
    "methods": 560,
    "refining": 450,
    "checks.py": 330,
    "result.py": 270,
    "latency.py": 200,
}
REST = 160  # names of the package, of modules that moved, and the one error
OF_TESTS = 25_150
LONGEST = 690  # of a module


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_room_is_longer_than_it_may_be() -> None:
    found: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0]
        found[room if room in LINES else "the rest"] += length(path)
    too_long = {room: lines for room, lines in found.items() if lines > LINES.get(room, REST)}
    assert not too_long, f"longer than {LINES}: shorten these rooms"


def test_no_module_is_longer_than_it_may_be() -> None:
    too_long = [path.name for path in SOURCE.rglob("*.py") if length(path) > LONGEST]
    assert not too_long


def test_the_tests_are_no_longer_than_they_may_be() -> None:
    assert sum(map(length, TESTS.rglob("*.py"))) <= OF_TESTS
