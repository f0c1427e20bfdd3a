"""Statistics at the inputs of consumers from nothing but the weights: no image, no forward pass.

Behind a BatchNorm a channel is taken as Gaussian, N(β, γ²), two channels as correlated as their
filters; the activation then acts in closed form (`lbyl.statistics.moments`).

What the design must satisfy: a consumer whose inputs do not follow from weights gets no moments
rather than wrong ones. Pooling passes the moments on as they are: exact for the mean of average
pooling, an approximation for all else (max pooling raises the mean, both change the variance).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lbyl.graph.unit import Consumer, Graph, Unit
from lbyl.graph.weights import UnitWeights, unit_weights
from lbyl.runtime.tensors import places, tensors
from lbyl.statistics.gaussian import ACTIVATIONS, Activation, activation_moments, filter_correlation
from lbyl.statistics.moments import Moments, Statistics

PASSING = frozenset(
    (
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d mean "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
        "adaptive_max_pool2d adaptive_max_pool3d dropout dropout1d dropout2d dropout3d "
        "feature_dropout alpha_dropout feature_alpha_dropout flatten reshape view squeeze "
        "unsqueeze identity contiguous clone cat concat concatenate"
    ).split()
)
"""Calls behind the activation that leave a channel's moments about as they are."""

MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "hardtanh": (nn.Hardtanh,),
    "relu6": (nn.ReLU6,),
    "leaky_relu": (nn.LeakyReLU,),
    "elu": (nn.ELU,),
    "gelu": (nn.GELU,),
    "softplus": (nn.Softplus,),
}
"""Activations with a parameter: taken from the modules of a network."""

LENGTHS = torch.cat([torch.zeros(1), torch.logspace(-1.0, 2.0, 61)]).double()
"""Candidates for the length over which neighbouring positions are alike, in taps."""


@dataclass(frozen=True)
class Channels:
    """Mean (m,) and covariance (m, m) of a unit's channels as its consumers read them."""

    mean: Tensor
    covariance: Tensor


def analytic_statistics(model: nn.Module, graph: Graph) -> Statistics:
    """Moments at every consumer for which they follow from the weights."""
    start = time.perf_counter()
    weights, state = unit_weights(graph, model), tensors(model)
    known = {name: _unit_channels(unit, model) for name, unit in weights.items()}
    moments: dict[str, Moments] = {}
    for consumer in graph.consumers.values():
        computed = _consumer_moments(graph, consumer, known, state)
        if computed is not None:
            moments[consumer.name] = computed
    return Statistics(moments, "analytic", {"collect": time.perf_counter() - start})


def _unit_channels(weights: UnitWeights, model: nn.Module) -> Channels | None:
    """What a unit's channels are like behind their activation, None where that is unknown."""
    gaussian, activation = _gaussian(weights), _activation(weights.unit, model)
    if gaussian is None or activation is None:
        return None
    return Channels(*activation_moments(activation, *gaussian))


def _gaussian(weights: UnitWeights) -> tuple[Tensor, Tensor, Tensor] | None:
    """Mean, deviation and correlation of a unit's channels in front of the activation."""
    unit = weights.unit
    if len(unit.producers) != 1:
        return None  # a sum or a product of several layers' channels
    producer = unit.producers[0]
    channel = weights.graph.axes[producer.weight, producer.axis]
    rows = unit.positions(channel)
    if producer.kind == "transposed" or len(rows) != unit.channels:
        return None
    filters = weights.state[producer.weight].detach().double().movedim(producer.axis, 0)
    filters = filters[rows.to(filters.device)]
    norm = weights.norm
    if norm is None:  # inputs of unit variance are the best guess where nothing tells the scale
        std = filters.flatten(1).norm(dim=1)
        return weights.bias_of(producer)[:, 0], std, filter_correlation(filters, std.square())
    # Inputs count as independent. Carrying covariances on from layer to layer instead was tried on
    # one deep chain, with corrections, and was worse there.
    sign = torch.where(norm.gamma < 0, -1.0, 1.0).to(norm.gamma)
    correlation = filter_correlation(filters, norm.var) * torch.outer(sign, sign)
    return norm.beta, norm.gamma.abs(), correlation


def _activation(unit: Unit, model: nn.Module) -> str | Activation | None:
    """The one pointwise function between a unit and its consumers, None where there are more."""
    path = list(unit.path)
    if unit.producers[0].norm is not None and (not path or path.pop(0) != "batch_norm"):
        return None
    path = [name for name in path if name not in PASSING]
    if not path:
        return "identity"
    if len(path) > 1:
        return None
    return _function(path[0], model)


