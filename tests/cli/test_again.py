"""Compress, train, compress again: one plan that composes, and reports that say what is so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lbyl
from lbyl.models import resolve

DIGITS = ["lbyl:digits", "--weights", "shipped"]


@pytest.fixture
def twice(run: Any, tmp_path: Path) -> Path:
    """A network that was compressed, trained, and compressed again, in the folder `second`."""
    run("compress", *DIGITS, "--ratio", "0.25", "--method", "none", "--out", tmp_path / "first")
    training = ["--train", "digits", "--test", "digits", "--limit", "100", "--epochs", "1"]
    told = run("finetune", tmp_path / "first", *training, "--out", tmp_path / "trained")
    assert "training loss" in told.stdout
    plain = ["--ratio", "0.5", "--method", "none", "--out", tmp_path / "second"]
    run("compress", tmp_path / "trained", *plain)
    return tmp_path


def test_what_was_compressed_twice_is_evaluated_loaded_and_reported(
    run: Any, run_json: Any, twice: Path
) -> None:
    plan = json.loads((twice / "second" / "plan.json").read_text())
    assert plan["network"]["name"] == "lbyl:digits"
    assert plan["units"]["stem.0"]["channels"] == 32 and len(plan["units"]["stem.0"]["kept"]) == 12
    assert plan["result"]["before"]["parameters"] == 116_682
    assert len(plan["earlier"]) == 2  # commands: compress, finetune
    found = run_json("evaluate", twice / "second", "--test", "digits", "--limit", "100")
    assert found["parameters"] == plan["result"]["after"]["parameters"]
    assert run("report", twice / "second").exit_code == 0
    third = ["--ratio", "0.2", "--method", "none", "--out", twice / "third"]
    run("compress", twice / "second", *third)
    assert (
        run_json("evaluate", twice / "third", "--test", "digits")["parameters"]
        < found["parameters"]
    )


def test_channels_of_the_composed_plan_are_those_of_the_original(twice: Path) -> None:
    """Without training and correction kept filters are the original's: the plan says which."""
    first = lbyl.Plan.from_dict(json.loads((twice / "first" / "plan.json").read_text()))
    whole = lbyl.Plan.from_dict(json.loads((twice / "second" / "plan.json").read_text()))
    for name, kept in whole.kept.items():
        assert set(kept.tolist()) < set(first.kept[name].tolist())


def test_a_saved_network_is_loaded_by_its_directory_alone_ready_to_use(twice: Path) -> None:
    alone = lbyl.load(twice / "second")
    x = torch.randn(3, 1, 8, 8)
    given = lbyl.load(twice / "second", resolve("lbyl:digits").model)
    assert not alone.training and torch.equal(alone(x), given(x))


def test_the_report_of_a_trained_network_forgets_what_was_measured_before(
    run: Any, twice: Path
) -> None:
    plan = json.loads((twice / "trained" / "plan.json").read_text())
    assert plan["result"]["forecast"] is None and "original" not in plan["accuracy"]
    run("report", twice / "trained")
    page = (twice / "trained" / "report.html").read_text()
    assert "Trained for 1 epoch afterwards." in page and "No training." not in page


def test_a_report_written_again_is_as_rich_as_the_first(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("compress", *DIGITS, "--ratio", "0.5", "--out", out)
    first = (out / "report.html").read_text()
    run("report", out)
    again = (out / "report.html").read_text()
    assert first.count("<section") == again.count("<section") == 5
    assert first.count('class="dot"') == again.count('class="dot"') > 10
    wide = json.loads((out / "report.json").read_text())["delivery"]["block.conv1"]
    assert (wide["channels"], wide["kept"]) == (64, 32)


def test_a_plan_of_another_network_does_not_compose() -> None:
    first = lbyl.Plan({"a": torch.tensor([0, 2])}, {"a": 4})
    later = lbyl.Plan({"a": torch.tensor([1])}, {"a": 2})
    assert first.then(later).kept["a"].tolist() == [2]
    with pytest.raises(lbyl.LbylError, match="2 were kept"):
        first.then(lbyl.Plan({"a": torch.tensor([1])}, {"a": 3}))


def test_several_compressions_are_compared_on_one_page(run: Any, tmp_path: Path) -> None:
    for ratio in ("0.25", "0.5"):
        arguments = ["--ratio", ratio, "--method", "none", "--no-report"]
        run("compress", *DIGITS, *arguments, "--out", tmp_path / f"r{ratio}")
    page = tmp_path / "both.html"
    run("report", tmp_path / "r0.25", tmp_path / "r0.5", "--out", page)
    text = page.read_text()
    assert "2 compressions compared" in text and "24/32" in text and "16/32" in text
    assert text.count('class="dot"') == 3 * 2  # both against MACs, parameters and bytes
    wrong = run("report", tmp_path / "r0.25", tmp_path / "r0.5", "--model", "lbyl:digits", code=2)
    assert "of one compression" in wrong.stderr


def test_the_report_draws_what_the_networks_were_compared_on(run: Any, tmp_path: Path) -> None:
    run("compress", *DIGITS, "--ratio", "0.5", "--method", "none", "--out", tmp_path / "out")
    assert 'src="data:image/png;base64,iVBOR' in (tmp_path / "out" / "report.html").read_text()
