"""Trained networks with the images that measure them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import benchmarks.networks  # noqa: F401 (registers the networks of the paper)
import lbyl
from benchmarks.common.environment import shared_dir
from lbyl.app import data
from lbyl.app.data import ImageSet
from lbyl.app.sources import Network, resolve, zoo
from lbyl.runtime.run import device_of

# The layers that published tables prune: convolutions of VGG, inner ones of residual blocks,
# expansions of inverted bottlenecks.
LAYERS: dict[str, str | tuple[str, ...]] = {
    "vgg16_cifar10": "features.*",
    "resnet56_cifar10": "layer*",
    "resnet20_cifar10": "layer*",
    "resnet50_cifar100": "layer*",
    "resnet34_imagenet": "layer*",
    "resnet101_imagenet": "layer*",
    "mobilenet_v2_imagenet": tuple(f"features.{i}.conv.0.0" for i in range(2, 18)),
    "efficientnet_lite0_imagenet": "*",
}
# Those whose weights a person has to bring, or of which no table was published, are run only when
# named.
ONLY_NAMED = ("resnet34_imagenet", "resnet101_imagenet", "efficientnet_lite0_imagenet")
NETWORKS = [name for name in LAYERS if name not in ONLY_NAMED]

# Folder `data` of the shared directory; torchvision's layout is read where a path is given.
FILES = {
    ("FashionMNIST", "test"): "t10k-images-idx3-ubyte.gz",
    ("CIFAR-10", "test"): "cifar10_test.npz",
    ("CIFAR-100", "test"): "cifar100_test.npz",
    ("CIFAR-100", "train"): "cifar100_train.npz",
    ("ImageNet", "test"): "imagenet_val1000.npz",
}
LARGE = 128  # from this side on images come in smaller batches

Pair = tuple[Tensor, Tensor]


def load_network(
    name: str, device: str | torch.device = "cpu", weights: str | Path | None = None
) -> Network:
    """A trained network of the zoo in evaluation mode, with what its inputs must look like."""
    if weights is None:
        weights = (
            "shipped" if name == "digits" else shared_dir() / "models" / zoo.info(name).weights
        )
    return resolve(f"lbyl:{name}", weights).to(device)


def load_images(name: str, split: str = "test", path: str | Path | None = None) -> ImageSet:
    """The images a network was made for; `path` names another file or a torchvision folder."""
    dataset = zoo.info(name).dataset
    if path is None:
        if dataset == "digits":
            return data.load("digits", split)
        if (dataset, split) not in FILES:
            raise SystemExit(f"no {split} images of {dataset} in {shared_dir()}: give a path")
        path = shared_dir() / "data" / FILES[dataset, split]
    return data.load(path, split, size=224 if dataset == "ImageNet" else None)


@dataclass(frozen=True)
class LabelledImages:
    """Normalised images on the device in batches: decoded once, they measure many models."""

    batches: tuple[Pair, ...] = field(repr=False)

    @classmethod
    def of(cls, images: ImageSet, network: Network, limit: int | None = None) -> LabelledImages:
        """The first `limit` images, or all, as `network` reads them."""
        if images.labels is None:
            raise SystemExit(f"{images.name} has no labels to measure by")
        size = 100 if is_large(network) else 500
        batches = images.batches(size, network.mean, network.std, device_of(network.model), limit)
        return cls.of_batches(batches, network)  # type: ignore[arg-type]  # labels are there

    @classmethod
    def of_batches(cls, batches: Iterable[Pair], network: Network) -> LabelledImages:
        """Normalised batches, flattened where the network reads vectors."""
        return cls(tuple((x.flatten(1) if network.flatten else x, y) for x, y in batches))

    def __len__(self) -> int:
        return sum(len(labels) for _, labels in self.batches)

    @torch.inference_mode()
    def accuracy(self, model: nn.Module) -> float:
        """Percentage of images whose largest logit is that of their label."""
        hits = sum(
            int((model(images).argmax(1) == labels).sum()) for images, labels in self.batches
        )
        return 100 * hits / len(self)

    def unlabelled(self, count: int, batch: int) -> list[Tensor]:
        """The first `count` images in batches, without their labels."""
        images: list[Tensor] = []
        for part, _ in self.batches:
            if sum(map(len, images)) < count:
                images.append(part)
        return list(torch.cat(images)[:count].split(batch))


def is_large(network: Network) -> bool:
    """Whether a network reads images of ImageNet's size."""
    return (network.image_size or 0) >= LARGE


@dataclass
class Case:
    """A trained network, the images that measure it, and the layers that a table prunes."""

    name: str
    network: Network
    test: LabelledImages
    include: str | Sequence[str] = "*"
    seed: int = 0  # of procedural images
    _prepared: dict[str, lbyl.Prepared] = field(default_factory=dict, repr=False)

    def prepared(self, source: str = "procedural") -> lbyl.Prepared:
        """The network, prepared once for each source of statistics.

        "procedural" leaves `data` out, so that methods go by what they go by themselves;
        "inversion" is the library's; "real" are test images without their labels.
        """
        if source not in self._prepared:
            data: dict[str, Any] = {"procedural": None, "inversion": "inversion"}
            given = self.real_images() if source == "real" else data[source]
            self._prepared[source] = lbyl.prepare(
                self.network.model,
                self.network.example,
                include=self.include,
                data=given,
                seed=self.seed,
            )
        return self._prepared[source]

    def statistics(self, source: str) -> lbyl.Statistics:
        """Statistics of a source; "analytic" ones follow from the weights."""
        if source == "analytic":
            return self.prepared().statistics("analytic")
        return self.prepared(source).statistics()

    def real_images(self) -> list[Tensor]:
        """256 test images of ImageNet's size, or 1,024 small ones."""
        count, batch = (256, 64) if is_large(self.network) else (1024, 512)
        return self.test.unlabelled(count, batch)

    def accuracy(self, model: nn.Module) -> float:
        return self.test.accuracy(model)


def load_case(
    name: str, device: str = "cpu", limit: int | None = None, weights: Path | None = None
) -> Case:
    """A network of the zoo with its test images, and the layers that published tables prune."""
    network = load_network(name, device, weights)
    test = LabelledImages.of(load_images(name), network, limit)
    return Case(name, network, test, LAYERS.get(name, "*"))


def criterion_for(method: Any, criterion: Any) -> Any:
    """The criterion to give with a method: None where the method chooses by itself."""
    return None if lbyl.methods.resolve(method).chooses else criterion
