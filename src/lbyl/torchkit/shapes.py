"""Running a network for its shapes alone: every tensor is replaced by one without data.

torch's meta tensors say that they lie on the device "meta"; its fake tensors do not, and take
several times as long. Here calls run on meta tensors, and whoever asks where one lies is told the
device that it stands for, so that code that goes by devices takes the way it takes in use.

Small constants, such as strides that a module keeps or positions that a forward counts out, are
known as long as they are computed from nothing else: code may look at their values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from lbyl.torchkit.forms import Forms
from lbyl.torchkit.intercept import changes_in_place

META, CPU = torch.device("meta"), torch.device("cpu")
MOVES = (Tensor.cpu, Tensor.cuda)
CONVOLUTIONS = tuple(
    getattr(torch, f"{name}{dims}d") for name in ("conv", "conv_transpose") for dims in (1, 2, 3)
)
KNOWN = 1 << 12  # numbers that a constant may hold to be known
UNSURE = ("rand", "empty", "new_empty", "normal", "bernoulli", "multinomial", "dropout", "set_")


class Shapes(TorchFunctionMode):
    """Inside a `with` calls give tensors without data, as if they lay on `device`.

    `unknown` are ids of tensors whose values are no constants: parameters, buffers. `forms` are
    those of calls that were made before.
    """

    def __init__(
        self, device: torch.device, unknown: Collection[int] = (), forms: Forms | None = None
    ) -> None:
        super().__init__()
        self.device = device
        self.unknown = set(unknown)
        self.knows = True  # until a constant is changed in place
        self._values: dict[int, tuple[Tensor, Tensor]] = {}  # id → tensor without data, its value
        self._empty: dict[int, Tensor] = {}
        self._true: dict[int, Tensor] = {}
        self._makers = _device_constructors()
        self._forms = Forms() if forms is None else forms
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
                made = self._without_data(tensor)
        return tensor if made is None else made

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """Make those of a network before it runs: amid other modes each takes far longer."""
        for tensor in tensors:
            if id(tensor) not in self._empty and not tensor.is_meta:
                self._without_data(tensor)

    def _without_data(self, tensor: Tensor) -> Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        self._empty[id(tensor)], self._true[id(made)] = made, tensor
        return made

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
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives without data."""
        if func in self._told:
            return self._told[func]
        if func in MOVES:  # all of them lie on one device
            return args[0]
        if kwargs:
            kwargs = {key: self._given(x) for key, x in kwargs.items()}
        if "device" in kwargs or func in self._makers:
            kwargs = {**kwargs, "device": META}
        if func is Tensor.to:
            args = tuple(META if isinstance(x, str) else x for x in args)
        args = tuple([self._given(x) for x in args])
        form, tensors = self._forms.of(func, args, kwargs)
        if form is not None and not (self.knows and self._constant(tensors[0]) is not None):
            made = self._forms.like(form, tensors)
            if made is not None:
                return self.true(made)
        result = self._called(func, args, kwargs)
        if form is not None:
            self._forms.keep(form, tensors, result)
        return self.true(result) if isinstance(result, Tensor) else result

    def _called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What torch gives of arguments without data; constants are followed."""
        if func in CONVOLUTIONS:
            _check_sizes(func.__name__, *args[:3], **kwargs)
        value = self._value(func, args, kwargs) if self.knows else None
        if value is not None and not _tensors(value):
            return value  # a number, a truth, a list of numbers
        try:
            result = func(*args, **kwargs)
        except Exception:
            if isinstance(value, Tensor):  # its size depends on values
                result = self.empty(value)
            else:
                numbers = [self._number(x) for x in args]
                if not self.knows or all(a is b for a, b in zip(args, numbers)):
                    raise
                result = func(*numbers, **kwargs)
        for made, own in zip(_tensors(result), _tensors(value)):
            if made.is_meta:
                self._values[id(made)] = made, own
        return result

    def ignore(self, tensor: Tensor) -> Tensor:
        """The tensor without data that stands for an input, whose values are no constants."""
        self.unknown.add(id(tensor))
        return self.empty(tensor)

    def _value(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call on constants gives; None where it reads anything else, or much."""
        name = getattr(func, "__name__", "")
        if name == "__get__" or name.startswith(UNSURE):
            return None
        if changes_in_place(name, kwargs):
            if args and isinstance(args[0], Tensor) and self._constant(args[0]) is not None:
                self.knows = False  # other constants may share its memory
            return None
        found: list[Tensor] = []
        if not self._all_known((args, kwargs), found):
            return None
        if not found and not (func in self._makers and self._is_small(func, args, kwargs)):
            return None
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            own = self._with_data((args, kwargs))
            try:
                value = func(*own[0], **own[1])
            except Exception:
                return None
        return None if any(x.numel() > KNOWN for x in _tensors(value)) else value

    def _is_small(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a tensor that is made of nothing holds few numbers."""
        try:
            made = func(*args, **kwargs)
        except Exception:
            return False
        return isinstance(made, Tensor) and made.numel() <= KNOWN

    def _all_known(self, x: Any, found: list[Tensor]) -> bool:
        """Whether all tensors of arguments are constants; they are added to `found`."""
        if isinstance(x, Tensor):
            found.append(x)
            return self._constant(x) is not None
        if isinstance(x, dict):
            return all(self._all_known(item, found) for item in x.values())
        return not isinstance(x, (tuple, list)) or all(self._all_known(i, found) for i in x)

    def _constant(self, x: Tensor) -> Tensor | None:
        """The value behind a tensor without data, where that is known."""
        if id(x) in self._values:
            return self._values[id(x)][1]
        true = self._true.get(id(x))
        if true is None or id(true) in self.unknown or isinstance(true, nn.Parameter):
            return None
        return true if true.numel() <= KNOWN and not true.is_meta else None

    def _number(self, x: Any) -> Any:
        """A constant of one number as that number: `x.new_full(size, stride)` looks at it."""
        value = self._constant(x) if isinstance(x, Tensor) and not x.dim() else None
        return x if value is None else value.item()

    def _with_data(self, x: Any) -> Any:
        """Arguments of a call with the values of constants, all on the processor."""
        if isinstance(x, Tensor):
            value = self._constant(x)
            assert value is not None
            return value.detach().cpu() if value.requires_grad or value.is_cuda else value
        if isinstance(x, torch.device):
            return CPU
        if type(x) in (tuple, list):
            return type(x)([self._with_data(item) for item in x])
        if type(x) is dict:
            return {key: self._with_data(item) for key, item in x.items()}
        return tree_map(self._with_data, x) if isinstance(x, (tuple, list, dict)) else x

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


def _tensors(x: Any) -> list[Tensor]:
    """The tensors that a call gave: itself, or those in a list."""
    if isinstance(x, Tensor):
        return [x]
    return [item for item in x if isinstance(item, Tensor)] if type(x) in (tuple, list) else []


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
