"""A copy of a network whose values are changed for one question and put back after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

from torch import Tensor, nn

from lbyl.runtime.tensors import copy_all, tensors
from lbyl.surgery.cut import copy_model


class Scratch:
    """Copied once, when first asked: what is put in place is far less than a whole network."""

    def __init__(self, model: nn.Module) -> None:
        self._original = model

    @cached_property
    def _copy(self) -> nn.Module:
        return copy_model(self._original)

    @cached_property
    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of the copy and of the original."""
        return tensors(self._copy), tensors(self._original)

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """The copy with these values, of the same shapes, in place of its own."""
        own, true = self._tensors
        changed = [own[name] for name in values]
        copy_all(changed, list(values.values()))
        try:
            yield self._copy
        finally:
            copy_all(changed, [true[name] for name in values])
