"""Intercepting a network's run: a callback for every torch function that its `forward` calls.

No module is changed and no hook is registered on one, so functional calls are seen like those of
modules, and the network is the same during a run as before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lbyl.torchkit.attention import in_steps

Function = Callable[..., Any]


class Interceptor(TorchFunctionMode):
    """Active inside a `with`; subclasses define `on_call`."""

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.multi_head_attention_forward:  # one function with layers in it: looked into
            TorchFunctionMode.__enter__(self)
            try:
                outcome = in_steps(args, kwargs or {})
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)
            if outcome is not None:
                return outcome
        return self.on_call(func, args, kwargs or {})

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives: usually what `func` gives."""
        raise NotImplementedError
