"""Compressed again: one plan that composes, and reports that say what is so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lbyl
from lbyl.app.sources import resolve

DIGITS = ["lbyl:digits", "--weights", "shipped"]


@pytest.fixture
def twice(run: Any, tmp_path: Path) -> Path:
    """A network that was compressed, and compressed again, in the folder `second`."""
    plain = ["--method", "none", "--no-report", "--out"]
    run("compress", *DIGITS, "--ratio", "0.25", *plain, tmp_path / "first")
    run("compress", tmp_path / "first", "--ratio", "0.5", *plain, tmp_path / "second")
    return tmp_path


def test_what_was_compressed_twice_is_one_compression_of_the_original(
    run: Any, run_json: Any, twice: Path
) -> None:
    first, plan = (json.loads((twice / n / "plan.json").read_text()) for n in ("first", "second"))
    assert plan["network"]["name"] == "lbyl:digits" and len(plan["earlier"]) == 1
    assert plan["units"]["stem.0"]["channels"] == 32 and len(plan["units"]["stem.0"]["kept"]) == 12
    assert plan["result"]["before"]["parameters"] == 116_682
    whole = lbyl.load(twice / "second")
    original = resolve("lbyl:digits", "shipped").model
    for name, unit in plan["units"].items():
        assert set(unit["kept"]) < set(first["units"][name]["kept"])
    # Without correction filters that are kept are the original's: the plan says which.
    kept = plan["units"]["stem.0"]["kept"]
    assert torch.equal(whole.stem[0].weight, original.stem[0].weight[kept])
    x = torch.randn(3, 1, 8, 8)
    given = lbyl.load(twice / "second", resolve("lbyl:digits").model)
    assert not whole.training and torch.equal(whole(x), given(x))
    found = run_json("evaluate", twice / "second", "--test", "digits", "--limit", "100")
    assert found["parameters"] == plan["result"]["after"]["parameters"]
    assert run("report", twice / "second").exit_code == 0


def test_a_report_written_again_is_as_rich_as_the_first(run: Any, slim: Path) -> None:
    first = (slim / "report.html").read_text()
    run("report", slim)
    again = (slim / "report.html").read_text()
    for part in ("<section", 'class="dot"', 'src="data:image/png;base64,iVBOR'):
        assert first.count(part) == again.count(part) > 0
    lead = re.compile(r'<p class="lead">.*?</p>')
    assert lead.findall(first) == lead.findall(again) != []
    wide = json.loads((slim / "report.json").read_text())["delivery"]["block.conv1"]
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
