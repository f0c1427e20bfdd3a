"""`--target` and `lbyl export`: what is written for a runtime is run by it, and compared."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lbyl.app.sources import resolve

onnxruntime = pytest.importorskip("onnxruntime")

DIGITS = ["lbyl:digits", "--weights", "shipped", "--ratio", "*=0.3", "--criterion", "l2"]
PLAIN = ["--method", "lbyl", "--no-report"]  # nothing is collected, so that it is quick


def answers(folder: Path, x: torch.Tensor) -> torch.Tensor:
    """What the network in a directory says."""
    with torch.no_grad():
        return resolve(str(folder)).model.eval()(x)  # type: ignore[no-any-return]


def kept(folder: Path) -> list[int]:
    units = json.loads((folder / "plan.json").read_text())["units"]
    return [len(unit["kept"]) for unit in units.values()]


def test_tensorrt_gets_widths_of_sixteen_and_an_onnx_file_that_computes_the_same(
    run: Any, tmp_path: Path
) -> None:
    out = tmp_path / "slim"
    shown = run("compress", *DIGITS, *PLAIN, "--target", "tensorrt", "--out", out)
    said = " ".join(shown.stderr.split())
    assert "--target tensorrt keeps multiples of 16 channels" in said and "--multiple-of 1" in said
    assert all(count % 16 == 0 for count in kept(out))
    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    x = torch.randn(5, 1, 8, 8)
    (made,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(made), answers(out, x), rtol=1e-3, atol=1e-4)


def test_a_width_that_is_asked_for_comes_before_that_of_the_target(
    run: Any, tmp_path: Path
) -> None:
    out = tmp_path / "slim"
    arguments = ["--onnx", "--multiple-of", "3", "--out", out]
    shown = run("compress", *DIGITS, *PLAIN, *arguments)
    assert "keeps multiples" not in shown.stderr
    assert all(count % 3 == 0 for count in kept(out))


@pytest.mark.skipif(
    importlib.util.find_spec("executorch") is not None, reason="ExecuTorch is installed"
)
def test_a_target_that_is_not_installed_is_said_before_any_work(run: Any, tmp_path: Path) -> None:
    shown = run("compress", *DIGITS, "--target", "executorch", "--out", tmp_path / "x", code=2)
    assert "pip install executorch" in shown.stderr and "✓" not in shown.stderr
    assert list(tmp_path.iterdir()) == []


def test_executorch_computes_what_the_network_does(run: Any, tmp_path: Path) -> None:
    runtime = pytest.importorskip("executorch.runtime", reason="pip install executorch")
    out = tmp_path / "slim"
    run("compress", *DIGITS, *PLAIN, "--target", "executorch", "--out", out)
    assert all(count % 8 == 0 for count in kept(out))
    program = runtime.Runtime.get().load_program((out / "model.pte").read_bytes())
    x = torch.randn(1, 1, 8, 8)
    (made,) = program.load_method("forward").execute([x])
    torch.testing.assert_close(made, answers(out, x), rtol=1e-3, atol=1e-4)


def test_openvino_computes_what_the_network_does(run: Any, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino", reason="pip install openvino")
    out, file = tmp_path / "slim", tmp_path / "deployed" / "slim.xml"
    run("compress", *DIGITS, *PLAIN, "--out", out)
    run("export", out, "--out", file)
    assert {p.name for p in file.parent.iterdir()} == {"slim.xml", "slim.bin"}
    x = torch.randn(4, 1, 8, 8)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}  # some processors compute in bfloat16 instead
    compiled = openvino.Core().compile_model(str(file), "CPU", settings)
    made = np.asarray(compiled(x.numpy())[0])
    torch.testing.assert_close(torch.from_numpy(made), answers(out, x), rtol=1e-3, atol=1e-4)
