"""Several variants of a network in one run: how each answers the same inputs.

Variants have the modules of a network and other values of some of its parameters. The batch holds
the inputs once for every variant; a call that reads a changed parameter is made anew for the part
of the batch that belongs to the variant. So many variants cost as many inputs, but one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.torchkit.intercept import Function, Interceptor
from lbyl.torchkit.run import Inputs, call_model, evaluation_mode
from lbyl.torchkit.tensors import tensors

Values = Mapping[str, Tensor]
"""Parameter or buffer → its value in a variant, of the same shape."""


class CannotBeSplit(RuntimeError):
    """A call reads a changed parameter but no part of the batch."""


class SideBySide(Interceptor):
    """Active inside a `with`, while the network runs on `repeated` inputs."""

    def __init__(self, model: nn.Module, variants: Sequence[Values], rows: int) -> None:
        super().__init__()
        self.count, self.rows = len(variants), rows * len(variants)
        state = tensors(model)
        self.changed: dict[int, dict[int, Tensor]] = {}  # id of a parameter → variant → its value
        for i, values in enumerate(variants):
            for name, value in values.items():
                self.changed.setdefault(id(state[name]), {})[i] = value

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [x for x in _leaves(args, kwargs) if isinstance(x, Tensor)]
        touched = {i for x in given for i in self.changed.get(id(x), ())}
        if not touched:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name.endswith("_"):
            raise CannotBeSplit(name)
        if len(touched) == self.count and any(self._is_batch(x) for x in given):
            parts = [self._of_variant(i, func, args, kwargs) for i in range(self.count)]
            shapes = {part.shape if isinstance(part, Tensor) else None for part in parts}
            if len(shapes) == 1 and next(iter(shapes)):
                return torch.cat(parts)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        if not any(self._is_batch(x) for x in (*given, result)):
            raise CannotBeSplit(name)
        for i in touched:
            self._part(result, i).copy_(self._of_variant(i, func, args, kwargs))
        return result

    def _of_variant(
        self, variant: int, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call gives for the part of the batch that belongs to a variant."""
        if _is_flat(args, kwargs):  # torch's own way through arguments takes several times as long
            own = [self._of(x, variant) if isinstance(x, Tensor) else x for x in args]
            return func(*own)
        args, kwargs = tree_map_only(Tensor, partial(self._of, variant=variant), (args, kwargs))
        return func(*args, **kwargs)

    def _is_batch(self, x: Tensor) -> bool:
        """Whether a tensor's rows are the inputs, or several rows for each of them."""
        return bool(x.dim() and len(x) and len(x) % self.rows == 0 and id(x) not in self.changed)

    def _part(self, x: Tensor, variant: int) -> Tensor:
        each = len(x) // self.count
        return x[variant * each : (variant + 1) * each]

    def _of(self, x: Tensor, variant: int) -> Tensor:
        if id(x) in self.changed:
            return self.changed[id(x)].get(variant, x)
        named = isinstance(x, nn.Parameter)  # one may have as many rows as there are inputs
        return self._part(x, variant) if not named and self._is_batch(x) else x


def _is_flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all tensors stand alone: containers hold none but sizes."""
    if kwargs:
        return False
    held = [x for x in args if isinstance(x, (tuple, list, dict))]
    return all(type(x) in (tuple, list) and all(type(i) is int for i in x) for x in held)


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    return args if _is_flat(args, kwargs) else tree_flatten((args, kwargs))[0]


def rows_of(inputs: Inputs) -> int | None:
    """How many examples inputs hold; None where not every tensor in them has as many."""
    leaves = tree_flatten(inputs)[0]
    sizes = {len(x) if isinstance(x, Tensor) and x.dim() else None for x in leaves}
    return sizes.pop() if len(sizes) == 1 else None


@torch.no_grad()
def run_side_by_side(
    model: nn.Module, variants: Sequence[Values], inputs: Inputs, rows: int
) -> Any:
    """What `model` makes of the inputs, `rows` of them, under each variant, one after the other."""
    repeated = tree_map_only(Tensor, lambda x: torch.cat([x] * len(variants)), inputs)
    with evaluation_mode(model), SideBySide(model, variants, rows):
        return call_model(model, repeated)
