"""The installed program: exit codes, streams, help and completion, as a shell sees them."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from typing import Any

from lbyl.cli.app import COMMANDS, load_command

WORDS = (
    "demo compress inspect estimate compare sweep evaluate finetune export report images".split()
)


def test_success(program: Any, file: str) -> None:
    done = program("compress", f"{file}:vectors", "--method", "lbyl", "--json")
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["method"]["name"] == "lbyl"


def test_failure_is_one_line(program: Any, file: str) -> None:
    done = program("compress", f"{file}:broken")
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert "no such luck" in lines[0]


def test_debug_shows_where(program: Any, file: str) -> None:
    done = program("compress", f"{file}:broken", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and 'raise RuntimeError("no such luck")' in done.stderr


def test_usage_error_is_one_line(program: Any) -> None:
    done = program("compress")
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "lbyl compress --help" in done.stderr


def test_a_reader_that_stops_early_is_no_error(program: Any, file: str) -> None:
    path = str(program.__closure__[0].cell_contents)
    command = f"'{path}' inspect '{file}:vectors' --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_help_names_every_command(run: Any) -> None:
    for arguments in ([], ["--help"]):
        shown = run(*arguments).stdout
        assert all(command in shown for command in WORDS)


def test_every_command_has_the_common_options(run: Any) -> None:
    for command in WORDS:
        shown = run(command, "--help").stdout
        assert all(option in shown for option in ("--json", "--quiet", "--debug"))


def test_version(run: Any) -> None:
    import lbyl

    assert run("--version").stdout.strip() == lbyl.__version__


HELP = """
import sys
import lbyl, lbyl.cli
from lbyl.cli.app import app
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


def test_every_command_is_listed_with_its_own_first_line() -> None:
    assert list(COMMANDS) == WORDS
    for name, entry in COMMANDS.items():
        function = getattr(importlib.import_module(f"lbyl.cli.{name}"), name)
        assert inspect.getdoc(function) == entry.help
        assert load_command(name).name == name


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
    assert "l2-gm" in complete("lbyl compress --criterion l2")
    assert complete("lbyl compress torchv") == ["torchvision:"]
    assert "--residual" in complete("lbyl compress lbyl:digits --resid")
    from lbyl.cli.options import complete_model

    assert complete_model("lbyl:resnet2") == ["lbyl:resnet20_cifar10"]
    assert complete_model("torchv") == ["torchvision:"]
    assert "torchvision:resnet18" in complete_model("torchvision:resnet1")
