"""Damaged and hostile files, each kind in a process of its own with limits on memory and time.

python scripts/fuzz_files.py                                  # 500 contents of every kind
python scripts/fuzz_files.py --count 5000 --only npz --seed 3
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

if sys.platform == "win32":
    sys.exit("Windows has no limits on what a process may take: run this on Linux or macOS")
import resource

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="contents of every kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one kind")
    parser.add_argument("--memory", type=int, default=1024, help="MiB that a reader may take")
    parser.add_argument("--limit", type=int, default=20, help="seconds for one content")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    from support.fuzz.files import kinds

    rows = [fuzz(name, options) for name in kinds() if options.only in (None, name)]
    total, failures = sum(r["contents"] for r in rows), sum(r["failed"] for r in rows)
    print(f"{total} contents of {len(rows)} kinds of files, failures: {failures}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(failures > 0)


def fuzz(name: str, options: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(name, options, there))
    process.start()
    there.close()
    try:
        row = here.recv()
    except EOFError:
        process.join()
        row = {"contents": 0, "failed": 1, "error": f"the process died ({process.exitcode})"}
    process.join()
    row = {"kind": name, **row}
    told = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("kind", "error"))
    print(f"{name}: {told}", flush=True)
    if row.get("error"):
        print(row["error"])
    return row


def work(name: str, options: argparse.Namespace, pipe: Connection) -> None:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from support.fuzz.files import attempt, kinds

    warnings.simplefilter("ignore")
    kind = kinds()[name]
    accepted = [attempt(kind, b"")]  # what is imported on first use is no reader's memory
    before = _peak()
    taken = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 4 * (options.memory << 20)  # address space, not use
    resource.setrlimit(resource.RLIMIT_AS, (limit, taken[1]))
    signal.signal(signal.SIGALRM, _too_long)

    @seed(options.seed)
    @settings(
        max_examples=options.count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(kind.contents)
    def run(content: bytes) -> None:
        signal.alarm(options.limit)
        try:
            accepted.append(attempt(kind, content))
        finally:
            signal.alarm(0)

    start, error = time.perf_counter(), ""
    try:
        run()
    except BaseException:
        error = traceback.format_exc()[-3000:]
    grown = (_peak() - before) / 1024
    if not error and grown > options.memory:
        error = f"it took {grown:.0f} MiB"
    row = {"contents": len(accepted) - 1, "accepted": sum(accepted), "MiB": round(grown)}
    row |= {"seconds": round(time.perf_counter() - start), "failed": int(bool(error))}
    pipe.send({**row, "error": error})


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("it takes too long")


if __name__ == "__main__":
    sys.exit(main())