def _function(name: str, model: nn.Module) -> str | Activation | None:
    """An activation by the name of its call, with the parameters that the network's modules have.

    Where modules of one kind differ, which one was called is not known.
    """
    kinds = MODULES.get(name, ())
    modules = [m for m in model.modules() if kinds and isinstance(m, kinds)]
    if modules:
        same = all(_options(m) == _options(modules[0]) for m in modules)
        return _out_of_place(modules[0]) if same else None
    if name == "hardtanh":  # so is ReLU6 recorded, which is the only one in use
        return F.relu6
    return name if name == "relu" or name in ACTIVATIONS else None


def _options(module: nn.Module) -> dict[str, object]:
    """The numbers and words that a module was made with."""
    plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str))}
    return {k: v for k, v in plain.items() if k not in ("inplace", "training")}


def _out_of_place(module: nn.Module) -> Activation:
    """A module's function past its hooks, its argument not changed in place."""

    def function(z: Tensor) -> Tensor:
        with torch.no_grad():
            made: Tensor = module.forward(z.clone())
        return made

    return function


def _consumer_moments(
    graph: Graph,
    consumer: Consumer,
    known: Mapping[str, Channels | None],
    state: Mapping[str, Tensor],
) -> Moments | None:
    """Moments over a consumer's inputs; channels of different units count as uncorrelated."""
    weight = state[consumer.weight].detach().double()
    units = [u for u in graph.units if consumer.name in u.consumers]
    made = {u.name: known.get(u.name) for u in units}
    computed = {name: channels for name, channels in made.items() if channels is not None}
    if not units or len(computed) < len(units) or consumer.calls > 1:
        return None
    columns = consumer.flattened_columns()
    channel = consumer.channel if columns is None else consumer.channel[columns[:, 0]]
    mean, covariance = _assembled(channel, units, computed, weight)
    shape = weight.movedim((consumer.output_axis, consumer.axis), (0, 1)).shape
    taps = math.prod(shape[2:])
    if columns is not None:
        spatial = torch.ones(columns.shape[1] * taps, columns.shape[1] * taps).to(weight)
    else:
        spatial = _spatial(consumer, covariance, weight, state)
    return Moments(mean[:, None], covariance, 1, spatial, columns)


def _assembled(
    channel: Tensor, units: list[Unit], known: Mapping[str, Channels], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and covariance by input; inputs that no unit makes get the mean variance."""
    mean = like.new_zeros(len(channel))
    covariance = like.new_zeros(len(channel), len(channel))
    known_inputs = torch.zeros(len(channel), dtype=torch.bool)
    for unit in units:
        positions = unit.positions(channel)
        owner = unit.local(channel)[positions].to(like.device)
        known_inputs |= unit.owns(channel)
        at = positions.to(like.device)
        mean[at] = known[unit.name].mean.to(like)[owner]
        covariance[at[:, None], at] = known[unit.name].covariance.to(like)[owner[:, None], owner]
    if not bool(known_inputs.all()):
        wide = covariance.diagonal()[known_inputs.to(like.device)].mean()
        rest = places(~known_inputs, like.device)
        covariance[rest, rest] = wide
    return mean, covariance


def _spatial(
    consumer: Consumer, covariance: Tensor, weight: Tensor, state: Mapping[str, Tensor]
) -> Tensor:
    """(taps, taps): correlation of a channel between the taps of the consumer's kernel.

    exp(−distance/ℓ) with the ℓ whose output variances are nearest to the running variance of the
    BatchNorm behind (squared differences of logarithms); ones where there is no BatchNorm.
    """
    moved = weight.movedim((consumer.output_axis, consumer.axis), (0, 1))  # (o, i, *kernel)
    kernel = moved.shape[2:]
    taps = math.prod(kernel)
    flat = torch.ones(taps, taps, dtype=torch.float64, device=weight.device)
    if consumer.norm is None or taps == 1:
        return flat
    filters = moved.reshape(*moved.shape[:2], taps)
    mixed = torch.einsum("oik,ij->ojk", filters, covariance)
    within = torch.einsum("oik,oil->okl", mixed, filters).flatten(1)  # (o, taps²)
    candidates = _decays(tuple(kernel)).to(weight.device)
    predicted = within @ candidates.flatten(1).T  # (o, lengths)
    running_var = state[consumer.norm.var].detach().double()
    usable = (running_var > 0) & (predicted > 0).all(1)
    if not bool(usable.any()):
        return flat
    gap = (predicted[usable].log() - running_var[usable, None].log()).square().mean(0)
    return candidates[int(gap.argmin())]


def _decays(kernel: tuple[int, ...]) -> Tensor:
    """(lengths, taps, taps): exp(−distance/ℓ) for every ℓ that is tried."""
    axes = [torch.arange(side, dtype=torch.float64) for side in kernel]
    at = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1).T
    distance = torch.cdist(at, at, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.exp(-distance / LENGTHS.clamp(min=1e-3)[:, None, None])
