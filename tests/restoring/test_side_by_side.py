"""Variants of a network that run together answer as each does alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lbyl.restoring.divergence import Divergence
from lbyl.restoring.scratch import Scratch
from lbyl.restoring.side_by_side import run_side_by_side
from lbyl.torchkit.run import call_model
from lbyl.torchkit.tensors import tensors
from support.networks import build, example


def changed(model: nn.Module, count: int) -> list[dict[str, Tensor]]:
    """Variants of a network, each with other values of some parameters and running statistics."""
    generator = torch.Generator().manual_seed(0)
    names = [n for n, t in tensors(model).items() if t.is_floating_point()]
    made = []
    for i in range(count):
        mine = {n: tensors(model)[n].detach() for n in names[i::count]}
        made.append(
            {n: t * (1 + 0.2 * torch.rand(t.shape, generator=generator)) for n, t in mine.items()}
        )
    return made


@pytest.mark.parametrize("name", ["bottleneck", "basic", "dense"])
def test_each_variant_answers_as_alone(name: str) -> None:
    model, x = build(name), example(name)
    x = torch.randn(3, *x.shape[1:], generator=torch.Generator().manual_seed(1))
    variants = changed(model, 4)
    together = run_side_by_side(model, variants, x, 3)
    scratch = Scratch(model)
    for values, part in zip(variants, together.tensor_split(4), strict=True):
        with scratch.holding(values) as alone, torch.no_grad():
            expected = call_model(alone.eval(), x)
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(part, together[:3]) or values is variants[0]


class LengthFirst(nn.Module):
    """Rows of its layer are positions, not examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:  # (examples, positions, 4)
        out: Tensor = self.layer(x.transpose(0, 1)).transpose(0, 1).mean(1)
        return out


class Computed(nn.Module):
    """Its weight is computed, so that no call reads it and the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) @ self.weight.exp()


@pytest.mark.parametrize("kind", [LengthFirst, Computed])
def test_networks_whose_rows_are_no_examples_are_not_run_together(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    for positions in (5, 32):  # as many as examples of all variants together
        judge = Divergence(model, [torch.randn(8, positions, 4)], (False,))
        assert judge.of_variants([*changed(model, 1), {}, {}, {}]) is None
