"""Where a choice's time goes: a profile of its Python, and the lines that wait for the device."""

from __future__ import annotations

import cProfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def profiled(work: Callable[[], object], file: Path) -> None:
    """Run once under cProfile (`file`), and on a GPU once more, counting waits (`file`.waits)."""
    profile = cProfile.Profile()
    profile.runcall(work)
    profile.dump_stats(file)
    if torch.cuda.is_available():
        lines = [f"{count:6d} {line}" for line, count in waits(work).most_common()]
        file.with_suffix(".waits").write_text("\n".join(lines) + "\n")


def waits(work: Callable[[], object]) -> Counter[str]:
    """How often each line of the package made the host wait for the device."""
    counts: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" not in str(message):
            return
        frames = [f for f in traceback.extract_stack() if "/lbyl/" in f.filename]
        lines = (f"{Path(f.filename).stem}:{f.lineno} {f.name}" for f in frames[-3:])
        counts[" > ".join(lines)] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return counts
