"""Many settings of one benchmark: several at once as processes, each kept as soon as it is done.

A setting is a key and a JSON file. What is there is never computed again, so a run that was cut off
goes on where it stood when the same command is given again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from harness import environment
from lbyl.io import read_json, write_json


@dataclass
class Ledger:
    """Finished settings of one benchmark under one choice of its parameters."""

    name: str
    parameters: dict[str, Any]
    scratch: Path
    found: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Another choice of parameters has another folder, so that the two never mix."""
        text = json.dumps(self.parameters, sort_keys=True)
        return self.scratch / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def place(self, key: str) -> Path:
        return self.folder / key.replace("/", "-").replace(" ", "_")

    def adopt(self, path: Path) -> None:
        """Take over what an earlier run has kept, if it was made under the same parameters."""
        if not path.is_file():
            return
        earlier = read_json(path)
        if earlier.get("parameters") != json.loads(json.dumps(self.parameters)):
            print(f"{path}: made under other parameters, not taken over")
            return
        self.found |= earlier["runs"]
        self.environment = earlier["environment"]

    def refresh(self, keys: Sequence[str], anew: Sequence[str] = ()) -> bool:
        """Read what workers have written since; whether there was anything new.

        Settings that were measured `anew` are read again although they are known.
        """
        wanted = [key for key in keys if key in anew or key not in self.found]
        fresh = [key for key in wanted if self._file(key).is_file()]
        for key in fresh:
            kept = read_json(self._file(key))
            self.environment = kept.pop("environment")
            self.found[key] = kept
        return bool(fresh)

    def keep(self, key: str, run: dict[str, Any]) -> None:
        """Write a finished setting; its checkpoints have served."""
        told = environment()
        told["command"] = told["command"].split(" --jobs 1 --worker")[0]  # what a person typed
        write_json(self._file(key), {"environment": told, **run})
        shutil.rmtree(self.place(key), ignore_errors=True)

    def _file(self, key: str) -> Path:
        return self.place(key).with_name(self.place(key).name + ".json")

    def to_dict(self, keys: Sequence[str]) -> dict[str, Any]:
        """In the order of the keys, whatever finished first."""
        order = [*keys, *(key for key in self.found if key not in keys)]
        runs = {key: self.found[key] for key in order if key in self.found}
        return {"environment": self.environment, "parameters": self.parameters, "runs": runs}


def chosen(keys: Sequence[str], only: str | None) -> list[str]:
    """The keys that fit one of the patterns, separated by commas."""
    if only is None:
        return list(keys)
    found = [key for key in keys if any(fnmatch(key, part) for part in only.split(","))]
    if not found:
        raise SystemExit(f"no setting is named like {only}; they are {', '.join(keys)}")
    return found


def run_parallel(
    keys: Sequence[str], jobs: int, limit: float | None, finished: Callable[[], None]
) -> list[str]:
    """Run this very command once for each key, `jobs` at a time; the keys that failed.

    After `limit` seconds what still runs is ended: its checkpoints stay for the next call.
    """
    waiting, running, failed = list(keys), dict[str, subprocess.Popen[bytes]](), list[str]()
    end = time.monotonic() + (limit or float("inf"))
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < jobs:
                key = waiting.pop(0)
                # The last of an option given twice counts.
                command = [sys.executable, *sys.argv, "--jobs", "1", "--worker", key]
                running[key] = subprocess.Popen(
                    command, env={**os.environ, "OMP_NUM_THREADS": threads}
                )
            time.sleep(0.2)
            for key in [key for key, process in running.items() if process.poll() is not None]:
                if running.pop(key).returncode:
                    failed.append(key)
                finished()
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    if running or waiting:
        print(f"time is up: {len(running)} settings cut off, {len(waiting)} not begun", flush=True)
    return failed
