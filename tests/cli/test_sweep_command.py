"""`lbyl sweep` and the report of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = ["--jobs", "1", "--threads", "1"]


def test_a_sweep_writes_rows_that_its_report_draws(
    run: Any, run_json: Any, small: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "s.db"
    some = ["--ratio", "0.3", "--ratio", "0.6", "--criterion", "l2", "--data", "16", *HERE]
    told = run_json("sweep", *small, *some, "--out", out)
    assert [row["amount"] for row in told["rows"]] == [0.3, 0.6]
    shown = run("sweep", *small, *some, "--out", out)
    assert "2 rows of 2 there already" in shown.stderr and "ratio 0.6" in shown.stdout
    run("report", out)
    page = (tmp_path / "s.html").read_text()
    assert told["rows"][1]["command"] in page.replace("&#39;", "'")


def test_options_of_a_sweep_that_contradict_each_other_are_refused(
    run: Any, small: list[str], tmp_path: Path
) -> None:
    out = ["--out", tmp_path / "s.db"]
    assert "one for each" in run("sweep", small[0], *out, "--weights", "a", "--weights", "b",
                                 code=2).stderr  # fmt: skip
    assert "above 0" in run("sweep", small[0], *out, "--macs", "1.5", code=2).stderr
    assert "unknown method" in run("sweep", small[0], *out, "--method", "nix", code=2).stderr
    assert "--test" in run("sweep", small[0], *out, "--limit", "3", code=2).stderr
    assert not (tmp_path / "s.db").exists()


def test_which_ratio_to_pick_is_one_command_and_its_page(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "s.db"
    amounts = ["--ratio", "0.05", "--ratio", "0.8"]
    settings = ["--weights", "shipped", "--criterion", "l2", "--data", "64", *HERE]
    shown = run("sweep", "lbyl:digits", *settings, *amounts, "--time", "--out", out).stdout
    assert "keeps about" in shown and " ms" in shown
    told = " ".join(shown.split())
    assert "recommended for lbyl:digits: echo, ratio 0.05" in told
    run("report", out)
    page = (tmp_path / "s.html").read_text()
    for cost in ("MACs", "Parameters", "Measured time of a pass"):
        assert f"<b>{cost}, % of the original</b>" in page
    assert page.count('class="dot"') == 2 * 3  # two networks against three costs
    assert "The smallest that keeps 95 % of the accuracy: <b>echo, ratio 0.05" in page
