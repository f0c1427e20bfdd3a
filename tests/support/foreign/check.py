"""What is asked of a small network of another package: exact, saved, loaded afresh, trained."""

from __future__ import annotations

import copy
import importlib
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lbyl
from support import foreign, reference
from support.attention import silenced
from support.published import stir

RATIO = 0.5
EXACT = 1e-4
SAME = 1e-6  # of two processes
NO_ATTENTION = "fits no attention"  # where none can be followed, in one sentence

Row = dict[str, Any]
LOADER = Path(__file__).with_name("loader.py")


class Missed(AssertionError):
    """A promise that does not hold for a network; the message says which."""


class Elsewhere:
    """A process that compresses nothing: it reads what another one saved, and computes with it."""

    def __init__(self) -> None:
        command = [sys.executable, str(LOADER)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def distance(self, name: str, folder: Path, double: bool) -> float:
        """How far what the loaded network computes there is from what was saved beside it."""
        assert self.process.stdin and self.process.stdout
        order = {"name": name, "folder": str(folder), "double": double}
        print(json.dumps(order), file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise Missed(answer["error"])
        return float(answer["distance"])

    def close(self) -> None:
        self.process.communicate()


def made(name: str, double: bool = True, seed: int = 0) -> tuple[nn.Module, Any]:
    """A network in evaluation mode, its weights drawn with a seed, and its example inputs."""
    torch.manual_seed(seed)
    model, inputs = foreign.every()[name]()
    stir(model, seed)
    return reference.in_double(model, inputs) if double else (model, inputs)


def output(model: nn.Module, inputs: Any) -> Any:
    """What a network gives, with the random state as it always is before."""
    torch.manual_seed(0)
    with torch.no_grad():
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def takes_double(name: str) -> bool:
    """Whether a network computes in float64, where a wrong index cannot hide behind rounding."""
    try:
        model, inputs = made(name)
        found = reference.flat(output(model, inputs))
        wide = all(x.dtype == torch.float64 for x in found)
        return bool(found) and wide and not any(bool(x.isnan().any()) for x in found)
    except Exception:
        return False


def examine(name: str, folder: Path, elsewhere: Elsewhere, attention: bool = False) -> Row:
    """Cut one network and look at everything that it promises.

    What does not hold stands under "problems", by the step: an error of the library, or what is
    wrong. With `attention` its heads and the channels of its queries and values are cut instead.
    """
    double = takes_double(name)
    model, inputs = made(name, double)
    before, original = copy.deepcopy(model.state_dict()), output(model, inputs)
    clock = time.process_time()
    try:
        prepared = lbyl.prepare(model, inputs, include="*:*" if attention else "*", data=8)
    except lbyl.LbylError as error:
        if not (attention and NO_ATTENTION in str(error)):
            raise
        return {"name": name, "units": 0, "reasons": {str(error): 1}, "problems": {}}
    graph, row = prepared.graph, described(name, model, prepared.graph)
    row["double"] = double
    if len(graph):
        result = prepared.compress({"*": RATIO}, method="none")
        row["kept"] = result.after.parameters / result.before.parameters
    row["seconds"] = round(time.process_time() - clock, 2)
    steps: dict[str, Callable[[], Any]] = {"unchanged": lambda: _unchanged(before, model)}
    if len(graph):
        slim = output(result.model, inputs)
        quiet = silenced(prepared.model, graph, result.plan.kept)
        steps["exact"] = lambda: _exact(slim, output(quiet, inputs), original)
        steps["saved"] = lambda: _saved(result, inputs, slim, folder)
        steps["loaded"] = lambda: _loaded(name, folder, elsewhere, double)
        steps["trained"] = lambda: _trains(result.model, name, inputs, double)
    for step, take in steps.items():
        try:
            row[step] = take()
        except Exception as error:
            row["problems"][step] = f"{type(error).__name__}: {error}"[:300]
    shutil.rmtree(folder, ignore_errors=True)
    return row


def described(name: str, model: nn.Module, graph: lbyl.Graph) -> Row:
    """What there is to prune, and why the rest is not pruned."""
    package = importlib.import_module(name.partition("/")[0])
    row: Row = {"name": name, "version": package.__version__.partition("+")[0]}
    row |= {"units": len(graph), "channels": graph.channels}
    row["kinds"] = dict(Counter(unit.kind for unit in graph))
    row["reasons"] = dict(Counter(map(reference.short, graph.unprunable.values())).most_common())
    row["parameters"] = sum(p.numel() for p in model.parameters())
    return row | {"problems": {}}


def _exact(slim: Any, quiet: Any, original: Any) -> float:
    """How far the slim network's output is from the silenced original's."""
    if not any(bool(x.isfinite().any()) for x in reference.flat(original)):
        raise Missed("the original gives no finite number")
    off = reference.distance(slim, quiet)
    if not off < EXACT:
        raise Missed(f"the cut is off by {off:.2e}")
    if not reference.distance(slim, original) > 0:
        raise Missed("the cut changed nothing: the comparison proves nothing")
    return off


def _unchanged(before: Mapping[str, Any], model: nn.Module) -> bool:
    after = model.state_dict()
    changed = [n for n, x in before.items() if isinstance(x, Tensor) and not _same(x, after[n])]
    if changed or before.keys() != after.keys():
        raise Missed(f"the given model changed: {', '.join(changed[:3])}")
    return True


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _saved(result: Any, inputs: Any, slim: Any, folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    lbyl.save(result, folder / "slim")
    torch.save({"inputs": inputs, "outputs": reference.flat(slim)}, folder / "about.pt")
    return True


def _loaded(name: str, folder: Path, elsewhere: Elsewhere, double: bool) -> float | None:
    """How far the network that a fresh process loads is from the one that was saved."""
    if not (folder / "about.pt").exists():
        return None
    off = elsewhere.distance(name, folder, double)
    if not off < SAME:
        raise Missed(f"it computes otherwise: {off:.2e}")
    return off


def _trains(slim: nn.Module, name: str, inputs: Any, double: bool) -> bool:
    """Whether a step of training went well; where the original takes one, the slim one must."""
    try:
        reference.assert_trains(slim, inputs)
    except Exception as error:
        try:
            reference.assert_trains(made(name, double)[0], inputs)
        except Exception:
            return False
        raise Missed(f"a step of training: {type(error).__name__}: {error}") from error
    return True
