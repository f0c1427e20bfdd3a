"""Sweeps: every row once, whatever is killed; on this machine and on a cluster."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lbyl
from lbyl.app.sources import resolve
from lbyl.app.sweep import Engine, Setting, Store, Subject, points, sweep

NETWORK = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    second = nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(12, 4))
"""
SETTING = Setting(input_shape=(3, 8, 8), data=16, threads=1)


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    path = tmp_path / "net.py"
    path.write_text(NETWORK)
    return Subject(f"{path}:small")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "sweep.db") as opened:
        yield opened


def grid(subject: Subject, *amounts: float, **axes: Any) -> list[Any]:
    defaults: dict[str, Any] = {"criteria": ["l2"], "methods_named": ["echo"], "seeds": [0]}
    return points([subject], [("ratio", a) for a in amounts], **{**defaults, **axes})


def test_a_sweep_has_a_row_for_every_combination_and_says_what_came_of_it(
    subject: Subject, store: Store
) -> None:
    made = grid(subject, 0.25, 0.5, methods_named=["echo", "none"], seeds=[0, 1])
    rows = sweep(made, SETTING, store, Engine(jobs=1))
    assert len(made) == len(rows) == 8
    asked = {(p.amount, p.method, p.seed) for p in made}
    assert {(row["amount"], row["method"], row["seed"]) for row in rows} == asked
    for row in rows:
        assert 0 < row["macs"] < row["macs_before"]
        assert 0 < row["parameters"] < row["parameters_before"]
        assert row["divergence"] > 0 and row["failed"] is None
        assert 0 <= row["kept_low"] <= row["kept"] <= row["kept_high"] <= 1
    by_method = {(r["method"], r["amount"], r["seed"]): r["divergence"] for r in rows}
    assert by_method["echo", 0.5, 0] < by_method["none", 0.5, 0]


def test_a_sweep_of_an_older_version_is_read_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with Store(path) as made:
        made.add("one", {"model": "m", "kind": "ratio", "amount": 0.5, "method": "echo", "seed": 0,
                         "setting": "{}", "command": "lbyl", "divergence": 0.1})  # fmt: skip
    with sqlite3.connect(path) as connection:
        for name in ("agreement", "kept", "kept_low", "kept_high"):
            connection.execute(f"ALTER TABLE rows DROP COLUMN {name}")
    with Store(path, writable=False) as old:
        (row,) = old.rows()
    assert row["divergence"] == 0.1 and row["kept"] is None
    with Store(path) as again:
        assert again.rows() == [row]
        assert again.add("two", {k: v for k, v in row.items() if k != "key"} | {"kept": 0.9})
        assert again.rows()[-1]["kept"] == 0.9


def test_a_row_is_what_its_command_makes(subject: Subject, store: Store) -> None:
    (row,) = sweep(grid(subject, 0.5), SETTING, store, Engine(jobs=1))
    network = resolve(subject.model, input_shape=(8,))
    result = lbyl.compress(network.model, network.example, 0.5, criterion="l2", data=16)
    assert (result.after.macs, result.story) == (row["macs"], row["story"])
    assert "--ratio 0.5 --criterion l2 --method echo --data 16" in row["command"]
    assert "--input-size 3x8x8" in row["command"]


def test_a_second_sweep_computes_only_what_is_missing(subject: Subject, store: Store) -> None:
    first = sweep(grid(subject, 0.25), SETTING, store, Engine(jobs=1))
    told: list[tuple[str, int, int]] = []
    both = grid(subject, 0.25, 0.5)
    rows = sweep(both, SETTING, store, Engine(jobs=1), lambda *step: told.append(step))
    assert [step for step in told if step[0] == "sweeping"] == [("sweeping", i, 2) for i in (1, 2)]
    assert [row for row in rows if row["amount"] == 0.25] == first


