"""Intercepting a network's run: a callback for every torch function that its `forward` calls.

No module is changed and no hook is registered on one, so functional calls are seen like those of
modules, and the network is the same during a run as before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

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
        return self.on_call(func, args, kwargs or {})

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives: usually what `func` gives."""
        raise NotImplementedError
