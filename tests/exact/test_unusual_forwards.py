"""Networks that compute their weights, differentiate, map over examples or are compiled in part.

Each is cut exactly or says why not; none ends in an error that only the library's authors read.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import lbyl

OLD: Any = nn.utils  # with functions that torch calls old


class Clipped(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.clamp(-1, 1)


def clipped(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Clipped())
    return layer


def clipped_bias(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "bias", Clipped())
    return layer


COMPUTED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral norm": parametrizations.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "hook of spectral norm": OLD.spectral_norm,
    "hook of weight norm": OLD.weight_norm,
    "clipped": clipped,
    "clipped bias": clipped_bias,
    "masked": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
}


def chain(computed: Callable[[nn.Module], nn.Module] | None, *at: int) -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3 if not i else 12, 12, 3) for i in range(4)]
    layers = [nn.Sequential(layer, nn.ReLU()) for layer in convolutions]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place in at if computed is not None else ():
            model[place][0] = computed(model[place][0])
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("at", "mode"), [((1,), True), ((0, 3), False)])
@pytest.mark.parametrize("name", COMPUTED)
def test_layers_that_compute_their_weights_stay_and_the_others_are_cut(
    name: str, at: tuple[int, ...], mode: bool, tmp_path: Path
) -> None:
    model, x = chain(COMPUTED[name], *at).train(mode), torch.randn(4, 3, 16, 16)
    result = lbyl.compress(model, x, 0.5)
    assert result.plan.pruned
    assert not {f"{place}.0" for place in at} & set(result.plan.pruned)
    assert all("computed in the forward" in result.graph.unprunable[f"{i}.0"] for i in at)
    lbyl.save(result, tmp_path / "slim")
    again = lbyl.load(tmp_path / "slim", chain(COMPUTED[name], *at).train(mode))
    assert torch.equal(again.eval()(x), result.model.eval()(x))


def energy() -> nn.Sequential:
    layers = [nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)]
    return nn.Sequential(*layers)


class Forces(nn.Module):
    """An energy and its gradient, found in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net, self.way = energy(), way

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.way == "with gradients":
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                e = self.net(x)
                return e, -torch.autograd.grad(e.sum(), x)[0]
        if self.way == "backward":
            x = x.detach().requires_grad_()
            e = self.net(x)
            e.sum().backward()
            assert x.grad is not None
            return e, -x.grad
        x = x if x.requires_grad else x.requires_grad_()
        e = self.net(x)
        force = -torch.autograd.grad(e.sum(), x, create_graph=self.way == "twice")[0]
        if self.way == "twice":
            return e, torch.autograd.grad(force.square().sum(), x)[0]
        return e, force


WAYS = ("with gradients", "plain", "backward", "twice")


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_differentiates_is_cut_exactly(way: str) -> None:
    torch.manual_seed(0)
    model, x = Forces(way).double().eval(), torch.randn(8, 6).double()
    result = lbyl.compress(model, x, 0.5, method="none")
    assert set(result.plan.pruned) == {"net.0", "net.2"}
    quiet = copy.deepcopy(model)
    for name, after in (("net.0", "net.2"), ("net.2", "net.4")):
        pruned = torch.ones(24, dtype=torch.bool)
        pruned[result.plan.kept[name]] = False
        quiet.get_parameter(f"{after}.weight").data[:, pruned] = 0
    for one, other in zip(quiet(x.clone()), result.model(x.clone())):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("refine", [0, 3])
def test_a_forward_that_differentiates_is_restored_and_refined(way: str, refine: int) -> None:
    torch.manual_seed(0)
    model, x = Forces(way).eval(), torch.randn(8, 6)
    result = lbyl.compress(model, x, 0.5, data=torch.randn(256, 6), refine=refine)
    bare = lbyl.compress(model, x, 0.5, method="none").model
    fresh = torch.randn(200, 6)
    wanted = model(fresh.clone())[0].detach()
    errors = [
        float((m(fresh.clone())[0].detach() - wanted).square().mean()) for m in (bare, result.model)
    ]
    assert errors[1] < 0.5 * errors[0]
    assert all(p.grad is None for p in model.parameters() if way != "backward")
    assert all(p.grad is None for p in lbyl.compress(model, x, 0.5).model.parameters())


