"""Mutation testing of the mathematics: small changes to the code that some test must notice.

python scripts/mutants.py                             # 150 mutants, drawn by seed
python scripts/mutants.py --count 40 --only methods --seed 2
python scripts/mutants.py --minutes 6 --json verdicts.jsonl          # as many as begin in 6 minutes
python scripts/mutants.py --json verdicts.jsonl --again              # only those that survived

One change is made to one module at a time (another operator, another constant, a condition turned
round, two branches exchanged); then the tests of its room run until the first fails. A
mutant that no test notices survives. Each runs in a fork of a process that has torch loaded, as
many at once as there are cores. One that takes far longer than the unchanged code is noticed, too.

With --json every verdict is a line of that file as soon as it is known, and a run that is repeated
goes on where the last one stopped: verdicts on files that are the same since are not asked again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "lbyl"

# Room, or file → the tests that know it best, the quickest first; of several the most specific.
ROOMS: dict[str, tuple[str, ...]] = {
    "methods": ("tests/methods", "tests/test_checks.py"),
    "methods/echo.py": (
        "tests/methods/test_echo.py",
        "tests/restoring/test_alone.py",
        "tests/methods/test_every_method.py",
    ),
    "rivals/fold.py": (
        "tests/methods/test_fold.py",
        "tests/methods/test_definitions.py",
        "tests/test_checks.py",
    ),
    "rivals/neuron_merging.py": (
        "tests/methods/test_definitions.py",
        "tests/methods/test_neuron_merging.py",
        "tests/test_checks.py",
    ),
    "statistics": ("tests/statistics", "tests/methods/test_echo.py"),
    "statistics/analytic.py": ("tests/statistics/test_analytic.py", "tests/statistics"),
    "statistics/products.py": (
        "tests/statistics/test_pairs.py",
        "tests/restoring/test_products.py",
        "tests/tracing/test_attention.py",
    ),
    "statistics/match.py": (
        "tests/statistics/test_matching.py",
        "tests/statistics",
    ),
    "statistics/solve.py": (
        "tests/methods/test_echo.py",
        "tests/restoring/test_alone.py",
        "tests/statistics",
        "tests/test_degenerate.py",
    ),
    "statistics/units.py": ("tests/planning/test_criteria.py", "tests/methods/test_echo.py"),
    "surgery": (
        "tests/surgery",
        "tests/graph/test_weights.py",
        "tests/torchkit/test_attention_steps.py",
        "tests/tracing/test_attention.py",
        "tests/test_storage.py",
        "tests/exact/test_other_methods.py",
        "tests/tracing",
    ),
    "planning": ("tests/planning", "tests/test_prepare.py", "tests/test_choosing.py"),
    "planning/candidates.py": (
        "tests/planning/test_allocation.py",
        "tests/planning",
        "tests/test_choosing.py",
    ),
    "planning/task.py": ("tests/planning", "tests/test_choosing.py", "tests/models/test_blocks.py"),
    "planning/grouped.py": (
        "tests/planning/test_criteria.py",
        "tests/restoring/test_products.py",
        "tests/planning",
    ),
    "restoring/correct.py": (
        "tests/restoring/test_written.py",
        "tests/methods/test_every_method.py",
        "tests/test_degenerate.py",
    ),
    "restoring/rewrite.py": (
        "tests/restoring/test_written.py",
        "tests/restoring/test_alone.py",
        "tests/restoring/test_products.py",
        "tests/restoring/test_channel_norms.py",
        "tests/methods/test_every_method.py",
    ),
    "restoring/recalibrate.py": (
        "tests/restoring/test_written.py",
        "tests/restoring/test_forecast.py",
        "tests/methods/test_echo.py",
    ),
}

MAKES_NO_DIFFERENCE = "no result depends on it"
"""In the comment of a line: its numbers decide how fast something is, and nothing else."""

SURVIVED = "SURVIVED"
FAIL = "these tests fail as they are, and notice nothing"

Drawn = tuple[Path, int, int]
"""A mutant: its file, the node that is changed and which of its changes."""
Name = tuple[str, str, int, int]
"""The same with the file's path inside the package and a digest of what is in it."""

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
# With a number that is not whole: nothing lies on it, and a boundary that is moved is none.
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
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


