"""Every registered network: keys, shapes, weights files; and the published accuracies."""

from __future__ import annotations

import os
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lbyl.data import evaluate, load
from lbyl.errors import LbylError
from lbyl.models import zoo

SHARED = Path(os.environ.get("LBYL_SHARED", Path(__file__).resolve().parents[3] / "shared"))

NAMES = [
    "digits",
    "efficientnet_lite0_imagenet",
    "lenet300_100_fashionmnist",
    "mobilenet_v2_imagenet",
    "resnet101_imagenet",
    "resnet20_cifar10",
    "resnet34_imagenet",
    "resnet50_cifar100",
    "resnet56_cifar10",
    "vgg16_cifar10",
]

# A few keys that pin the layout of each published file, and the number of learnt tensors.
LAYOUT = {
    "digits": ({"stem.0.weight": (32, 1, 3, 3), "block.bn2.weight": (64,)}, 17),
    "efficientnet_lite0_imagenet": (
        {"_blocks.15._bn2.weight": (320,), "_fc.weight": (1000, 1280)},
        149,
    ),
    "lenet300_100_fashionmnist": ({"ip1.weight": (300, 784), "ip3.bias": (10,)}, 6),
    "mobilenet_v2_imagenet": ({"classifier.1.weight": (1000, 1280)}, 158),
    "resnet101_imagenet": ({"layer3.22.conv3.weight": (1024, 256, 1, 1)}, 314),
    "resnet34_imagenet": ({"layer3.5.conv2.weight": (256, 256, 3, 3), "fc.bias": (1000,)}, 110),
    "resnet20_cifar10": (
        {"layer2.0.conv1.weight": (32, 16, 3, 3), "linear.weight": (10, 64)},
        59,
    ),
    "resnet50_cifar100": (
        {
            "conv1.weight": (64, 3, 3, 3),
            "layer2.0.conv2.weight": (128, 128, 3, 3),
            "layer4.0.downsample.0.weight": (2048, 1024, 1, 1),
            "layer3.5.bn3.running_var": (1024,),
            "fc.weight": (100, 2048),
        },
        161,
    ),
    "resnet56_cifar10": ({"layer3.8.bn2.bias": (64,), "linear.bias": (10,)}, 167),
    "vgg16_cifar10": (
        {
            "features.14.weight": (256, 128, 3, 3),
            "features.41.running_var": (512,),
            "classifier.1.running_mean": (512,),
            "classifier.3.weight": (10, 512),
        },
        45,
    ),
}


def make(name: str) -> torch.nn.Module:
    if name.endswith("_imagenet"):
        pytest.importorskip("torchvision")
    torch.manual_seed(0)
    return zoo.create(name)


def test_names_are_the_documented_ones() -> None:
    assert zoo.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_network_has_the_published_layout_and_reads_its_inputs(name: str) -> None:
    model, info = make(name), zoo.info(name)
    assert info.name == name
    assert not any(module.training for module in model.modules())
    keys, count = LAYOUT[name]
    state = model.state_dict()
    assert {key: tuple(state[key].shape) for key in keys} == keys
    assert len(list(model.parameters())) == count
    with torch.inference_mode():
        assert model(torch.randn(2, *info.input_shape)).shape == (2, info.classes)


@pytest.mark.parametrize("name", NAMES)
def test_normalisation_fits_the_channels(name: str) -> None:
    info = zoo.info(name)
    channels = 1 if info.flatten else info.input_shape[0]
    assert len(info.mean) == len(info.std) == channels
    assert info.weights.endswith(".safetensors")
    with pytest.raises(FrozenInstanceError):
        info.name = "other"  # type: ignore[misc]


def test_padded_shortcut_subsamples_and_pads_both_sides() -> None:
    block = make("resnet20_cifar10").get_submodule("layer2.0")
    x = torch.randn(1, 16, 8, 8)
    short = block.get_submodule("shortcut")(x)
    assert short.shape == (1, 32, 4, 4)
    assert torch.equal(short[:, 8:24], x[:, :, ::2, ::2])
    assert not short[:, :8].any()
    assert not short[:, 24:].any()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_round_trip(tmp_path: Path, suffix: str) -> None:
    saved, path = make("resnet20_cifar10"), tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": {f"module.{k}": v for k, v in saved.state_dict().items()}}, path)
    else:
        save_file(saved.state_dict(), path)
    torch.manual_seed(1)
    loaded = zoo.create("resnet20_cifar10", path)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(x), saved(x))


def test_half_precision_becomes_single_and_counters_may_be_absent(tmp_path: Path) -> None:
    state = make("digits").state_dict()
    half = {k: v.half() if v.ndim > 1 else v for k, v in state.items() if "num_batches" not in k}
    save_file(half, tmp_path / "half.safetensors")
    loaded = zoo.create("digits", str(tmp_path / "half.safetensors")).state_dict()
    assert loaded["stem.0.weight"].dtype == torch.float32
    assert torch.equal(loaded["stem.0.weight"], state["stem.0.weight"].half().float())


