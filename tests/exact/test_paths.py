"""Layers that the example does not reach keep their inputs, unless each path has an example."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lbyl


class Tasks(nn.Module):
    """A trunk and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.middle = nn.Linear(8, 16), nn.Linear(16, 24)
        self.heads = nn.ModuleDict({"a": nn.Linear(24, 3), "b": nn.Linear(24, 5)})

    def forward(self, x: Tensor, task: str = "a") -> Tensor:
        return self.heads[task](self.middle(self.trunk(x).relu()).relu())


class Decides(nn.Module):
    """Which layer runs depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.middle = nn.Linear(8, 12), nn.Linear(12, 16)
        self.up, self.down = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.trunk(x).relu()).relu()
        return self.up(h) if x.sum() > 0 else self.down(h)


class Domains(nn.Module):
    """A BatchNorm for each domain behind one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 4, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(12), nn.BatchNorm2d(12)])

    def forward(self, x: Tensor, domain: int = 0) -> Tensor:
        return self.out(self.norms[domain](self.conv(x)).relu())


class MaskToken(nn.Module):
    """A token in the place of masked ones, which only training asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(6, 10), nn.Linear(10, 3)
        self.mask_token = nn.Parameter(torch.randn(1, 1, 10))

    def forward(self, x: Tensor, masked: Tensor | None = None) -> Tensor:
        h = self.embed(x)
        if masked is not None:
            h = torch.where(masked[..., None], self.mask_token, h)
        return self.out(h.relu())


def test_a_head_of_another_task_keeps_what_it_reads() -> None:
    torch.manual_seed(0)
    model, x = Tasks().eval(), torch.randn(4, 8)
    result = lbyl.compress(model, x, 0.5, method="none")
    assert result.model(x, "b").shape == (4, 5)
    assert list(result.plan.pruned) == ["trunk"]
    assert "heads.b.weight, which the example does not reach" in result.graph.unprunable["middle"]


def test_an_iterator_of_examples_reaches_every_path() -> None:
    torch.manual_seed(0)
    model, x = Tasks().eval(), torch.randn(4, 8)
    result = lbyl.compress(model, iter([(x, "a"), (x, "b")]), 0.5, method="none")
    assert sorted(result.plan.pruned) == ["middle", "trunk"]
    quiet = copy.deepcopy(model)
    with torch.no_grad():
        for name, readers in (("trunk", [quiet.middle]), ("middle", [*quiet.heads.values()])):
            gone = torch.ones(result.plan.channels[name], dtype=torch.bool)
            gone[result.plan.kept[name]] = False
            for reader in readers:
                reader.weight[:, gone] = 0
    for task in "ab":
        torch.testing.assert_close(result.model(x, task), quiet(x, task))


def test_several_examples_serve_restoration() -> None:
    torch.manual_seed(0)
    model, x = Tasks().eval(), torch.randn(4, 8)
    bare, restored = (
        lbyl.compress(model, iter([(x, "a"), (x, "b")]), {"*": 0.5}, method=m, criterion="l2")
        for m in ("none", "echo")
    )
    data = torch.randn(500, 8, generator=torch.Generator().manual_seed(1))
    for task in "ab":
        errors = [
            (r.model(data, task) - model(data, task)).square().mean() for r in (bare, restored)
        ]
        assert errors[1] < 0.7 * errors[0]


def test_a_list_is_one_argument() -> None:
    class Stacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, parts: list[Tensor]) -> Tensor:
            return self.b(self.a(torch.stack(parts)).relu())

    parts = [torch.randn(8), torch.randn(8)]
    assert lbyl.trace(Stacks().eval(), (parts,)).names == ["a"]


def test_examples_of_different_batch_sizes_are_refused() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(lbyl.LbylError, match="same batch size for each path"):
        lbyl.compress(Tasks(), iter([(x, "a"), (x[:2], "b")]), 0.5)
    with pytest.raises(lbyl.LbylError, match="same batch size for each path"):
        lbyl.compress(Tasks(), iter([]), 0.5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_branch_that_values_decide_keeps_its_inputs(sign: float) -> None:
    torch.manual_seed(0)
    model, x = Decides().eval(), torch.ones(4, 8)
    result = lbyl.compress(model, sign * x, 0.5, method="none")
    assert list(result.plan.pruned) == ["trunk"]
    for each in (x, -x):
        assert result.model(each).shape == (4, 3)


def test_both_branches_are_pruned_with_an_example_of_each() -> None:
    torch.manual_seed(0)
    model, x = Decides().eval(), torch.ones(4, 8)
    result = lbyl.compress(model, iter([x, -x]), 0.5, method="none")
    assert sorted(result.plan.pruned) == ["middle", "trunk"]
    for each in (x, -x):
        assert result.model(each).shape == (4, 3)


def test_a_norm_of_another_domain_keeps_its_channels() -> None:
    torch.manual_seed(0)
    model, x = Domains().eval(), torch.randn(2, 3, 8, 8)
    with pytest.raises(lbyl.LbylError, match=r"norms\.1\.\w+, which the example does not reach"):
        lbyl.compress(model, x, 0.5)
    result = lbyl.compress(model, iter([(x, 0), (x, 1)]), 0.5)
    assert [len(result.model.norms[i].weight) for i in (0, 1)] == [6, 6]
    assert result.model(x, 1).shape == model(x, 1).shape


def test_a_vector_that_is_not_reached_is_named() -> None:
    torch.manual_seed(0)
    result = lbyl.compress(MaskToken().eval(), torch.randn(2, 5, 6), 0.5)
    assert any(line.startswith("mask_token:") for line in result.fallbacks)
    assert "mask_token" in str(result)
    whole = lbyl.compress(MaskToken().eval(), torch.randn(2, 5, 6), 0.0)
    assert not any(line.startswith("mask_token:") for line in whole.fallbacks)


def test_layers_elsewhere_that_are_not_reached_pin_nothing() -> None:
    """What a layer cannot be handed, it cannot read, though it has the same width."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu())

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Inner(), Inner()

        def forward(self, x: Tensor, other: bool = False) -> Tensor:
            return self.other(x) if other else self.one(x)

    assert lbyl.trace(Towers().eval(), torch.randn(2, 8)).names == ["one.a"]


