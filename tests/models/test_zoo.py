"""Every registered network: keys, shapes, weights files; and the published accuracies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lbyl import LbylError
from lbyl.app.data import evaluate, load
from lbyl.app.sources import zoo

# The number of learnt tensors, and a few keys that pin the layout of each published file.
LAYOUT = {
    "digits": (17, {"stem.0.weight": (32, 1, 3, 3), "block.bn2.weight": (64,)}),
    "efficientnet_lite0_imagenet": (149, {"_blocks.15._bn2.weight": (320,)}),
    "lenet300_100_fashionmnist": (6, {"ip1.weight": (300, 784), "ip3.bias": (10,)}),
    "mobilenet_v2_imagenet": (158, {"classifier.1.weight": (1000, 1280)}),
    "resnet101_imagenet": (314, {"layer3.22.conv3.weight": (1024, 256, 1, 1)}),
    "resnet20_cifar10": (59, {"layer2.0.conv1.weight": (32, 16, 3, 3), "linear.weight": (10, 64)}),
    "resnet34_imagenet": (110, {"layer3.5.conv2.weight": (256, 256, 3, 3), "fc.bias": (1000,)}),
    "resnet50_cifar100": (161, {"conv1.weight": (64, 3, 3, 3), "fc.weight": (100, 2048)}),
    "resnet56_cifar10": (167, {"layer3.8.bn2.bias": (64,), "linear.bias": (10,)}),
    "vgg16_cifar10": (45, {"features.41.running_var": (512,), "classifier.3.weight": (10, 512)}),
}


def make(name: str) -> torch.nn.Module:
    if name.endswith("_imagenet"):
        pytest.importorskip("torchvision")
    torch.manual_seed(0)
    return zoo.create(name)


def test_names_are_the_documented_ones() -> None:
    assert zoo.names() == list(LAYOUT)


@pytest.mark.parametrize("name", LAYOUT)
def test_network_has_the_published_layout_and_reads_its_inputs(name: str) -> None:
    model, info = make(name), zoo.info(name)
    assert info.name == name
    assert not any(module.training for module in model.modules())
    count, keys = LAYOUT[name]
    state = model.state_dict()
    assert {key: tuple(state[key].shape) for key in keys} == keys
    assert len(list(model.parameters())) == count
    assert len(info.mean) == len(info.std) == (1 if info.flatten else info.input_shape[0])
    with torch.inference_mode():
        assert model(torch.randn(2, *info.input_shape)).shape == (2, info.classes)


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


def test_disagreement_names_every_kind_of_key_and_changes_nothing(
    tmp_path: Path,
) -> None:
    model = make("lenet300_100_fashionmnist")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {key: torch.zeros_like(value) for key, value in before.items()}
    del state["ip1.bias"]
    state["ip2.weight"] = torch.zeros(5, 300)
    state["extra"] = torch.zeros(1)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(LbylError) as caught:
        zoo.load_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    message = str(caught.value)
    assert "missing: ip1.bias" in message and "unexpected: extra" in message
    assert "wrong shape: ip2.weight (file (5, 300), network (100, 300))" in message


def test_unreadable_weights_are_refused(tmp_path: Path) -> None:
    model = make("lenet300_100_fashionmnist")
    (tmp_path / "w.safetensors").write_bytes(b"nonsense")
    (tmp_path / "w.bin").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pth")
    for name in ("absent.pth", "w.safetensors", "w.bin", "list.pth"):
        with pytest.raises(LbylError, match=name):
            zoo.load_weights(model, tmp_path / name)


def test_unknown_names_and_missing_shipped_weights() -> None:
    with pytest.raises(LbylError, match="resnet20_cifar10"):
        zoo.create("resnet21")
    with pytest.raises(LbylError, match="digits"):
        zoo.create("vgg16_cifar10", "shipped")
    with pytest.raises(LbylError, match="already"):
        zoo.register(zoo.info("digits"))(zoo.DigitsNet)


def test_demo_is_accurate_and_small() -> None:
    pytest.importorskip("sklearn")
    assert Path(zoo.digits.SHIPPED).stat().st_size < 2**20
    assert evaluate("digits", zoo.create("digits", "shipped"), load("digits")) >= 98


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
    shared: Path, name: str, file: str, count: int | None, published: float, margin: float
) -> None:
    weights, images = shared / "models" / zoo.info(name).weights, shared / "data" / file
    if not weights.is_file() or not images.is_file():
        pytest.skip(f"{weights} or {images} is not here")
    data = load(images)
    data = data if count is None else data.subset(count, seed=0)
    measured = evaluate(name, zoo.create(name, weights), data, batch_size=100)
    assert measured == pytest.approx(published, abs=margin)
