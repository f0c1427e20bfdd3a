"""Further networks of other families, trained on CIFAR-100 in a minute each on a GPU.

    python -m benchmarks.small_networks --device cuda --out DIRECTORY

They are no records: they are there so that the forecast (`benchmarks.forecast`) is calibrated and
judged on more families than those with published weights. SGD with Nesterov momentum or AdamW, one
cycle, crops and flips; a network that is there already is not trained again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.environment import default_device
from benchmarks.common.networks import LabelledImages, load_images
from lbyl.app.sources import Network, zoo
from lbyl.runtime.files import write_tensors

LIKE = "resnet50_cifar100"  # whose images these networks read
EPOCHS, BATCH, PAD = 16, 256, 4


def _resnet18() -> nn.Module:
    from torchvision.models import resnet18

    model = resnet18(num_classes=100)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    model = DenseNet(growth_rate=16, block_config=(6, 6, 6), num_init_features=32, num_classes=100)
    model.features.conv0 = nn.Conv2d(3, 32, 3, 1, 1, bias=False)
    model.features.pool0 = nn.Identity()
    return model


def _mobilenet_v3() -> nn.Module:
    """Hard swish and squeeze-and-excite; three strides fewer."""
    from torchvision.models import mobilenet_v3_small

    return _unstrided(mobilenet_v3_small(num_classes=100), 3)


def _efficientnet() -> nn.Module:
    from torchvision.models import efficientnet_b0

    return _unstrided(efficientnet_b0(num_classes=100), 2)


def _regnet() -> nn.Module:
    from torchvision.models import regnet_y_400mf

    return _unstrided(regnet_y_400mf(num_classes=100), 3)  # stem, and both ways of a block


def _plain() -> nn.Module:
    """Convolutions with bias and without BatchNorm, two hidden linear layers."""
    layers: list[nn.Module] = []
    width = 3
    for out in (64, 64, 0, 128, 128, 0, 256, 256, 0):
        layers += [nn.MaxPool2d(2)] if not out else [nn.Conv2d(width, out, 3, 1, 1), nn.ReLU()]
        width = out or width
    head = [nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 100)]
    model = nn.Sequential(*layers, nn.Flatten(), *head)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def _unstrided(model: nn.Module, count: int) -> nn.Module:
    """The first convolutions of stride 2 made to keep the size: images have 32 pixels."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.stride == (2, 2) and count:
            module.stride = (1, 1)
            count -= 1
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18_cifar100": _resnet18,
    "densenet_cifar100": _densenet,
    "mobilenet_v3_cifar100": _mobilenet_v3,
    "efficientnet_b0_cifar100": _efficientnet,
    "regnet_cifar100": _regnet,
    "plain_cifar100": _plain,
}
ADAM = ("plain_cifar100", "mobilenet_v3_cifar100", "efficientnet_b0_cifar100")


def load_trained(name: str, folder: Path, device: str) -> Network:
    """A network that was trained here, in evaluation mode."""
    model = zoo.load_weights(NETWORKS[name](), folder / f"{name}.safetensors").eval()
    known = zoo.info(LIKE)
    shape = known.input_shape
    example = torch.zeros(1, *shape)
    return Network(name, model, example, shape, known.mean, known.std).to(device)


def train(name: str, images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """A network trained on normalised images that lie on its device."""
    torch.manual_seed(0)
    model = NETWORKS[name]().to(images.device).to(memory_format=torch.channels_last).train()
    steps = epochs * (len(images) // BATCH)
    rate = 2e-3 if name in ADAM else 0.2
    optimiser: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
        if name in ADAM
        else torch.optim.SGD(model.parameters(), rate, 0.9, weight_decay=5e-4, nesterov=True)
    )
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.2)
    padded = F.pad(images, (PAD,) * 4, mode="reflect")
    for _ in range(epochs):
        order = torch.randperm(len(images), device=images.device)
        for index in order.split(BATCH)[: len(images) // BATCH]:
            with torch.autocast(images.device.type, torch.bfloat16):
                out = model(_moved(padded[index]).contiguous(memory_format=torch.channels_last))
                loss = F.cross_entropy(out, labels[index])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimiser.step()
            cycle.step()
    return model.to(memory_format=torch.contiguous_format).eval()


def _moved(batch: Tensor) -> Tensor:
    """One crop for a batch, and half of its images mirrored."""
    side = batch.shape[-1] - 2 * PAD
    y, x = torch.randint(0, 2 * PAD + 1, (2,)).tolist()
    crop = batch[:, :, y : y + side, x : x + side]
    mirrored = torch.rand(len(crop), device=crop.device) < 0.5
    return torch.where(mirrored[:, None, None, None], crop.flip(3), crop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--limit", type=int, help="training images to use")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = [
        n for n in options.networks.split(",") if not (options.out / f"{n}.safetensors").is_file()
    ]
    known = Network(LIKE, nn.Linear(1, 1).to(options.device), None, (3, 32, 32))
    known = known.scaled(zoo.info(LIKE).mean, zoo.info(LIKE).std)
    learnt = LabelledImages.of(load_images(LIKE, "train"), known, options.limit).batches
    images, labels = (torch.cat(part) for part in zip(*learnt))
    test = LabelledImages.of(load_images(LIKE), known, options.limit)
    for name in wanted:
        start = time.perf_counter()
        model = train(name, images, labels, options.epochs)
        spent = time.perf_counter() - start
        print(name, f"{test.accuracy(model):.2f} %, {spent:.0f} s", flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        state = {key: value.cpu().contiguous() for key, value in model.state_dict().items()}
        write_tensors(options.out / f"{name}.safetensors", state, {"format": "pt"})


if __name__ == "__main__":
    main()
