"""Weights that are no real numbers: what touches them is cut exactly, or named as unprunable."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl

METHODS = ("none", "echo", "lbyl", "fold")


class Complex(nn.Module):
    """A linear layer of complex numbers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, dtype=torch.cfloat) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.cfloat), self.weight, self.bias)


class Net(nn.Module):
    """A first, a second and a last layer; `between` stands behind the first, `behind` the second.

    A layer in front and one behind them are real, so that something can always be pruned.
    """

    def __init__(
        self,
        first: nn.Module,
        second: nn.Module,
        between: Callable[[Net, Tensor], Tensor] = lambda net, h: h.relu(),
        behind: Callable[[Net, Tensor], Tensor] = lambda net, h: h.abs(),
    ) -> None:
        super().__init__()
        self.start, self.first, self.second = nn.Linear(8, 24), first, second
        self.last, self.end = nn.Linear(24, 16), nn.Linear(16, 5)
        self.turn = nn.Parameter(torch.randn(24, dtype=torch.cfloat))
        self.shift = nn.Parameter(torch.randn(24, dtype=torch.cfloat))
        self.count = nn.Parameter(torch.randint(1, 5, (24,)), requires_grad=False)
        self.between, self.behind = between, behind

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(self, self.first(self.start(x).relu()))
        return self.end(self.last(self.behind(self, self.second(h))).relu())


def real() -> nn.Linear:
    return nn.Linear(24, 24, bias=False)


NETS: dict[str, tuple[Callable[[], Net], set[str]]] = {
    "a complex reader": (lambda: Net(real(), Complex(24, 24)), {"start", "last"}),
    "a complex maker": (
        lambda: Net(Complex(24, 24), real(), lambda net, h: h.abs()),
        {"second", "last"},
    ),
    "a complex scale": (
        lambda: Net(real(), real(), lambda net, h: (h * net.turn).abs()),
        {"start", "first", "second", "last"},
    ),
    "a complex bias": (
        lambda: Net(
            real(),
            real(),
            lambda net, h: (h + net.turn).abs(),
            lambda net, h: (h + net.shift).abs(),
        ),
        {"start", "first", "second", "last"},
    ),
    "pairs of channels as complex numbers": (
        lambda: Net(
            real(),
            real(),
            lambda net, h: torch.view_as_real(
                torch.view_as_complex(h.unflatten(-1, (12, 2)).contiguous()) * 1j
            ).flatten(-2),
        ),
        {"start", "second", "last"},
    ),
    "a Fourier transform of channels": (
        lambda: Net(real(), real(), lambda net, h: torch.fft.fft(h).real),
        {"start", "second", "last"},
    ),
    "the parts of complex numbers": (
        lambda: Net(
            real(), real(), lambda net, h: (h * net.turn).real.relu() + (h * net.turn).imag
        ),
        {"start", "second", "last"},
    ),
}


def build(name: str) -> tuple[Net, Tensor, set[str]]:
    torch.manual_seed(0)
    make, prunable = NETS[name]
    return make().eval(), torch.randn(16, 8), prunable


def silenced(model: nn.Module, plan: lbyl.Plan) -> nn.Module:
    """The original whose next layer hears no pruned channel."""
    quiet = copy.deepcopy(model)
    after = {"start": "first", "first": "second", "second": "last", "last": "end"}
    with torch.no_grad():
        for name, kept in plan.kept.items():
            pruned = torch.ones(plan.channels[name], dtype=torch.bool)
            pruned[kept] = False
            quiet.get_parameter(f"{after[name]}.weight")[:, pruned] = 0
    return quiet


@pytest.mark.parametrize("name", NETS)
def test_a_cut_beside_complex_numbers_equals_the_silenced_original(name: str) -> None:
    model, x, _ = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of torch, about an imaginary part that is discarded
        result = lbyl.compress(model, x, 0.5, method="none")
    torch.testing.assert_close(
        result.model(x), silenced(model, result.plan)(x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NETS)
def test_complex_parameters_are_taken_over_as_they_are(
    name: str, method: str, tmp_path: Path
) -> None:
    model, x, prunable = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = lbyl.compress(model, x, 0.5, method=method)
    assert set(result.graph.names) == prunable
    kinds = {n: p.dtype for n, p in model.named_parameters()}
    slim = dict(result.model.named_parameters())
    assert all(slim[n].dtype == kind for n, kind in kinds.items())
    for layer in ("first", "second"):
        if isinstance(model.get_submodule(layer), Complex):
            assert torch.equal(
                slim[f"{layer}.weight"], dict(model.named_parameters())[f"{layer}.weight"]
            )
    lbyl.save(result, tmp_path / "slim")
    again = lbyl.load(tmp_path / "slim", model=build(name)[0])
    assert torch.equal(again(x), result.model(x))


def test_the_reason_names_the_numbers() -> None:
    model, x, _ = build("a complex reader")
    reasons = lbyl.trace(model, x).unprunable
    assert reasons["second"] == "its weights are complex numbers"
    assert "second, which multiplies by complex numbers" in reasons["first"]


def test_integer_weights_are_left_alone() -> None:
    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)
            self.weight = nn.Parameter(torch.randint(-9, 9, (16, 16)), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            whole = F.linear((9 * self.b(self.a(x).relu())).long(), self.weight)
            return self.c(whole.float())

    model, x = Integers().eval(), torch.randn(8, 8)
    assert lbyl.trace(model, x).unprunable["weight"] == "its weights are integers"
    assert lbyl.trace(model, x).names == ["a"]


def test_integers_are_not_averaged() -> None:
    torch.manual_seed(0)
    model = Net(real(), real(), lambda net, h: (h * net.count).relu()).eval()
    x = torch.randn(16, 8)
    result = lbyl.compress(model, x, 0.5, method="none")
    torch.testing.assert_close(
        result.model(x), silenced(model, result.plan)(x), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(lbyl.LbylError, match=r"count holds integers, which cannot be averaged"):
        lbyl.compress(model, x, 0.5, method="fold")


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="this torch has no float8")
def test_a_scale_in_a_byte_is_cut() -> None:
    class Byte(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 5)
            scale = torch.rand(16).to(torch.float8_e4m3fn)
            self.scale = nn.Parameter(scale, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu() * self.scale.float())

    torch.manual_seed(0)
    model, x = Byte().eval(), torch.randn(8, 8)
    result = lbyl.compress(model, x, 0.5, method="none")
    scale = result.model.get_parameter("scale").float()
    assert torch.equal(scale, model.scale.float()[result.plan.kept["a"]])


def test_not_a_number_is_found_in_complex_weights_too() -> None:
    model, x, _ = build("a complex scale")
    with torch.no_grad():
        model.turn[3] = torch.tensor(float("nan") * 1j)
    # Nothing is named a weight or a bias here, as torch's own layers name theirs.
    with pytest.raises(lbyl.LbylError, match=r"turn holds NaN"):
        lbyl.compress(model, x, 0.5, method="none")


def test_complex_inputs_are_painted_for_statistics() -> None:
    """Not the example over and over: what is written from one input fits no other."""

    class Magnitude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(torch.cat([x.real, x.imag], -1)).relu()).relu())

    torch.manual_seed(0)
    model, x = Magnitude().eval(), torch.randn(64, 4, dtype=torch.cfloat)
    with torch.no_grad():
        off = {
            method: float((lbyl.compress(model, x, 0.5, method=method).model(x) - model(x)).norm())
            for method in ("none", "echo")
        }
    assert off["echo"] < 0.8 * off["none"], off
