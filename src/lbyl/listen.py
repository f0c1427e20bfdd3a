"""Listening to a network: every torch function that its `forward` calls can be heard.

Nothing is hooked and nothing changed, so that a network is the same during a run as before it, and
functional calls are heard like those of modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]


class Listener(TorchFunctionMode):
    """Active inside a `with`; subclasses say in `hear` what they make of a call."""

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.hear(func, args, kwargs or {})

    def hear(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives: usually what `func` gives."""
        raise NotImplementedError


class NormListener(Listener):
    """One that also decides how BatchNorm normalises: by the batch, or as it is."""

    def __init__(self, by_batch: bool) -> None:
        super().__init__()
        self.by_batch = by_batch

    def normalise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What a call of BatchNorm gives."""
        return (batch_norm_by_batch if self.by_batch else F.batch_norm)(*args, **kwargs)


def batch_norm_by_batch(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """BatchNorm by the batch's own statistics; the running ones are neither used nor changed."""
    if input.numel() == input.shape[1]:  # a single value a channel has no statistics
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return F.batch_norm(input, None, None, weight, bias, True, momentum, eps)
