"""`keep=` is a promise by inputs that no choice has seen, and a lost network is no success."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import Result
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from typer.testing import CliRunner

import lbyl
from lbyl.app.cli.app import app

pytestmark = pytest.mark.usefixtures("whole_forecast")

FACTORY = """
import torch
from torch import nn

def lost():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 400)), torch.zeros(1, 16)
"""


def wide(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, classes))


class Overheard(nn.Module):
    """A network told apart from all others, and from none of its copies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_the_size_is_the_smallest_that_keeps_at_least_what_was_asked() -> None:
    prepared = lbyl.prepare(wide(16), torch.zeros(1, 16))
    sizes = []
    for keep in (0.6, 0.9):
        result = prepared.compress(lbyl.Budget(keep=keep))
        told = result.forecast
        assert told is not None and told.low is not None and told.kept is not None
        assert keep <= told.low < told.kept
        sizes.append(result.after.macs)
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] < prepared.compress(0.0).after.macs


def test_the_last_comparison_is_on_inputs_that_no_choice_has_seen() -> None:
    stages: list[str] = ["start"]
    heard: dict[bytes, int] = {}  # a row of an input → at which stage it came first

    def listen(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        for row in args[0] if isinstance(module, Overheard) else ():
            heard.setdefault(row.numpy().tobytes(), len(stages))

    def progress(stage: str, step: int, steps: int) -> None:
        stages.append(stage)

    prepared = lbyl.prepare(Overheard(), torch.zeros(1, 16), progress=progress)
    handle = register_module_forward_pre_hook(listen)
    result = prepared.compress(lbyl.Budget(keep=0.8), criterion="echo")
    handle.remove()
    told = result.forecast
    assert told is not None
    last = max(i for i, stage in enumerate(stages) if stage == "trying sizes")
    unseen = sum(stage > last for stage in heard.values())
    assert unseen >= told.inputs >= 8  # first run on after all choices were made


def test_a_result_says_at_least_and_what_stands_behind_it() -> None:
    text = " ".join(str(lbyl.compress(wide(16), torch.zeros(1, 16), 0.2)).split())
    assert ", at least " in text and "12 networks" in text and "thin by design" in text


def test_more_inputs_of_ones_own_are_compared_in_two_halves() -> None:
    data = torch.randn(2048, 16)
    result = lbyl.compress(wide(16), torch.zeros(1, 16), lbyl.Budget(keep=0.8), data=data)
    told = result.forecast
    assert told is not None and (told.source, told.inputs) == ("own", 256)
    assert told.low is not None and told.low >= 0.8


def test_what_cannot_be_promised_is_said_with_a_remedy() -> None:
    with pytest.raises(lbyl.LbylError, match=r"cannot be promised .* ask for less"):
        lbyl.compress(wide(16), torch.zeros(1, 16), lbyl.Budget(keep=1.0))


def test_a_lost_network_is_called_lost() -> None:
    prepared = lbyl.prepare(wide(400), torch.zeros(1, 16))
    with pytest.warns(UserWarning, match="the smaller network is lost: keeps about"):
        result = prepared.compress({"*": 0.97}, method="none")
    assert result.lost and result.forecast is not None and result.forecast.high is not None
    assert result.forecast.high < 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        kept = prepared.compress(0.1)
        assert not kept.lost
        prepared.estimate((0.97,), methods=("none",))  # a curve is to be read, not to be used


def test_without_a_forecast_nothing_is_refused_and_nothing_is_claimed() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 4:
                raise ValueError("at most four at once")
            return self.two(self.one(x).relu())

    result = lbyl.compress(Picky(), torch.zeros(2, 6), 0.5, method="none")
    assert result.forecast is None and not result.lost
    assert "nothing is known of the accuracy" in str(result)
    regression = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    told = lbyl.compress(regression, torch.zeros(2, 6), 0.9, method="none")
    assert not told.lost and "nothing is known of the accuracy" in str(told)


def run(arguments: list[str], folder: Path) -> Result:
    (folder / "net.py").write_text(FACTORY)
    return CliRunner().invoke(app, ["compress", f"{folder / 'net.py'}:lost", *arguments])


def test_a_lost_network_is_not_written_unless_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ["--ratio", "*=0.97", "--method", "none", "--no-report", "--out", str(out)]
    refused = run([*given, "--json"], tmp_path)
    assert refused.exit_code == 3, refused.stderr
    assert not out.exists() and "lost" in refused.stderr and "--anyway" in refused.stderr
    document = json.loads(refused.stdout)
    assert document["lost"] and document["forecast"]["high"] < 0.5
    out.mkdir()
    (out / "note.txt").write_text("mine")
    assert run(given, tmp_path).exit_code == 3
    assert [path.name for path in out.iterdir()] == ["note.txt"]
    written = run([*given, "--anyway"], tmp_path)
    assert written.exit_code == 0, written.stderr
    assert (out / "plan.json").is_file()


@pytest.mark.parametrize("last", [0.32, 0.9])
def test_a_time_far_from_what_was_asked_is_an_error_with_both_figures(
    last: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that a busy machine puts off at the end."""
    times = iter([0.7] * 7 + [last])
    monkeypatch.setattr(lbyl.Prepared, "_time_fraction", lambda self, left: next(times))
    with pytest.raises(lbyl.LbylError, match=f"70.0% .* asked for.* {100 * last:.1f}%"):
        lbyl.compress(wide(16), torch.zeros(1, 16), lbyl.Budget(latency=0.7))
