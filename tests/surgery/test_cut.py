"""Cutting: the indices that stay, a copy that shares nothing, attributes that are true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.surgery.indices import pruned_of
from support.networks import Beside, build, example, fingerprint

conv = nn.Conv2d


def cut(model: nn.Module, x: Tensor, kept: dict[str, list[int]], **options: Any) -> Any:
    graph = lbyl.trace(model, x, **options)
    sizes = {name: graph[name].channels for name in kept}
    plan = lbyl.Plan({name: torch.tensor(k) for name, k in kept.items()}, sizes)
    return lbyl.compress(model, x, plan, method="none", **options).model


def test_a_cut_is_a_copy_with_true_attributes() -> None:
    model, kept = build("chain"), [0, 3, 4, 9]
    before = fingerprint(model)
    slim = cut(model, example("chain"), {"0": kept})
    assert (slim[0].out_channels, slim[1].num_features, slim[3].in_channels) == (4, 4, 4)
    assert torch.equal(slim[0].weight, model[0].weight[kept])
    assert torch.equal(slim[3].weight, model[3].weight[:, kept])
    for part in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(getattr(slim[1], part), getattr(model[1], part)[kept])
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {p.data_ptr() for p in slim.parameters()}
    assert fingerprint(model) == before
    assert pruned_of(10, torch.tensor(kept)).tolist() == [1, 2, 5, 6, 7, 8]


def test_columns_behind_a_flatten_follow_their_channel() -> None:
    model = build("flattened")
    slim = cut(model, example("flattened"), {"0": [1, 6]})
    columns = [*range(16, 32), *range(96, 112)]
    assert torch.equal(slim[5].weight, model[5].weight[:, columns])
    assert (slim[5].in_features, slim[5].out_features) == (32, 5)


class Conv1D(nn.Module):
    """As Hugging Face's GPT-2 has it: the weight is (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.ones(nf))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return out.view(*x.shape[:-1], self.nf)


plain = {"affine": False}
# Layers, kept channels of the first, and what the attributes of the others are afterwards.
TOLD: dict[str, tuple[list[nn.Module], list[int], dict[str, int]]] = {
    "depthwise": ([conv(3, 8, 1), conv(8, 8, 3, groups=8), conv(8, 4, 1)], [2, 5, 7],
                  {"1.groups": 3, "1.in_channels": 3, "1.out_channels": 3, "2.in_channels": 3}),
    "multiplied": ([conv(3, 8, 1), conv(8, 16, 3, groups=8), conv(16, 4, 1)], [2, 5, 7],
                   {"1.groups": 3, "1.in_channels": 3, "1.out_channels": 6, "2.in_channels": 6}),
    "grouped": ([conv(3, 12, 1), conv(12, 8, 3, groups=4), conv(8, 4, 1)], [0, 1, 3],
                {"0.out_channels": 9, "1.groups": 3, "1.in_channels": 9, "1.out_channels": 6}),
    "transposed": ([nn.ConvTranspose2d(3, 8, 2), nn.ReLU(), nn.ConvTranspose2d(8, 5, 3)], [1, 4, 7],
                   {"0.in_channels": 3, "0.out_channels": 3, "2.in_channels": 3,
                    "2.out_channels": 5}),
    "grouped transposed": ([conv(3, 8, 1), nn.ConvTranspose2d(8, 12, 2, groups=4), conv(12, 2, 1)],
                           [0, 2, 3], {"1.groups": 3, "1.in_channels": 6, "1.out_channels": 9}),
    "without weights": ([conv(3, 8, 1), nn.BatchNorm2d(8, **plain), conv(8, 2, 1)], [0, 5],
                        {"1.num_features": 2}),
    "of the batch": ([conv(3, 8, 1), nn.BatchNorm2d(8, track_running_stats=False), conv(8, 2, 1)],
                     [0, 5], {"1.num_features": 2}),
    "group norm": ([conv(3, 12, 1), nn.GroupNorm(4, 12), nn.ReLU(), conv(12, 2, 1)], [0, 2],
                   {"1.num_channels": 6, "1.num_groups": 2, "3.in_channels": 6}),
    "slopes": ([conv(3, 8, 1), nn.PReLU(8), conv(8, 2, 1)], [1, 2, 6], {"1.num_parameters": 3}),
    "turned": ([Conv1D(8, 6), nn.GELU(), Conv1D(5, 8)], [1, 2, 6],
               {"0.nf": 3, "0.nx": 6, "2.nf": 5, "2.nx": 3}),
    "linear": ([nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)], [1, 2, 6],
               {"0.in_features": 6, "0.out_features": 3, "2.in_features": 3, "2.out_features": 5}),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_attributes_tell_the_sizes_that_tensors_have(name: str) -> None:
    layers, kept, told = TOLD[name]
    model = nn.Sequential(*layers).double().eval()
    x = torch.randn(2, 6) if name in ("turned", "linear") else torch.randn(2, 3, 6, 6)
    slim = cut(model, x.double(), {"0": kept})
    found = {attribute: _attribute(slim, attribute) for attribute in told}
    assert found == told and slim(x.double()).shape == model(x.double()).shape


