"""From options to a network on its device and to images: what most commands begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lbyl.cli.errors import UsageError
from lbyl.cli.options import parse_numbers
from lbyl.cli.screen import Screen

if TYPE_CHECKING:
    from torch import nn

    from lbyl.data import ImageSet
    from lbyl.models import Network


def pick_device(name: str) -> str:
    """The device asked for; `auto` takes a GPU where there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise UsageError(f"--device {name!r}: write cpu, cuda, cuda:1, mps or auto") from None
    missing = {"cuda": not torch.cuda.is_available(), "mps": not torch.backends.mps.is_available()}
    if missing.get(kind, False):
        raise UsageError(f"--device {name}: there is none here; use --device cpu")
    return name


def build(
    screen: Screen,
    model: str,
    weights: str | None,
    *,
    input_size: str | None = None,
    classes: int | None = None,
    mean: str | None = None,
    std: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    trained: bool = True,
) -> Network:
    """The network that the options describe, on its device; says so where it is untrained."""
    place = pick_device(device)
    with screen.stage("loading the network"):
        import torch

        from lbyl.models import parse_input_shape, resolve

        if threads:
            torch.set_num_threads(threads)
        shape = parse_input_shape(input_size) if input_size else None
        network = resolve(model, weights, shape, classes)
        network = network.scaled(parse_numbers(mean, "mean"), parse_numbers(std, "std")).to(place)
    if trained and network.weights is None and ".py:" not in model:
        screen.warn(f"{model} has random weights; give trained ones with --weights")
    return network


def load_images(
    screen: Screen, network: Network, path: str, split: str = "test", limit: int | None = None
) -> ImageSet:
    """Images for a network, at the size it reads."""
    from lbyl import data

    with screen.stage("opening the images"):
        images = data.load(path, split, size=network.image_size)
        if limit is not None and limit < len(images):
            images = images.subset(limit)
    return images


def measure(
    screen: Screen,
    network: Network,
    images: ImageSet,
    model: nn.Module | None = None,
    stage: str = "measuring accuracy",
    batch_size: int = 100,
) -> float:
    """Top-1 accuracy of the network, or of another model that reads the same inputs."""
    from lbyl import data

    with screen.stage(stage) as tick:
        return data.accuracy(
            as_classifier(network, model),
            images,
            network.mean,
            network.std,
            batch_size,
            flatten=network.flatten,
            progress=tick,
        )


def as_classifier(network: Network, model: nn.Module | None = None) -> nn.Module:
    """A model that takes images and gives logits, also where the network wants names for them."""
    from torch import nn

    chosen = network.model if model is None else model
    if not isinstance(network.example, dict):
        return chosen
    name = next(iter(network.example))

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = chosen

        def forward(self, images: Any) -> Any:
            made = self.inner(**{name: images})
            return getattr(made, "logits", made)

    return Classifier()


def calibration_batches(
    screen: Screen, network: Network, path: str | None, limit: int | None = 1024
) -> list[Any] | None:
    """A user's own images as batches the network takes, or None where none were given."""
    if path is None:
        return None
    images = load_images(screen, network, path, "train", limit)
    device = next(network.model.parameters()).device
    batches = [x for x, _ in images.batches(64, network.mean, network.std, device)]
    if network.flatten:
        return [x.flatten(1) for x in batches]
    if isinstance(network.example, dict):
        return [{next(iter(network.example)): x} for x in batches]
    return batches
