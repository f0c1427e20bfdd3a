"""Tests hold on to public names alone, so that what lies behind these can move."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lbyl

TESTS = Path(__file__).parent
OPEN = (  # modules all of whose names are public
    *("lbyl.methods", "lbyl.criteria", "lbyl.checks", "lbyl.app.data"),
)
NAMES = {  # modules some of whose names README and the pages of the documentation teach
    "lbyl": {*lbyl.__all__, "__version__", "data", "checks"},
    "lbyl.app": {"data"},
    "lbyl.app.cli.app": {"app"},
    "lbyl.app.deploy": {"measure_steps", "quantise_onnx"},
    "lbyl.app.export": {"export_onnx"},
    "lbyl.methods.base": {"identity_rows"},
    "lbyl.app.sources": {"parse_input_shape", "resolve", "zoo"},
    "lbyl.app.streaming": {"compress_blocks"},
    "lbyl.app.sources.saved": {"load"},
    "lbyl.app.sources.yolo": {"as_yolo"},
    "lbyl.app.report": {"gather", "loader_snippet", "write_report"},
    "lbyl.storage.files.files": {"save"},
    "lbyl.rivals.errors": {"LayerErrors", "adaptive_ratios", "layer_errors"},
    "lbyl.surgery.indices": {"pruned_of"},
    "lbyl.app.sweep": {"Engine", "Setting", "Store", "Subject", "points", "sweep"},
    "lbyl.tracing.labels": {"Flow"},
    "lbyl.tracing.record": {"Call"},
}
REASON = re.compile(r"#\s*private: \w+")
LINE = re.compile(r"^\s*((?:from lbyl[\w.]* import|import lbyl\.)[^\n]*)", re.MULTILINE)
PATCHES = {"setattr", "delattr", "setitem", "patch", "import_module"}


def public(module: str, name: str | None = None) -> bool:
    """May a test import this name, or the module itself?"""
    if any(module == way or module.startswith(f"{way}.") for way in OPEN if way != "lbyl.methods"):
        return True
    if module == "lbyl.methods" or name is None:
        return name is not None or module in (*OPEN, *NAMES) or public(*module.rpartition(".")[::2])
    return name in NAMES.get(module, ()) or (
        module.startswith("lbyl.app.sources.zoo") and not name.startswith("_")
    )


def private(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """What is imported, replaced or reached inside of lbyl that is not public, and where."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.partition(".")[0] == "lbyl":
                found = [f"{module}.{a.name}" for a in node.names if not public(module, a.name)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found = [n for n in names if n.startswith("lbyl.") and not public(n)]
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "lbyl":
                fine = node.attr.startswith("__") or public("lbyl", node.attr)
                found = [] if fine else [f"lbyl.{node.attr}"]
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = [a.value for a in node.args if isinstance(a, ast.Constant)]
            paths = [str(g) for g in given if re.fullmatch(r"lbyl(\.\w+)+", str(g))]
            found = [p for p in paths if called in PATCHES and not public(*p.rpartition(".")[::2])]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for line in LINE.findall(node.value):  # a program for a process of its own
                if not REASON.search(line):
                    found += [name for _, name in private(_parsed(line))]
        for name in found:
            yield node, name


def _parsed(line: str) -> ast.AST:
    try:
        return ast.parse(line)
    except SyntaxError:
        return ast.parse("")


def unexplained(text: str) -> list[tuple[int, str]]:
    """Lines with private names that no `# private: …` on them or right above them explains."""
    lines = ["", *text.splitlines()]
    found = []
    for node, name in private(ast.parse(text)):
        first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
        while lines[first - 1].strip().startswith("#") and not REASON.search(lines[first - 1]):
            first -= 1  # a reason of several lines
        if not any(REASON.search(line) for line in lines[first - 1 : last + 1]):
            found.append((getattr(node, "lineno", 1), name))
    return sorted(set(found))


@pytest.mark.parametrize(
    "path",
    [p.relative_to(TESTS).as_posix() for p in sorted(TESTS.rglob("*.py")) if p != Path(__file__)],
)
def test_names_that_are_not_public_have_a_reason(path: str) -> None:
    found = unexplained((TESTS / path).read_text(encoding="utf-8"))
    told = "\n".join(f"tests/{path}:{line}: {name}" for line, name in found)
    assert not found, f"private names without a `# private:` reason:\n{told}"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import lbyl\nlbyl.trace\nlbyl.methods.Echo", []),
        (
            "from lbyl.app.sources import resolve, zoo, network",
            ["lbyl.app.sources.network"],
        ),
        ("import lbyl.graph.unit as unit", ["lbyl.graph.unit"]),
        ("from lbyl import api  # private: because", []),
        ("# private: because\n# of this\nfrom lbyl.api import (\n    a,\n    b,\n)", []),
        ("from lbyl.api import a, b", ["lbyl.api.a", "lbyl.api.b"]),
        ("patch.setattr('lbyl.scoring.choose.spare', 1)", ["lbyl.scoring.choose.spare"]),
        ("import lbyl\nlbyl.storage.PLAN", ["lbyl.storage"]),
        ("P = 'import lbyl\\nfrom lbyl.api import a'", ["lbyl.api.a"]),
    ],
)
def test_a_private_name_is_noticed(text: str, names: list[str]) -> None:
    assert [name for _, name in unexplained(text)] == names
