"""Mutation testing of the mathematics: small changes to the code that some test must notice.

python scripts/mutants.py                             # 150 mutants, drawn by seed
python scripts/mutants.py --count 40 --only methods --seed 2

One change is made to one module at a time (another operator, another constant, a condition turned
round, two branches exchanged); then the tests of its room run until the first fails. A
mutant that no test notices survives. Each runs in a fork of a process that has torch loaded, as
many at once as there are cores.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "lbyl"

# Room, or file → the tests that know it best, the quickest first; of several the most specific.
ROOMS: dict[str, tuple[str, ...]] = {
    "methods": ("tests/methods", "tests/test_checks.py"),
    "statistics": ("tests/statistics", "tests/methods/test_echo.py", "tests/test_processes.py"),
    "statistics/analytic.py": (
        "tests/statistics/test_analytic.py",
        "tests/statistics",
        "tests/methods/test_analytic_moments.py",
    ),
    "statistics/products.py": (
        "tests/statistics/test_product_moments.py",
        "tests/restoring/test_products.py",
        "tests/tracing/test_attention.py",
    ),
    "statistics/solve.py": ("tests/statistics/test_solve.py", "tests/statistics", "tests/methods"),
    "surgery": ("tests/surgery", "tests/test_storage.py", "tests/tracing"),
    "planning": ("tests/planning", "tests/test_prepare.py", "tests/test_choosing.py"),
    "planning/grouped.py": (
        "tests/planning/test_grouped.py",
        "tests/restoring/test_products.py",
        "tests/planning",
    ),
    "restoring/correct.py": (
        "tests/restoring/test_correct.py",
        "tests/methods/test_every_method.py",
        "tests/test_degenerate.py",
    ),
    "restoring/rewrite.py": ("tests/methods/test_every_method.py", "tests/restoring"),
    "restoring/recalibrate.py": (
        "tests/restoring/test_recalibrate.py",
        "tests/restoring",
        "tests/methods/test_echo.py",
    ),
}

MAKES_NO_DIFFERENCE = "no result depends on it"
"""In the comment of a line: its numbers decide how fast something is, and nothing else."""

Drawn = tuple[Path, int, int]
"""A mutant: its file, the node that is changed and which of its changes."""

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Add,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}

Change = Callable[[ast.AST], None]


def changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """The mutants of one node: what each changes, and how."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:

        def compare(n: ast.AST) -> None:
            n.ops[0] = COMPARED[type(n.ops[0])]()  # type: ignore[attr-defined]

        yield "comparison", compare
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in COMPUTED:

        def compute(n: ast.AST) -> None:
            n.op = COMPUTED[type(n.op)]()  # type: ignore[attr-defined]

        yield "operator", compute
    if isinstance(node, ast.BoolOp):

        def connect(n: ast.AST) -> None:
            n.op = ast.Or() if isinstance(n.op, ast.And) else ast.And()  # type: ignore[attr-defined]

        yield "and/or", connect
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):

        def drop(n: ast.AST) -> None:
            n.op = ast.UAdd() if isinstance(n.op, ast.USub) else n.op  # type: ignore[attr-defined]
            if not isinstance(n.op, ast.UAdd):  # type: ignore[attr-defined]
                n.operand = ast.UnaryOp(n.op, n.operand)  # type: ignore[attr-defined]

        yield "sign or not", drop
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):

        def constant(n: ast.AST) -> None:
            n.value = n.value + 1 if isinstance(n.value, int) else 2 * n.value + 1e-3  # type: ignore[attr-defined]

        yield "constant", constant
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):

        def flip(n: ast.AST) -> None:
            n.value = not n.value  # type: ignore[attr-defined]

        yield "truth", flip
    if isinstance(node, ast.IfExp):

        def swap(n: ast.AST) -> None:
            n.body, n.orelse = n.orelse, n.body  # type: ignore[attr-defined]

        yield "branches", swap


def skipped(tree: ast.Module, lines: list[str]) -> set[int]:
    """Nodes that compute nothing: annotations, docstrings, messages of errors and notes.

    And the numbers of lines that say that no result depends on them.
    """
    found: set[int] = set()

    def leave(node: ast.AST | None) -> None:
        if node is not None:
            found.update(id(n) for n in ast.walk(node))

    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            leave(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            leave(node.returns)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for decorator in node.decorator_list:
                leave(decorator)
        unimportant = MAKES_NO_DIFFERENCE in lines[getattr(node, "lineno", 1) - 1]
        if _computes_nothing(node) or (isinstance(node, ast.stmt) and unimportant):
            leave(node)
    return found


def _computes_nothing(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") in ("note", "progress")
    if isinstance(node, (ast.Assign, ast.Expr)):
        return _is_type(node)
    if isinstance(node, ast.FunctionDef):
        return isinstance(node.returns, ast.Name) and node.returns.id == "str"  # words
    return isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr))


def _is_type(node: ast.AST) -> bool:
    """Whether a statement makes a name for a type, such as `Ratio = float | Mapping`."""
    value = getattr(node, "value", None)
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr)


