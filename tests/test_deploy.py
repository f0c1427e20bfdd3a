"""From PyTorch to int8: sizes, answers and files of every step."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from lbyl import LbylError
from lbyl.cli.app import app
from lbyl.deploy import (
    CALIBRATED,
    TARGETS,
    OnnxNetwork,
    _slices,
    measure_steps,
    quantise_onnx,
    step_texts,
    target_of,
)
from lbyl.export import difference, export_executorch, export_onnx, export_openvino
from lbyl.inputs.batches import FreshInputs
from lbyl.models import resolve
from lbyl.restoring.forecast import Forecaster
from lbyl.torchkit.fallbacks import noting

onnx = pytest.importorskip("onnx")


def invoke(*arguments: object, code: int = 0) -> str:
    ran = CliRunner().invoke(app, [str(a) for a in arguments])
    assert ran.exit_code == code, ran.output
    return ran.output


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
    assert all(text in page for row in step_texts(rows) for text in row)


def test_int8_answers_like_the_network_it_was_made_from(slim: Path, tmp_path: Path) -> None:
    network = resolve("lbyl:digits", "shipped")
    fresh = FreshInputs(network.model, network.example, seed=1)
    export_onnx(network.model, network.example, tmp_path / "m.onnx")
    quantise_onnx(tmp_path / "m.onnx", tmp_path / "q.onnx", list(fresh.collection().batches))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "q.onnx"]
    forecaster = Forecaster(network.model, fresh.forecasting())
    told = forecaster(OnnxNetwork(tmp_path / "q.onnx"))
    assert told.agreement is not None and told.agreement > 0.93
    assert forecaster(OnnxNetwork(tmp_path / "m.onnx")).agreement == 1


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
    true, made = model(x).detach(), OnnxNetwork(tmp_path / "q.onnx")(x)
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
    with noting() as notes:
        steps = measure_steps(
            {"original": model}, {}, x, Forecaster(model, [x]), compiled=True, repeats=2
        )
    assert [(s.network, s.runtime) for s in steps] == [("original", "PyTorch")]
    assert notes == ["original: torch.compile failed: no compiler here"]


@pytest.mark.slow
def test_a_compiled_network_has_a_row_where_there_is_a_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++ on the CPU")
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.rand(4, 8)
    with noting() as notes:
        steps = measure_steps(
            {"original": model}, {}, x, Forecaster(model, [x]), compiled=True, repeats=2
        )
    assert [step.runtime for step in steps] == ["PyTorch", "compiled"] and not notes
    assert [step.forecast.agreement for step in steps if step.forecast] == [1, 1] and model.training


def test_calibration_takes_the_first_inputs_and_no_more() -> None:
    batches: list[Any] = [torch.arange(100.0)[:, None], torch.arange(100.0, 300)[:, None]]
    given = torch.cat(list(_slices(batches)))
    assert torch.equal(given[:, 0], torch.arange(float(CALIBRATED)))


def test_an_unknown_target_and_one_that_is_not_installed_are_said_before_anything() -> None:
    assert TARGETS["tensorrt"].multiple_of % 16 == 0
    with pytest.raises(LbylError, match="onnx-cpu, tensorrt, executorch"):
        target_of("phone")
    invoke("compress", "lbyl:digits", "--target", "phone", "--out", "none", code=2)
    assert "add --out" in invoke("compress", "lbyl:digits", "--int8", code=2)
    assert "end in" in invoke("export", "lbyl:digits", "--out", "m.txt", code=2)
    assert "ONNX" in invoke("export", "lbyl:digits", "--int8", "--out", "m.pt2", code=2)


@pytest.mark.parametrize(
    ("package", "write", "name"),
    [("executorch", export_executorch, "m.pte"), ("openvino", export_openvino, "m.xml")],
)
def test_other_runtimes_are_compared_where_they_are_installed(
    package: str, write: Any, name: str, tmp_path: Path
) -> None:
    network = resolve("lbyl:digits", "shipped")
    if importlib.util.find_spec(package) is None:
        with pytest.raises(LbylError, match=f"pip install {package}"):
            write(network.model, network.example, tmp_path / name)
        return
    with pytest.raises(LbylError, match="nothing was written"):
        write(network.model, network.example, tmp_path / name, tolerance=-1)
    assert list(tmp_path.iterdir()) == []
    assert 0 <= write(network.model, network.example, tmp_path / name) < 1e-4
    assert (tmp_path / name).stat().st_size > 0 and not list(tmp_path.glob("*.onnx"))


def test_an_export_that_computes_something_else_is_found() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    assert difference(model, x, lambda given: [model(given)]) == 0
    assert difference(model, x, lambda given: [model(given) * 1.5]) == pytest.approx(0.5)
