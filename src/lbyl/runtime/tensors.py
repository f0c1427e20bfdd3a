"""A model's tensors by name: read, checked, replaced."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.runtime.assumptions import are_assumed, holds


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name; tied ones under their first name."""
    found: dict[str, Tensor] = {}
    modules = list(model.named_modules())
    for kind in ("_parameters", "_buffers"):  # torch's own walk takes several times as long
        seen: set[int] = set()
        for prefix, module in modules:
            for name, tensor in getattr(module, kind).items():  # scripted ones keep no `__dict__`
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Tensors of one number each as numbers; a device is waited for once."""
    if not any(x.is_cuda for x in scalars):
        return [float(x.detach()) for x in scalars]
    first = next(x for x in scalars if x.is_cuda)
    if any(x.dtype != first.dtype or x.device != first.device for x in scalars):
        scalars = [x.double().to(first.device) for x in scalars]
    told: list[float] = torch.stack([x.detach() for x in scalars]).double().tolist()
    return told


def is_finite(*several: Tensor) -> bool:
    """Whether no entry is NaN or Inf: those survive a sum, which needs no memory."""
    if are_assumed():
        for t in map(_real, several):
            holds(t.sum().isfinite())
        return True
    return finite_each([several])[0]


def finite_each(groups: Sequence[Sequence[Tensor]]) -> list[bool]:
    """The same of several groups of tensors; a device is waited for once."""
    groups = [[_real(t) for t in group] for group in groups]
    # A sum of large finite numbers may overflow; only then every entry is looked at.
    sums = iter(numbers([t.sum() for group in groups for t in group]))
    suspects = [[t for t in group if not math.isfinite(next(sums))] for group in groups]
    return [all(bool(t.isfinite().all()) for t in group) for group in suspects]


def _real(t: Tensor) -> Tensor:
    """A tensor as numbers that torch adds up: complex ones as pairs, those of a byte widened."""
    t = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    return t.float() if t.is_floating_point() and t.element_size() == 1 else t


def onto(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; what comes from the processor's memory is not waited for."""
    return x.to(device, non_blocking=x.device.type == "cpu")


def places(flags: Tensor, device: torch.device) -> Tensor:
    """The indices at which flags are set, on a device."""
    return onto(torch.nonzero(flags).reshape(-1), device)


def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Values into tensors, in one call: there are hundreds."""
    if into:
        with torch.no_grad():
            torch._foreach_copy_(list(into), [value.detach() for value in values])


def select(x: Tensor, axis: int, indices: Tensor) -> Tensor:
    """`x.index_select`, for images with channels innermost in memory so that they stay there."""
    if x.dim() == 4 and axis == 1 and x.is_contiguous(memory_format=torch.channels_last):
        return x.movedim(1, -1).index_select(-1, indices).movedim(-1, 1)
    return x.index_select(axis, indices)


def replace_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put new values, of any shape, in place of parameters and buffers; ties are kept.

    A bias may be new: the layer gets it.
    """
    state = tensors(model)
    new = {id(state[name]): value for name, value in values.items() if name in state}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in new:
                old = id(parameter)
                value = _aligned(new[old].to(parameter))
                made.setdefault(old, nn.Parameter(value, parameter.requires_grad))
                module._parameters[name] = made[old]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in new:
                module._buffers[name] = _aligned(new[id(buffer)].to(buffer))
    for name in values.keys() - state.keys():
        _add_bias(model, name, values[name])


def _aligned(value: Tensor) -> Tensor:
    """A tensor copied where its memory is not aligned to 64 bytes, as for slices of a file.

    Kernels treat such memory differently, in the last bit of what they compute.
    """
    if not has_channels_innermost(value):
        value = value.contiguous()
    return value.clone() if value.device.type == "cpu" and value.data_ptr() % 64 else value


def has_channels_innermost(value: Tensor) -> bool:
    """Whether a weight or an image lies in memory with its channels innermost, and only so."""
    innermost = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return innermost and not value.is_contiguous()


def laid_out_as(value: Tensor, like: Tensor) -> Tensor:
    """A tensor in the order of memory that another one has."""
    same = has_channels_innermost(like) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if same else value.contiguous()


def _add_bias(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if last not in module._parameters:
        raise LbylError(f"{owner} ({type(module).__name__}) has no parameter {last!r}")
    like = next(p for p in module.parameters(recurse=False))
    module._parameters[last] = nn.Parameter(value.to(like), like.requires_grad)


def can_take_bias(model: nn.Module, name: str) -> bool:
    """Whether the layer of this name has room for a bias and none yet.

    One that is there but took no part in the layer's call is added elsewhere: it is not ours.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:  # a parameter that stands alone
        return False
    return "bias" in module._parameters and module._parameters["bias"] is None


def shape_of(tensor: Tensor) -> Tensor:
    """A stand-in for a parameter or buffer: a single zero behind its shape."""
    empty = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


def names_of(own: Mapping[str, Tensor]) -> dict[int, str]:
    """id → name of every tensor, given by name; of tied ones the first name."""
    names: dict[int, str] = {}
    for name, tensor in own.items():
        names.setdefault(id(tensor), name)
    return names
