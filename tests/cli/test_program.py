"""The installed program: exit codes, streams, help and completion, as a shell sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

COMMANDS = "demo compress inspect estimate compare evaluate finetune export report images".split()


def test_success(program: Any, file: str) -> None:
    done = program("compress", f"{file}:vectors", "--method", "lbyl", "--json")
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["method"] == "lbyl"


def test_failure_is_one_line(program: Any, file: str) -> None:
    done = program("compress", f"{file}:broken")
    assert done.returncode == 1 and done.stdout == ""
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
        assert all(command in shown for command in COMMANDS)


def test_every_command_has_the_common_options(run: Any) -> None:
    for command in COMMANDS:
        shown = run(command, "--help").stdout
        assert all(option in shown for option in ("--json", "--quiet", "--debug"))


def test_version(run: Any) -> None:
    import lbyl

    assert run("--version").stdout.strip() == lbyl.__version__


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    """Beside what the package needs anyway, only typer and rich come with help."""
    code = (
        "import sys, lbyl; before = set(sys.modules); import lbyl.cli;"
        "print(*{m.partition('.')[0] for m in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torchvision", "timm", "transformers", "sklearn", "PIL", "onnx", "accelerate"}
    assert "typer" in done.stdout.split() and not heavy & set(done.stdout.split())


def test_shell_completion_knows_the_names(program: Any) -> None:
    def complete(words: str) -> list[str]:
        import os

        environment = os.environ | {
            "_LBYL_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        return program(env=environment).stdout.split()

    assert sorted(complete("lbyl comp")) == ["compare", "compress"]
    assert complete("lbyl compress --method neur") == ["neuron-merging"]
    assert "l2-gm" in complete("lbyl compress --criterion l2")
    from lbyl.cli.options import complete_model

    assert complete_model("lbyl:resnet2") == ["lbyl:resnet20_cifar10"]
    assert complete_model("torchv") == ["torchvision:"]
    assert "torchvision:resnet18" in complete_model("torchvision:resnet1")
