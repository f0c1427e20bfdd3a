"""How far a network's outputs are from the original's."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lbyl.restoring.divergence import Divergence, half_sure, kl, relative_error
from support.networks import build, example


def moved(model: nn.Module, by: float) -> nn.Module:
    """A copy with weights somewhat changed."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    for p in other.parameters():
        p.data += by * p.data.std().nan_to_num() * torch.randn_like(p)
    return other


def test_a_network_does_not_diverge_from_itself_and_more_change_diverges_more() -> None:
    model, x = build("bottleneck"), example("bottleneck")
    images = torch.randn(16, *x.shape[1:])
    divergence = Divergence(model, [images])
    assert divergence(model) <= 1e-9
    little, much = (divergence(moved(model, by)) for by in (0.02, 0.5))
    assert 0 < little < much < math.inf
    assert not model.training or all(m.training for m in model.modules())


def test_kl_is_that_of_torch_and_does_not_depend_on_the_scale_of_scores() -> None:
    teacher, student = torch.randn(2, 50, 10, dtype=torch.float64)
    expected = F.kl_div(
        F.log_softmax(student / 2, 1), F.softmax(teacher / 2, 1), reduction="batchmean"
    )
    torch.testing.assert_close(kl(teacher, student, 2.0).mean(), expected)
    here = kl(teacher, student, half_sure(teacher)).mean()
    there = kl(100 * teacher, 100 * student, half_sure(100 * teacher)).mean()
    torch.testing.assert_close(here, there)


def test_half_sure_is_half_of_the_greatest_entropy() -> None:
    scores = 7 * torch.randn(200, 10, dtype=torch.float64)
    p = F.log_softmax(scores / half_sure(scores), 1)
    entropy = -(p.exp() * p).sum(1).mean()
    torch.testing.assert_close(float(entropy), 0.5 * math.log(10), rtol=1e-6, atol=0.0)


def test_other_outputs_go_by_the_relative_error() -> None:
    teacher = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    student = teacher + 0.1 * torch.randn_like(teacher)
    error = float(relative_error([teacher], [student]))
    assert 0.008 < error < 0.012
    torch.testing.assert_close(float(relative_error([9 * teacher], [9 * student])), error)
    assert float(relative_error([teacher], [student[:1]])) < 0.02  # as far as both go
    assert float(relative_error([teacher], [teacher[0]])) == math.inf


def test_outputs_that_are_no_numbers_are_infinitely_far() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 5), torch.nan)

    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    assert Divergence(model, [torch.randn(4, 3, 2, 2)], (False,))(Broken()) == math.inf