class Derived(nn.Module):
    """A second head that reads something made of the features, not the features themselves."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.after = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 7, 3, padding=1)
        self.out, self.kind = nn.Linear(7, 4), kind
        columns = {"flattened": 12 * 36, "joined": 12 + 7, "doubled": 24, "half": 6, "square": 144}
        if kind == "condition":
            self.other: nn.Module = nn.Linear(3, 24)
        else:
            self.other = nn.Sequential(nn.Linear(columns[kind], 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, x: Tensor, aside: bool = False) -> Tensor:
        h = self.conv(x).relu()
        if aside and self.kind == "condition":
            scale, shift = self.other(x.mean((2, 3))).chunk(2, 1)
            h = h * scale[..., None, None] + shift[..., None, None]
        y = self.after(h).relu()
        if not aside or self.kind == "condition":
            return self.out(y.mean((2, 3)))
        pooled = h.mean((2, 3))
        read = {
            "flattened": lambda: h.flatten(1),
            "joined": lambda: torch.cat([pooled, y.mean((2, 3))], 1),
            "doubled": lambda: torch.cat([pooled, h.amax((2, 3))], 1),
            "half": lambda: pooled[:, : pooled.shape[1] // 2],
            "square": lambda: (pooled[:, :, None] * pooled[:, None]).flatten(1),
        }
        return self.other(read[self.kind]())


@pytest.mark.parametrize("kind", ["flattened", "joined", "doubled", "half", "square", "condition"])
def test_a_head_that_reads_what_is_made_of_features_keeps_them(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Derived(kind).eval(), torch.randn(2, 3, 6, 6)
    try:
        result = lbyl.compress(model, x, {"*": 0.5}, method="none")
    except lbyl.LbylError as error:
        assert "which the example does not reach" in str(error)
        return
    quiet = copy.deepcopy(model)
    if "after" in result.plan.pruned:
        gone = torch.ones(7, dtype=torch.bool)
        gone[result.plan.kept["after"]] = False
        with torch.no_grad():
            quiet.out.weight[:, gone] = 0
    assert "conv" not in result.plan.pruned
    for aside in (False, True):
        torch.testing.assert_close(result.model(x, aside), quiet(x, aside))


class Encoder(nn.Module):
    """Two layers; it keeps what the first gives."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(6, 12), nn.Linear(12, 16), how
        self.seen: object = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        self.seen = {"list": [h], "dict": {0: h}, "alone": h}[self.how]
        return self.second(h).relu()


