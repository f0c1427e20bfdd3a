"""Statistics collected in parts are those of one run, and hold no more memory than there is."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import lbyl
from lbyl.errors import LbylError
from lbyl.statistics import collect, parts
from lbyl.statistics.moments import Moments
from lbyl.statistics.parts import Stored, in_parts
from lbyl.torchkit import memory
from support.networks import build, example


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(parts, "_folder", lambda: str(tmp_path))
    return tmp_path


def little_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(collect, "free_bytes", lambda device: free)


def assert_alike(found: Mapping[str, Moments], expected: Mapping[str, Moments]) -> None:
    assert list(found) == list(expected) and len(found) == len(expected)
    for name, one in expected.items():
        assert name in found and found[name].taps == one.taps
        torch.testing.assert_close(found[name].mean, one.mean)
        torch.testing.assert_close(found[name].covariance, one.covariance)


def test_groups_fit_and_keep_their_order() -> None:
    sizes = {"a": 3, "b": 4, "c": 9, "d": 1, "e": 1}
    assert in_parts(sizes, 7) == [["a", "b"], ["c"], ["d", "e"]]
    assert in_parts(sizes, 6) == [["a"], ["b"], ["c"], ["d", "e"]]
    assert in_parts(sizes, 18) == [["a", "b", "c", "d", "e"]]
    assert in_parts({}, 1) == []


@pytest.mark.parametrize("name", ["bottleneck", "dense"])
def test_parts_are_what_one_run_gives(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few images, of which every row is taken: nothing is drawn."""
    model, x = build(name), example(name)
    whole = lbyl.prepare(model, x, data=16).statistics()
    told: list[tuple[str, int, int]] = []
    little_memory(monkeypatch, 0)
    split = lbyl.prepare(model, x, data=16, progress=lambda *step: told.append(step)).statistics()
    assert isinstance(split.moments, Stored)
    assert_alike(split.moments, whole.moments)
    assert split.source == whole.source and split.fallbacks == whole.fallbacks
    steps = [step for step in told if step[0] == "collecting"]
    assert [step[1] for step in steps] == list(range(1, len(whole.moments) + 1))  # a batch each
    assert {step[2] for step in steps} == {len(whole.moments)}
    assert len([path for path in folder.rglob("*") if path.is_file()]) == len(whole.moments)
    del split
    gc.collect()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("ratio", [0.5, lbyl.Budget(macs=0.6)])
def test_compressions_do_not_notice(
    ratio: float | lbyl.Budget, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = build("bottleneck"), example("bottleneck")
    expected = lbyl.compress(model, x, ratio, data=16)
    little_memory(monkeypatch, 1 << 20)
    found = lbyl.compress(model, x, ratio, data=16)
    for (name, one), other in zip(
        found.model.state_dict().items(), expected.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


def test_only_the_last_that_were_asked_for_stay(folder: Path) -> None:
    each = {str(i): Moments(torch.zeros(4, 1), torch.full((4, 4), float(i))) for i in range(3)}
    stored = Stored(torch.device("cpu"), 2 * 16 * 8)
    stored.add(each)
    first = stored["0"]
    assert stored["1"] is stored["1"] and stored["0"] is first
    assert stored["2"].covariance[0, 0] == 2.0
    assert stored["0"] is first and list(stored._recent) == ["2", "0"]
    assert stored.get("3") is None and "3" not in stored and set(stored) == set(each)
    alone = Stored(torch.device("cpu"), 0)  # there is always room for one
    alone.add(each)
    assert alone["1"] is alone["1"]
    assert alone["2"] is not None and list(alone._recent) == ["2"]


def test_what_waits_on_the_disk_is_not_read_to_be_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = build("bottleneck"), example("bottleneck")
    little_memory(monkeypatch, 0)
    statistics = lbyl.prepare(model, x, data=16).statistics()
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
    graph = lbyl.trace(model, x)
    collect.check_statistics(graph, statistics)
    with pytest.raises(FileNotFoundError):
        statistics.get(next(iter(graph.consumers)))


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_batches_are_smaller_where_memory_is_short(
    free: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = build("bottleneck"), example("bottleneck")
    little_memory(monkeypatch, free)
    monkeypatch.setattr(collect, "FEWEST_TOGETHER", 10)
    told: list[int] = []
    model.register_forward_pre_hook(lambda module, args: told.append(len(args[0])))
    parts = len(lbyl.prepare(model, x, data=40).statistics().moments)
    assert told[-4 * parts :] == [10] * (4 * parts) if free == 0 else told[-1] == 40


def test_a_full_disk_says_what_to_do(folder: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    stored = Stored(torch.device("cpu"), 0)
    (Path(stored._folder.name) / "0").symlink_to("/dev/full")
    with pytest.raises(LbylError, match="let TMPDIR name a directory with more room"):
        stored.add({"a": Moments(torch.zeros(400, 1), torch.zeros(400, 400))})


def test_large_files_do_not_go_where_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(parts, "LARGE_FILES", Path("/"))
    assert parts._folder() in (None, "/")
    monkeypatch.setattr(parts, "LARGE_FILES", Path("/nowhere/at/all"))
    assert parts._folder() is None
    monkeypatch.setattr(parts, "LARGE_FILES", Path("/"))
    monkeypatch.setenv("TMPDIR", "/somewhere")
    assert parts._folder() is None  # whoever asks gets what he asks for


def test_free_memory_is_what_the_machine_and_the_container_leave(tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    assert memory._of_machine(told) == memory.UNKNOWN
    told.write_text("MemTotal: 9000 kB\nMemAvailable:   2000 kB\n")
    assert memory._of_machine(told) == 2000 * 1024
    told.write_text("MemTotal: 9000 kB\n")
    assert memory._of_machine(told) == memory.UNKNOWN
    assert memory._of_container(tmp_path) == memory.UNKNOWN
    for name, text in (("max", "1000"), ("current", "700"), ("stat", "anon 5\ninactive_file 50")):
        (tmp_path / f"memory.{name}").write_text(text + "\n")
    assert memory._of_container(tmp_path) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._of_container(tmp_path) == memory.UNKNOWN
    assert memory.free_bytes(torch.device("cpu")) > 0


def test_networks_without_batchnorm_are_collected_in_parts_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little_memory(monkeypatch, 0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    result = lbyl.compress(model, torch.randn(8, 4), 0.5)
    assert result.model(torch.randn(2, 4)).shape == (2, 3)
