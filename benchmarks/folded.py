"""Networks whose BatchNorms were folded into their weights, as most ONNX files have them.

    python -m benchmarks.folded [--networks resnet20_cifar10,...] [--limit 4000]

Nothing in such a network tells what its channels were like on the training data. Without data,
closed form, all layers open to pruning; beside it the same network with its BatchNorms, and folded
with a few test images, unlabelled, which are not among those that measure. Every row has the
agreement that the forecast is made of; the map for such networks is fitted on those:

    python -m benchmarks.forecast_fit --folded docs/results/folded.json
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
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
from benchmarks.own_inputs import Divided
from lbyl.planning.task import Amount

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


def agreement(prepared: lbyl.Prepared, slim: nn.Module) -> float:
    """The fraction of equal answers on held-out synthetic inputs."""
    told = prepared.forecast(slim)
    assert told is not None and told.agreement is not None
    return told.agreement


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
                row["agreement"] = agreement(prepared, result.model)
        print(name, row, flush=True)
        rows.append(row)
    return {"base": base, "images": len(images), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--results", type=Path, help="where folded.json is stored")
    parser.add_argument("--merge", nargs="*", type=Path, default=[], help="JSON of earlier runs")
    options = parser.parse_args()
    networks = merged_networks(options.merge)
    for name in filter(None, options.networks.split(",")):
        networks[name] = measure(name, options.device, options.limit)
        save_results("folded", {"networks": networks}, folder=options.results)
    columns = ("BatchNorm", "folded", *(f"folded, {count} own" for count in OWN))
    for name, figures in networks.items():
        rows = [[row["setting"], *(row.get(c) for c in columns)] for row in figures["rows"]]
        print_table(f"{name}, {figures['base']:.1f} % before", ["pruned", *columns], rows)


if __name__ == "__main__":
    main()
