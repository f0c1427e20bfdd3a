"""Networks of segmentation-models-pytorch, ONNX files, and files that were pickled whole."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lbyl
from lbyl import LbylError
from lbyl.app.cli.app import app
from lbyl.app.export import export_onnx
from lbyl.app.sources import resolve
from lbyl.app.sources.zoo import load_weights


def small() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    second = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(8, 4)).eval()


@pytest.mark.parametrize(
    ("name", "package", "remedy"),
    [
        ("smp:unet", "segmentation_models_pytorch", "pip install lbyl[segment]"),
        ("ultralytics:yolo11n.yaml", "ultralytics.nn.tasks", "pip install lbyl[detect]"),
        ("there.onnx", "onnx2torch", "pip install onnx2torch"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_brings_it(
    name: str, package: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.endswith(".onnx"):
        pytest.importorskip("onnx")  # which is asked for first
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.onnx").touch()
    with pytest.raises(LbylError) as error:
        resolve(name)
    assert str(error.value).endswith(remedy) and "\n" not in str(error.value)


def test_a_detector_of_torchvision_takes_a_list_and_fetches_no_backbone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetch(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nobody asked for weights")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", fetch)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
    name = "torchvision:ssdlite320_mobilenet_v3_large"
    network = resolve(name, input_shape=(3, 48, 64), classes=3)
    ((image,),) = network.example
    assert image.shape == network.input_shape == (3, 48, 64)
    assert {"boxes", "labels", "scores"} == network.model(*network.example)[0].keys()


def test_a_segmenter_is_an_architecture_on_an_encoder(tmp_path: Path) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    network = resolve("smp:unet/mobilenet_v2", input_shape=(64,), classes=3)
    assert network.input_shape == (3, 64, 64) and network.weights is None
    assert network.model(network.example).shape == (1, 3, 64, 64)
    network.model.save_pretrained(tmp_path)
    again = resolve(f"smp:{tmp_path}", input_shape=(64,))
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(again.model(x), network.model(x))
    with pytest.raises(LbylError, match="brings its own weights and classes"):
        resolve(f"smp:{tmp_path}", classes=4)
    for name, said in (("unett", "did you mean unet"), ("unet/none", "cannot be made: .*none")):
        with pytest.raises(LbylError, match=said):
            resolve(f"smp:{name}")


def test_an_onnx_file_is_compressed_saved_and_loaded_in_one_call(tmp_path: Path) -> None:
    pytest.importorskip("onnx2torch")
    model, x = small(), torch.randn(3, 3, 12, 12)
    export_onnx(model, x, tmp_path / "net.onnx")
    network = resolve(str(tmp_path / "net.onnx"))
    assert network.input_shape == (3, 12, 12) and network.weights
    torch.testing.assert_close(network.model(x), model(x), atol=1e-5, rtol=1e-4)
    arguments = ["compress", str(tmp_path / "net.onnx"), "--ratio", "0.5", "--criterion", "l2"]
    out = tmp_path / "slim"
    ran = CliRunner().invoke(app, [*arguments, "--data", "16", "--out", str(out), "--no-report"])
    assert ran.exit_code == 0, ran.output
    assert f'model = lbyl.load("{out}")' in ran.output.replace("\n", "")
    slim = lbyl.load(out)
    count = [sum(p.numel() for p in m.parameters()) for m in (slim, model)]
    assert slim(x).shape == (3, 4) and count[0] < 0.7 * count[1]


def test_weights_that_are_moved_about_and_equal_parts_fix_no_width(
    tmp_path: Path,
) -> None:
    """As Paddle writes a bias (reshaped, then added), and PyTorch a tensor in equal parts."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnx2torch")
    make, tensor = onnx.helper.make_node, onnx.numpy_helper.from_array
    sizes = {"first": (8, 3, 3, 3), "left": (8, 4, 3, 3), "last": (4, 8, 1, 1), "bias": (8,)}
    kernels = {name: torch.randn(size) for name, size in sizes.items()}
    held = {name: value.numpy() for name, value in kernels.items()}
    held |= {"shape": np.array([1, 8, 1, 1]), "parts": np.array([4, 4])}
    nodes = [make("Constant", [], [name], value=tensor(value)) for name, value in held.items()]
    nodes += [
        make("Conv", ["x", "first"], ["a"], pads=[1, 1, 1, 1]),
        make("Reshape", ["bias", "shape"], ["wide"]),
        make("Add", ["a", "wide"], ["b"]),
        make("Relu", ["b"], ["c"]),
        make("Split", ["c", "parts"], ["d", "e"], axis=1),
        make("Mul", ["d", "e"], ["f"]),
        make("Conv", ["f", "left"], ["g"], pads=[1, 1, 1, 1]),
        make("Relu", ["g"], ["h"]),
        make("Conv", ["h", "last"], ["y"]),
    ]
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, width, 12, 12])
        for name, width in (("x", 3), ("y", 4))
    ]
    graph = onnx.helper.make_graph(nodes, "net", ends[:1], ends[1:])
    file = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)])
    onnx.save(file, str(tmp_path / "net.onnx"))
    network, x = resolve(str(tmp_path / "net.onnx")), torch.randn(1, 3, 12, 12)
    conv = nn.functional.conv2d
    c = (conv(x, kernels["first"], padding=1) + kernels["bias"][None, :, None, None]).relu()
    g = conv(c[:, :4] * c[:, 4:], kernels["left"], padding=1).relu()
    torch.testing.assert_close(network.model(x), conv(g, kernels["last"]), atol=1e-4, rtol=1e-4)
    slim = lbyl.compress(network.model, x, ratio=0.5, criterion="l2", data=16, progress=False)
    shapes = sorted(tuple(p.shape) for p in slim.model.parameters() if p.ndim == 4 and len(p) > 1)
    assert shapes == [(4, 2, 3, 3), (4, 3, 3, 3), (4, 4, 1, 1)]


