"""A network with what is needed to feed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.app.sources.zoo.registry import IMAGENET_MEAN, IMAGENET_STD
from lbyl.inputs.images.procedural import as_given, channels_come_last, channels_first
from lbyl.runtime.run import Inputs

WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin")


@dataclass(frozen=True)
class Network:
    """A network with what is needed to feed it."""

    name: str
    model: nn.Module
    example: Inputs
    input_shape: tuple[int, ...]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    weights: str | None = None  # None: as the factory made it, which mostly means untrained
    classes: int | None = None  # None: as many as the architecture has of itself
    unsized: bool = False  # whether it takes images of any size and says nothing of which
    notes: tuple[str, ...] = ()  # what its user should know of how it was loaded

    @property
    def flatten(self) -> bool:
        """Whether images are given to the network as vectors."""
        return len(self.input_shape) == 1

    @property
    def channels_last(self) -> bool:
        """Whether images are given to the network as (height, width, channels)."""
        return channels_come_last(self.input_shape)

    @property
    def image_size(self) -> int | None:
        return channels_first(self.input_shape)[-1] if len(self.input_shape) == 3 else None

    def given(self, images: Tensor) -> Tensor:
        """Images (n, channels, height, width) in the form that the network takes."""
        return images.flatten(1) if self.flatten else as_given(images, self.channels_last)

    def to(self, device: str | torch.device) -> Network:
        """The same on another device; the model itself is moved."""
        example = torch.utils._pytree.tree_map_only(Tensor, lambda x: x.to(device), self.example)
        return replace(self, model=self.model.to(device), example=example)

    def scaled(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> Network:
        """The same with another normalisation of its inputs, where one is given."""
        return replace(self, mean=tuple(mean or self.mean), std=tuple(std or self.std))

    def as_classifier(self, model: nn.Module) -> nn.Module:
        """A model that takes images and gives logits, also where the network wants names."""
        if isinstance(self.example, dict):
            return Named(model, next(iter(self.example)))
        return ChannelsLast(model) if self.channels_last else model

    def describe(self) -> dict[str, Any]:
        """What another run needs to build the network again, as plain data."""
        return {
            "name": self.name,
            "input_shape": list(self.input_shape),
            "mean": list(self.mean),
            "std": list(self.std),
            "weights": self.weights,
            "classes": self.classes,
        }


class ChannelsLast(nn.Module):
    """A network that takes (n, height, width, channels), for images with their channels first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Any:
        return self.inner(as_given(images, last=True))


class Named(nn.Module):
    """A network that takes its images by name, and may give logits inside of something else."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name

    def forward(self, images: Tensor) -> Any:
        outputs = self.inner(**{self.name: images})
        return getattr(outputs, "logits", outputs)
