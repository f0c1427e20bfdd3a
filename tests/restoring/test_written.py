"""Everything that the closed form writes, against a computation of its own from the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.methods import Delivery, Echo, Method
from support.by_hand import (
    LIMITS,
    Reader,
    batch_moments,
    plan_of,
    reader,
    statistics_of,
)
from support.networks import build, example, randomise

CORRECTIONS = ["none", "mean", "mean+variance"]


def two_readers() -> nn.Module:
    """One unit read by two layers, through a depthwise convolution with a stride."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, stride=2, bias=False)
            self.norm = nn.BatchNorm2d(8)
            self.each = nn.Conv2d(8, 8, 3, padding=1, groups=8)
            self.left, self.right = nn.Conv2d(8, 4, 1, bias=False), nn.Conv2d(8, 4, 3, padding=1)
            self.behind = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.each(self.norm(self.first(x)).relu()).relu()
            return (self.behind(self.left(x)) * self.right(x)).mean((2, 3))

    return Two()


# Network → units with what stays of each, and layers that read them with the BatchNorm behind.
CASES: dict[str, tuple[dict[str, list[int]], dict[str, tuple[str, str | None]]]] = {
    "chain": ({"0": [0, 2, 4, 5, 6, 9], "3": [1, 2, 7]}, {"3": ("0", "4"), "8": ("3", None)}),
    "biased": ({"0": [1, 3, 8], "2": [0, 2, 5, 6]}, {"2": ("0", None), "6": ("2", None)}),
    "dense": ({"0": [*range(1, 16, 2)], "3": [0, 1, 5]}, {"3": ("0", "4"), "6": ("3", None)}),
    "flattened": ({"0": [0, 3, 4]}, {"5": ("0", None)}),
    "pooled": ({"0": [2, 3, 5, 8]}, {"5": ("0", None)}),
    "bottleneck": (
        {"conv1": [0, 1, 5, 6], "conv2": [2, 3, 4, 9]},
        {"conv2": ("conv1", "bn2"), "conv3": ("conv2", "bn3")},
    ),
    "basic": ({"conv1": [0, 1, 2, 8]}, {"conv2": ("conv1", "bn2")}),
    "two": ({"first": [1, 2, 5, 7]}, {"left": ("first", "behind"), "right": ("first", None)}),
}


def network(name: str) -> tuple[nn.Module, Tensor]:
    model = randomise(two_readers(), 3) if name == "two" else build(name, 3)
    return model.double(), example("chain" if name == "two" else name, 24).double()


@cache
def prepared_of(name: str) -> tuple[nn.Module, Tensor, lbyl.Prepared]:
    """A network, its inputs and the network prepared with the statistics of these alone."""
    model, x = network(name)
    return model, x, lbyl.prepare(model, x[:2], data=statistics_of(model, x))


