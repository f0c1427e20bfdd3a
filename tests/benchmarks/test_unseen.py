"""The table of networks that nobody has seen: any directory of networks, fixed settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import unseen
from benchmarks.common.networks import load_images
from lbyl.torchkit.files import read_json

pytest.importorskip("sklearn")

FACTORY = """
from lbyl.models import zoo

def make():
    return zoo.create("digits", "shipped")
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two networks: one of the zoo, one of a Python file beside its images."""
    digits = load_images("digits")
    np.savez(tmp_path / "images.npz", images=digits.pixels(), labels=digits.labels)
    (tmp_path / "factory.py").write_text(FACTORY)
    scale: dict[str, Any] = {"mean": [0.3], "std": [0.35], "input_size": 8, "test": "images.npz"}
    entries = {
        "zoo": {"model": "lbyl:digits", "weights": "shipped", "test": "digits"},
        "file": {"model": "factory.py:make", **scale},
    }
    for name, entry in entries.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(entry))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, directory: Path, *options: str) -> dict[str, Any]:
    out = directory / "out"
    command = ["unseen", str(directory), "--device", "cpu", "--results", str(out), *options]
    monkeypatch.setattr(sys, "argv", command)
    unseen.main()
    stored: dict[str, Any] = read_json(out / "unseen.json")["networks"]
    return stored


def test_every_setting_is_a_row_with_every_column(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unseen, "RATIOS", (0.5,))
    monkeypatch.setattr(unseen, "CRITERIA", ("l2",))
    monkeypatch.setattr(unseen, "BUDGETS", (0.6,))
    networks = run(
        monkeypatch, directory, "--only", "file", "--refine", "1", "--own", "--limit", "200"
    )
    names = ["50% as it comes", "50% l2", "MACs 0.6 chosen", "MACs 0.6 uniform"]
    assert list(networks) == ["file"]
    for figures in networks.values():
        assert figures["base"] > 90
        assert figures["images"] == 200
        assert [row["setting"] for row in figures["rows"]] == names
        for row in figures["rows"]:
            assert not row["errors"]
            assert all(60 < row[column] <= 100 for column in unseen.COLUMNS)
        chosen, uniform = figures["rows"][2:]
        assert 0.5 < chosen["macs"] <= 0.6
        assert 0.5 < uniform["macs"] <= 0.6
    printed = capsys.readouterr().out
    assert "MACs 0.6 uniform" in printed
    assert "real images, closed form" in printed


def test_the_settings_are_those_of_the_protocol() -> None:
    assert [setting.name for setting in unseen.settings()] == [
        *("30% as it comes", "30% l2", "30% echo"),
        *("50% as it comes", "50% l2", "50% echo"),
        *("MACs 0.8 chosen", "MACs 0.8 uniform", "MACs 0.6 chosen", "MACs 0.6 uniform"),
        *("MACs 0.4 chosen", "MACs 0.4 uniform"),
    ]


def test_what_fails_is_a_row_and_not_the_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unseen, "RATIOS", (0.5, 1.5))
    monkeypatch.setattr(unseen, "CRITERIA", ("l2",))
    monkeypatch.setattr(unseen, "BUDGETS", ())
    networks = run(monkeypatch, directory, "--only", "zoo", "--limit", "100")
    assert list(networks) == ["zoo"]
    _, good, _, bad = networks["zoo"]["rows"]
    assert good["closed form"] > 60
    assert bad["closed form"] is None
    assert "at least 0 and below 1" in bad["errors"]["closed form"]
    assert "failed" in capsys.readouterr().out


def test_a_description_that_says_too_little_or_too_much_is_refused(directory: Path) -> None:
    path = directory / "zoo.json"
    for entry in ({"model": "lbyl:digits"}, {"model": "lbyl:digits", "test": "digits", "std.": 1}):
        path.write_text(json.dumps(entry))
        with pytest.raises(SystemExit, match="'model' and 'test' are needed"):
            unseen.load(path, "cpu")
    with pytest.raises(SystemExit, match=r"no NAME\.json"):
        unseen.described(directory / "nowhere")
