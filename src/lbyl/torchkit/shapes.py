"""Running a network for its shapes alone: every tensor is replaced by one without data.

torch's meta tensors say that they lie on the device "meta"; its fake tensors do not, and take
several times as long. Here calls run on meta tensors, and whoever asks where one lies is told the
device that it stands for, so that code that goes by devices takes the way it takes in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

META = torch.device("meta")
MOVES = (Tensor.cpu, Tensor.cuda)
CONVOLUTIONS = tuple(
    getattr(torch, f"{name}{dims}d") for name in ("conv", "conv_transpose") for dims in (1, 2, 3)
)


class Shapes(TorchFunctionMode):
    """Inside a `with` calls give tensors without data, as if they lay on `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._empty: dict[int, Tensor] = {}
        self._true: dict[int, Tensor] = {}
        self._makers = _device_constructors()
        self._told: dict[Callable[..., Any], Any] = {
            Tensor.device.__get__: device,  # type: ignore[attr-defined]
            Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: device.type == "cpu",  # type: ignore[attr-defined]
            Tensor.is_cuda.__get__: device.type == "cuda",  # type: ignore[attr-defined]
        }

    def empty(self, tensor: Tensor) -> Tensor:
        """The tensor without data that stands for one with data, always the same."""
        made = self._empty.get(id(tensor))
        if made is None and not tensor.is_meta:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                made = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META
                )
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, tensor.requires_grad)
            self._empty[id(tensor)], self._true[id(made)] = made, tensor
        return tensor if made is None else made

    def true(self, tensor: Tensor) -> Tensor:
        """The tensor that another one stands for; itself where it stands for none."""
        return self._true.get(id(tensor), tensor)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            told = self._told.get(func)
            if told is not None:
                return told
        if func in MOVES:  # all of them lie on one device
            return args[0]
        kwargs = {key: self._given(x) for key, x in kwargs.items()} if kwargs else {}
        if "device" in kwargs or func in self._makers:
            kwargs["device"] = META
        if func is Tensor.to:
            args = tuple(META if isinstance(x, str) else x for x in args)
        args = tuple([self._given(x) for x in args])
        if func in CONVOLUTIONS:
            _check_sizes(func.__name__, *args[:3], **kwargs)
        result = func(*args, **kwargs)
        return self.true(result) if isinstance(result, Tensor) else result

    def _given(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.empty(x)
        if isinstance(x, torch.device):
            return META
        if type(x) in (tuple, list):
            return type(x)([self._given(item) for item in x])
        if isinstance(x, (tuple, list, dict)):  # of other classes torch knows how
            return tree_map(self._given, x)
        return x


def _check_sizes(
    name: str, input: Tensor, weight: Tensor, bias: Tensor | None = None, **rest: Any
) -> None:
    """Raise where a convolution of data would: without data torch looks at some sizes only."""
    inputs = input.shape[1 - weight.dim()]
    if "transpose" in name:  # its bias is looked at
        if inputs != weight.shape[0]:
            raise RuntimeError(f"{name} takes {weight.shape[0]} channels, not {inputs}")
    elif bias is not None and len(bias) != len(weight):
        raise RuntimeError(f"{name} makes {len(weight)} channels, its bias is for {len(bias)}")
