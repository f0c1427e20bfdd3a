"""What a budget allows is what is returned, counted on the networks themselves."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import lbyl


class Unheard(nn.Module):
    """A large head that only training runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.c = nn.Linear(32, 4, bias=False)
        self.aside = nn.Linear(8, 100)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(self.b(self.a(x).relu()).relu())
        return y + self.aside(x).mean() if self.training else y


class Bare(nn.Module):
    """Consumers without biases, each of which gets one."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        widths = (4, 12, 12, 12, 12)
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(12) if norm else nn.Identity() for _ in "abcd")
        self.out = nn.Linear(12, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms):
            x = norm(layer(x)).relu()
        return self.out(x)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("fraction", [0.4, 0.5, 0.6, 0.75, 0.9])
@pytest.mark.parametrize("kind", ["aside", "bare", "norms"])
def test_no_more_parameters_are_returned_than_asked_for(kind: str, fraction: float) -> None:
    torch.manual_seed(0)
    model = Unheard() if kind == "aside" else Bare(norm=kind == "norms")
    x = torch.randn(16, 8 if kind == "aside" else 4)
    if kind == "aside" and fraction < 0.45:  # two fifths are the head's
        with pytest.raises(lbyl.LbylError, match="cannot be met by pruning alone"):
            lbyl.compress(model.eval(), x, lbyl.Budget(params=fraction))
        return
    result = lbyl.compress(model.eval(), x, lbyl.Budget(params=fraction))
    assert count(result.model) <= fraction * count(model)
    assert count(result.model) > 0.75 * fraction * count(model)
    assert result.after.parameters == count(result.model)


@pytest.mark.parametrize("what", ["macs", "params"])
def test_what_cannot_be_met_is_said_before_the_work(what: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 64, 3)).eval()
    stages: list[str] = []
    with pytest.raises(lbyl.LbylError, match=rf"{what}=0\.01 cannot be met by pruning alone"):
        lbyl.compress(
            model,
            torch.randn(1, 3, 64, 64),
            lbyl.Budget(**{what: 0.01}),
            progress=lambda stage, step, steps: stages.append(stage),
        )
    assert not stages, "nothing was collected or tried"


def test_a_plan_that_keeps_more_than_asked_is_made_smaller() -> None:
    """Behind a concatenation a layer keeps one input at least, whatever a budget says."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList(nn.Linear(6, n) for n in (2, 3, 20))
            self.out = nn.Linear(25, 12)
            self.last = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.cat([way(x) for way in self.ways], 1).relu()
            return self.last(self.out(h).relu())

    torch.manual_seed(0)
    model, x = Joined().eval(), torch.randn(8, 6)
    for fraction in (0.3, 0.45, 0.6):
        for what, size in (("params", "parameters"), ("macs", "macs")):
            result = lbyl.compress(model, x, lbyl.Budget(**{what: fraction}))
            assert getattr(result.after, size) <= fraction * getattr(result.before, size)
