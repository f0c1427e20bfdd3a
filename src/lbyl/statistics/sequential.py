"""Fitting each reader on what the pruned network really delivers, in the order they run.

For a user's own images. The original runs once and leaves, for every consumer, its output at some
positions. Then the slim network runs once; where it comes to a consumer, the weight is fitted there
and then so that its output from the inputs that really arrive is the original's, and the run goes
on with the new weight. One pass serves all layers, because each is fitted before the next is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lbyl.channels import Axis
from lbyl.listen import Function, Listener
from lbyl.record import Inputs, call_model, evaluation_mode
from lbyl.repair import VARIANCE_LIMITS
from lbyl.restore.echo import RIDGE, solve_ridge
from lbyl.statistics.gather import CONVOLUTIONS, FEATURE_LIMIT, Geometry, gram, patches_of, thin
from lbyl.surgery import readers_cut, tensors
from lbyl.unit import Consumer, Graph

SAMPLES = 1 << 15


Repair = Callable[[Tensor, Tensor], None]
"""Takes how the output's mean moved and by what factor its variance, and puts both back."""


class Fitter(Listener):
    """Listens to both runs: keeps the original's outputs, then fits the slim network's weights."""

    def __init__(
        self,
        consumers: Mapping[int, Consumer],
        targets: dict[str, Tensor] | None = None,
        repairs: Mapping[str, Repair] | None = None,
    ) -> None:
        super().__init__()
        self.consumers = consumers  # by the id of the weight, in the network that runs
        self.fitting = targets is not None
        self.targets: dict[str, Tensor] = {} if targets is None else targets
        self.repairs = repairs or {}
        self.fitted: list[str] = []

    def hear(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weight: Any = args[1] if len(args) > 1 else kwargs.get("weight")
        consumer = self.consumers.get(id(weight))
        if consumer is None or not (func in CONVOLUTIONS or func is F.linear):
            return func(*args, **kwargs)
        samples = inputs_seen(func, args, kwargs)
        if not self.fitting:
            self.targets[consumer.name] = samples @ weight.detach().flatten(1).T
        elif samples.shape[1] <= FEATURE_LIMIT and consumer.name in self.targets:
            self._fit(consumer, weight, samples.double())
        return func(*args, **kwargs)

    def _fit(self, consumer: Consumer, weight: Tensor, x: Tensor) -> None:
        """Least squares of the original's output on what arrives, mean and variance repaired."""
        target = self.targets.pop(consumer.name).double()
        mean_in, mean_out = x.mean(0), target.mean(0)
        x, centred = x - mean_in, target - mean_out
        new = solve_ridge((centred.T @ x) / len(x), gram(x) / len(x), RIDGE)
        ratio = ((x @ new.T).square().mean(0) + 1e-12) / (centred.square().mean(0) + 1e-12)
        weight.copy_(new.reshape(weight.shape))
        self.repairs[consumer.name](new @ mean_in - mean_out, ratio.clamp(*VARIANCE_LIMITS))
        self.fitted.append(consumer.name)


def inputs_seen(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """(samples, features): what a layer multiplies its weight with, at the same places each run."""
    x = args[0] if args else kwargs["input"]
    generator = torch.Generator().manual_seed(0)
    if func is F.linear:
        return thin(x.reshape(-1, x.shape[-1]), SAMPLES, generator)
    geometry = Geometry.of(func, args, kwargs)
    return patches_of(x, geometry, geometry.positions(x) / SAMPLES, generator).flatten(1)


def fit_sequentially(
    original: nn.Module,
    slim: nn.Module,
    graph: Graph,
    indices: Mapping[Axis, Tensor],
    batch: Inputs,
) -> list[str]:
    """Refit, in place, every consumer of `slim` that lost inputs; the names of those fitted."""
    touched = [
        c for c in readers_cut(graph, indices) if c.calls == 1 and c.kind in ("conv", "linear")
    ]
    before, after = tensors(original), tensors(slim)
    listener = Fitter({id(before[c.weight]): c for c in touched})
    with evaluation_mode(original), torch.no_grad(), listener:
        call_model(original, batch)
    rows = {c.name: indices.get((c.weight, c.output_axis)) for c in touched}
    targets = {name: _take(t, rows[name]) for name, t in listener.targets.items()}
    repairs = {c.name: _repair(c, before, after, rows[c.name]) for c in touched}
    fitter = Fitter({id(after[c.weight]): c for c in touched}, targets, repairs)
    with evaluation_mode(slim), torch.no_grad(), fitter:
        call_model(slim, batch)
    return fitter.fitted


def _take(values: Tensor, rows: Tensor | None) -> Tensor:
    """The outputs that stay, along the last dimension."""
    return values if rows is None else values[..., rows.to(values.device)]


def _repair(
    consumer: Consumer,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    rows: Tensor | None,
) -> Repair:
    """Puts a shift into the BatchNorm behind a consumer, or into its bias where it has one."""
    norm = consumer.norm
    bias = consumer.bias or f"{consumer.name}.bias"

    def into_norm(shift: Tensor, ratio: Tensor) -> None:
        assert norm is not None
        mean = _take(before[norm.mean].double(), rows)
        var = _take(before[norm.var].double(), rows) + norm.eps
        after[norm.mean].copy_(mean + shift)
        after[norm.var].copy_((var * ratio - norm.eps).clamp(min=0))

    def into_bias(shift: Tensor, ratio: Tensor) -> None:
        if bias in after:
            old = _take(before[bias].double(), rows) if bias in before else 0.0
            after[bias].copy_(old - shift)

    return into_norm if norm is not None else into_bias
