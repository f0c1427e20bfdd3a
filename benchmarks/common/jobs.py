"""Many settings of one benchmark: several at once, each stored as soon as it is finished.

A setting is a key and a JSON file. What is there is never computed again, so a run that was cut off
goes on where it stood when the same command is given again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.common.environment import environment
from lbyl.runtime.files import read_json, write_json


@dataclass
class Ledger:
    """Finished settings of one benchmark under one choice of its parameters."""

    name: str
    parameters: dict[str, Any]
    scratch: Path
    runs: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Another choice of parameters has another folder, so that the two never mix."""
        text = json.dumps(self.parameters, sort_keys=True)
        return self.scratch / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def checkpoints(self, key: str) -> Path:
        """The directory for what a setting needs to go on after it was cut off."""
        return self.folder / key.replace("/", "-").replace(" ", "_")

    def adopt(self, path: Path) -> None:
        """Take over what an earlier run has stored, if it was made under the same parameters."""
        if not path.is_file():
            return
        earlier = read_json(path)
        if earlier.get("parameters") != json.loads(json.dumps(self.parameters)):
            print(f"{path}: made under other parameters, not taken over")
            return
        self.runs |= earlier["runs"]
        self.environment = earlier["environment"]

    def refresh(self, keys: Sequence[str], anew: Sequence[str] = ()) -> bool:
        """Read what workers have written since; whether there was anything new.

        Settings that were measured `anew` are read again although they are known.
        """
        wanted = [key for key in keys if key in anew or key not in self.runs]
        fresh = [key for key in wanted if self._file(key).is_file()]
        for key in fresh:
            stored = read_json(self._file(key))
            self.environment = stored.pop("environment")
            self.runs[key] = stored
        return bool(fresh)

    def store(self, key: str, run: dict[str, Any]) -> None:
        """Write a finished setting; its checkpoints have served."""
        write_json(self._file(key), {"environment": environment(), **run})
        shutil.rmtree(self.checkpoints(key), ignore_errors=True)

    def _file(self, key: str) -> Path:
        folder = self.checkpoints(key)
        return folder.with_name(folder.name + ".json")

    def to_dict(self, keys: Sequence[str]) -> dict[str, Any]:
        """In the order of the keys, whatever finished first."""
        order = [*keys, *(key for key in self.runs if key not in keys)]
        runs = {key: self.runs[key] for key in order if key in self.runs}
        return {"environment": self.environment, "parameters": self.parameters, "runs": runs}


def matching(keys: Sequence[str], only: str | None) -> list[str]:
    """The keys that fit one of the patterns, separated by commas."""
    if only is None:
        return list(keys)
    fitting = [key for key in keys if any(fnmatch(key, part) for part in only.split(","))]
    if not fitting:
        raise SystemExit(f"no setting is named like {only}; they are {', '.join(keys)}")
    return fitting


def run_parallel(
    work: Callable[[str], None],
    keys: Sequence[str],
    jobs: int,
    limit: float | None,
    finished: Callable[[], None] = lambda: None,
) -> list[str]:
    """Call `work` for each key in `jobs` processes; gives the keys that failed.

    After `limit` seconds what still runs is ended: its checkpoints stay for the next call.
    """
    from joblib.externals.loky import get_reusable_executor

    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    executor = get_reusable_executor(
        max_workers=jobs, reuse=False, env={"OMP_NUM_THREADS": threads}
    )
    futures = {executor.submit(work, key): key for key in keys}
    failed: list[str] = []
    try:
        for future in as_completed(futures, limit):
            error = future.exception()
            if error is not None:
                failed.append(futures[future])
                traceback.print_exception(error)
            finished()
    except TimeoutError:
        left = sum(not future.done() for future in futures)
        print(f"time is up: {left} settings cut off or not begun", flush=True)
    finally:
        executor.shutdown(kill_workers=True)
    return failed