def mutants(path: Path) -> list[tuple[int, int]]:
    """All mutants of a file: the number of the node that is changed, and that of its change."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    away = skipped(tree, source.splitlines())
    return [
        (index, number)
        for index, node in enumerate(ast.walk(tree))
        if id(node) not in away
        for number, _ in enumerate(changes(node))
    ]


def mutated(path: Path, index: int, number: int) -> tuple[int, str, str]:
    """A mutant: its line, what is changed, and the changed source."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node = next(n for i, n in enumerate(ast.walk(tree)) if i == index)
    what, change = list(changes(node))[number]
    change(node)
    source = ast.unparse(ast.fix_missing_locations(tree))
    return getattr(node, "lineno", 0), what, source


def begin(path: Path, source: str, tests: tuple[str, ...]) -> int:
    """A process that runs the tests with this source in the place of the file's own."""
    process = os.fork()
    if process == 0:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        status = 1
        try:
            status = _tested(path, source, tests)
        finally:
            os._exit(status)
    return process


def finished(process: int, deadline: float) -> bool | None:
    """Whether the tests failed; None while they run and may run on."""
    done, status = os.waitpid(process, os.WNOHANG)
    if done:
        return status != 0
    if time.monotonic() < deadline:
        return None
    os.kill(process, signal.SIGKILL)  # a mutant that never ends is noticed, too
    os.waitpid(process, 0)
    return True


def _tested(path: Path, source: str, tests: tuple[str, ...]) -> int:
    import importlib.abc
    import importlib.util

    import pytest

    name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    name = name.removesuffix(".__init__")

    class Mutant(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, fullname, *rest):  # type: ignore[no-untyped-def]
            if fullname != name:
                return None
            return importlib.util.spec_from_file_location(fullname, path, loader=self)

        def create_module(self, spec):  # type: ignore[no-untyped-def]
            return None

        def exec_module(self, module):  # type: ignore[no-untyped-def]
            exec(compile(source, str(path), "exec"), module.__dict__)

    sys.meta_path.insert(0, Mutant())
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--no-header", "-p", "no:timeout"]
    return int(pytest.main([*options, "-o", "addopts=-m 'not slow'", *tests]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", choices=list(ROOMS))
    parser.add_argument("--limit", type=int, default=600, help="seconds for one mutant")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    drawn = draw(options.count, options.seed, options.only)
    preload()
    if failed := unchanged(drawn, options.processes):
        print("tests that fail without a mutant notice nothing:", *failed, file=sys.stderr)
        return 1
    survivors, done = [], 0
    for place, killed in run(drawn, options.processes, options.limit):
        done += 1
        if not killed:
            survivors.append(place)
        print(f"{done}/{len(drawn)} {'killed  ' if killed else 'SURVIVED'} {place}", flush=True)
    score = 100 * (1 - len(survivors) / max(1, done))
    print(f"{done} mutants, {len(survivors)} survived: score {score:.1f} %")
    if options.json:
        figures = {"mutants": done, "survived": survivors, "score": score, "seed": options.seed}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(score < 85)


def run(drawn: list[Drawn], processes: int, limit: int) -> Iterator[tuple[str, bool]]:
    """Where each mutant is and whether the tests noticed it, in the order they end."""
    waiting, busy = list(drawn), {}
    while waiting or busy:
        while waiting and len(busy) < processes:
            path, index, number = waiting.pop(0)
            line, what, source = mutated(path, index, number)
            place = f"{path.relative_to(ROOT)}:{line} {what}"
            busy[begin(path, source, tests_of(path))] = place, time.monotonic() + limit
        for process, (place, deadline) in list(busy.items()):
            killed = finished(process, deadline)
            if killed is not None:
                del busy[process]
                yield place, killed
        time.sleep(0.05)


def tests_of(path: Path) -> tuple[str, ...]:
    """The tests of a file, or of its room where it has none of its own."""
    inner = path.relative_to(SOURCE).as_posix()
    return ROOMS[max((room for room in ROOMS if _within(inner, room)), key=len)]


def _within(inner: str, room: str) -> bool:
    return inner == room or inner.startswith(room + "/")


def draw(count: int, seed: int, only: str | None) -> list[Drawn]:
    """A sample of all mutants of the rooms, each as likely as any other."""
    files = {
        path
        for room in ROOMS
        for path in ((SOURCE / room).glob("*.py") if (SOURCE / room).is_dir() else [SOURCE / room])
        if only is None or _within(path.relative_to(SOURCE).as_posix(), only)
    }
    every = [(path, *mutant) for path in sorted(files) for mutant in mutants(path)]
    return random.Random(seed).sample(every, min(count, len(every)))


def unchanged(drawn: list[Drawn], processes: int) -> list[str]:
    """Files whose tests fail as they are, which would notice every mutant."""
    busy: dict[int, Path] = {}
    waiting = sorted({path for path, *_ in drawn}, key=tests_of)
    waiting = [
        p for i, p in enumerate(waiting) if i == 0 or tests_of(p) != tests_of(waiting[i - 1])
    ]
    failed = []
    while waiting or busy:
        while waiting and len(busy) < processes:
            path = waiting.pop(0)
            busy[begin(path, path.read_text(encoding="utf-8"), tests_of(path))] = path
        for process, path in list(busy.items()):
            if (fails := finished(process, time.monotonic() + 1)) is not None:
                del busy[process]
                failed += [path.relative_to(ROOT).as_posix()] * fails
        time.sleep(0.05)
    return failed


def preload() -> None:
    """What every mutant's tests import, except lbyl itself, which each imports anew."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    import torch._subclasses.fake_tensor
    import torch.fx.experimental.symbolic_shapes

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
