"""From PyTorch to int8: sizes, answers and files of every step."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import lbyl
from lbyl.app.cli.app import app
from lbyl.app.deploy import measure_steps, quantise_onnx
from lbyl.app.export import export_onnx
from lbyl.app.sources import resolve

onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")


def invoke(*arguments: object, code: int = 0) -> str:
    ran = CliRunner().invoke(app, [str(a) for a in arguments])
    assert ran.exit_code == code, ran.output
    return ran.output


def answers(path: Path, x: Tensor) -> Tensor:
    """What a file gives in ONNX Runtime."""
    session = onnxruntime.InferenceSession(str(path))
    (given,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(given)


def measured(models: dict[str, nn.Module], x: Tensor, **options: Any) -> list[Any]:
    forecaster = lbyl.prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), x[:, :4])
    return measure_steps(models, {}, x, forecaster.judges.forecaster, repeats=4, **options)


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of `lbyl compress` with everything for a target."""
    out = tmp_path_factory.mktemp("deploy") / "slim"
    invoke(
        "compress", "lbyl:digits", "--weights", "shipped", "--ratio", "*=0.3", "--criterion", "l2",
        "--target", "onnx-cpu", "--int8", "--out", out, "--json",
    )  # fmt: skip
    return out


def test_a_target_brings_its_file_its_widths_and_int8(slim: Path) -> None:
    plan = json.loads((slim / "plan.json").read_text())
    kept = [len(unit["kept"]) for unit in plan["units"].values()]
    assert all(count % 8 == 0 for count in kept) and min(kept) < 48
    sizes = {name: (slim / name).stat().st_size for name in ("model.onnx", "model.int8.onnx")}
    assert sizes["model.int8.onnx"] < 0.4 * sizes["model.onnx"]
    graph = onnx.load(slim / "model.int8.onnx").graph
    int8 = [x for x in graph.initializer if x.data_type == onnx.TensorProto.INT8 and x.dims]
    assert sum(len(x.dims) == 4 for x in int8) >= 5  # kernels of convolutions


def test_every_step_has_its_row_and_the_report_shows_them(slim: Path) -> None:
    rows = json.loads((slim / "plan.json").read_text())["deployment"]
    steps = [(row["network"], row["runtime"]) for row in rows]
    assert steps == [
        ("original", "PyTorch"),
        ("slim", "PyTorch"),
        ("original", "ONNX Runtime"),
        ("slim", "ONNX Runtime"),
        ("int8", "ONNX Runtime"),
    ]
    assert all(0 < row["low"] <= row["median"] <= row["high"] for row in rows)
    agreements = {row["network"]: row["agreement"] for row in rows}
    assert agreements["original"] == 1 and 0.5 < agreements["slim"] < 1
    assert agreements["int8"] == pytest.approx(agreements["slim"], abs=0.06)
    kept = {row["network"]: row["kept"] for row in rows}
    told = json.loads((slim / "plan.json").read_text())["result"]["forecast"]
    assert kept["original"] == [1, 1, 1]
    assert kept["slim"] == pytest.approx([told["kept"], told["low"], told["high"]])
    low, high = kept["int8"][1:]
    assert low < kept["int8"][0] <= high and kept["int8"][0] == pytest.approx(told["kept"], abs=0.1)
    page = (slim / "report.html").read_text()
    assert all(word in page for word in ("ONNX Runtime", "int8", "original"))


def test_int8_answers_like_the_network_it_was_made_from(slim: Path, tmp_path: Path) -> None:
    network = resolve("lbyl:digits", "shipped")
    prepared = lbyl.prepare(network.model, network.example, seed=1)
    images = list(prepared.fresh.collection().batches)
    export_onnx(network.model, network.example, tmp_path / "m.onnx")
    quantise_onnx(tmp_path / "m.onnx", tmp_path / "q.onnx", images)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "q.onnx"]
    x = torch.cat(images)[:500]
    true = network.model(x).argmax(1)
    assert torch.equal(answers(tmp_path / "m.onnx", x).argmax(1), true)
    assert float((answers(tmp_path / "q.onnx", x).argmax(1) == true).float().mean()) > 0.93


