"""Calls on tensors without data, known by their form: like arguments give a like tensor.

torch takes 20 to 900 microseconds to find out what a call gives, and networks repeat their blocks:
the same function on tensors of the same sizes, with the same numbers beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NUMBERS = (int, float, complex, bool, torch.Size)
WORDS = (str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout)
PLAIN = frozenset((*NUMBERS, *WORDS, torch.memory_format))  # arguments of which equal ones do alike

Form = tuple[Any, ...]
FIRST = slice(4, 7)  # what tells the first argument, where it is a tensor


class Forms:
    """What calls gave, by their form: a new tensor, or their first one as it was (`relu_`)."""

    def __init__(self) -> None:
        self._given: dict[Form, tuple[torch.Size, tuple[int, ...], torch.dtype] | None] = {}
        self._sharing: set[Callable[..., Any]] = set()  # functions that gave memory of an argument

    def of(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Form | None, list[Tensor]]:
        """The form of a call and its tensors; no form where it does not tell what the call gives.

        Gradients are part of no form.
        """
        tensors: list[Tensor] = []
        if func in self._sharing or torch.is_grad_enabled():
            return None, tensors
        parts: list[Any] = [func, torch.get_default_dtype()]
        if not _describe(args, parts, tensors) or not tensors:
            return None, tensors
        for key, value in kwargs.items():
            parts.append(key)
            if not _describe(value, parts, tensors):
                return None, tensors
        return tuple(parts), tensors

    def like(self, form: Form, tensors: list[Tensor]) -> Tensor | None:
        """What a call of this form gives of its tensors; None where there was none yet."""
        if form not in self._given:
            return None
        known = self._given[form]
        if known is None:
            return tensors[0]
        shape, stride, dtype = known
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def keep(self, form: Form, tensors: list[Tensor], result: Any) -> None:
        """Remember what a call gave, where its form tells it."""
        if type(result) is not Tensor or not result.is_meta or result.layout is not torch.strided:
            return
        memory = result.untyped_storage()._cdata
        told = result.shape, result.stride(), result.dtype
        sharing = [x for x in tensors if x.untyped_storage()._cdata == memory]
        if not sharing:
            self._given[form] = told
        elif len(sharing) == 1 and sharing[0] is result and form[FIRST] == told:
            self._given[form] = None
        else:
            self._sharing.add(form[0])


def _describe(x: Any, parts: list[Any], tensors: list[Tensor]) -> bool:
    """Add to the parts of a form what tells an argument; False for one that cannot be told."""
    kind = type(x)
    if kind is Tensor or kind is nn.Parameter:
        if x.layout is not torch.strided:
            return False
        parts += (x.shape, x.stride(), x.dtype)
        tensors.append(x)
        return True
    if kind in PLAIN:
        parts += (kind, x)  # 2 and 2.0 are equal but do not do the same
        return True
    if kind is tuple or kind is list:
        parts += (kind, len(x))
        return all(_describe(item, parts, tensors) for item in x)
    if kind is slice:
        parts.append(slice)
        return all(_describe(item, parts, tensors) for item in (x.start, x.stop, x.step))
    return False
