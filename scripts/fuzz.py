"""Random networks by seed, each asked for every promise of the library.

python scripts/fuzz.py                        # 10,000 networks, a process for every core
python scripts/fuzz.py --count 500 --first 20000 --processes 1
python scripts/fuzz.py --count 1 --first 417  # one network again, with the whole traceback

A network that hangs is given up after --limit seconds and counts as a failure; so does one that
ends the process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

Outcome = tuple[int, str, str]  # seed, "ok …" or what failed, traceback


def main() -> int:
    options = arguments()
    start = time.perf_counter()
    outcomes = run(options.first, options.count, options.processes, options.limit)
    report(outcomes, time.perf_counter() - start, options)
    return int(any(not what.startswith("ok") for _, what, _ in outcomes))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="how many networks")
    parser.add_argument("--first", "--seed", type=int, default=0, help="seed of the first")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=int, default=120, help="seconds for one network")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def run(first: int, count: int, processes: int, limit: int) -> list[Outcome]:
    """Every seed once; a process that dies takes only its network with it."""
    context = multiprocessing.get_context("spawn")
    seeds = iter(range(first, first + count))
    outcomes: list[Outcome] = []
    busy: dict[Connection, tuple[Any, int]] = {}

    def give(here: Connection, process: Any) -> None:
        seed = next(seeds, None)
        if seed is None:
            here.send(None)
            process.join()
        else:
            here.send(seed)
            busy[here] = (process, seed)

    def begin() -> None:
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, limit), daemon=True)
        process.start()
        there.close()
        give(here, process)

    for _ in range(min(processes, count)):
        begin()
    while busy:
        for here in wait(list(busy)):
            assert isinstance(here, Connection)
            process, seed = busy.pop(here)
            try:
                outcome = here.recv()
            except EOFError:
                process.join()
                outcome = (seed, f"the process died ({process.exitcode})", "")
                begin()
            else:
                give(here, process)
            outcomes.append(outcome)
            tell(outcome, len(outcomes), count)
    return outcomes


def tell(outcome: Outcome, done: int, count: int) -> None:
    seed, what, trace = outcome
    if not what.startswith("ok"):
        print(f"seed {seed}: {what}", flush=True)
        if count == 1:
            print(trace)
    if done % 500 == 0:
        print(f"{done} of {count}", flush=True)


def work(pipe: Connection, limit: int) -> None:
    """Networks one after the other, as they are asked for."""
    import torch

    from lbyl.tracing.rules import base

    base.STRICT = True
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _too_long)
    while (seed := pipe.recv()) is not None:
        pipe.send(attempt(seed, limit))


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("it takes too long")


def attempt(seed: int, limit: int) -> Outcome:
    from support.fuzz.promises import check

    alarm = getattr(signal, "alarm", lambda seconds: None)
    alarm(limit)
    try:
        kept = check(seed)
    except Exception as error:
        line = str(error).strip().splitlines()
        return seed, f"{type(error).__name__}: {line[0] if line else ''}", traceback.format_exc()
    finally:
        alarm(0)
    return seed, f"ok {kept.units} {kept.method}", ""


def report(outcomes: list[Outcome], seconds: float, options: argparse.Namespace) -> None:
    good = [what.split() for _, what, _ in outcomes if what.startswith("ok")]
    bad = [(seed, what) for seed, what, _ in sorted(outcomes) if not what.startswith("ok")]
    pruned = [units for _, units, _ in good if units != "0"]
    methods = Counter(method for _, units, method in good if units != "0")
    print(f"{len(outcomes)} networks, {len(pruned)} with something to prune, in {seconds:.0f} s")
    print("restored with " + ", ".join(f"{m} {n}" for m, n in sorted(methods.items())))
    print(f"failures: {len(bad)}")
    for seed, what in bad:
        print(f"  python scripts/fuzz.py --count 1 --first {seed}  # {what}")
    if options.json:
        figures = {"networks": len(outcomes), "first": options.first, "pruned": len(pruned)}
        figures |= {"units": sum(map(int, pruned)), "seconds": round(seconds), "failures": len(bad)}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
