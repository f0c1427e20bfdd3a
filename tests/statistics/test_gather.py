"""What of a layer's input is a feature, which positions are read, and which statistics fit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.graph.unit import Consumer
from lbyl.graph.watch import LayerCall
from lbyl.inputs.batches import InputBatches, procedural
from lbyl.statistics import collect
from lbyl.statistics.collect import (
    FEATURE_LIMIT,
    Accumulator,
    check_complete,
    check_statistics,
    collect_moments,
    gather_convolution,
    gather_linear,
    sample_limit,
)
from lbyl.statistics.moments import Moments, Statistics
from lbyl.statistics.samples import Geometry

NONE = torch.Generator().manual_seed(0)


def consumer(kind: str, channels: int, axis: int = 1) -> Consumer:
    return Consumer("l", "l.weight", None, axis, 1 - axis, None, kind, torch.arange(channels))


def made(kind: str, shape: tuple[int, ...], taps: str = "auto", batches: int = 4) -> Accumulator:
    axis = 0 if kind == "transposed" else 1
    reader = consumer(kind, shape[axis], axis)
    return collect._accumulator(reader, shape, taps, batches)


def moments_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.mean(0), torch.cov(rows.T, correction=0)


def check(sums: Accumulator, rows: Tensor) -> None:
    found = sums.moments()
    mean, covariance = moments_of(rows)
    torch.testing.assert_close(found.mean.flatten(), mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-8, atol=1e-9)


def test_every_tap_is_a_feature_where_that_is_affordable() -> None:
    exact = FEATURE_LIMIT // 9
    for channels, per_tap in ((8, True), (exact, True), (exact + 1, False)):
        sums = made("conv", (6, channels, 3, 3))
        assert (sums.taps, sums.per_tap, sums.columns) == (9, per_tap, None)
        features = 9 * channels if per_tap else channels
        assert sums.sample_limit == sample_limit(features) // 4
    assert not made("conv", (6, 8, 3, 3), "channels").per_tap
    assert made("conv", (6, 8, 1, 1), "channels").per_tap
    assert made("linear", (6, 8)).per_tap and made("linear", (6, 8)).taps == 1
    assert made("linear", (6, 8), batches=0).sample_limit == sample_limit(8)


@pytest.mark.parametrize("kernel, windows, per_tap", [(3, 71, False), (3, 72, True), (1, 2, True)])
def test_taps_are_told_apart_where_windows_outnumber_them(
    kernel: int, windows: int, per_tap: bool
) -> None:
    shape = 6, 8, kernel, kernel
    reader = consumer("conv", 8)
    sums = collect._accumulator(reader, shape, "auto", 1, windows)
    assert (sums.per_tap, sums.features) == (per_tap, 8 * kernel**2 if per_tap else 8)
    assert collect._accumulator(reader, shape, "auto", 1, None).per_tap  # nobody knows how many


@pytest.mark.parametrize("side, taps", [(4, 9), (2, 1)])
def test_maps_too_small_for_their_features_are_read_by_channel(side: int, taps: int) -> None:
    # 20 images of 4×4 pixels are 320 windows of 72 features, of 2×2 they are 80 of 108.
    channels = 8 if side == 4 else 12
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, 4, 3, padding=1)
    )
    example = torch.zeros(1, 3, side, side)
    for batches in (
        own([torch.randn(10, 3, side, side)] * 2),
        procedural(model, example, count=20),
    ):
        assert batches.examples == 20
        found = collect_moments(model, lbyl.trace(model, example), batches).moments["2"]
        assert (found.taps, len(found.covariance)) == (taps, channels * taps)


@pytest.mark.parametrize("kernel", [1, 3])
def test_transposed_layers_read_channels(kernel: int) -> None:
    sums = made("transposed", (8, 6, kernel, kernel))
    assert (sums.taps, sums.per_tap) == (kernel**2, False)
    assert sums.sample_limit == sample_limit(8) // 4


@pytest.mark.parametrize("more", [0, 4])
def test_flattened_inputs_are_grouped_only_beyond_the_limit(more: int) -> None:
    inputs = FEATURE_LIMIT + more
    reader = replace(consumer("linear", inputs), channel=torch.arange(inputs) // 4)
    sums = collect._accumulator(reader, (1, inputs), "auto", 1)
    if more:
        assert sums.columns is not None and sums.columns.shape == (inputs // 4, 4)
        assert not sums.per_tap and sums.sample_limit == sample_limit(inputs // 4)
    else:
        assert sums.columns is None and sums.per_tap
        assert sums.sample_limit == sample_limit(inputs)


def geometry(**given: Any) -> Geometry:
    weight = torch.zeros(2, 3, 4, 3)
    return Geometry.of(LayerCall("conv", torch.zeros(1), weight, given))


def test_the_geometry_of_a_call_is_what_its_arguments_say() -> None:
    plain = Geometry((4, 3), (1, 1), ((0, 0), (0, 0)), (1, 1))
    assert geometry() == geometry(padding="valid") == plain
    assert geometry(stride=2).stride == geometry(stride=(2, 2)).stride == (2, 2)
    assert geometry(dilation=(1, 3)).dilation == (1, 3)
    assert geometry(padding=(1, 2)).padding == ((1, 1), (2, 2))
    assert geometry(padding=2).padding == ((2, 2), (2, 2))
    # torch puts the odd one at the end
    assert geometry(padding="same", dilation=(1, 2)).padding == ((1, 2), (2, 2))


@pytest.mark.parametrize("given", [{"padding": "same", "dilation": (1, 2)}, {"padding": (1, 0)}])
def test_windows_times_the_kernel_are_the_convolution(given: dict[str, Any]) -> None:
    x, weight = torch.randn(2, 3, 9, 8).double(), torch.randn(2, 3, 4, 3).double()
    wanted = F.conv2d(x, weight, **given).movedim(1, -1).flatten(0, -2)
    (seen,) = collect.patches_of(x, geometry(**given), 1 << 20, NONE)
    torch.testing.assert_close(seen.flatten(1) @ weight.flatten(1).T, wanted)


@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("batched", [True, False])
def test_kernels_of_one_tap_read_the_pixels_that_they_step_on(
    stride: tuple[int, int], batched: bool
) -> None:
    x = torch.randn(5, 4, 7, 8).double()
    sums = Accumulator(consumer("conv", 4), 1, True, None, 1 << 20)
    one = Geometry((1, 1), stride, ((0, 0), (0, 0)), (1, 1))
    for images in [x] if batched else x:
        gather_convolution(sums, images, one, NONE)
    check(sums, x[:, :, :: stride[0], :: stride[1]].movedim(1, -1).flatten(0, -2))


def test_kernels_of_several_taps_read_windows() -> None:
    x = torch.randn(5, 4, 6, 7).double()
    seen = geometry(padding=1, stride=2)
    (wanted,) = collect.patches_of(x, seen, 1 << 20, NONE)
    by_tap = Accumulator(consumer("conv", 4), 12, True, None, 1 << 20)
    by_channel = Accumulator(consumer("conv", 4), 12, False, None, 1 << 20)
    for sums in (by_tap, by_channel):
        gather_convolution(sums, x, seen, NONE)
    check(by_tap, wanted.flatten(1))
    check(by_channel, wanted.transpose(1, 2).flatten(0, 1))
    assert by_tap.spatial is None and by_channel.spatial is not None
    assert by_channel.spatial.shape == (12, 12)


def test_flattened_rows_are_read_by_channel() -> None:
    columns = torch.tensor([[3, 0], [1, 4], [5, 2]])
    x = torch.randn(6, 2, 6).double()
    sums = Accumulator(consumer("linear", 6), 1, False, columns, 1 << 20)
    gather_linear(sums, x, NONE)
    rows = x.reshape(-1, 6)
    check(sums, torch.cat([rows[:, columns[:, 0]], rows[:, columns[:, 1]]]))
    plain = Accumulator(consumer("linear", 6), 1, True, None, 1 << 20)
    gather_linear(plain, x, NONE)
    check(plain, rows)


def own(batches: list[Any]) -> InputBatches:
    return InputBatches(batches, len(batches), False, "own")


class Padded(nn.Module):
    """Two layers on every token; the mask is looked at by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).relu())
        return out


