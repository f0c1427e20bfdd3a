"""Disks that are full or read-only, two writers, and processes that are killed while they write."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lbyl
from support import quick
from support.fuzz.kills import in_fork
from support.networks import build, example

resource = pytest.importorskip("resource", reason="Windows has no such limits")
ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, limits and modes")


@pytest.fixture(scope="module")
def result() -> lbyl.Result:
    return quick.compress(build("chain"), example("chain"), 0.5, criterion="l2")


def told(write: Callable[[Path], None], message: str) -> Callable[[Path], None]:
    """In a process of its own: writing must fail with one clear error that says this."""

    def run(folder: Path) -> None:
        with pytest.raises(lbyl.LbylError, match=message):
            write(folder)

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("room", [0, 500, 2000])
def test_a_full_disk_is_one_clear_error(tmp_path: Path, result: lbyl.Result, room: int) -> None:
    """The limit stands for the end of the disk, at several places in the files."""
    lbyl.save(result, tmp_path / "out")
    before = contents(tmp_path)

    def save(folder: Path) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        lbyl.save(result, folder / "out")

    def statistics(folder: Path) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        quick.statistics(build("chain"), example("chain")).save(folder / "statistics")

    assert in_fork(told(save, "cannot be written"), tmp_path) == 0
    assert in_fork(told(statistics, "cannot be written"), tmp_path) == 0
    assert contents(tmp_path) == before and len(list(tmp_path.rglob("*"))) == 3


TRAINING = """
import resource, sys, torch, lbyl
from benchmarks.training import TrainConfig, train
pair = torch.randn(4, 3, 8, 8), torch.arange(4) % 2
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8))
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
try:
    train(model, pair, config=TrainConfig(epochs=1), out=sys.argv[1], progress=False, cpu=True)
except lbyl.LbylError as error:
    print(error)
"""


def test_a_full_disk_while_training_is_one_clear_error(tmp_path: Path) -> None:
    # A process of its own and not a fork: autograd's threads, where tests before had any, are gone.
    command = [sys.executable, "-c", TRAINING, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot be written" in ended.stdout, ended.stderr
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_what_the_file_system_says_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: lbyl.Result, number: int
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    lbyl.save(result, tmp_path / "out")
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        for name in ("out", "new"):
            with pytest.raises(lbyl.LbylError, match=rf"{name}.*{os.strerror(number)}"):
                lbyl.save(result, tmp_path / name)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("target", ["out", "out/new", "new"])
def test_a_read_only_directory_is_one_clear_error(
    tmp_path: Path, result: lbyl.Result, target: str
) -> None:
    lbyl.save(result, tmp_path / "out")
    before = contents(tmp_path)
    for folder in (tmp_path / "out", tmp_path):
        folder.chmod(0o555)

    def save(folder: Path) -> None:
        if os.geteuid() == 0:  # who may do everything notices nothing
            for parent in tmp_path.parents:
                if parent != Path("/") and parent.owner() == "root":
                    parent.chmod(parent.stat().st_mode | 0o111)
            os.seteuid(65534)
        lbyl.save(result, folder / target)

    try:
        assert in_fork(told(save, "cannot be written"), tmp_path) == 0
    finally:
        for folder in (tmp_path, tmp_path / "out"):
            folder.chmod(0o755)
    assert contents(tmp_path) == before


def during(patch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Let something happen while a directory is being written: before its first file moves."""
    replace = Path.replace

    def replacing(self: Path, target: Path) -> Path:
        if self.suffix == ".safetensors" or self.is_dir():
            patch.setattr(Path, "replace", replace)
            happens()
        return replace(self, target)

    patch.setattr(Path, "replace", replacing)


def test_a_second_writer_is_told_of_the_first(
    tmp_path: Path, result: lbyl.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    lbyl.save(result, tmp_path / "out")
    before = {name: sorted(found) for name, found in contents(tmp_path).items()}
    second = told(lambda folder: lbyl.save(result, folder / "out") and None, "another process")
    ended: list[int] = []
    during(monkeypatch, lambda: ended.append(in_fork(second, tmp_path)))
    lbyl.save(result, tmp_path / "out")
    assert ended == [0]
    # safetensors writes what is noted beside the tensors in any order
    assert {n: sorted(x) for n, x in contents(tmp_path).items()} == before
    lbyl.save(result, tmp_path / "out")  # the first is done


def test_two_writers_of_a_new_directory_leave_one_of_them(
    tmp_path: Path, result: lbyl.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    during(monkeypatch, lambda: lbyl.save(result, tmp_path / "new"))
    with pytest.raises(lbyl.LbylError, match="cannot be written"):
        lbyl.save(result, tmp_path / "new")
    assert sorted(contents(tmp_path)) == ["new/model.safetensors", "new/plan.json"]


@pytest.mark.parametrize("name", ["save", pytest.param("fine-tune", marks=pytest.mark.slow)])
def test_a_process_killed_while_it_writes_leaves_whole_files(name: str) -> None:
    """`make kill` does so a hundred times."""
    command = [sys.executable, "scripts/kill.py", "--count", "2", "--only", name]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # what forks has no other threads
    told = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "2 kills, failures: 0" in told.stdout
