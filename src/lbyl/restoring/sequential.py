"""Fitting each consumer on what the pruned network really delivers, in the order they run.

For a user's own inputs. The original runs once and leaves, for every consumer, its output at some
positions. Then the slim network runs once; where it comes to a consumer, the weight is fitted there
and then so that its output from the inputs that really arrive is the original's, and the run goes
on with the new weight. One pass serves all layers, because each is fitted before the next is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lbyl.graph.unit import Axis, Consumer, Graph
from lbyl.graph.watch import LayerCall, Watch
from lbyl.restoring.correct import VARIANCE_LIMITS, scaled_variance
from lbyl.runtime.notes import at, note
from lbyl.runtime.run import Inputs, call_model, evaluation_mode
from lbyl.runtime.tensors import copy_all, is_finite, tensors
from lbyl.statistics.collect import FEATURE_LIMIT
from lbyl.statistics.samples import Geometry, patches_of, thin
from lbyl.statistics.solve import RIDGE, gram, solve_ridge
from lbyl.surgery.indices import consumers_cut

SAMPLES = 1 << 15
Correction = Callable[[Tensor, Tensor], None]
"""Takes how the output's mean moved and by what factor its variance, and puts both back."""


class Targets(Watch):
    """Keeps the outputs of the original's consumers at some positions."""

    def __init__(self, model: nn.Module, consumers: Sequence[Consumer]) -> None:
        super().__init__(model, consumers)
        self.outputs: dict[str, Tensor] = {}

    def before_layer(self, consumer: Consumer, call: LayerCall) -> None:
        self.outputs[consumer.name] = inputs_seen(call) @ call.weight.detach().flatten(1).T


class Fitter(Watch):
    """Fits the slim network's consumers to the targets, each as it comes to run."""

    def __init__(
        self,
        model: nn.Module,
        consumers: Sequence[Consumer],
        targets: dict[str, Tensor],
        corrections: Mapping[str, Correction],
    ) -> None:
        super().__init__(model, consumers)
        self.targets, self.corrections = targets, corrections
        self.fitted: list[str] = []

    def before_layer(self, consumer: Consumer, call: LayerCall) -> None:
        samples = inputs_seen(call)
        if samples.shape[1] <= FEATURE_LIMIT and consumer.name in self.targets:
            with at(consumer.name):
                self._fit(consumer, call.weight, samples.double())

    def _fit(self, consumer: Consumer, weight: Tensor, x: Tensor) -> None:
        """Least squares of the original's output on what arrives; mean and variance corrected."""
        target = self.targets.pop(consumer.name).double()
        mean_in, mean_out = x.mean(0), target.mean(0)
        x, centred = x - mean_in, target - mean_out
        new = solve_ridge((centred.T @ x) / len(x), gram(x) / len(x), RIDGE)
        ratio = ((x @ new.T).square().mean(0) + 1e-12) / (centred.square().mean(0) + 1e-12)
        if not is_finite(new.to(weight.dtype), ratio):
            note("not fitted in sequence: what arrives is not finite")
            return
        weight.copy_(new.reshape(weight.shape))
        self.corrections[consumer.name](new @ mean_in - mean_out, ratio.clamp(*VARIANCE_LIMITS))
        self.fitted.append(consumer.name)


def inputs_seen(call: LayerCall) -> Tensor:
    """(samples, features): a layer's inputs, at the same positions in each run."""
    generator = torch.Generator().manual_seed(0)
    if call.kind == "linear":
        return torch.cat(list(thin(call.x.reshape(-1, call.x.shape[-1]), SAMPLES, generator)))
    geometry = Geometry.of(call)
    parts = patches_of(call.x, geometry, SAMPLES, generator)
    return torch.cat([patches.flatten(1) for patches in parts])


def fit_sequentially(
    original: nn.Module,
    slim: nn.Module,
    graph: Graph,
    indices: Mapping[Axis, Tensor],
    batch: Inputs,
) -> list[str]:
    """Refit, in place, every consumer of `slim` that lost inputs; the names of those fitted."""
    consumers = [c for c in consumers_cut(graph, indices) if _can_be_fitted(c)]
    before, after = tensors(original), tensors(slim)
    targets = Targets(original, consumers)
    with evaluation_mode(original), torch.no_grad(), targets:
        call_model(original, batch)
    rows = {c.name: indices.get((c.weight, c.output_axis)) for c in consumers}
    outputs = {name: _take(t, rows[name]) for name, t in targets.outputs.items()}
    moved: dict[str, Tensor] = {}  # running statistics: what a run writes is undone after it
    corrections = {c.name: _correction(c, before, after, rows[c.name], moved) for c in consumers}
    fitter = Fitter(slim, consumers, outputs, corrections)
    with evaluation_mode(slim), torch.no_grad(), fitter:
        call_model(slim, batch)
    copy_all([after[name] for name in moved], list(moved.values()))
    return fitter.fitted


def _can_be_fitted(consumer: Consumer) -> bool:
    """Whether a consumer runs once and its weight is (outputs, …)."""
    plain = consumer.kind in ("conv", "linear") and consumer.output_axis == 0
    return plain and consumer.calls == 1


def _take(values: Tensor, rows: Tensor | None) -> Tensor:
    """The kept outputs, along the last dimension."""
    return values if rows is None else values[..., rows.to(values.device)]


def _correction(
    consumer: Consumer,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    rows: Tensor | None,
    moved: dict[str, Tensor],
) -> Correction:
    """Puts a shift into the BatchNorm behind a consumer, or into its bias where it has one.

    Running statistics that it writes are in `moved`, too.
    """
    norm = consumer.norm
    bias = consumer.bias or f"{consumer.name}.bias"

    def into_norm(shift: Tensor, ratio: Tensor) -> None:
        assert norm is not None
        mean, var = (_take(before[name].double(), rows) for name in (norm.mean, norm.var))
        moved[norm.mean] = mean + shift
        moved[norm.var] = scaled_variance(var, norm.eps, ratio)
        copy_all([after[n] for n in (norm.mean, norm.var)], [moved[norm.mean], moved[norm.var]])

    def into_bias(shift: Tensor, ratio: Tensor) -> None:
        if bias in after:
            old = _take(before[bias].double(), rows) if bias in before else 0.0
            after[bias].copy_(old - shift)

    return into_norm if norm is not None else into_bias