def test_tokens_that_a_mask_hides_are_not_counted() -> None:
    model = Padded().double()
    x = torch.randn(4, 5, 3).double()
    mask = torch.rand(4, 5) > 0.4
    batch = {"x": x, "mask": mask}
    graph = lbyl.trace(model, batch)
    found = collect_moments(model, graph, own([batch])).moments["last"]
    mean, covariance = moments_of(model.first(x[mask]).relu().detach())
    torch.testing.assert_close(found.mean[:, 0], mean)
    torch.testing.assert_close(found.covariance, covariance)


def traced() -> tuple[nn.Module, lbyl.Graph]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU())
    model.append(nn.Conv2d(5, 2, 1))
    return model, lbyl.trace(model, torch.zeros(1, 3, 8, 8))


def square(features: int, taps: int = 1) -> Moments:
    rows = features * taps
    return Moments(torch.zeros(features, taps), torch.eye(rows).double(), taps)


@pytest.mark.parametrize(
    ("moments", "fit"),
    [
        ({"2": square(4, 9), "4": square(5)}, True),
        ({"2": square(4), "4": square(5)}, True),  # taps alike
        ({"4": square(5), "elsewhere": square(7)}, True),
        ({}, True),
        ({"2": square(4, 3)}, False),
        ({"2": square(5, 9)}, False),
        ({"2": square(4, 9), "4": square(4)}, False),
        ({"elsewhere": square(4, 9)}, False),
    ],
)
def test_statistics_fit_layers_of_their_sizes_alone(moments: dict[str, Moments], fit: bool) -> None:
    _, graph = traced()
    refused = pytest.raises(lbyl.LbylError, match="belong to another model")
    with nullcontext() if fit else refused:
        check_statistics(graph, Statistics(moments))