class Keeping(nn.Module):
    """A second head that reads what the encoder keeps."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.encoder, self.head, self.aside = Encoder(how), nn.Linear(16, 3), nn.Linear(12, 2)

    def forward(self, x: Tensor, aside: bool = False) -> Tensor:
        y = self.encoder(x)
        seen = self.encoder.seen
        return (
            self.aside(seen[0] if isinstance(seen, (list, dict)) else seen)
            if aside
            else self.head(y)
        )


@pytest.mark.parametrize("how", ["list", "dict", "alone"])
def test_features_that_a_module_keeps_stay_for_a_head_that_is_not_reached(how: str) -> None:
    torch.manual_seed(0)
    model, x = Keeping(how).eval(), torch.randn(4, 6)
    result = lbyl.compress(model, x, 0.5, method="none")
    assert list(result.plan.pruned) == ["encoder.second"]
    torch.testing.assert_close(result.model(x, True), model(x, True))


def test_a_layer_that_no_code_names_leaves_the_others_prunable() -> None:
    class LeftOver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(8, 30), nn.Linear(30, 4), nn.Linear(101, 9)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu())

    assert lbyl.trace(LeftOver().eval(), torch.randn(2, 8)).names == ["a"]


class NormsByColour(nn.Module):
    """The colour of images decides which norms they go through."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.first, self.other = nn.Conv2d(3, 6, 3, padding=1), other
        self.norm, self.out = nn.BatchNorm2d(6), nn.Linear(6, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)) if x[:, 0].mean() <= 1e-6 else self.other(x)
        return self.last(self.out(h.mean((2, 3))).relu())


OTHER: dict[str, Callable[[], nn.Module]] = {
    "none": lambda: nn.Conv2d(3, 6, 1),
    "wider": lambda: nn.Sequential(nn.Conv2d(3, 9, 1), nn.BatchNorm2d(9), nn.Conv2d(9, 6, 1)),
    "smaller map": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6)),
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_images_are_drawn_for_a_network_that_takes_them_through_several_norms(
    other: str, sign: float
) -> None:
    torch.manual_seed(0)
    model, x = NormsByColour(OTHER[other]()).eval(), torch.ones(2, 3, 12, 12)
    result = lbyl.compress(model, x * sign, {"out": 0.5}, method="echo")
    assert "out" in result.plan.pruned
    if other != "smaller map":  # whose norm is as wide as the other
        with pytest.raises(lbyl.LbylError, match="BatchNorm"):
            lbyl.compress(model, x * sign, {"out": 0.5}, method="echo", data="inversion")


class Late(nn.Module):
    """Something behind the middle of which the example has no need."""

    def __init__(self, aside: nn.Module) -> None:
        super().__init__()
        self.trunk, self.middle = nn.Linear(8, 12), nn.Linear(12, 16)
        self.aside, self.out = aside, nn.Linear(16, 3)

    def forward(self, x: Tensor, aside: bool | None = None) -> Tensor:
        h = self.middle(self.trunk(x).relu()).relu()
        asked = bool(x.sum() > 0) if aside is None else aside
        return self.out(self.aside(h) if asked else h)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm1d(16, affine=False),
    "LayerNorm": lambda: nn.LayerNorm(16, elementwise_affine=False),
    "GroupNorm": lambda: nn.GroupNorm(4, 16, affine=False),
    "one of a list": lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm1d(16, affine=False)),
}


def silenced(model: nn.Module, result: lbyl.Result, readers: dict[str, str]) -> nn.Module:
    """A copy in which the one reader of every layer hears no pruned channel."""
    quiet = copy.deepcopy(model)
    with torch.no_grad():
        for name, kept in result.plan.kept.items():
            gone = torch.ones(result.plan.channels[name], dtype=torch.bool)
            gone[kept] = False
            quiet.get_submodule(readers[name]).weight[:, gone] = 0
    return quiet


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("by_value", [True, False])
def test_a_norm_without_weights_that_is_not_reached_keeps_its_channels(
    norm: str, by_value: bool
) -> None:
    torch.manual_seed(0)
    model, x = Late(NORMS[norm]()).eval(), torch.rand(4, 8)
    result = lbyl.compress(model, -x if by_value else (x, False), 0.5, method="none")
    assert list(result.plan.pruned) == ["trunk"]
    assert "which the example does not reach" in result.graph.unprunable["middle"]
    quiet = silenced(model, result, {"trunk": "middle"})
    torch.testing.assert_close(result.model(x, True), quiet(x, True))


