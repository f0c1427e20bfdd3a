"""What the program prints to be copied runs as it is printed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lbyl.app.cli.app import app

FACTORIES = """
import torch
from torch import nn

from neighbour import WIDTH


class Net(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, WIDTH, 3), nn.Conv2d(WIDTH, 8, 3)
        self.c = nn.Linear(8, classes)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu().mean((2, 3)))


def alone(classes=5):
    torch.manual_seed(0)
    return Net(classes)


def with_inputs():
    return alone(), torch.zeros(1, 3, 12, 12)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with blanks in its name, in which a file's factories make networks."""
    place = tmp_path / "my nets"
    place.mkdir()
    (place / "neighbour.py").write_text("WIDTH = 12\n")
    for name in ("made.py", "made-2.py"):
        (place / name).write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    yield place
    for name in ("made", "neighbour"):
        sys.modules.pop(name, None)


def run(*words: object) -> str:
    """What a command prints, both ways out together, lines as they are."""
    ended = CliRunner().invoke(app, [str(word) for word in words])
    assert ended.exit_code == 0, ended.output
    return ended.stdout + ended.stderr


def program_in(text: str) -> str:
    """The lines of Python that were printed."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    start = next(i for i, line in enumerate(lines) if line.startswith(("import", "from")))
    return "\n".join(lines[start:])


def command_in(text: str, name: str) -> list[str]:
    """The words of the command of this name that was printed, without the program's own."""
    found = re.search(rf"lbyl {name} .*", text)
    assert found is not None, text
    return shlex.split(found[0])[1:]


def executed(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(program, names)
    return names


SMALL = ["--method", "none", "--ratio", "0.5", "--anyway"]


@pytest.mark.parametrize("factory", ["made.py:alone", "made.py:with_inputs", "made-2.py:alone"])
def test_lines_that_load_what_a_factory_of_a_file_made(folder: Path, factory: str) -> None:
    out = folder / 'slim "one"'
    said = run("compress", folder / factory, "--input-size", "12", *SMALL, "--out", out)
    model = executed(program_in(said))["model"]
    assert model(torch.zeros(2, 3, 12, 12)).shape == (2, 5) and not model.training
    assert model.a.out_channels == 6


def test_lines_for_other_numbers_of_classes_and_for_modules(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--input-size", "12", *SMALL, "--no-report"]
    said = run("compress", folder / "made.py:alone", "--classes", 7, *words, "--out", "a")
    assert executed(program_in(said))["model"](torch.zeros(1, 3, 12, 12)).shape == (1, 7)
    monkeypatch.chdir(folder)
    said = run("compress", "made:with_inputs", *words, "--out", "b")
    assert executed(program_in(said))["model"].a.out_channels == 6


def test_lines_for_networks_that_the_plan_names(folder: Path) -> None:
    said = run("compress", "lbyl:digits", "--weights", "shipped", *SMALL, "--out", folder / "out")
    assert executed(program_in(said))["model"](torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    run(*command_in(said, "inspect"))


@pytest.mark.parametrize("ratio", ["*mlp*=0.25", "model.layers.0.mlp*=0.25"])
def test_lines_for_transformers_with_a_configuration_and_without(ratio: str, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(folder / "in")
    words = ["--ratio", ratio, "--criterion", "l2", "--method", "none", "--no-report", "--anyway"]
    said = run("compress", f"hf:{folder / 'in'}", *words, "--out", folder / "out")
    assert (folder / "out" / "config.json").exists() == (ratio == "*mlp*=0.25")
    loaded = executed(program_in(said))["model"]
    with torch.no_grad():
        assert loaded(torch.arange(9)[None]).logits.shape == (1, 9, 96)


def test_the_program_of_the_demonstration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    program = program_in(run("demo"))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    names: dict[str, Any] = {"model": model, "example_inputs": torch.randn(2, 6)}
    exec(program, names)
    assert sorted(p.name for p in Path("out").iterdir()) == ["model.safetensors", "plan.json"]


def test_commands_carry_the_options_that_were_given(folder: Path) -> None:
    name = folder / "made.py:alone"
    given = ["--input-size", "12", "--classes", "7", "--exclude", "a"]
    said = run("compress", name, *given, *SMALL, "--out", folder / "out")
    words = command_in(said, "inspect")
    assert words[1] == str(name)
    assert set(words[2:]) == {"--classes", "7", "--input-size", "12", "--exclude", "a"}
    assert "excluded" in run(*words)
    text = " ".join((folder / "out" / "report.html").read_text().split())
    assert "lbyl.load(" in text


def test_what_estimate_recommends_runs(folder: Path) -> None:
    said = run("estimate", "lbyl:digits", "--weights", "shipped", "--ratio", "0.1")
    words = command_in(said, "compress")
    assert words[1:6] == ["lbyl:digits", "--keep", "0.95", "--weights", "shipped"]
    ended = CliRunner().invoke(app, [*words, "--no-report", "--out", str(folder / "out")])
    assert ended.exit_code in (0, 1, 2), ended.output  # nothing may keep so much
    assert "No such option" not in ended.stderr
    assert "random weights" not in ended.stderr


def test_commands_of_a_sweep_run(folder: Path) -> None:
    table = folder / "rows.db"
    words = ["--weights", "shipped", "--ratio", "0.3", "--method", "none", "--jobs", "1"]
    said = run("sweep", "lbyl:digits", *words, "--out", table)
    run(*command_in(said, "report"))
    page = (folder / "rows.html").read_text()
    command = re.search(r"lbyl compress [^<\"]*", page)
    assert command is not None
    run(*shlex.split(command[0])[1:-1], folder / "again", "--no-report", "--anyway")


def code_blocks(page: Path) -> dict[str, str]:
    """The programs of a report, by their names there."""
    import html

    found = re.findall(r'<pre id="(\w+)"[^>]*><code>(.*?)</code>', page.read_text("utf-8"), re.S)
    return {name: html.unescape(text) for name, text in found}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lbyl:digits", (1, 1, 8, 8)),
        pytest.param("timm:resnet10t", (1, 3, 32, 32), marks=pytest.mark.slow),
        pytest.param("torchvision:squeezenet1_1", (1, 3, 64, 64), marks=pytest.mark.slow),
        ("made.py:with_inputs", (1, 3, 12, 12)),
        ("made-2.py:alone", (1, 3, 12, 12)),
    ],
)
def test_the_programs_of_a_report_load_the_network(
    name: str, shape: tuple[int, ...], folder: Path
) -> None:
    if not name.startswith("lbyl"):
        pytest.importorskip("torchvision" if name.startswith("torch") else "timm")
    out, x = folder / "out", torch.rand(shape)
    place = str(folder / name) if ".py" in name else name
    run("compress", place, "--input-size", "x".join(map(str, shape[1:])), *SMALL, "--out", out)
    blocks = code_blocks(out / "report.html")
    mine = executed(blocks["loader"])["model"].eval()
    (folder / "alone.py").write_text(blocks["program"] + CHECK.format(shape=shape))
    ended = subprocess.run(
        [sys.executable, str(folder / "alone.py")], cwd=out, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    with torch.no_grad():
        assert json.loads(ended.stdout) == pytest.approx(float(mine(x * 0 + 0.5).sum()), rel=1e-3)


CHECK = """
import torch
with torch.no_grad():
    print(float(model(torch.full({shape}, 0.5)).sum()))
"""