def test_a_file_for_images_of_any_size_asks_for_one(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnx2torch")
    export_onnx(small(), torch.randn(3, 3, 12, 12), tmp_path / "net.onnx")

    path = str(tmp_path / "net.onnx")
    file = onnx.load(path)
    for side, name in ((2, "height"), (3, "width")):
        file.graph.input[0].type.tensor_type.shape.dim[side].dim_param = name
    onnx.save(file, path)
    with pytest.raises(LbylError, match="--input-size") as error:
        resolve(path)
    assert "\n" not in str(error.value)
    assert resolve(path, input_shape=(12,)).input_shape == (3, 12, 12)


def test_what_is_no_onnx_file_is_said_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("onnx2torch")
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07nothing of the kind")
    for name, message in (("broken.onnx", "no readable ONNX file"), ("none.onnx", "no file")):
        with pytest.raises(LbylError, match=message) as error:
            resolve(str(tmp_path / name))
        assert "\n" not in str(error.value)
    with pytest.raises(LbylError, match="brings its own weights"):
        resolve(str(tmp_path / "broken.onnx"), classes=3)


class Lookup(nn.Module):
    """A network of a class that whoever reads its file does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("dropped", torch.ones(2), persistent=False)


reads_whole = pytest.mark.skipif(
    not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"),
    reason="torch before 2.6 cannot say what a file names",
)


@reads_whole
@pytest.mark.parametrize("wrapped", [False, True])
def test_weights_of_a_network_pickled_whole_are_read(wrapped: bool, tmp_path: Path) -> None:
    model = Lookup()
    held = {"epoch": 3, "ema": None, "model": model} if wrapped else model
    torch.save(held, tmp_path / "whole.pt")
    fresh = Lookup()
    fresh.inner[0].weight.data.zero_()
    load_weights(fresh, tmp_path / "whole.pt")
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)


class Hostile:
    """Would run a function when its pickle is read."""

    def __init__(self, function: Callable[..., Any], argument: str) -> None:
        self.function, self.argument = function, argument

    def __reduce__(self) -> Any:
        return self.function, (self.argument,)


@pytest.mark.parametrize("run", [os.system, builtins.exec, subprocess.check_call, os.mkdir])
def test_no_function_that_a_file_names_is_run(run: Callable[..., Any], tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    text = str(trap) if run is os.mkdir else f"mkdir {trap}"
    text = f"import os; os.mkdir({str(trap)!r})" if run is builtins.exec else text
    model = small()
    model.extra = Hostile(run, text)
    torch.save(model, tmp_path / "hostile.pt")
    try:
        load_weights(small(), tmp_path / "hostile.pt")  # its tensors are good
    except LbylError as error:
        assert "not a plain PyTorch state dict" in str(error)
    assert not trap.exists()
