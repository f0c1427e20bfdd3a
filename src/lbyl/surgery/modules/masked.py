"""Linear layers that have lost rows or columns while what surrounds them keeps its size.

A network's code may say how wide a layer's output is (`view(b, n, 8, 32)`). Such a layer keeps the
rows that stay, and puts zeros where the others were; one that reads such an output leaves the
places of pruned columns out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

OUTPUTS, INPUTS = "kept_outputs", "kept_inputs"  # buffers: where kept ones lie, and the width


class Masked(nn.Module):
    """A linear layer whose rows and columns are those that its masks say."""

    def forward(self, x: Tensor) -> Tensor:
        inputs, outputs = self._buffers.get(INPUTS), self._buffers.get(OUTPUTS)
        if inputs is not None:
            x = x[..., inputs[:-1]]
        y: Tensor = super().forward(x)
        if outputs is not None:
            full = y.new_zeros(*y.shape[:-1], self._widths[OUTPUTS])
            y = full.index_copy(-1, outputs[:-1], y)
        return y

    @property
    def _widths(self) -> dict[str, int]:
        """The sizes of what surrounds the layer, by the name of the buffer."""
        widths: dict[str, int] = self.__dict__["widths"]
        return widths

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        for name, word in ((INPUTS, "inputs"), (OUTPUTS, "outputs")):
            if name in self._widths:
                parts.append(f"of {self._widths[name]} {word}")
        return ", ".join(part for part in parts if part)


class MaskedLinear(Masked, nn.Linear):
    """A linear layer with masks."""


def masked_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer with masks."""
    if issubclass(kind, Masked):
        return kind
    if kind is nn.Linear:
        return MaskedLinear
    return type(f"Masked{kind.__name__}", (Masked, kind), {})


def can_be_masked(module: nn.Module | None) -> bool:
    """Whether a module is nothing but a linear layer."""
    if module is None or isinstance(module, Masked):
        return False
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain or type(module).__name__ == "Conv1D"  # Hugging Face's GPT-2


def layout(kept: Tensor) -> Tensor:
    """Flags along an axis as a buffer: the positions of kept indices, and the width at the end."""
    return torch.cat([torch.nonzero(kept).reshape(-1), torch.tensor([len(kept)])])


def add_mask(module: nn.Module, name: str, kept: Tensor) -> None:
    """Make a linear layer one with such a buffer, in place."""
    kind: Any = masked_class(type(module))
    module.__class__ = kind
    module._buffers[name] = kept
    module.__dict__.setdefault("widths", {})[name] = int(kept[-1])
