"""Calls known by their form give what torch gives, and those that no form tells are left to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lbyl.torchkit.forms import Forms
from lbyl.torchkit.shapes import Shapes

X = torch.ones(2, 3, 4, 4)
WHOLE = torch.ones(2, 3, dtype=torch.long)
CALLS: dict[str, Callable[[], Any]] = {
    "conv": lambda: F.conv2d(X, torch.ones(5, 3, 3, 3), padding=1),
    "conv without padding": lambda: F.conv2d(X, torch.ones(5, 3, 3, 3)),
    "conv of images with channels innermost": lambda: F.conv2d(
        X.to(memory_format=torch.channels_last), torch.ones(5, 3, 3, 3), padding=1
    ),
    "times a whole number": lambda: WHOLE * 2,
    "times a fraction": lambda: WHOLE * 2.0,
    "sum": lambda: X.sum((2, 3)),
    "sum, dimensions kept": lambda: X.sum((2, 3), keepdim=True),
    "cat": lambda: torch.cat([X, X[:1]]),
    "cat along another dimension": lambda: torch.cat([X, X], 1),
    "cast": lambda: X.to(torch.float16),
    "dropout": lambda: F.dropout(X, 0.5, training=True),
    "index": lambda: X[:, 1:, [0, 2]],
    "mean": lambda: X.transpose(1, 2).mean(0),
}


def told(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype


@torch.no_grad()
@pytest.mark.parametrize("first", [None, "conv", "times a whole number", "sum", "cat"])
def test_a_call_gives_what_torch_gives_whatever_was_called_before(first: str | None) -> None:
    wanted = {}
    for name, call in CALLS.items():
        with Shapes(torch.device("cpu"), {id(X), id(WHOLE)}):  # asked for the first time
            wanted[name] = told(call())
        assert wanted[name][::2] == told(call())[::2]  # with data some are laid out otherwise
    with Shapes(torch.device("cpu"), {id(X), id(WHOLE)}):
        if first is not None:
            CALLS[first]()
        found = {name: told(call()) for name, call in CALLS.items()}
        again = {name: told(call()) for name, call in CALLS.items()}
    assert found == again == wanted


@torch.no_grad()
def test_like_calls_give_tensors_of_their_own_without_asking_torch() -> None:
    x, asked = torch.ones(2, 3, device="meta"), []
    shapes = Shapes(torch.device("cpu"))

    def double(x: Tensor) -> Tensor:
        asked.append(x)
        return x + x

    one, other = (shapes.call(double, (x,), {}) for _ in range(2))
    assert len(asked) == 1 and told(one) == told(other)
    assert one is not other and one.untyped_storage()._cdata != other.untyped_storage()._cdata
    shapes.call(double, (torch.ones(3, 3, device="meta"),), {})
    assert len(asked) == 2


@torch.no_grad()
def test_what_shares_memory_with_its_arguments_is_never_made_anew() -> None:
    shapes = Shapes(torch.device("cpu"))
    for func in (Tensor.t, Tensor.contiguous, Tensor.relu_, Tensor.t_):
        for size in (3, 3, 4):
            x = torch.ones(2, size, device="meta")
            made = shapes.call(func, (x,), {})
            assert made.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert (made is x) == (func is not Tensor.t)
            assert made.shape == ((size, 2) if func in (Tensor.t, Tensor.t_) else (2, size))


@torch.no_grad()
def test_one_tensor_that_takes_the_memory_of_another_takes_it_every_time() -> None:
    shapes = Shapes(torch.device("cpu"))
    for _ in range(2):
        one, other = (torch.ones(2, device="meta") for _ in range(2))
        shapes.call(Tensor.set_, (one, other), {})
        assert one.untyped_storage()._cdata == other.untyped_storage()._cdata


@torch.no_grad()
def test_a_constant_that_is_changed_in_place_is_known_no_more() -> None:
    x = torch.ones(1)
    with Shapes(torch.device("cpu"), {id(x)}):
        x.clone().add_(x)  # the form of the call is known
        constant = torch.ones(1)
        assert bool(constant == 1)
        constant.add_(x)
        with pytest.raises(RuntimeError):
            bool(constant == 1)


def test_gradients_and_arguments_of_other_kinds_have_no_form() -> None:
    forms, x = Forms(), torch.ones(2, 3, device="meta")
    assert forms.of(torch.relu, (x,), {})[0] is None  # gradients are on
    with torch.no_grad():
        assert forms.of(torch.relu, (x,), {})[0] is not None
        assert forms.of(torch.relu, (x, object()), {})[0] is None
        assert forms.of(torch.zeros, (2, 3), {})[0] is None  # of no tensor