class PixelsAndChances(nn.Module):
    """Ends as detectors do: numbers of two scales in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        made = self.last(self.first(x).relu())
        return torch.cat([made[:, :4] * 1000, made[:, 4:].sigmoid()], 1)


def test_what_no_layer_follows_stays_as_exact_as_it_was(tmp_path: Path) -> None:
    model, x = PixelsAndChances().eval(), torch.rand(8, 3, 12, 12)
    export_onnx(model, x, tmp_path / "m.onnx")
    quantise_onnx(tmp_path / "m.onnx", tmp_path / "q.onnx", [x])
    true, made = model(x).detach(), answers(tmp_path / "q.onnx", x)
    assert (made != true).any()
    assert (made[:, 4:] - true[:, 4:]).abs().max() < 0.02  # one scale for both is coarser than 1
    scale = true[:, :4].abs().max()
    assert scale > 256 and (made[:, :4] - true[:, :4]).abs().max() < 0.05 * scale


@pytest.mark.slow
def test_what_was_exported_again_is_compared_with_the_original(slim: Path, tmp_path: Path) -> None:
    told = json.loads(invoke("export", slim, "--int8", "--out", tmp_path / "m.onnx", "--json"))
    agreements = {row["network"]: row["agreement"] for row in told["deployment"]}
    assert agreements.keys() == {"original", "slim", "int8"} and agreements["slim"] < 1
    assert (tmp_path / "m.int8.onnx").stat().st_size == told["int8_bytes"]


class Unanswering(nn.Module):
    """Compiles nowhere, and its outputs are no answers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


def test_a_step_that_is_not_possible_is_noted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: nn.Module) -> nn.Module:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", broken)
    model, x = Unanswering(), torch.zeros(2, 4)
    steps = measured({"original": model}, x, compiled=True)
    assert [(s.network, s.runtime) for s in steps] == [("original", "PyTorch")]


@pytest.mark.slow
def test_a_compiled_network_has_a_row_where_there_is_a_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++ on the CPU")
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.rand(4, 8)
    steps = measured({"original": model}, x, compiled=True)
    assert [step.runtime for step in steps] == ["PyTorch", "compiled"]
    assert [step.forecast.agreement for step in steps if step.forecast] == [1, 1] and model.training


def test_an_unknown_target_and_one_that_is_not_installed_are_said_before_anything() -> None:
    said = invoke("compress", "lbyl:digits", "--target", "phone", "--out", "none", code=2)
    assert all(name in said for name in ("onnx-cpu", "tensorrt", "executorch"))
    assert "add --out" in invoke("compress", "lbyl:digits", "--int8", code=2)
    assert "end in" in invoke("export", "lbyl:digits", "--out", "m.txt", code=2)
    assert "ONNX" in invoke("export", "lbyl:digits", "--int8", "--out", "m.pt2", code=2)


class Sleeper(nn.Module):
    """Takes as long as it is told, and tells when it runs: what it kept itself would be undone."""

    def __init__(self, name: str, seconds: float, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.name, self.seconds, self.tell = name, seconds, tell
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.tell(self.name)
        assert not self.training and not torch.is_grad_enabled()
        time.sleep(self.seconds)
        return x * self.scale


def test_networks_that_are_timed_take_turns_and_are_left_as_they_were() -> None:
    diary: list[str] = []
    models: dict[str, nn.Module] = {
        name: Sleeper(name, s, diary.append) for name, s in (("original", 0.002), ("slim", 0.02))
    }
    before, x = torch.get_num_threads(), torch.zeros(2, 4)
    fast, slow = (step.timing for step in measured(models, x, threads=1))
    assert 0.002 <= fast.median < slow.median and slow.median >= 0.02 and len(fast.runs) == 4
    assert diary[-8:] == ["original", "slim", "slim", "original"] * 2
    assert models["slim"].training and torch.get_num_threads() == before
