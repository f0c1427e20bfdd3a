"""Statistics that memory cannot hold at once: collected in parts, which wait on the disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lbyl.errors import LbylError
from lbyl.runtime.heap import spare_memory
from lbyl.statistics.moments import Moments

LARGE_FILES = Path("/var/tmp")  # where they belong on Unix: /tmp may lie in memory itself


def in_parts(sizes: Mapping[str, int], room: int) -> list[list[str]]:
    """Names in order, in groups whose sizes together fit; what does not fit alone stands alone."""
    groups: list[list[str]] = []
    held = 0
    for name, size in sizes.items():
        held += size
        if not groups or held > room:
            groups.append([])
            held = size
        groups[-1].append(name)
    return groups


class Stored(Mapping[str, Moments]):
    """Moments whose covariances lie in files of their own, which go when nobody has them any more.

    The last that were asked for stay in memory, as many as there is `room` for, in bytes.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        spare_memory()
        self.device, self.room = device, room
        self._folder = tempfile.TemporaryDirectory(prefix="lbyl-", dir=_folder())
        self.outlines: dict[str, Moments] = {}  # without covariances,
        self._shapes: dict[str, torch.Size] = {}  # their shapes,
        self._files: dict[str, Path] = {}  # and where they lie
        self._recent: dict[str, Moments] = {}  # the last asked for comes last

    def add(self, moments: Mapping[str, Moments]) -> None:
        for name, one in moments.items():
            matrix = one.covariance.double().cpu().contiguous()
            file = Path(self._folder.name) / str(len(self._files))
            try:
                matrix.numpy().tofile(file)
            except OSError as error:
                raise LbylError(
                    f"statistics do not fit into memory, nor into {self._folder.name} ({error}): "
                    "let TMPDIR name a directory with more room"
                ) from error
            self.outlines[name] = replace(one, covariance=matrix.new_empty(0), mixed=None)
            self._shapes[name], self._files[name] = matrix.shape, file

    def __getitem__(self, name: str) -> Moments:
        found = self._recent.pop(name, None)
        if found is None:
            outline, shape = self.outlines[name], self._shapes[name]
            spare_memory()
            self._make_room(8 * shape.numel())
            values = np.fromfile(self._files[name])
            matrix = torch.from_numpy(values).reshape(shape).to(self.device)
            found = replace(outline, covariance=matrix)
        self._recent[name] = found
        return found

    def _make_room(self, size: int) -> None:
        """Forget those that were asked for longest ago, before another is read."""
        while self._recent and self._held() + size > self.room:
            del self._recent[next(iter(self._recent))]

    def _held(self) -> int:
        return sum(8 * self._shapes[name].numel() for name in self._recent)

    def __iter__(self) -> Iterator[str]:
        return iter(self.outlines)

    def __len__(self) -> int:
        return len(self.outlines)

    def __contains__(self, name: object) -> bool:
        return name in self.outlines


def _folder() -> str | None:
    """None: where Python puts such files."""
    asked = any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return None if asked or not os.access(LARGE_FILES, os.W_OK) else str(LARGE_FILES)
