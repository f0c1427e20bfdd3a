"""The installed program: exit codes, streams, help and completion, as a shell sees them."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import lbyl

WORDS = "demo compress inspect estimate compare sweep evaluate export report images".split()


def test_success(program: Any, file: str) -> None:
    done = program("compress", f"{file}:vectors", "--method", "lbyl", "--json")
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["method"]["name"] == "lbyl"


def test_failures_are_one_line_and_debug_shows_where(run: Any, program: Any, file: str) -> None:
    done = program("compress", f"{file}:broken")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and "no such luck" in line
    usage = run("compress", code=2)
    assert usage.stdout == "" and len(usage.stderr.strip().splitlines()) == 1
    assert "compress --help" in usage.stderr
    raised = run("compress", f"{file}:broken", "--debug", code=1).exception
    assert "no such luck" in f"{raised} {raised.__cause__}"


def test_a_reader_that_stops_early_is_no_error(program: Any, file: str) -> None:
    path = str(program.__closure__[0].cell_contents)
    command = f"'{path}' inspect '{file}:vectors' --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_help_names_every_command_and_each_has_the_common_options(run: Any) -> None:
    for arguments in ([], ["--help"]):
        shown = run(*arguments).stdout
        assert re.findall(r"^│ ([a-z]+) ", shown, re.M) == WORDS
    for command in WORDS:
        own = run(command, "--help").stdout
        assert all(option in own for option in ("--json", "--quiet", "--debug"))


def test_version(run: Any) -> None:
    assert run("--version").stdout.strip() == lbyl.__version__


HELP = """
import sys
import lbyl, lbyl.app.cli
from lbyl.app.cli.app import app
try:
    app(["--help"])
except SystemExit as end:
    assert not end.code, end.code
loaded = {name.partition(".")[0] for name in sys.modules}
print("heavy:", sorted(loaded & {"torch", "torchvision", "timm", "numpy", "sklearn", "PIL"}))
"""


def test_help_loads_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert "compress" in done.stdout and "heavy: []" in done.stdout


def test_the_reference_has_every_command_and_option_as_the_program_has_them() -> None:
    root = Path(__file__).resolve().parents[2]
    made = runpy.run_path(str(root / "scripts" / "cli_reference.py"))["reference"]()
    assert (root / "docs" / "cli.md").read_text(encoding="utf-8") == made


def test_what_others_print_while_a_stage_runs_is_no_result(program: Any, tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        "from torch import nn\ndef make():\n    print('loading weights')\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
    )
    done = program("inspect", f"{tmp_path}/noisy.py:make", "--json")
    assert done.stderr == "" and len(json.loads(done.stdout)["units"]) == 1
    assert "loading weights" in program("inspect", f"{tmp_path}/noisy.py:make").stderr


def test_an_unknown_command_is_one_line(run: Any) -> None:
    result = run("compres", code=2)
    assert "compress" in result.stderr and result.stderr.count("\n") == 1


def test_shell_completion_knows_the_names(program: Any) -> None:
    def complete(words: str) -> list[str]:
        environment = os.environ | {
            "_LBYL_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        return program(env=environment).stdout.split()

    assert sorted(complete("lbyl comp")) == ["compare", "compress"]
    assert complete("lbyl compress --method neur") == ["neuron-merging"]
    assert complete("lbyl compress torchvision:resnet10") == ["torchvision:resnet101"]
