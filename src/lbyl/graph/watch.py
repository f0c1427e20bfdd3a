"""Which torch call is which layer or BatchNorm: decided here, for everyone who watches a run.

Arguments are known by name, however a call gives them. A BatchNorm written out in arithmetic
(`FrozenBatchNorm2d`) makes no call of its own: its module is watched instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lbyl.graph.unit import Consumer
from lbyl.runtime.intercept import Function, Interceptor, is_wrapped
from lbyl.runtime.session import module_hooks
from lbyl.runtime.tensors import tensors

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups")
_NORMS: dict[Function, tuple[str, ...]] = {
    F.batch_norm: tuple("input running_mean running_var weight bias training momentum eps".split()),
    torch.batch_norm: tuple(
        "input weight bias running_mean running_var training momentum eps cudnn_enabled".split()
    ),
}


LEAST_EPS = 1e-12


@dataclass(frozen=True)
class Signature:
    """How a function that multiplies with a weight takes its arguments."""

    kind: str  # "conv", "transposed" or "linear"
    names: tuple[str, ...]
    x: str = "input"
    weight: str = "weight"


LAYERS: dict[Function, Signature] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), Signature("conv", _CONV)),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        Signature("transposed", (*_TRANSPOSED, "dilation")),
    ),
    F.linear: Signature("linear", ("input", "weight", "bias")),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__),
        Signature("linear", ("input", "other"), weight="other"),
    ),
    **dict.fromkeys((torch.mm, Tensor.mm), Signature("linear", ("input", "mat2"), weight="mat2")),
    **dict.fromkeys(
        (torch.addmm, Tensor.addmm),
        Signature("linear", ("input", "mat1", "mat2"), x="mat1", weight="mat2"),
    ),
}


@dataclass(frozen=True)
class LayerCall:
    """A call that multiplies an input with a weight; `arguments` are by name."""

    kind: str
    x: Tensor
    weight: Tensor
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class NormCall:
    """A call of BatchNorm."""

    x: Tensor
    mean: Tensor | None  # running
    var: Tensor | None
    arguments: Mapping[str, Any]

    @property
    def varies(self) -> bool:
        """Whether a channel has more than a single value in the batch."""
        return self.x.numel() > self.x.shape[1]


def layer_call(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall | None:
    """The call as that of a layer, None where it is none."""
    signature = LAYERS.get(func)
    if signature is None:
        return None
    arguments = dict(zip(signature.names, args)) | kwargs
    x, weight = arguments.get(signature.x), arguments.get(signature.weight)
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return None
    return LayerCall(signature.kind, x, weight, arguments)


def norm_call(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NormCall | None:
    """The call as that of BatchNorm, None where it is none."""
    names = _NORMS.get(func)
    if names is None:
        return None
    arguments = dict(zip(names, args)) | kwargs
    x, mean, var = (arguments.get(name) for name in ("input", "running_mean", "running_var"))
    return None if x is None else NormCall(x, mean, var, arguments)


class Watch(Interceptor):
    """Calls `before_layer`, `after_layer`, `before_norm` and `after_norm` while a model runs.

    Layers are those of the consumers given; every BatchNorm counts. With `by_batch` BatchNorm
    normalises by the batch, as in training, and its running statistics are not changed.
    """

    frozen: ClassVar[bool] = False  # whether frozen BatchNorms count too

    def __init__(
        self,
        model: nn.Module | None = None,
        consumers: Iterable[Consumer] = (),
        by_batch: bool = False,
    ) -> None:
        super().__init__()
        state = {} if model is None else tensors(model)
        self.by_batch = by_batch
        self.consumers = {id(state[c.weight]): c for c in consumers}  # by their weight
        self._hooks = ExitStack()
        self._gradients = False  # whether who watches computes them; the network may by itself

    def before_layer(self, consumer: Consumer, call: LayerCall) -> None:
        """A consumer is about to run."""

    def after_layer(self, consumer: Consumer, out: Tensor) -> None:
        """A consumer has run."""

    def before_norm(self, call: NormCall) -> None:
        """A BatchNorm is about to run."""

    def after_norm(self, call: NormCall, out: Tensor) -> None:
        """A BatchNorm has run."""

    def on_batch(self, call: NormCall, mean: Tensor, variance: Tensor) -> None:
        """A BatchNorm has normalised by the batch, which has this mean and biased variance."""

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        norm = norm_call(func, args, kwargs)
        if norm is not None and is_wrapped(norm.x):  # which nobody can look into
            return func(*args, **kwargs)
        if norm is not None:
            with torch.set_grad_enabled(self._gradients):
                self.before_norm(norm)
            out = self._by_batch(norm) if self.by_batch else func(*args, **kwargs)
            with torch.set_grad_enabled(self._gradients):
                self.after_norm(norm, out)
            return out
        if not self.consumers:
            return func(*args, **kwargs)
        layer = layer_call(func, args, kwargs)
        consumer = None if layer is None else self.consumers.get(id(layer.weight))
        if layer is None or consumer is None:
            return func(*args, **kwargs)
        with torch.set_grad_enabled(self._gradients):
            self.before_layer(consumer, layer)
        out = func(*args, **kwargs)
        with torch.set_grad_enabled(self._gradients):
            self.after_layer(consumer, out)
        return out

    def _by_batch(self, call: NormCall) -> Tensor:
        if not call.varies:  # a single value a channel has no statistics
            return batch_norm_as_in_use(call)
        if type(self).on_batch is Watch.on_batch:  # nobody asks for them
            return batch_norm_by_batch(call)
        out, mean, variance = batch_norm_with_moments(call)
        self.on_batch(call, mean, variance)
        return out

    def __enter__(self) -> Watch:
        self._gradients = torch.is_grad_enabled()
        if self.frozen:
            self._hooks.enter_context(module_hooks(self._frozen_norm))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _frozen_norm(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        mean = getattr(module, "running_mean", None)
        normal = isinstance(module, nn.modules.batchnorm._NormBase)
        if isinstance(mean, Tensor) and not normal and isinstance(out, Tensor) and args:
            self.after_norm(NormCall(args[0], mean, getattr(module, "running_var", None), {}), out)


def _affine(call: NormCall) -> tuple[Tensor | None, Tensor | None]:
    return call.arguments.get("weight"), call.arguments.get("bias")


def _rates(call: NormCall) -> tuple[float, float]:
    return call.arguments.get("momentum", 0.1), call.arguments.get("eps", 1e-5)


def _rates_by_batch(call: NormCall) -> tuple[float, float]:
    """Where a batch is normalised by itself torch asks for an eps above 0."""
    momentum, eps = _rates(call)
    return momentum, max(eps, LEAST_EPS)


def batch_norm_as_in_use(call: NormCall) -> Tensor:
    """BatchNorm by its running statistics."""
    return F.batch_norm(call.x, call.mean, call.var, *_affine(call), False, *_rates(call))


def batch_norm_by_batch(call: NormCall) -> Tensor:
    """BatchNorm by the batch's own statistics; the running ones are neither used nor changed."""
    return F.batch_norm(call.x, None, None, *_affine(call), True, *_rates_by_batch(call))


def batch_norm_with_moments(call: NormCall) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with the batch's mean and biased variance.

    torch works them out anyway, and to do it a second time takes longer than to normalise.
    """
    momentum, eps = _rates_by_batch(call)
    out, mean, reciprocal = torch.native_batch_norm(
        call.x, *_affine(call), None, None, True, momentum, eps
    )
    return out, mean, (reciprocal.double().pow(-2) - eps).clamp(min=0)