def test_layers_that_statistics_do_not_know_are_named() -> None:
    _, graph = traced()
    some = {"2": square(4, 9)}
    check_complete(graph, Statistics({**some, "4": square(5)}))
    check_complete(graph, Statistics(some, fallbacks=("4: its inputs are not finite",)))
    check_complete(graph, Statistics(some, source="analytic"))
    with pytest.raises(lbyl.LbylError, match="know nothing of 4: collect"):
        check_complete(graph, Statistics(some))


def test_progress_is_told_for_every_batch() -> None:
    model, graph = traced()
    told: list[tuple[str, int, int]] = []
    batches = list(torch.randn(3, 2, 3, 8, 8))
    collect_moments(model, graph, own(batches), progress=lambda *step: told.append(step))
    assert told == [("collecting", i, 3) for i in (1, 2, 3)]


class Scaled(nn.Module):
    """An attention by torch's kernel, with a scale or without."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        options = {} if self.scale is None else {"scale": self.scale}
        y = F.scaled_dot_product_attention(q, k, v, **options)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize("scale", [None, 0.3])
def test_products_are_gathered_with_the_scale_of_their_call(
    scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Scaled(scale), torch.randn(6, 5, 8)
    graph = lbyl.trace(model, x, include=["*:qk"])
    (unit,) = graph.units
    seen: list[tuple[torch.Size, float]] = []
    add = collect.ProductSums.add

    def told(sums: Any, q: Tensor, k: Tensor, mask: Any, by: float, generator: Any) -> None:
        seen.append((q.shape, by))
        assert mask is None
        add(sums, q, k, mask, by, generator)

    monkeypatch.setattr(collect.ProductSums, "add", told)
    found = collect_moments(model, graph, own([x[:4], x[4:]]))
    assert [shape for shape, _ in seen] == [(4, 2, 5, 4), (2, 2, 5, 4)]
    assert {by for _, by in seen} == {0.5 if scale is None else scale}
    assert set(found.products) == {unit.name}
    assert found.products[unit.name].query.shape[0] == 2
