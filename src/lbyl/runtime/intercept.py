"""Intercepting a network's run: a callback for every torch function that its `forward` calls.

No module is changed and no hook is registered on one, so functional calls are seen like those of
modules, and the network is the same during a run as before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lbyl.runtime.decompose import DECOMPOSITIONS

Function = Callable[..., Any]

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


def as_linear(func: Function, args: tuple[Any, ...]) -> tuple[Function, tuple[Any, ...]]:
    """`x @ weight.T` as the layer that it is: `linear(x, weight)`."""
    x, other = args
    weight = getattr(other, "_base", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or x.dim() < 2:
        return func, args
    turned = other.dim() == 2 and other.shape == weight.shape[::-1]
    if turned and other.stride() == weight.stride()[::-1]:
        return F.linear, (x, weight)
    return func, args


def is_wrapped(x: Any) -> bool:
    """Whether a tensor stands for another one inside `torch.func` (vmap, grad, jvp)."""
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def changes_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of this name changes its first argument: `add_`, `x[i] = y`."""
    augmented = name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")
    method = name.endswith("_") and not name.endswith("__")
    return method or augmented or name == "__setitem__" or bool(kwargs.get("inplace"))


class Interceptor(TorchFunctionMode):
    """Active inside a `with`; subclasses define `on_call`.

    `decompositions` give, for functions with layers in them, what runs in single steps instead.
    """

    def __init__(self, decompositions: Mapping[Function, Function] = DECOMPOSITIONS) -> None:
        super().__init__()
        self.decompositions = decompositions

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        steps = self.decompositions.get(func)
        if steps is not None:
            TorchFunctionMode.__enter__(self)
            try:
                outcome = steps(args, kwargs or {})
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)
            if outcome is not None:
                return outcome
        if func in PRODUCTS and len(args) == 2 and not kwargs:
            func, args = as_linear(func, args)
        return self.on_call(func, args, kwargs or {})

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives: usually what `func` gives."""
        raise NotImplementedError
