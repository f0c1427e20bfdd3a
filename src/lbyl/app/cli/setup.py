"""From options to a network on its device, to images, and to a prepared network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lbyl
from lbyl.app import data
from lbyl.app.cli.errors import UsageError, usage
from lbyl.app.cli.parse import OwnImages, Source, parse_numbers
from lbyl.app.cli.screen import Screen
from lbyl.app.data import ImageSet
from lbyl.app.sources import Network, parse_input_shape, resolve
from lbyl.app.sources.hf import with_task
from lbyl.app.sources.kinds import source_of
from lbyl.runtime.run import device_of

OWN_LIMIT = 1024  # own images that statistics are collected on


def pick_device(name: str) -> str:
    """The device asked for; `auto` takes a GPU where there is one."""
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


def check_writable(path: Path) -> None:
    """What would fail at the end of the work is better said at its beginning."""
    there = path.resolve()
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):
        raise UsageError(f"{path} cannot be written to: there is no permission to write in {there}")
    if there != path.resolve() and not there.is_dir():
        raise UsageError(f"{path} cannot be written to: {there} is a file")


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
    task: str | None = None,
) -> Network:
    """The network that the options describe, on its device; says so where it is untrained."""
    chosen = pick_device(device)
    with usage():
        model = with_task(model, task)
    scale = parse_numbers(mean, "mean"), parse_numbers(std, "std")
    with screen.stage("loading the network"):
        if threads:
            torch.set_num_threads(threads)
        shape = parse_input_shape(input_size) if input_size else None
        network = resolve(model, weights, shape, classes).scaled(*scale).to(chosen)
    for line in network.notes:
        screen.warn(line)
    source, _ = source_of(model)
    if trained and network.weights is None and source is not None and not source.own_weights:
        screen.warn(f"{model} has random weights; give trained ones with --weights")
    return network


def load_images(
    screen: Screen, network: Network, path: str, split: str = "test", limit: int | None = None
) -> ImageSet:
    """Images for a network, at the size it reads."""
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
    return score(screen, network, images, model, stage, batch_size).accuracy


def score(
    screen: Screen,
    network: Network,
    images: ImageSet,
    model: nn.Module | None = None,
    stage: str = "measuring accuracy",
    batch_size: int = 100,
) -> data.Score:
    """How many images are taken for what they are: by the network, or by another model."""
    with screen.stage(stage) as tick:
        return data.score(
            network.as_classifier(network.model if model is None else model),
            images,
            network.mean,
            network.std,
            batch_size,
            flatten=network.flatten,
            progress=tick,
        )


@dataclass
class Accuracies:
    """Accuracies of several networks on the same labelled images; none where there are none."""

    screen: Screen
    network: Network
    images: ImageSet | None
    found: dict[str, float] = field(default_factory=dict)

    @classmethod
    def on(
        cls, screen: Screen, network: Network, test: str | None, limit: int | None
    ) -> Accuracies:
        """On the images that `--test` names."""
        images = load_images(screen, network, test, limit=limit) if test else None
        return cls(screen, network, images)

    def measure(self, name: str, stage: str, model: nn.Module | None = None) -> None:
        """Measure the network, or another that reads the same inputs, under a name."""
        if self.images is not None:
            self.found[name] = measure(self.screen, self.network, self.images, model, stage)


def own_inputs(screen: Screen, network: Network, path: str) -> list[Any]:
    """A user's own images as batches the network takes."""
    images = load_images(screen, network, path, "train", OWN_LIMIT)
    device = device_of(network.model)
    read = images.batches(64, network.mean, network.std, device)
    batches = [network.given(x) for x, _ in read]
    if isinstance(network.example, dict):
        return [{next(iter(network.example)): x} for x in batches]
    return batches


def prepare(
    screen: Screen,
    network: Network,
    *,
    source: Source = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    residual: bool = False,
    seed: int = 0,
) -> lbyl.Prepared:
    """The network traced, with what its statistics come from."""
    inputs: Any = source
    if isinstance(source, OwnImages):
        inputs = own_inputs(screen, network, source.path)
    with screen.stage("tracing"):
        return lbyl.prepare(
            network.model,
            network.example,
            include=include or "*",
            exclude=exclude or (),
            residual=residual,
            data=inputs,
            seed=seed,
            progress=screen.progress,
        )
