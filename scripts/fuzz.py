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
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]


@dataclass(frozen=True)
class Outcome:
    """What became of the network of a seed."""

    seed: int
    failure: str = ""  # empty where every promise is kept
    trace: str = ""
    units: int = 0  # pruned
    elements: tuple[str, ...] = ()  # what was drawn and asked for
    seconds: float = 0.0  # of a processor


def main() -> int:
    options = arguments()
    start = time.perf_counter()
    outcomes = run(options)
    report(outcomes, time.perf_counter() - start, options)
    return int(any(outcome.failure for outcome in outcomes))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="how many networks")
    parser.add_argument("--first", "--seed", type=int, default=0, help="seed of the first")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=int, default=120, help="seconds for one network")
    parser.add_argument(
        "--without", default="", help="groups of unusual parts to leave out: complex,buffers"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def run(options: argparse.Namespace) -> list[Outcome]:
    """Every seed once; a process that dies takes only its network with it."""
    context = multiprocessing.get_context("spawn")
    seeds = iter(range(options.first, options.first + options.count))
    without = [group for group in options.without.split(",") if group]
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
        process = context.Process(target=work, args=(there, options.limit, without), daemon=True)
        process.start()
        there.close()
        give(here, process)

    for _ in range(min(options.processes, options.count)):
        begin()
    while busy:
        for here in wait(list(busy)):
            assert isinstance(here, Connection)
            process, seed = busy.pop(here)
            try:
                outcome = here.recv()
            except EOFError:
                process.join()
                outcome = Outcome(seed, f"the process died ({process.exitcode})")
                begin()
            else:
                give(here, process)
            outcomes.append(outcome)
            tell(outcome, len(outcomes), options.count)
    return outcomes


def tell(outcome: Outcome, done: int, count: int) -> None:
    if outcome.failure:
        print(f"seed {outcome.seed}: {outcome.failure}", flush=True)
        if count == 1:
            print(outcome.trace)
    if done % 500 == 0:
        print(f"{done} of {count}", flush=True)


def work(pipe: Connection, limit: int, without: Sequence[str]) -> None:
    """Networks one after the other, as they are asked for."""
    import torch

    from lbyl.tracing.rules import base

    base.STRICT = True
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _too_long)
    while (seed := pipe.recv()) is not None:
        pipe.send(attempt(seed, limit, without))


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("it takes too long")


def attempt(seed: int, limit: int, without: Sequence[str]) -> Outcome:
    from support.fuzz.architectures import draw
    from support.fuzz.promises import check

    alarm = getattr(signal, "alarm", lambda seconds: None)
    alarm(limit)
    start = time.process_time()
    try:
        kept = check(seed, without)
    except Exception as error:
        line = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {line[0] if line else ''}"
        return Outcome(seed, what, traceback.format_exc(), 0, draw(seed, without).elements)
    finally:
        alarm(0)
    return Outcome(seed, "", "", kept.units, kept.elements, time.process_time() - start)


def report(outcomes: list[Outcome], seconds: float, options: argparse.Namespace) -> None:
    bad = sorted((o for o in outcomes if o.failure), key=lambda o: o.seed)
    pruned = [o for o in outcomes if o.units]
    tried, cut, failed = (
        Counter(name for o in some for name in o.elements) for some in (outcomes, pruned, bad)
    )
    print("element: networks that have it, those of them pruned, those that failed")
    for name in sorted(tried):
        print(f"  {name}: {tried[name]}, {cut[name]}, {failed[name]}")
    used = sum(o.seconds for o in outcomes)
    print(f"{len(outcomes)} networks, {len(pruned)} of them pruned, in {seconds:.0f} s")
    print(f"{used:.0f} s of a processor, {used / max(1, len(outcomes)):.3f} s for each network")
    print(f"failures: {len(bad)}")
    extra = f" --without {options.without}" if options.without else ""
    for o in bad:
        print(f"  python scripts/fuzz.py --count 1 --first {o.seed}{extra}  # {o.failure}")
    if options.json:
        figures: dict[str, Any] = {"networks": len(outcomes), "first": options.first}
        figures |= {"pruned": len(pruned), "units": sum(o.units for o in outcomes)}
        figures |= {"seconds": round(seconds), "failures": len(bad)}
        figures["elements"] = {n: [tried[n], cut[n], failed[n]] for n in sorted(tried)}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