def flags(unit: Tensor, count: int, inputs: int) -> Tensor:
    """Which inputs of a layer are of kept channels, each of which may own several."""
    kept = torch.zeros(count, dtype=torch.bool)
    kept[unit] = True
    return kept.repeat_interleave(inputs // count)


def assert_written(
    result: lbyl.Result,
    model: nn.Module,
    layers: dict[str, Any],
    readers: dict[str, Reader],
    correction: str,
    ridge: float | None,
    folded: tuple[str, ...] = (),
) -> None:
    """`ridge` None: nothing is taken over."""
    slim, graph, plan = result.model, result.graph, result.plan
    for layer, (unit, norm) in layers.items():
        here, old, new = readers[layer], model.get_submodule(layer), slim.get_submodule(layer)
        kept = flags(plan.kept[unit], graph[unit].channels, here.weight.shape[1])
        wanted = here.weight[:, kept]
        if ridge is not None:
            wanted = here.restored(kept, ridge)
        mean, ratio, error = here.moved(wanted, kept)
        if layer in folded and correction == "mean+variance":
            scale = ratio.rsqrt()[:, None, None]
            wanted = wanted * scale
            mean, _, _ = here.moved(wanted, kept)
        rows = plan.kept.get(layer, torch.arange(len(wanted)))
        torch.testing.assert_close(
            new.weight, wanted[rows].reshape(new.weight.shape), rtol=1e-7, atol=1e-9
        )
        (told,) = (row.error for row in result.rows if row.unit == unit)
        alone = sum(read == unit for read, _ in layers.values()) == 1
        assert told == pytest.approx(error, 1e-7) if alone else told > error * (1 - 1e-7)
        bias = torch.zeros(len(mean)).double() if old.bias is None else old.bias
        if norm is not None:
            a, b = model.get_submodule(norm), slim.get_submodule(norm)
            moved = a.running_mean + (mean if correction != "none" else 0)
            torch.testing.assert_close(b.running_mean, moved[rows], rtol=1e-7, atol=1e-9)
            factor = ratio if correction == "mean+variance" else torch.ones_like(ratio)
            variance = ((a.running_var + a.eps) * factor - a.eps).clamp(min=0)
            torch.testing.assert_close(b.running_var, variance[rows], rtol=1e-7, atol=1e-9)
            assert torch.equal(b.weight, a.weight[rows]) and torch.equal(b.bias, a.bias[rows])
        elif correction != "none":
            bias = bias - mean
        if new.bias is None:
            assert old.bias is None and (norm is not None or correction == "none")
        else:
            torch.testing.assert_close(new.bias, bias[rows], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", CASES)
def test_weights_means_and_variances_are_those_of_the_samples(name: str, correction: str) -> None:
    (model, x, prepared), (kept, layers) = prepared_of(name), CASES[name]
    readers = {layer: reader(model, layer, x) for layer in layers}
    plan = plan_of(prepared.graph, kept)
    # Without any norm a convolution may be one that BatchNorm was folded into.
    folded = ("2",) if name == "biased" else ()
    for method, ridge in (
        (Echo(correction=correction), 0.01),
        (Echo(0.2, correction=correction), 0.2),
    ):
        result = prepared.compress(plan, method=method)
        assert_written(result, model, layers, readers, correction, ridge, folded)
        norms = sum(norm is not None for _, norm in layers.values()) + len(folded)
        told = result.corrections
        assert (told.rewritten, told.recalibrated) == (len(layers), 0)
        assert told.mean == (0 if correction == "none" else len(layers))
        assert told.variance == (norms if correction == "mean+variance" else 0)
        assert not result.fallbacks
    if correction != "none":
        cut = prepared.compress(plan, method=lbyl.methods.Prune(correction=correction))
        assert_written(cut, model, layers, readers, correction, None, folded)
    for name, producer in ((n, m) for n, m in model.named_modules() if n in kept):
        own = result.model.get_submodule(name).weight
        if name not in layers:
            assert torch.equal(own, producer.weight[plan.kept[name]])


def injected(old: lbyl.Statistics, name: str, **parts: Any) -> lbyl.Statistics:
    """Statistics with other moments of one layer."""
    moments = {**old.moments, name: replace(old.moments[name], **parts)}
    return replace(old, moments=moments, orders={}, totals={})


def definite(size: int, seed: int) -> Tensor:
    rows = torch.randn(3 * size, size, generator=torch.Generator().manual_seed(seed)).double()
    return rows.T @ rows / len(rows)


@pytest.mark.parametrize("name", ["chain", "flattened"])
def test_taps_served_alike_and_columns_regrouped_by_channel(name: str) -> None:
    """One covariance of channels, and how much a channel at two places has in common."""
    (model, x), (kept, layers) = network(name), CASES[name]
    layer, unit = ("3", "0") if name == "chain" else ("5", "0")
    weight = model.get_submodule(layer).weight.detach()
    by_tap = weight.flatten(2) if name == "chain" else weight.unflatten(1, (8, 16))
    taps, channels = by_tap.shape[2], by_tap.shape[1]
    covariance, mean = definite(channels, 1), torch.rand(channels, 1).double()
    alike = torch.corrcoef(definite(taps, 2) + 1)
    columns = None if name == "chain" else torch.arange(128).reshape(8, 16)
    data = injected(
        prepared_of(name)[2].statistics(), layer,
        mean=mean, covariance=covariance, taps=1, spatial=alike, columns=columns,
    )  # fmt: skip
    here = Reader(by_tap, mean.expand(-1, taps).flatten(), covariance, alike)
    prepared = lbyl.prepare(model, x[:2], data=data)
    plan = plan_of(prepared.graph, {unit: kept[unit]})
    result = prepared.compress(plan, method=Echo(correction="mean+variance"))
    if name == "chain":
        assert_written(result, model, {layer: layers[layer]}, {layer: here}, "mean+variance", 0.01)
    chosen = flags(plan.kept[unit], channels, channels)
    wanted = here.restored(chosen)
    new = result.model.get_submodule(layer)
    torch.testing.assert_close(new.weight.flatten(), wanted.flatten(), rtol=1e-7, atol=1e-9)
    mean_moved, _, error = here.moved(wanted, chosen)
    assert result.rows[0].error == pytest.approx(error, 1e-7)
    if name == "flattened":
        bias = model.get_submodule(layer).bias - mean_moved
        torch.testing.assert_close(new.bias, bias, rtol=1e-7, atol=1e-9)


def test_where_nothing_takes_the_mean_the_kept_inputs_do() -> None:
    model, x, prepared = prepared_of("biased")
    plan = plan_of(prepared.graph, {"2": [0, 2, 5, 6]})
    result = prepared.compress(plan, method=Echo(new_bias=False))
    here, kept = reader(model, "6", x), flags(plan.kept["2"], 8, 8)
    assert result.model[6].bias is None
    wanted = here.restored(kept, second=True)[..., 0]
    torch.testing.assert_close(result.model[6].weight, wanted, rtol=1e-7, atol=1e-9)
    assert prepared.compress(plan, method=Echo()).model[6].bias is not None


def test_covariances_that_are_indefinite_are_solved_all_the_same_and_noted() -> None:
    model, x, measured = prepared_of("chain")
    data = measured.statistics()
    broken = injected(data, "3", covariance=-data.moments["3"].covariance)
    prepared = lbyl.prepare(model, x[:2], data=broken)
    result = prepared.compress(plan_of(prepared.graph, CASES["chain"][0]), method=Echo())
    assert any(line.startswith("3: ") for line in result.fallbacks)
    assert not any(line.startswith("8: ") for line in result.fallbacks)
    assert all(bool(t.isfinite().all()) for t in result.model.state_dict().values())


@dataclass(frozen=True)
class Given(Method):
    """Makes of a consumer's weight, cut, what it is told to."""

    change: Callable[[Tensor], Tensor] = torch.clone
    name = "given"  # type: ignore[assignment]
    by_unit = False

    def rewrite(self, rewrite: Any) -> Tensor:
        return self.change(rewrite.weight[:, rewrite.kept_columns])


class Measured(Given):
    """Goes by statistics, and is held to them."""

    needs_statistics = True


KEPT = torch.tensor([0, 2, 4, 5, 6, 9])


def changed(
    method: Method, sizes: dict[int, float] | None = None
) -> tuple[lbyl.Result, nn.Module, Reader]:
    """A chain whose first unit was pruned; outputs of its second convolution may be small."""
    model, x, prepared = prepared_of("chain")
    if sizes:
        model, x = network("chain")
        with torch.no_grad():
            model[3].weight[list(sizes)] *= torch.tensor([*sizes.values()])[:, None, None, None]
        prepared = lbyl.prepare(model, x[:2], data=prepared.statistics())
    result = prepared.compress(plan_of(prepared.graph, {"0": KEPT}), method=method)
    return result, model, reader(model, "3", x)


@pytest.mark.parametrize("factor", [0.01, 0.3, 1.0, 1.4, 9.0])
def test_variances_are_put_back_within_limits_where_there_were_any(factor: float) -> None:
    sizes = {1: 1e-8, 2: 1e-5, 4: 1e-8}  # the second is small and varies
    result, model, here = changed(Given(lambda w: factor * w, correction="mean+variance"), sizes)
    kept = flags(KEPT, 10, 10)
    mean, ratio, _ = here.moved(factor * here.weight[:, kept], kept)
    slim, silent = result.model[4], [1, 4]
    assert {0.01: LIMITS[0], 9.0: LIMITS[1]}.get(factor, float(ratio[0])) == float(ratio[0])
    assert ratio[silent].tolist() == [1, 1]
    expected = (model[4].running_var + model[4].eps) * ratio - model[4].eps
    torch.testing.assert_close(slim.running_var, expected.clamp(min=0), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(slim.running_mean, model[4].running_mean + mean)


def test_outputs_that_are_all_small_are_told_by_their_own_size() -> None:
    method = Given(lambda w: 1.2 * w, correction="mean+variance")
    result, model, here = changed(method, dict.fromkeys(range(8), 1e-8))
    kept = flags(KEPT, 10, 10)
    _, ratio, error = here.moved(1.2 * here.weight[:, kept], kept)
    assert result.rows[0].error == pytest.approx(error) and bool((ratio != 1).all())
    expected = (model[4].running_var + model[4].eps) * ratio - model[4].eps
    torch.testing.assert_close(result.model[4].running_var, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("factor", "worse"), [(1.009, False), (1.02, True)])
def test_a_weight_that_errs_by_more_than_what_went_carried_is_only_cut(
    factor: float, worse: bool
) -> None:
    """Scaled so that its error is so many times that of nothing taken over."""
    small = dict.fromkeys(range(8), 0.01)
    (_, model, here), kept = changed(Given(correction="mean"), small), flags(KEPT, 10, 10)
    cut = here.weight[:, kept]
    none = here.moved(cut, kept)[2]

    def error(scale: float) -> float:
        return here.moved(scale * cut, kept)[2] / none

    low, high = min((i / 100 for i in range(40, 160)), key=error), 9.0  # from there on it grows
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if error(middle) > factor else (middle, high)
    for kind, noted in ((Measured, worse), (Given, False)):
        result, _, _ = changed(kind(lambda w: low * w, correction="mean"), small)
        assert any("more harm than good" in line for line in result.fallbacks) == noted
        wanted = (1.0 if noted else low) * cut
        torch.testing.assert_close(result.model[3].weight.flatten(2), wanted)
        mean, _, told = here.moved(wanted, kept)
        torch.testing.assert_close(result.model[4].running_mean, model[4].running_mean + mean)
        assert result.rows[0].error == pytest.approx(told)


@pytest.mark.parametrize(("scale", "sound"), [(1e11, True), (1e13, False), (torch.nan, False)])
def test_weights_beyond_all_measure_are_only_cut(scale: float, sound: bool) -> None:
    result, model, _ = changed(Given(lambda w: scale * w, correction="mean"))
    assert any("beyond all measure" in line for line in result.fallbacks) != sound
    assert torch.equal(result.model[3].weight, (scale if sound else 1) * model[3].weight[:, KEPT])


@dataclass(frozen=True)
class Delivering(Method):
    """Delivers what it is given."""

    delivery: Any = None
    name = "delivering"  # type: ignore[assignment]

    def deliver(self, weights: Any, kept: Tensor, statistics: Any) -> Delivery:
        made: Delivery = self.delivery
        return made


def delivered(model: nn.Module, correction: str = "none", **parts: Tensor) -> lbyl.Result:
    x = example("chain").to(next(model.parameters()).dtype)
    plan = plan_of(lbyl.trace(model, x), {"0": [1, 2, 4, 7]})
    method = Delivering(delivery=Delivery(**parts), correction=correction)
    data = None if correction == "none" else 16
    return lbyl.compress(model, x, plan, method=method, data=data)


def mixing() -> dict[str, Tensor]:
    """Any matrix by which channels are read, any by which they are mixed, and factors."""
    parts = {"matrix": torch.randn(10, 4), "merge": torch.randn(4, 10), "gain": torch.rand(4) + 0.5}
    return {name: part.double() for name, part in parts.items()}


@pytest.mark.parametrize("correction", ["none", "mean"])
@pytest.mark.parametrize("with_gain", [True, False])
def test_what_is_merged_and_what_is_read(with_gain: bool, correction: str) -> None:
    model, parts = build("chain", 3).double(), mixing()
    gain = parts["gain"] if with_gain else parts.pop("gain") * 0 + 1
    new, merge = delivered(model, correction, **parts).model, parts["merge"]
    wanted = torch.einsum("tm,m...->t...", merge, model[0].weight)
    torch.testing.assert_close(new[0].weight, wanted)
    for name in ("bias", "running_mean", "running_var"):
        torch.testing.assert_close(getattr(new[1], name), merge @ getattr(model[1], name))
    torch.testing.assert_close(new[1].weight, merge @ model[1].weight * gain)
    read = torch.einsum("omkl,mt->otkl", model[3].weight, parts["matrix"])
    torch.testing.assert_close(new[3].weight, read)
    assert torch.equal(new[4].weight, model[4].weight) and new[3].out_channels == 8


@pytest.mark.parametrize("straight", [True, False])
def test_factors_go_to_the_norm_that_sees_the_filters_first(straight: bool) -> None:
    """To every norm of those channels where something else comes between."""
    between = nn.Identity() if straight else nn.ReLU()
    each = nn.Conv2d(10, 10, 3, groups=10, bias=False)
    layers = nn.Conv2d(3, 10, 1), between, nn.BatchNorm2d(10), each, nn.BatchNorm2d(10)
    model = randomise(nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(10, 4, 1)), 3).double()
    parts = mixing()
    new = delivered(model, **parts).model
    for norm, factor in ((2, parts["gain"]), (4, 1 if straight else parts["gain"])):
        torch.testing.assert_close(new[norm].weight, parts["merge"] @ model[norm].weight * factor)


@pytest.mark.parametrize("part", ["matrix", "merge", "gain", "too large", "too large to read"])
def test_what_is_not_finite_is_not_delivered(part: str) -> None:
    model, parts = build("chain", 3), mixing()
    if part == "too large to read":
        parts = {"matrix": 1e39 * parts["matrix"]}
    elif part == "too large":
        parts["merge"] *= 1e39
    else:
        parts[part].flatten()[3] = torch.nan
    result = delivered(model, **parts)
    told = {"too large": "no channels are merged", "too large to read": "3: only cut"}
    assert any(told.get(part, "0: nothing is delivered") in line for line in result.fallbacks)
    kept = torch.tensor([1, 2, 4, 7])
    assert torch.equal(result.model[0].weight, model[0].weight[kept])
    assert torch.equal(result.model[1].running_var, model[1].running_var[kept])
    assert torch.equal(result.model[3].weight, model[3].weight[:, kept])
    assert (result.corrections.mean, result.corrections.variance) == (0, 0)
    (row,) = [row for row in result.rows if row.unit == "0"]
    assert row.kept == 4


def test_progress_is_told_for_every_layer_that_is_solved() -> None:
    told: list[tuple[str, int, int]] = []
    model, x, measured = prepared_of("chain")
    data = measured.statistics()
    prepared = lbyl.prepare(model, x[:2], data=data, progress=lambda *step: told.append(step))
    prepared.compress(plan_of(prepared.graph, CASES["chain"][0]), method=Echo())
    assert [step for step in told if step[0] == "solving"] == [("solving", 1, 2), ("solving", 2, 2)]


def moved_norms(
    model: nn.Module, held: nn.Module, x: Tensor, norms: dict[str, Tensor], step: float = 0.5
) -> dict[str, tuple[Tensor, Tensor]]:
    """Where the running statistics of `held` go: half way to what both networks show on `x`."""
    old, new = (batch_moments(m, list(norms), x) for m in (model, held))
    found = {}
    for name, kept in norms.items():
        was, now = model.get_submodule(name), held.get_submodule(name)
        mean = was.running_mean[kept] + new[name][0] - old[name][0][kept]
        ratio = (new[name][1] / old[name][1][kept]).clamp(*LIMITS)
        there, here = (was.running_var[kept] + was.eps) * ratio, now.running_var + now.eps
        variance = (here * (there / here) ** step - now.eps).clamp(min=0)
        found[name] = now.running_mean + step * (mean - now.running_mean), variance
    return found


@pytest.mark.parametrize("name", ["chain", "bottleneck"])
def test_a_second_pass_moves_running_statistics_half_way(name: str) -> None:
    """On the user's own inputs, of which there are 32 and more."""
    model, x = network(name)
    x = example(name, 40).double()
    with torch.no_grad():  # widths of one channel go far beyond the limits
        next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)).weight[:2] *= 30
    prepared = lbyl.prepare(model, x[:2], data=[x[:7], x[7:]])
    plan = plan_of(prepared.graph, CASES[name][0])
    held, moved = (
        prepared.compress(plan, method=Echo(correction=c)) for c in ("mean+variance", "recalibrate")
    )
    behind = {norm: layer for layer, (_, norm) in CASES[name][1].items() if norm is not None}
    behind |= {"chain": {"1": "0"}, "bottleneck": {"bn1": "conv1", "down.1": ""}}[name]
    norms = {
        norm: plan.kept.get(layer, torch.arange(len(model.get_submodule(norm).weight)))
        for norm, layer in behind.items()
    }
    expected = moved_norms(model, held.model, x, norms)
    assert moved.corrections.recalibrated == len(norms)
    for norm, (mean, variance) in expected.items():
        found = moved.model.get_submodule(norm)
        torch.testing.assert_close(found.running_mean, mean, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(found.running_var, variance, rtol=1e-7, atol=1e-9)
    for key, value in held.model.state_dict().items():
        assert "running" in key or torch.equal(value, moved.model.state_dict()[key])


def test_fewer_own_inputs_than_batchnorm_needs_are_not_what_is_run_again() -> None:
    model, x = network("chain")
    few = example("chain", 20).double()
    prepared = lbyl.prepare(model, x[:2], data=[few])
    plan = plan_of(prepared.graph, CASES["chain"][0])
    held, moved = (
        prepared.compress(plan, method=Echo(correction=c)) for c in ("mean+variance", "recalibrate")
    )
    own = moved_norms(model, held.model, few, {"4": plan.kept["3"]})
    assert moved.corrections.recalibrated == 2
    assert not torch.allclose(moved.model[4].running_mean, own["4"][0], rtol=1e-3)
    whole = plan_of(prepared.graph, {"0": range(10), "3": range(8)})
    assert torch.equal(prepared.compress(whole).model(x), model(x))


def test_statistics_that_are_not_finite_are_not_moved_and_others_are() -> None:
    model, x = network("chain")
    x = example("chain", 40).double()
    with torch.no_grad():
        model[0].weight[3] = 1e200  # what enters the first norm has no variance that can be held
    prepared = lbyl.prepare(model, x[:2], data=[x])
    result = prepared.compress(plan_of(prepared.graph, {"3": [0, 1, 2]}), method=Echo())
    assert torch.equal(result.model[1].running_mean, model[1].running_mean)
    assert any(line.startswith("1: not recalibrated") for line in result.fallbacks)
