"""Kills real processes at random moments of saving, compressing, fine-tuning and sweeping.

python scripts/kill.py                       # 25 of each: 100
python scripts/kill.py --count 5 --only save --seed 3

After every kill the old files or the new ones must be there, whole, and the work must be done when
it is started again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402

from support.fuzz.kills import WORKS, kill_at, seconds_of  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=25, help="kills of each work")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(WORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)  # a fork has no other threads
    rng, failures, kills = random.Random(options.seed), 0, 0
    for name in WORKS:
        if options.only not in (None, name):
            continue
        start, during, work = time.perf_counter(), 0, WORKS[name]()
        with tempfile.TemporaryDirectory(prefix="lbyl-kill-") as folder:
            whole = seconds_of(work, Path(folder))
            while during < options.count:
                moment = rng.uniform(0, whole)
                try:
                    at_work = kill_at(work, Path(folder), moment)
                except Exception as error:
                    at_work, failures = True, failures + 1
                    print(f"{name} killed after {moment:.4f} s: {type(error).__name__}: {error}")
                during += at_work
                whole *= 1 if at_work else 0.9  # it was done already
        kills += during
        seconds = time.perf_counter() - start
        print(f"{name}: {during} kills while at work, in {seconds:.0f} s", flush=True)
    print(f"{kills} kills, failures: {failures}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
