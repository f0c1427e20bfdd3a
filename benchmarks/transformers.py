"""A language model with fewer MLP neurons: perplexity, without data and with real text.

    python -m benchmarks.transformers --ratios 0.3 0.5
    python -m benchmarks.transformers --refine 200

The network is a Llama of 7 M parameters, trained on technical English. Perplexity is measured on
the first 60 windows of 256 tokens of held-out text; calibration text comes from far behind them.

Beside ours stand two selections and a slicing of our own making, from the formulas of their papers,
all on the same texts:

- wanda: a neuron counts by Σ |W_down| · ‖x‖₂ over its outgoing weights; nothing is restored.
- FLAP: by the fluctuation of its activation, Σ_n (x_n − x̄)² · ‖W_down‖²; the mean of what went is
  added as a bias.
- SliceGPT: hidden activations are turned onto their principal axes and the last ones dropped.
  Behind a product of two projections no turning can be taken into the weights, so it is shown as
  what it would bring if it cost nothing: a bound, not a network.

Figures are stored after every row, so that a run that is cut off has not been for nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lbyl
from benchmarks.common.environment import default_device, environment, results_dir
from benchmarks.common.text import (
    FEW,
    MANY,
    calibration_windows,
    language_model,
    measured_windows,
    perplexity,
)
from lbyl.planning.plan import Plan
from lbyl.runtime.files import write_json
from lbyl.statistics.collect import collect
from lbyl.statistics.moments import Statistics
from lbyl.surgery.cut import copy_model

LAYERS = "*mlp*"
TEXTS = 96
WRITTEN, REAL = "written", "real"

Slim = Callable[[float], nn.Module]


def neuron_scores(model: nn.Module, statistics: Statistics, kind: str) -> dict[str, Tensor]:
    """Unit → a score for every neuron, by the moments at its down projection."""
    made = {}
    for name, moments in statistics.moments.items():
        weight = model.get_parameter(f"{name}.weight").detach().double()  # (outputs, neurons)
        mean, variance = moments.mean[:, 0], moments.covariance.diagonal()
        if kind == "wanda":
            made[name] = (weight.abs() * (variance + mean.square()).sqrt()).sum(0)
        else:
            made[name] = variance * weight.square().sum(0)
    return made


def selected(prepared: lbyl.Prepared, ratio: float, kind: str) -> Plan:
    """The plan that keeps the best neurons of every layer by these scores."""
    scores = neuron_scores(prepared.model, prepared.statistics(), kind)
    kept, channels = {}, {}
    for unit in prepared.graph.units:
        score = scores[unit.consumers[0]]
        count = max(1, int(len(score) * (1 - ratio) + 1e-9))
        kept[unit.name] = score.topk(count).indices.sort().values
        channels[unit.name] = unit.channels
    return Plan(kept, channels)


def sliced(prepared: lbyl.Prepared, ratio: float) -> nn.Module:
    """Every down projection reads the leading principal axes of its input alone."""
    slim = copy_model(prepared.model)
    for name, moments in prepared.statistics().moments.items():
        mean = moments.mean[:, 0]
        second = moments.covariance + torch.outer(mean, mean)
        axes = torch.linalg.eigh(second).eigenvectors  # ascending
        kept = axes[:, int(len(mean) * ratio + 1e-9) :]
        weight = slim.get_parameter(f"{name}.weight")
        with torch.no_grad():
            weight.copy_((weight.double() @ kept @ kept.T).to(weight))
    return slim


def on_these_texts_alone(prepared: lbyl.Prepared) -> lbyl.Prepared:
    """The same network for methods of others, which know nothing but the texts given."""
    if prepared.own is None:
        return prepared
    known = collect(prepared.model, prepared.graph, prepared.own)
    return lbyl.prepare(prepared.model, prepared.example_inputs, data=known, include=LAYERS)


def ways(prepared: lbyl.Prepared, refine: int) -> dict[str, Slim]:
    """What is compared, each a function of the ratio."""
    plain = on_these_texts_alone(prepared)

    def by(criterion: str | None, method: Any, steps: int = 0) -> Slim:
        return lambda ratio: (
            prepared.compress(
                {LAYERS: ratio}, criterion=criterion, method=method, refine=steps
            ).model
        )

    def planned(kind: str, method: Any) -> Slim:
        return lambda ratio: plain.compress(selected(plain, ratio, kind), method=method).model

    flap = lbyl.methods.resolve("none")
    made = {
        "echo": by("echo", "echo"),
        "echo after l2": by("l2", "echo"),
        "FLAP-style, bias": planned("flap", type(flap)(correction="mean")),
        "wanda-style, cut": planned("wanda", "none"),
        "SliceGPT-style, bound": lambda ratio: sliced(plain, ratio),
        "l2, cut": by("l2", "none"),
    }
    return made | ({f"echo, {refine} steps": by("echo", "echo", refine)} if refine else {})


def measure(
    model: nn.Module,
    ratios: Sequence[float],
    refine: int,
    only: str,
    texts: Sequence[str],
    count: int,
    windows: dict[str, Tensor],
    store: Callable[[dict[str, Any]], None],
) -> None:
    """Text → way → ratio → perplexity on each set of windows."""
    real = list(calibration_windows(count).to(next(iter(windows.values())).device).split(8))
    example = real[0][:2]
    figures: dict[str, Any] = {}
    for text in texts:
        # A number that is asked for is all that is written, for refinement as well.
        data = real if text != WRITTEN else None if count == TEXTS else count
        prepared = lbyl.prepare(model, example, data=data, include=LAYERS)
        figures[text] = {}
        for name, slim in ways(prepared, refine).items():
            if only and only not in name:
                continue
            rows = {}
            for ratio in ratios:
                start = time.perf_counter()
                made = slim(ratio)
                seconds = time.perf_counter() - start
                found = {key: round(perplexity(made, x), 3) for key, x in windows.items()}
                rows[str(ratio)] = {**found, "seconds": round(seconds, 1)}
                print(f"{text:18} {name:24} {ratio:.0%}  {found}  {seconds:.0f} s", flush=True)
            figures[text][name] = rows
            store(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.3, 0.5])
    parser.add_argument("--refine", type=int, default=0, help="steps, as a row of its own")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--text", nargs="+", default=[WRITTEN, REAL], choices=[WRITTEN, REAL])
    parser.add_argument("--texts", type=int, default=TEXTS, help="to collect on")
    parser.add_argument("--windows", type=int, default=FEW)
    parser.add_argument("--all-windows", action="store_true", help="also on 1,000 windows")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--out", type=Path, default=results_dir() / "transformers.json")
    options = parser.parse_args()
    model = language_model(options.device)
    given = measured_windows(options.windows)
    windows = {f"{options.windows} windows": given.to(options.device)}
    if options.all_windows:
        windows["1,000 windows"] = measured_windows(MANY).to(options.device)
    base = {key: round(perplexity(model, x), 3) for key, x in windows.items()}
    print(f"as it is: {base}", flush=True)

    def store(figures: dict[str, Any]) -> None:
        document = {"environment": environment(), "base": base, "perplexity": figures}
        write_json(options.out, document)

    rows = options.ratios, options.refine, options.only
    measure(model, *rows, options.text, options.texts, windows, store)


if __name__ == "__main__":
    main()