def changes(node: ast.AST, fractions: set[str]) -> Iterator[tuple[str, Change]]:
    """The mutants of one node: what each changes, and how.

    `fractions` are names of numbers that are not whole.
    """
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        turned = any(_is_fraction(n, fractions) for n in ast.walk(node))
        becomes = {**COMPARED, **TURNED} if turned else COMPARED

        def compare(n: ast.AST) -> None:
            n.ops[0] = becomes[type(n.ops[0])]()  # type: ignore[attr-defined]

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


def _is_fraction(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    return isinstance(node, ast.Constant) and isinstance(node.value, float)


def fractions_of(tree: ast.Module) -> set[str]:
    """Names that a module gives to numbers that are not whole."""
    return {
        target.id
        for statement in tree.body
        if isinstance(statement, ast.Assign) and _is_fraction(statement.value, set())
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


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
    away, fractions = skipped(tree, source.splitlines()), fractions_of(tree)
    return [
        (index, number)
        for index, node in enumerate(ast.walk(tree))
        if id(node) not in away
        for number, _ in enumerate(changes(node, fractions))
    ]


def mutated(path: Path, index: int, number: int) -> tuple[int, int, str, str]:
    """A mutant: its line and column, what is changed, and the changed source."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node = next(n for i, n in enumerate(ast.walk(tree)) if i == index)
    what, change = list(changes(node, fractions_of(tree)))[number]
    before = ast.unparse(node)
    change(node)
    what = f"{what}: {before} → {ast.unparse(node)}"
    source = ast.unparse(ast.fix_missing_locations(tree))
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0), what, source


def begin(path: Path, source: str, tests: tuple[str, ...], log: str = os.devnull) -> int:
    """A process that runs the tests with this source in the place of the file's own."""
    process = os.fork()
    if process == 0:
        os.setsid()
        written = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(written, 1)
        os.dup2(written, 2)
        status = 1
        try:
            status = _tested(path, source, tests)
        finally:
            os._exit(status)
    return process


def finished(process: int, deadline: float) -> str | None:
    """What the tests said of a mutant; None while they run and may run on."""
    done, status = os.waitpid(process, os.WNOHANG)
    if done:
        return "killed" if status else SURVIVED
    if time.monotonic() < deadline:
        return None
    os.killpg(process, signal.SIGKILL)  # it is the head of a group of its own
    os.waitpid(process, 0)
    return "took too long"


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
    options = arguments()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]
    rows = stored(options.json)
    drawn = draw(options.count, options.seed, options.only)
    known = [rows[name] for name in map(name_of, drawn) if name in rows]
    if options.again:
        known = [row for row in known if row["verdict"] != SURVIVED]
    names = {(row["file"], row["source"], row["node"], row["change"]) for row in known}
    drawn = [mutant for mutant in drawn if name_of(mutant) not in names]
    preload()
    count, failing = len(known) + len(drawn), False
    for row in run(drawn, options.processes, time.monotonic() + 60 * options.minutes):
        if isinstance(row, str):
            print(row, flush=True)
            failing |= row.startswith(FAIL)
            continue
        known.append(row)
        print(f"{len(known)}/{count} {row['verdict']:13} {place(row)}", flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return max(report(known), int(failing))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=150, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", help="a room or a file in it, such as rivals/fold.py")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none later")
    parser.add_argument("--json", type=Path, help="a line for every verdict; also read from it")
    parser.add_argument("--again", action="store_true", help="ask again about survivors")
    return parser.parse_args()


def report(rows: list[dict[str, Any]]) -> int:
    """Survivors and noticed mutants by file; whether more survive than may."""
    same = equivalents()
    left_out = [row for row in rows if row["verdict"] == SURVIVED and told(row) in same]
    rows = [row for row in rows if row not in left_out]
    for row in left_out:
        print(f"changes nothing: {place(row)} ({same[told(row)]})")
    files = sorted({row["file"] for row in rows})
    for file in files:
        verdicts = [row["verdict"] for row in rows if row["file"] == file]
        noticed = len(verdicts) - verdicts.count(SURVIVED)
        print(f"{file}: {noticed} of {len(verdicts)}")
    survivors = [row for row in rows if row["verdict"] == SURVIVED]
    for row in survivors:
        print(f"survived: {place(row)}")
    score = 100 * (1 - len(survivors) / max(1, len(rows)))
    print(f"{len(rows)} mutants, {len(survivors)} survived: score {score:.1f} %")
    return int(score < 85)


def equivalents() -> dict[tuple[str, str, str], str]:
    """Mutants that someone has looked at and that change nothing, with the reason.

    Each is named by its file, the line as it reads and what is changed in it, so that a line which
    is written anew is looked at anew.
    """
    path = ROOT / "scripts" / "equivalent_mutants.json"
    named = json.loads(path.read_text(encoding="utf-8"))
    return {(e["file"], e["code"], e["what"]): e["why"] for e in named}


def told(row: dict[str, Any]) -> tuple[str, str, str]:
    lines = (SOURCE / row["file"]).read_text(encoding="utf-8").splitlines()
    return row["file"], lines[row["line"] - 1].strip(), row["what"]


def place(row: dict[str, Any]) -> str:
    return f"{row['file']}:{row['line']}:{row['column']} {row['what']}"


def stored(path: Path | None) -> dict[Name, dict[str, Any]]:
    """Verdicts that are known already, the last one of each mutant."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["file"], row["source"], row["node"], row["change"]): row for row in rows}


def name_of(mutant: Drawn) -> Name:
    """What tells a mutant from all others, also when its file is changed."""
    path, index, number = mutant
    source = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return path.relative_to(SOURCE).as_posix(), source, index, number


def run(drawn: list[Drawn], processes: int, stop: float) -> Iterator[dict[str, Any] | str]:
    """What the tests say of each mutant, in the order they end; none begins after `stop`.

    The tests of a file run on the unchanged code before any of its mutants: how long that takes is
    a line of text, and so is that they fail, which would notice everything.
    """
    waiting = list({tests_of(path): path for path, *_ in drawn}.values())
    mutants, seconds = list(drawn), {}
    busy: dict[int, Job] = {}
    with tempfile.TemporaryDirectory() as folder:
        while True:
            while len(busy) < processes and time.monotonic() < stop:
                if waiting:
                    job = Job(waiting.pop(0), log=Path(folder, str(len(waiting))))
                elif ready := next((m for m in mutants if tests_of(m[0]) in seconds), None):
                    mutants.remove(ready)
                    job = Job(*ready, limit=3 * seconds[tests_of(ready[0])] + 30)
                else:
                    break
                busy[job.begin()] = job
            if not busy:
                return
            for process, job in list(busy.items()):
                if verdict := finished(process, job.start + job.limit):
                    del busy[process]
                    if job.index is not None:
                        yield {**job.row, "verdict": verdict}
                    elif verdict == SURVIVED:
                        seconds[tests_of(job.path)] = time.monotonic() - job.start
                        yield f"unchanged: {time.monotonic() - job.start:.0f} s {job.path.name}"
                    else:
                        yield f"{FAIL}: {' '.join(tests_of(job.path))}\n{job.written}"
            time.sleep(0.05)


@dataclass
class Job:
    """The tests of a file, on a mutant of it or, without a node to change, as it is."""

    path: Path
    index: int | None = None
    number: int = 0
    limit: float = float("inf")
    log: Path = Path(os.devnull)
    start: float = field(default_factory=time.monotonic)
    row: dict[str, Any] = field(default_factory=dict)

    def begin(self) -> int:
        source = self.path.read_text(encoding="utf-8")
        if self.index is not None:
            line, column, what, source = mutated(self.path, self.index, self.number)
            file, digest, *_ = name_of((self.path, self.index, self.number))
            self.row = {"file": file, "line": line, "column": column, "what": what}
            self.row |= {"source": digest, "node": self.index, "change": self.number}
        return begin(self.path, source, tests_of(self.path), str(self.log))

    @property
    def written(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-1500:]


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


def preload() -> None:
    """What every mutant's tests import, except lbyl itself, which each imports anew."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