class Scale(nn.Module):
    """A vector of its own, as a parameter or a buffer, that values ask for."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.trunk, self.middle = nn.Linear(8, 12), nn.Linear(12, 16)
        self.out = nn.Linear(16, 3)
        scale = torch.randn(16)
        if is_buffer:
            self.register_buffer("scale", scale)
        else:
            self.scale = nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.trunk(x).relu()).relu()
        return self.out(h * self.scale if x.mean() > 0 else h)


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_vector_that_values_ask_for_keeps_its_channels(is_buffer: bool) -> None:
    torch.manual_seed(0)
    model, x = Scale(is_buffer).eval(), torch.rand(4, 8)
    result = lbyl.compress(model, -x, 0.5)
    assert list(result.plan.pruned) == ["trunk"]
    bare = lbyl.compress(model, -x, 0.5, method="none")
    torch.testing.assert_close(bare.model(x), silenced(model, bare, {"trunk": "middle"})(x))


class JoinsFixed(nn.Module):
    """A second head reads features beside others that carry no channels.

    How many those are together is a multiple of the outputs in two cases.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
        self.second = nn.Linear(8, 10)
        self.hidden, self.out, self.kind = nn.Linear(10, 14), nn.Linear(14, 3), kind
        self.aside = nn.Linear({"normalised": 18, "input": 16, "three": 24}[kind], 2)

    def forward(self, x: Tensor, aside: bool = False) -> Tensor:
        normalised = self.first(x)
        last = self.second(normalised).relu()
        if aside:
            three = [x, normalised, last]
            parts = {"normalised": three[1:], "input": three[::2], "three": three}[self.kind]
            return self.aside(torch.cat(parts, 1))
        return self.out(self.hidden(last).relu())


@pytest.mark.parametrize("kind", ["normalised", "input", "three"])
def test_features_read_beside_what_carries_no_channel_stay_for_a_head_that_is_not_reached(
    kind: str,
) -> None:
    torch.manual_seed(0)
    model, x = JoinsFixed(kind).eval(), torch.randn(4, 6)
    try:
        result = lbyl.compress(model, x, {"*": 0.5}, method="none")
    except lbyl.LbylError as error:
        assert "which the example does not reach" in str(error)
        return
    assert list(result.plan.pruned) == ["hidden"]
    torch.testing.assert_close(result.model(x, True), model(x, True))


def test_a_condition_that_the_example_leaves_out_costs_only_what_it_meets() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = (
                nn.Linear(*s) for s in ((6, 12), (12, 20), (20, 7))
            )
            self.out, self.condition = nn.Linear(7, 4), nn.Linear(5, 24)

        def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
            h = self.first(x)
            if given is not None:
                scale, shift = self.condition(given).chunk(2, 1)
                h = h * scale + shift
            return self.out(self.last(self.second(h.relu()).relu()).relu())

    graph = lbyl.trace(Conditioned().eval(), torch.randn(2, 6))
    assert "first" not in graph.names and "last" in graph.names


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_branches_that_are_both_made_stay_as_wide_where_values_choose_one(sign: float) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 12), nn.Linear(8, 12)
            self.middle, self.out = nn.Linear(12, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.one(x), self.other(x)
            h = one if x.sum() > 0 else other
            return self.out(self.middle(h.relu()).relu())

    torch.manual_seed(0)
    model, x = Chooses().eval(), torch.rand(4, 8)
    result = lbyl.compress(model, sign * x, {"*": 0.5}, method="none")
    assert list(result.plan.pruned) == ["middle"]
    quiet = silenced(model, result, {"middle": "out"})
    for each in (x, -x):
        torch.testing.assert_close(result.model(each), quiet(each))
    both = lbyl.compress(model, iter([x, -x]), {"*": 0.5}, method="none")
    assert sorted(both.plan.pruned) == ["middle", "one"]
    assert both.model(x).shape == both.model(-x).shape