class Mapped(nn.Module):
    """A part of it is mapped over examples, or differentiated, by `torch.func`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.inner = (
            nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6)),
            energy(),
        )
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.way == "vmap":
            x = torch.func.vmap(self.inner)(x)
        elif self.way == "vmap of a norm":
            x = torch.func.vmap(self.norm)(torch.stack([x, x])).sum(0)
        elif self.way == "grad":
            x = torch.func.vmap(torch.func.grad(lambda row: self.inner(row).sum()))(x)
        elif self.way == "jacobian":
            x = torch.func.vmap(torch.func.jacrev(self.inner))(x).flatten(1)
        else:
            x = torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))[1]
        return self.last(x)


@pytest.mark.parametrize("way", ["vmap", "vmap of a norm", "grad", "jacobian", "jvp"])
def test_what_torch_func_reads_is_named_and_stays(way: str) -> None:
    torch.manual_seed(0)
    model, x = Mapped(way).eval(), torch.randn(8, 6)
    model(x)
    result = lbyl.compress(model, x, 0.5)
    assert "last.0" in result.plan.pruned
    if way != "vmap of a norm":
        assert not any(name.startswith("inner") for name in result.plan.pruned)
        assert "torch.func" in result.graph.unprunable["inner.0"]
    assert result.model(x).shape == (8, 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_a_model_that_is_compiled_as_a_whole_is_refused_with_the_remedy(kind: str) -> None:
    model, x = chain(None).eval(), torch.randn(4, 3, 16, 16)
    whole: Any = torch.jit.script(model) if kind == "scripted" else torch.jit.trace(model, x)
    for verb in (lbyl.trace, lbyl.prepare, lbyl.compress, lbyl.estimate):
        with pytest.raises(lbyl.LbylError, match=r"compiled by torch\.jit.*was made from"):
            verb(whole, x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["scripted", "traced"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_part_that_is_compiled_keeps_its_channels(place: int, kind: str, tmp_path: Path) -> None:
    x = torch.randn(4, 3, 16, 16)

    def build() -> nn.Sequential:
        model = chain(None).eval()
        before = model[:place](x)
        part: Any = model[place]
        made = torch.jit.script(part) if kind == "scripted" else torch.jit.trace(part, before)
        model[place] = made
        return model

    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = lbyl.compress(model, x, 0.5)
    assert result.plan.pruned
    assert f"{place}.0" not in result.plan.pruned
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    lbyl.save(result, tmp_path / "slim")
    assert torch.equal(lbyl.load(tmp_path / "slim", build())(x), result.model(x))


class Particular(nn.Module):
    """Complains of what `complain` finds in its inputs."""

    def __init__(self, complain: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.net, self.complain = chain(None), complain

    def forward(self, x: Tensor) -> Tensor:
        self.complain(x)
        return self.net(x)


def many(x: Tensor) -> None:
    assert len(x) <= 8


def large(x: Tensor) -> None:
    if x.abs().max() > 2.5:
        raise ValueError("pixels are expected in [-2.5, 2.5]")


def keyed(x: Tensor) -> None:
    if len(x) > 8:
        raise KeyError("batch")


@pytest.mark.parametrize("complain", [many, large, keyed])
def test_an_error_of_the_model_itself_is_shown_with_its_place_and_inputs(
    complain: Callable[[Tensor], None],
) -> None:
    model = Particular(complain).eval()
    x = torch.randn(4, 3, 16, 16).clamp(-2, 2)
    with pytest.raises(lbyl.LbylError) as caught:
        lbyl.compress(model, x, 0.5)
    cause = caught.value.__cause__
    kind = {many: AssertionError, large: ValueError, keyed: KeyError}[complain]
    assert isinstance(cause, kind)
    assert "test_unusual_forwards.py" in str(caught.value)
    assert "(1024, 3, 16, 16) float32" in str(caught.value)
    assert "len(x) <= 8" in str(caught.value) or complain is not many
    if complain is large:  # own inputs are within bounds
        assert lbyl.compress(model, x, 0.5, data=x.repeat(16, 1, 1, 1)).plan.pruned


def test_an_error_on_the_example_names_the_line_that_raised_it() -> None:
    model = Particular(many).eval()
    with pytest.raises(lbyl.LbylError, match=r"does not run.*test_unusual_forwards.py:\d+") as e:
        lbyl.trace(model, torch.randn(16, 3, 16, 16).clamp(-2, 2).repeat(2, 1, 1, 1)[:, :, :2])
    assert isinstance(e.value.__cause__, Exception)
