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
from support.fuzz.architectures import draw
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


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", ["bottleneck", "basic", "dense"])
def test_each_variant_answers_as_alone(name: str, at_once: bool) -> None:
    model, x = build(name), example(name)
    x = torch.randn(3, *x.shape[1:], generator=torch.Generator().manual_seed(1))
    variants = [{}, *changed(model, 4)]  # the first has nothing that differs
    together = run_side_by_side(model, variants, x, 3, at_once)
    scratch = Scratch(model)
    for values, part in zip([{}, *variants], together.tensor_split(6), strict=True):
        with scratch.holding(values) as alone, torch.no_grad():
            expected = call_model(alone.eval(), x)
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)
        assert torch.allclose(part, together[:3]) == (not values)


ROWS: list[int] = []  # not kept on the network: what a run writes there is undone


class Counting(nn.Module):
    """How many rows each of its layers gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
            ROWS.append(len(x))
        return x


def test_a_variant_costs_only_the_layers_behind_its_change() -> None:
    model = Counting().eval()
    # Backwards, so that variants differ in another order than they are given in.
    variants = [{f"layers.{i}.weight": torch.randn(4, 4)} for i in (3, 1, 0)]
    x = torch.randn(2, 4)
    ROWS.clear()
    together = run_side_by_side(model, variants, x, 2)
    assert ROWS == [4, 6, 6, 8]
    for values, part in zip([{}, *variants], together.tensor_split(4), strict=True):
        with Scratch(model).holding(values) as alone, torch.no_grad():
            torch.testing.assert_close(part, alone(x))


class Early(nn.Module):
    """Has something from before a layer that differs: rows, or values that it changes in place."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        early = torch.cat([x, x[:, :2]], 1)
        zeros = torch.zeros(len(x), 6)
        if self.what == "+=":
            early += self.first(x)
        elif self.what == "add_":
            early.add_(self.first(x))  # what it gives is dropped
        elif self.what == "copy_":
            early.copy_(self.first(x))
        else:
            early = zeros + self.first(x)
        return self.last(early)  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["+=", "add_", "copy_", "rows"])
def test_networks_that_look_back_have_all_rows_from_the_beginning(what: str) -> None:
    torch.manual_seed(0)
    model = Early(what).eval()
    x = torch.randn(5, 4)
    variants = changed(model, 4)
    judge = Divergence(model, [x], (False,))
    told = judge.of_variants(variants)
    assert told is not None and judge._ways == (what != "+=",)
    for values, one in zip(variants, told, strict=True):
        with judge.scratch.holding(values) as alone:
            assert judge(alone) == pytest.approx(one, rel=1e-4)


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


class Keeping(nn.Module):
    """Writes what it is given into a buffer, and goes on with that."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(rows, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.seen.copy_(x) + self.first(x))  # type: ignore[no-any-return]


def test_nothing_is_left_on_what_the_model_holds() -> None:
    torch.manual_seed(0)
    model = Keeping(5).eval()
    variants = [{"last.weight": torch.randn(3, 4)}]
    run_side_by_side(model, variants, torch.randn(5, 4), 5)
    assert not any(vars(t) for t in tensors(model).values())


def test_random_networks_run_together_or_not_at_all() -> None:
    """Whatever a network does with its rows: what is told is what each variant gives alone."""
    told_of = 0
    for seed in range(30):
        drawn = draw(seed)
        model = drawn.model.eval()
        names = [n for n, t in tensors(model).items() if t.is_floating_point() and t.dim() > 1]
        variants = [
            {n: 1.3 * tensors(model)[n].detach()} for n in names[:: max(1, len(names) // 4)]
        ]
        variants += [{**variants[0], **variants[-1]}, {}]
        judge = Divergence(model, [drawn.inputs], (False,))
        told = judge.of_variants(variants)
        told_of += told is not None
        for values, one in zip(variants, told or ()):
            with judge.scratch.holding(values) as alone:
                assert one == pytest.approx(judge(alone), rel=0.02, abs=1e-7), seed
    assert told_of > 15