def test_a_sweep_that_dies_goes_on_where_it_was_and_keeps_the_statistics(
    subject: Subject, store: Store
) -> None:
    made, stages = grid(subject, 0.25, 0.4, 0.5, 0.6), list[str]()

    def interrupt(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        if stage == "sweeping" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(made, SETTING, store, Engine(jobs=1), interrupt)
    assert stages[0] == "collecting statistics" and len(store.rows()) == 2
    folder = store.path.with_name("sweep.db.statistics")
    assert len(list(folder.iterdir())) == 1
    stages.clear()
    rows = sweep(made, SETTING, store, Engine(jobs=1), lambda stage, *_: stages.append(stage))
    assert sorted(row["amount"] for row in rows) == [0.25, 0.4, 0.5, 0.6]
    assert set(stages) == {"sweeping"}  # nothing was collected again
    assert not folder.exists()  # they have served


def test_what_cannot_be_done_is_a_row_that_says_why_and_is_tried_again(
    subject: Subject, store: Store
) -> None:
    impossible = points([subject], [("macs", 0.001)], [None], ["echo"], [0])
    (row,) = sweep(impossible, SETTING, store, Engine(jobs=1))
    assert "budget" in row["failed"] and row["macs"] is None
    key = impossible[0].key(SETTING)
    assert not store.done([key])
    again = {k: v for k, v in row.items() if k not in ("key", "finished")} | {"failed": None}
    assert store.add(key, again | {"macs": 1})
    assert not store.add(key, again | {"macs": 2})  # what is finished stays
    assert store.rows()[0]["macs"] == 1


def test_methods_that_choose_themselves_come_once_and_where_rows_are_computed_makes_no_other(
    subject: Subject,
) -> None:
    made = grid(subject, 0.5, criteria=["l1", "l2"], methods_named=["echo", "fold"])
    named = [(p.method, p.criterion) for p in made]
    assert named == [("echo", "l1"), ("fold", None), ("echo", "l2")]
    here, there = Setting(threads=1), Setting(threads=8, device="cuda")
    assert made[0].key(here) == made[0].key(there) != made[0].key(Setting(limit=3))


def test_a_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (x)")
    before = path.read_bytes()
    with pytest.raises(lbyl.LbylError, match="another program"):
        Store(path)
    assert path.read_bytes() == before
    (tmp_path / "notes.txt").write_text("nothing of ours " * 99)
    with pytest.raises(lbyl.LbylError, match="no sweep"):
        Store(tmp_path / "notes.txt")


def test_rows_can_be_read_while_they_are_written(subject: Subject, store: Store) -> None:
    seen = list[int]()

    def look(stage: str, done: int, total: int) -> None:
        with Store(store.path, writable=False) as reader:
            seen.append(len(reader.rows()))

    sweep(grid(subject, 0.25, 0.5), SETTING, store, Engine(jobs=1), look)
    assert seen[-1] == 2 and 1 in seen


def test_an_address_where_nobody_answers_is_one_clear_error(subject: Subject, store: Store) -> None:
    pytest.importorskip("distributed")
    with pytest.raises(lbyl.LbylError, match="no Dask scheduler answers at nobody://there"):
        sweep(grid(subject, 0.5), SETTING, store, Engine(cluster="nobody://there"))


def started(*arguments: str) -> subprocess.Popen[bytes]:
    source = str(Path(lbyl.__file__).parents[1])
    paths = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "distributed.cli.dask_" + arguments[0], *arguments[1:]]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two workers, each a process of its own on loopback."""
    distributed = pytest.importorskip("distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    port = address.rpartition(":")[2]
    running = [started("scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")]
    one = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(tmp_path)]
    running += [started("worker", address, *one) for _ in range(2)]
    try:
        with distributed.Client(address, timeout=120, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=120)
        yield address, running[1:]
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_a_worker_of_a_cluster_may_be_killed_and_no_row_is_lost_or_there_twice(
    subject: Subject, store: Store, cluster: tuple[str, list[subprocess.Popen[bytes]]]
) -> None:
    address, workers = cluster
    made = grid(subject, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, methods_named=["echo", "lbyl"])
    stages: list[tuple[str, int]] = []

    def kill(stage: str, done: int, total: int) -> None:
        stages.append((stage, done))
        if (stage, done) == ("sweeping", 3):
            workers[0].kill()

    rows = sweep(made, SETTING, store, Engine(cluster=address), kill)
    assert workers[0].wait() and workers[1].poll() is None
    assert len(rows) == len(made) == 12
    assert {row["key"] for row in rows} == {point.key(SETTING) for point in made}
    assert all(row["failed"] is None and row["macs"] for row in rows)
    assert [n for stage, n in stages if stage == "sweeping"] == list(range(13))  # none came twice
    computed_by = {int(row["worker"].rpartition(":")[2]) for row in rows}
    assert computed_by <= {worker.pid for worker in workers}
    assert workers[1].pid in computed_by


@pytest.mark.slow
def test_processes_of_this_machine_may_be_killed_and_the_sweep_goes_on(
    subject: Subject, store: Store
) -> None:
    made = grid(subject, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    killed: list[int] = []

    def kill(stage: str, done: int, total: int) -> None:
        if stage == "sweeping" and done == 2 and not killed:
            time.sleep(0.2)
            killed.append(int(store.rows()[0]["worker"].rpartition(":")[2]))
            os.kill(killed[0], signal.SIGKILL)

    rows = sweep(made, SETTING, store, Engine(jobs=2), kill)
    assert killed and len(rows) == 6
    assert all(row["failed"] is None for row in rows)