def test_disagreement_names_every_kind_of_key(tmp_path: Path) -> None:
    state = make("lenet300_100_fashionmnist").state_dict()
    del state["ip1.bias"]
    state["ip2.weight"] = torch.zeros(5, 300)
    state["extra"] = torch.zeros(1)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(LbylError) as caught:
        zoo.create("lenet300_100_fashionmnist", tmp_path / "w.safetensors")
    message = str(caught.value)
    assert "missing: ip1.bias" in message
    assert "unexpected: extra" in message
    assert "wrong shape: ip2.weight (file (5, 300), network (100, 300))" in message


def test_long_disagreement_is_cut_short(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(LbylError, match="more") as caught:
        zoo.create("resnet56_cifar10", tmp_path / "w.safetensors")
    assert len(str(caught.value)) < 600


def test_failed_load_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    model = make("lenet300_100_fashionmnist")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    bad = {key: torch.zeros_like(value) for key, value in before.items() if key != "ip3.bias"}
    save_file(bad, tmp_path / "w.safetensors")
    with pytest.raises(LbylError):
        zoo.load_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class _Runs:
    """Pickles to a call: what a hostile checkpoint looks like."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_unreadable_weights_are_refused(tmp_path: Path) -> None:
    model = make("lenet300_100_fashionmnist")
    (tmp_path / "w.safetensors").write_bytes(b"nonsense")
    (tmp_path / "w.bin").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"a": _Runs(str(tmp_path / "made"))}, tmp_path / "evil.pth")
    for name in ("absent.pth", "w.safetensors", "w.bin", "list.pth", "evil.pth"):
        with pytest.raises(LbylError, match=name):
            zoo.load_weights(model, tmp_path / name)
    assert not (tmp_path / "made").exists()


def test_unknown_names_and_missing_shipped_weights() -> None:
    with pytest.raises(LbylError, match="resnet20_cifar10"):
        zoo.create("resnet21")
    with pytest.raises(LbylError, match="digits"):
        zoo.create("vgg16_cifar10", "shipped")
    with pytest.raises(LbylError, match="already"):
        zoo.register(zoo.info("digits"))(zoo.DigitsNet)


def test_mobilenet_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(LbylError, match="pip install"):
        zoo.create("mobilenet_v2_imagenet")


def test_demo_is_accurate_and_small() -> None:
    pytest.importorskip("sklearn")
    assert Path(zoo.digits.SHIPPED).stat().st_size < 2**20
    assert evaluate("digits", zoo.create("digits", "shipped"), load("digits")) >= 98


def test_demo_suffers_when_half_its_filters_go_unrepaired() -> None:
    pytest.importorskip("sklearn")
    model = zoo.create("digits", "shipped")
    pairs = (("stem.0", "stem.1"), ("plain1.0", "plain1.1"), ("block.conv1", "block.bn1"))
    for conv, norm in pairs:
        weight = model.get_submodule(conv).get_parameter("weight")
        gone = weight.flatten(1).norm(dim=1).argsort()[: len(weight) // 2]
        for parameter in model.get_submodule(norm).parameters():
            parameter.data[gone] = 0
    assert evaluate("digits", model, load("digits")) < 50


# Beyond one thousand images the larger networks take minutes; the figure published for the whole
# test set then holds within three standard errors of the sample.
REAL = [
    ("lenet300_100_fashionmnist", "t10k-images-idx3-ubyte.gz", None, 89.80, 0.005),
    ("resnet20_cifar10", "cifar10_test.npz", None, 91.73, 0.005),
    ("resnet56_cifar10", "cifar10_test.npz", 1000, 93.39, 2.4),
    ("vgg16_cifar10", "cifar10_test.npz", 1000, 93.34, 2.4),
    ("resnet50_cifar100", "cifar100_test.npz", 300, 77.50, 7.3),
    ("mobilenet_v2_imagenet", "imagenet_val1000.npz", 200, 72.56, 9.5),
    ("efficientnet_lite0_imagenet", "imagenet_val1000.npz", 200, 75.1, 9.2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file", "count", "published", "margin"), REAL)
def test_published_accuracy(
    name: str, file: str, count: int | None, published: float, margin: float
) -> None:
    weights, images = SHARED / "models" / zoo.info(name).weights, SHARED / "data" / file
    if not weights.is_file() or not images.is_file():
        pytest.skip(f"{weights} or {images} is not here (LBYL_SHARED says where to look)")
    data = load(images)
    data = data if count is None else data.subset(count, seed=0)
    measured = evaluate(name, zoo.create(name, weights), data, batch_size=100)
    assert measured == pytest.approx(published, abs=margin)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "digits"])
def test_keys_are_those_of_the_published_file(name: str) -> None:
    weights = SHARED / "models" / zoo.info(name).weights
    if not weights.is_file():
        pytest.skip(f"{weights} is not here (LBYL_SHARED says where to look)")
    with safe_open(weights, "pt") as file:
        keys = {k for k in file.keys() if "num_batches" not in k}  # noqa: SIM118
    assert keys == {k for k in make(name).state_dict() if "num_batches" not in k}
