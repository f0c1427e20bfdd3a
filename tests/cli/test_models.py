"""Names of models: every source, and what is said when one does not exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lbyl
from lbyl import LbylError
from lbyl.app.sources import parse_input_shape, resolve


def test_torchvision_with_a_file_of_weights(tmp_path: Path) -> None:
    made = resolve("torchvision:squeezenet1_1", classes=7)
    assert made.input_shape == (3, 224, 224) and made.weights is None
    save_file(made.model.state_dict(), str(tmp_path / "w.safetensors"))
    torch.save(made.model.state_dict(), tmp_path / "w.pth")
    x = torch.randn(1, 3, 64, 64)
    for name in ("w.safetensors", "w.pth"):
        again = resolve("torchvision:squeezenet1_1", tmp_path / name, (64,), classes=7)
        assert again.input_shape == (3, 64, 64) and again.weights
        torch.testing.assert_close(again.model(x), made.model(x))


def test_timm_brings_its_own_size_and_scale() -> None:
    network = resolve("timm:inception_v4", classes=3)
    assert network.input_shape == (3, 299, 299) and network.mean == (0.5, 0.5, 0.5)
    assert network.model.last_linear.out_features == 3


def test_zoo_networks_know_their_inputs() -> None:
    network = resolve("lbyl:lenet300_100_fashionmnist")
    assert network.flatten and network.image_size is None
    assert tuple(network.example.shape) == (1, 784)


def test_transformers_directory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=4
    )
    config.image_size = 32
    made = transformers.ResNetForImageClassification(config).eval()
    made.save_pretrained(tmp_path)
    scale = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(scale))
    network = resolve(f"hf:{tmp_path}")
    assert type(network.model) is type(made) and network.mean == (0.1, 0.2, 0.3)
    assert network.input_shape == (3, 32, 32)
    graph = lbyl.trace(network.model, network.example)
    assert len(graph) > 0


def test_transformers_text_network(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24}
    config = transformers.BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path)
    network = resolve(f"hf:{tmp_path}")
    tokens = network.example["input_ids"]
    assert int(tokens.max()) == 49
    assert network.model(**network.example).last_hidden_state.shape == (1, len(tokens[0]), 16)


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_net.py").write_text("WIDTH = 6\n")
    (tmp_path / "own.py").write_text(
        "from torch import nn\nfrom neighbour_of_net import WIDTH\n"
        "def make():\n    return nn.Sequential(nn.Conv2d(1, WIDTH, 3), nn.Flatten())\n"
    )
    network = resolve(f"{tmp_path}/own.py:make", input_shape=(9,))
    assert network.input_shape == (1, 9, 9)  # one channel, as the first layer reads


def test_a_plan_cannot_name_code_to_run(tmp_path: Path, file: str) -> None:
    network = {"name": f"{file}:small", "input_shape": [3, 12, 12]}
    (tmp_path / "plan.json").write_text(json.dumps({"network": network}))
    with pytest.raises(LbylError, match="name the model itself"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "weights", "said"),
    [
        ("resnet50", None, "torchvision:NAME"),
        ("torchvision:resnet51", None, "did you mean resnet50"),
        ("timm:mobilenetv2_101", None, "did you mean"),
        ("lbyl:nothing", None, "no network named"),
        ("hf:nowhere", None, "no config.json"),
        ("nowhere.py:make", None, "there is no file"),
        ("torchvision:resnet18", "IMAGENET9", "it has IMAGENET1K_V1"),
        ("timm:resnet18", "IMAGENET1K_V1", "'pretrained'"),
        ("lbyl:digits", "pretrained", "'shipped'"),
        ("lbyl:resnet20_cifar10", "shipped", "give a path"),
    ],
)
def test_unknown_names(name: str, weights: str | None, said: str) -> None:
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
    with pytest.raises(LbylError, match=said):
        resolve(name, weights)


@pytest.mark.parametrize(
    ("function", "said"),
    [("broken", "RuntimeError: no such luck"), ("number", "gave a int"), ("none", "no function")],
)
def test_files_that_make_no_model(file: str, function: str, said: str) -> None:
    with pytest.raises(LbylError, match=said):
        resolve(f"{file}:{function}")


def test_input_shapes() -> None:
    assert parse_input_shape("224") == (224,)
    assert parse_input_shape("1x28x28") == parse_input_shape("1,28,28") == (1, 28, 28)
    for text in ("", "a", "3x0x4", "-3"):
        with pytest.raises(LbylError):
            parse_input_shape(text)


def test_brackets_in_names_are_printed(tmp_path: Path, run: Any) -> None:
    (tmp_path / "[bold]").mkdir()
    (tmp_path / "[bold]" / "own.py").write_text(
        "from torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
    )
    assert "[bold]/own.py:make" in run("inspect", f"{tmp_path}/[bold]/own.py:make").stdout
