"""All methods × criteria × corrections on what is degenerate: finite, or one clear error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl


class Small(nn.Module):
    """Three convolutions, two with BatchNorm, and whatever `between` does before the last layer."""

    def __init__(self, affine: bool = True, running: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"affine": affine, "track_running_stats": running}
        self.first, self.norm = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, **options)
        self.second, self.other = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6, **options)
        self.third, self.last = nn.Conv2d(6, 4, 1), nn.Linear(4, 3)
        self.between: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = self.third(self.other(self.second(x)).relu())
        out: Tensor = self.last(self.between(x).mean((2, 3)))
        return out


def trained(**options: bool) -> Small:
    """Running statistics as training leaves them."""
    model = Small(**options).train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(32, 3, 6, 6))
    return model.eval()


Change = Callable[[Small], Any]


def scaled(factor: float, *names: str) -> Change:
    def change(model: Small) -> None:
        for name, parameter in model.named_parameters():
            if not names or name in names:
                parameter *= factor

    return change


def dead(model: Small) -> None:
    model.first.weight[:3] = 0
    model.second.weight[:3] = 0


def switched_off(model: Small) -> None:
    model.norm.weight[::2] = 0
    model.other.weight.neg_()


def alike(model: Small) -> None:
    model.first.weight[3:] = 2 * model.first.weight[:3]
    model.second.weight[1:] = model.second.weight[:1]


def overflowing(model: Small) -> None:
    model.first.weight.mul_(1e37)
    model.second.weight.mul_(1e30)
    model.norm.running_var.fill_(1e-30)
    model.norm.eps = 0.0


def without_variance(model: Small) -> None:
    for norm in (model.norm, model.other):
        norm.running_var[::2] = 0


def behind_reciprocal(model: Small) -> None:
    model.between = torch.reciprocal


def hooked(model: Small) -> None:
    model.second.register_forward_hook(lambda module, args, out: 1.5 * out)
    model.first.register_forward_pre_hook(lambda module, args: (2 * args[0],))


CASES: dict[str, Change] = {
    "healthy": lambda model: None,
    "weights of 1e20": scaled(1e20, "first.weight", "third.weight"),
    "weights of 1e-20": scaled(1e-20, "first.weight", "third.weight"),
    "everything of 1e20": scaled(1e20),
    "everything of 1e-20": scaled(1e-20),
    "gains of 1e20": scaled(1e20, "norm.weight"),
    "gains of 1e-20": scaled(1e-20, "norm.weight"),
    "dead filters": dead,
    "gains of 0 and below": switched_off,
    "collinear and equal filters": alike,
    "infinite activations": overflowing,
    "variances of 0": without_variance,
    "behind a reciprocal": behind_reciprocal,
    "hooks": hooked,
    "frozen": lambda model: model.requires_grad_(False),
    "training": lambda model: model.train(),
    "float16": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
}
METHODS, CRITERIA = lbyl.methods.names(), lbyl.criteria.names()
CORRECTIONS = ("none", "mean", "mean+variance", "recalibrate")


def made(case: str) -> Small:
    if case in ("no affine", "no running statistics"):
        return trained(affine=case != "no affine", running=case == "no affine")
    model = trained()
    with torch.no_grad():
        CASES[case](model)
    return model


def prepared(case: str) -> lbyl.Prepared:
    model = made(case)
    images = torch.randn(16, 3, 6, 6).to(model.first.weight.dtype)
    return lbyl.prepare(model, images[:1], data=images)


def compressed(network: lbyl.Prepared, method: str, criterion: str, correction: str) -> None:
    chosen = replace(lbyl.methods.resolve(method), correction=correction)
    given = None if chosen.chooses else criterion
    result = network.compress(0.5, criterion=given, method=chosen)
    assert all(v.isfinite().all() for v in result.model.state_dict().values())
    assert result.after.parameters < result.before.parameters


def some(shift: int) -> Iterator[tuple[str, str, str]]:
    """Half of the methods; another criterion and correction for each, and for each case."""
    for i, method in enumerate(METHODS):
        if (i + shift) % 2 == 0:
            yield method, CRITERIA[(i + shift) % len(CRITERIA)], CORRECTIONS[(i + shift) % 4]


NAMES = [*CASES, "no affine", "no running statistics"]


@pytest.mark.parametrize("case", NAMES)
def test_some_of_all_combinations_are_finite(case: str) -> None:
    network = prepared(case)
    for method, criterion, correction in some(NAMES.index(case)):
        compressed(network, method, criterion, correction)


@pytest.mark.slow
@pytest.mark.parametrize("case", NAMES)
def test_all_combinations_are_finite(case: str) -> None:
    network = prepared(case)
    for combination in itertools.product(METHODS, CRITERIA, CORRECTIONS):
        compressed(network, *combination)


@pytest.mark.parametrize(("variance", "eps"), [(-1.0, 1e-5), (0.0, 0.0), (-1e-3, 0)])
def test_a_batchnorm_that_gives_no_numbers_is_refused(variance: float, eps: float) -> None:
    model = trained()
    model.other.running_var[2], model.other.eps = variance, eps
    with pytest.raises(lbyl.LbylError, match=r"other\.running_var plus eps is not positive"):
        lbyl.trace(model, torch.zeros(1, 3, 6, 6))


@pytest.mark.parametrize("batch", [1, 3])
def test_networks_that_take_one_size_of_batch_are_run_in_it(batch: int) -> None:
    model = trained()
    model.between = lambda x: x.view(batch, 4, *x.shape[2:])
    images = torch.randn(batch, 3, 6, 6)
    result = lbyl.compress(model, images, 0.3, data=10, refine=1)
    assert result.corrections.rewritten == 2
    assert result.model(images).shape == (batch, 3)


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_quantised_layers_are_unprunable_with_a_reason() -> None:
    quantisation = pytest.importorskip("torch.ao.quantization")
    plain = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
    model = quantisation.quantize_dynamic(plain, {"4"}, dtype=torch.qint8)
    graph = lbyl.trace(model, torch.zeros(2, 6))
    assert graph.names == ["0"] and "quantised" in graph.unprunable["4"]
    result = lbyl.compress(model, torch.zeros(2, 6), 0.5, data=torch.randn(16, 6))
    assert result.model(torch.randn(2, 6)).shape == (2, 4)


@pytest.mark.parametrize("scale", [1e8, 1e14, 1e20])
def test_what_lbyl_delivers_stays_small_at_every_scale(scale: float) -> None:
    """Terms of rank one, larger than all others by the square of the scale, must not cancel."""
    model = trained()
    with torch.no_grad():
        model.norm.weight *= scale
    prepared = lbyl.prepare(model, torch.zeros(1, 3, 6, 6), include="first")
    largest = float(model.second.weight.detach().abs().max())
    for kept in itertools.islice(itertools.combinations(range(6), 3), 0, None, 4):
        plan = lbyl.Plan({"first": torch.tensor(kept)}, {"first": 6})
        slim = prepared.compress(plan, method="lbyl").model
        assert float(slim.second.weight.detach().abs().max()) < 1e3 * largest
