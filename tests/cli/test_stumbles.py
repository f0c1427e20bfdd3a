"""What somebody new stumbles over: late failures, raw errors, silence, missing figures."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lbyl
from lbyl.app.sources import resolve
from lbyl.app.sources.zoo import load_weights
from lbyl.latency import Timing  # private: no clock of the machine can be told what to show

DIGITS = ["lbyl:digits", "--weights", "shipped"]


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def test_the_forecast_comes_first_and_the_truth_beside_it(run: Any, run_json: Any) -> None:
    arguments = ["compress", *DIGITS, "--ratio", "0.5", "--method", "none"]
    shown = run(*arguments, "--test", "digits", "--limit", "100")
    lines = [line for line in shown.stdout.splitlines() if line.strip()]
    assert lines[0].startswith("forecast: keeps about ")
    assert lines[1].startswith("measured: keeps ")
    assert "nothing was written: add --out DIR" in shown.stderr
    found = run_json(*arguments)
    assert 0 <= found["forecast"]["low"] <= found["forecast"]["kept"] <= found["forecast"]["high"]


def test_keep_is_a_budget_like_the_others(run: Any, run_json: Any) -> None:
    found = run_json("compress", *DIGITS, "--keep", "0.8", "--criterion", "l2")
    assert found["forecast"]["low"] >= 0.8
    assert found["after"]["macs"] < found["before"]["macs"]
    wrong = run("compress", *DIGITS, "--keep", "0.8", "--macs", "0.5", code=2)
    assert "several budgets" in wrong.stderr


def test_a_budget_of_time_shows_the_time_and_is_refused_where_it_is_missed(
    run: Any, run_json: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clocks: one that sizes are found by, and one that says at last what came of it."""
    seconds = {"original": Timing.of([1.0, 1.0]), "slim": Timing.of([0.95, 0.95])}
    # private: as above; whatever is measured on a busy machine would be another number each time
    monkeypatch.setattr(lbyl.Prepared, "_time_fraction", lambda self, left: 0.95)
    # private: as above
    monkeypatch.setattr("lbyl.app.cli.compress.compare", lambda *args: seconds)
    out = tmp_path / "out"
    arguments = ["compress", *DIGITS, "--latency", "0.95", "--criterion", "l2", "--out", out]
    found = run_json(*arguments)
    assert found["latency"] == {"original": 1.0, "slim": 0.95}
    assert "Latency" in (out / "report.html").read_text()
    seconds["slim"] = Timing.of([0.32, 0.32])
    refused = run(*arguments[:-1], tmp_path / "other", code=2)
    assert "95.0%" in refused.stderr and "32.0%" in refused.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(getattr(os, "geteuid", int)() == 0, reason="root may write everywhere")
def test_a_target_that_cannot_be_written_to_is_refused_at_once(run: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "no permission" in run("compress", *DIGITS, "--out", tmp_path / "x", code=2).stderr


@pytest.mark.parametrize(
    "wrong", [["--include", "nix.*"], ["--exclude", "nix.*"], ["--ratio", "nix.*=0.5"]]
)
def test_a_pattern_that_matches_nothing_is_said_before_images_are_measured(
    run: Any, wrong: list[str]
) -> None:
    told = run("compress", *DIGITS, "--test", "digits", *wrong, code=2).stderr
    assert "nix.*" in told.splitlines()[-1] and "accuracy of the original" not in told


def test_inputs_that_the_network_does_not_take_are_one_clear_error() -> None:
    with pytest.raises(lbyl.LbylError, match=r"\(9, 5\) .* example inputs are \(2, 6\)"):
        lbyl.compress(small(), torch.randn(2, 6), 0.5, data=torch.randn(9, 5))


def test_a_module_where_a_name_belongs_is_one_clear_error() -> None:
    model = small()
    for argument in ({"exclude": [model[0]]}, {"include": model[0]}):
        with pytest.raises(lbyl.LbylError, match="takes patterns of layer names"):
            lbyl.compress(model, torch.randn(2, 6), 0.5, **argument)


def test_what_is_not_installed_is_named_as_it_is_installed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    told = run("images", tmp_path / "a.png", "--count", "4", "--input-size", "8", code=1).stderr
    assert 'PIL is not installed: pip install "lbyl[vision]"' in " ".join(told.split())


def test_a_file_with_a_whole_model_says_how_to_convert_it_where_torch_is_too_old_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "get_unsafe_globals_in_checkpoint"
    monkeypatch.delattr(torch.serialization, name, raising=False)
    torch.save(small(), tmp_path / "model.pth")
    with pytest.raises(lbyl.LbylError, match=r"save model\.state_dict\(\)"):
        load_weights(small(), tmp_path / "model.pth")


def test_checkpoints_of_trainers_are_read_under_whatever_prefix(
    run_json: Any, tmp_path: Path
) -> None:
    trained = resolve("lbyl:digits", "shipped").model
    state = {f"model.{k}": v for k, v in trained.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "last.ckpt")
    again = load_weights(resolve("lbyl:digits").model, tmp_path / "last.ckpt")
    assert torch.equal(again.fc.weight, trained.fc.weight)
    test = ["--weights", tmp_path / "last.ckpt", "--test", "digits", "--limit", "100"]
    assert run_json("evaluate", "lbyl:digits", *test)["accuracy"] > 90


def test_a_compiled_network_is_taken_as_what_it_was_compiled_from() -> None:
    result = lbyl.compress(torch.compile(small()), torch.randn(2, 6), 0.5)  # type: ignore[arg-type]
    assert type(result.model) is nn.Sequential


def test_a_factory_may_live_in_a_package_and_bring_its_inputs(
    run_json: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mynets").mkdir()
    (tmp_path / "mynets" / "__init__.py").write_text("")
    (tmp_path / "mynets" / "pair.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Pair(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 3)\n"
        "    def forward(self, x, y):\n"
        "        return self.b(self.a(x + y).relu())\n"
        "def pair():\n"
        "    return Pair(), (torch.randn(2, 6), torch.randn(2, 6))\n"
    )
    monkeypatch.chdir(tmp_path)
    found = run_json("compress", "mynets.pair:pair", "--ratio", "0.5")
    assert found["after"]["parameters"] < found["before"]["parameters"]
    assert str(tmp_path) not in sys.path
    with pytest.raises(lbyl.LbylError, match="no Python module mynetz"):
        resolve("mynetz.pair:pair")


def test_an_accuracy_comes_with_how_far_chance_may_have_moved_it(run_json: Any) -> None:
    found = run_json("evaluate", *DIGITS, "--test", "digits", "--limit", "100")
    low, high = found["interval"]
    assert low < found["accuracy"] < high and found["top_5"] is None  # of ten classes


def test_python_calls_show_a_bar_where_one_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    deep = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    for asked in (None, False):
        lbyl.compress(deep, torch.randn(2, 6), 0.5, progress=asked)
        assert capsys.readouterr().err == ""
    lbyl.compress(deep, torch.randn(2, 6), 0.5, progress=True)
    assert "solving" in capsys.readouterr().err