def _attribute(model: nn.Module, path: str) -> int:
    module, name = path.split(".")
    return int(getattr(model.get_submodule(module), name))


@dataclass(frozen=True)
class These(lbyl.criteria.Criterion):
    """Keeps channels by name."""

    name = "these"  # type: ignore[assignment]
    kept: tuple[int, ...] = ()

    def select(self, weights: Any, count: int, statistics: Any) -> Tensor:
        return torch.tensor(self.kept)


WORTH = [1.0, 2, 9, 3, 5, 5, 8, 1, 7, 6, 4, 4]


@pytest.mark.parametrize(
    ("worth", "kept", "complete"),
    [
        (WORTH, (1, 5, 9), [1, 5, 9]),  # what leaves no layer empty stays as it is
        (WORTH, (6, 7, 8, 9), [2, 6, 8, 9]),  # nothing of the left: its 2 comes in, and 7 goes
        (list(range(12)), (5,), [3, 5]),  # where every kept one is needed there is one more
    ],
)
def test_every_layer_keeps_a_channel_that_it_needs(
    worth: list[float], kept: tuple[int, ...], complete: list[int]
) -> None:
    model = Beside()
    made = torch.zeros(12, 6)
    made[:, 0] = torch.tensor(worth)  # the norms of what makes a channel of the sum
    for layer, own in ((model.left, made[:4]), (model.right, made[4:]), (model.sum, 0 * made)):
        layer.weight.data.copy_(own)
    prepared = lbyl.prepare(model, torch.zeros(2, 6), residual=True)
    (unit,) = prepared.graph.units
    plan = prepared.plan(1 - len(kept) / 12, criterion=These(kept), method="none")
    assert plan.kept[unit.name].tolist() == complete


# ------------------------------------------------------------- precision and order of memory


def network() -> nn.Module:
    return nn.Sequential(
        conv(3, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), conv(12, 10, 3, bias=False),
        nn.BatchNorm2d(10), nn.ReLU(), conv(10, 6, 3), nn.Flatten(), nn.Linear(24, 4),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_comes_back_in_the_precision_it_had(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    result = lbyl.compress(model, torch.zeros(2, 3, 8, 8, dtype=dtype), 0.5, data=32)
    before, after = ({n: t.dtype for n, t in m.state_dict().items()} for m in (model, result.model))
    assert before == after
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    assert result.model(x).dtype == dtype and bool(result.model(x).isfinite().all())


def test_weights_with_channels_innermost_come_back_so() -> None:
    model = network()
    plain = lbyl.compress(model, torch.zeros(2, 3, 8, 8), {"*": 0.5}, data=32).model
    model = model.to(memory_format=torch.channels_last)
    slim = lbyl.compress(model, torch.zeros(2, 3, 8, 8), {"*": 0.5}, data=32).model
    for name, weight in slim.named_parameters():
        if weight.dim() == 4:
            assert weight.is_contiguous(memory_format=torch.channels_last), name
    assert plain[3].weight.is_contiguous()
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(slim(x), plain(x), rtol=1e-3, atol=1e-4)
