"""Networks whose BatchNorms were folded into their weights, as most ONNX files have them.

    python -m benchmarks.folded [--networks resnet20_cifar10,...] [--limit 4000]

Nothing in such a network tells what its channels were like on the training data. Without data,
closed form, all layers open to pruning; beside it the same network with its BatchNorms, and folded
with a few test images, unlabelled, which are not among those that measure. What the forecast is
made of stands in every row; the map for such networks was fitted on those:

    python -m benchmarks.folded --networks "" --merge docs/results/folded.json --fit
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

import lbyl
from benchmarks.common.environment import default_device
from benchmarks.common.networks import Case, LabelledImages, load_images, load_network
from benchmarks.common.results import merged_networks, save_results
from benchmarks.common.tables import print_table
from benchmarks.forecast_fit import fitted
from benchmarks.own_inputs import Divided
from lbyl.planning.task import Amount
from lbyl.restoring.divergence import joined_scores, kl, outputs
from lbyl.restoring.forecast import Signs, correlation, equal_answers

NETWORKS = (
    "resnet20_cifar10",
    "resnet56_cifar10",
    "vgg16_cifar10",
    "resnet50_cifar100",
    "mobilenet_v2_imagenet",
    "efficientnet_lite0_imagenet",
    "digits",
)
OWN = (16, 64, 256)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
LAYERS = (nn.modules.conv._ConvNd, nn.Linear)


@torch.no_grad()
def folded(model: nn.Module, example: torch.Tensor) -> nn.Module:
    """A copy with every BatchNorm that follows a layer taken into that layer."""
    slim = copy.deepcopy(model).eval()
    made: dict[int, tuple[nn.Module, torch.Tensor]] = {}
    pairs: dict[nn.Module, nn.Module] = {}

    def after(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if isinstance(module, LAYERS):
            made[id(out)] = module, out  # held, so that no other gets its number
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and id(args[0]) in made:
            pairs[module] = made[id(args[0])][0]

    hooks = [module.register_forward_hook(after) for module in slim.modules()]
    slim(example)
    for hook in hooks:
        hook.remove()
    for name, norm in list(slim.named_modules()):
        layer = pairs.get(norm)
        if layer is None:
            continue
        fuse: Any = fuse_linear_bn_weights if isinstance(layer, nn.Linear) else fuse_conv_bn_weights
        statistics = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        layer.weight, layer.bias = fuse(layer.weight, layer.bias, *statistics)
        parent, _, last = name.rpartition(".")
        setattr(slim.get_submodule(parent), last, nn.Identity())
    return slim


def settings() -> Iterator[tuple[str, str, Amount]]:
    for criterion in ("echo", "l2"):
        for ratio in RATIOS:
            yield f"{ratio:.0%} {criterion}", criterion, {"*": ratio}
    for macs in (0.8, 0.6):
        yield f"MACs {macs:g}", "echo", lbyl.Budget(macs=macs)


def signs(prepared: lbyl.Prepared, slim: nn.Module) -> Signs:
    """What the forecast of a network without BatchNorm is made of."""
    fresh = prepared.fresh.forecasting
    teacher, student = (outputs(model, fresh, False) for model in (prepared.model, slim))
    temperature = prepared.judges.forecaster._temperature
    equal = [equal_answers(t, s) for t, s in zip(teacher, student)]
    agreement = float(torch.cat([e for e in equal if e is not None]).double().mean())
    t, s = joined_scores(teacher), joined_scores(student)
    assert t is not None and s is not None
    return Signs(agreement, float(kl(t, s, temperature).mean()), correlation(t, s))


def measure(name: str, device: str, limit: int) -> dict[str, Any]:
    network = load_network(name, device)
    case = Case(name, network, LabelledImages.of(load_images(name), network, limit))
    divided = Divided.of(case, max(OWN))
    images, plain = divided.case.test, folded(network.model, network.example)
    ways: dict[str, lbyl.Prepared] = {
        "folded": lbyl.prepare(plain, network.example),
        "BatchNorm": lbyl.prepare(network.model, network.example),
    }
    for count in OWN:
        data = divided.own[:count]
        ways[f"folded, {count} own"] = lbyl.prepare(plain, network.example, data=data)
    base, rows = images.accuracy(network.model), []
    for setting, criterion, amount in settings():
        row: dict[str, Any] = {"setting": setting}
        for way, prepared in ways.items():
            if way != "folded" and criterion == "l2":
                continue
            result = prepared.compress(amount, criterion=criterion)
            row[way] = images.accuracy(result.model)
            told = result.forecast
            row[f"{way}, forecast"] = told and [told.kept, told.low, told.high]
            if way == "folded":
                row["signs"] = asdict(signs(prepared, result.model))
        print(name, row, flush=True)
        rows.append(row)
    return {"base": base, "images": len(images), "rows": rows}


def rows_to_fit(networks: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of all networks as `benchmarks.forecast_fit` takes them."""
    for name, figures in networks.items():
        for row in figures["rows"]:
            told = row["signs"]
            features = {"finite": True, "kl_2": told["divergence"], **told}
            yield {
                "network": name,
                "base": figures["base"],
                "accuracy": row["folded"],
                "agreement": told["agreement"],
                "features": {"painted": features},
            }


def without_dents(errors: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Bounds no narrower at a knot than on the straight line between any two others.

    So few rows leave knots with nobody near: that nothing was seen there is no certainty.
    """
    made = []
    for k, *ends in errors:
        for low, high in itertools.product(errors, errors):
            if low[0] < k < high[0]:
                t = (k - low[0]) / (high[0] - low[0])
                lines = [a + t * (b - a) for a, b in zip(low[1:], high[1:])]
                ends = [max(pair) for pair in zip(ends, lines)]
        made.append((k, *(round(end, 4) for end in ends)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--results", type=Path, help="where folded.json is stored")
    parser.add_argument("--merge", nargs="*", type=Path, default=[], help="JSON of earlier runs")
    parser.add_argument("--fit", action="store_true", help="fit the forecast on all rows")
    options = parser.parse_args()
    networks = merged_networks(options.merge)
    for name in filter(None, options.networks.split(",")):
        networks[name] = measure(name, options.device, options.limit)
        save_results("folded", {"networks": networks}, folder=options.results)
    columns = ("BatchNorm", "folded", *(f"folded, {count} own" for count in OWN))
    for name, figures in networks.items():
        rows = [[row["setting"], *(row.get(c) for c in columns)] for row in figures["rows"]]
        print_table(f"{name}, {figures['base']:.1f} % before", ["pruned", *columns], rows)
    if options.fit:
        found = fitted(list(rows_to_fit(networks)), "fresh")
        print("errors without dents:", without_dents(found["errors"]))
        for name, figures in found["networks"].items():
            print(name, {key: value for key, value in figures.items() if key != "points"})


if __name__ == "__main__":
    main()
