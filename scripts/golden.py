"""The values that compressions give, kept and compared: weights, plans, graphs and scores.

python scripts/golden.py record new.safetensors             # some 60 cells, one thread
python scripts/golden.py compare old.safetensors new.safetensors
python scripts/golden.py trees ../old . --jobs 2            # both recorded here, then compared
python scripts/golden.py record new.safetensors --all       # every network × setting × method

A recording holds values alone, no text and no times, so that trees with other names and messages
can be compared. Two trees are recorded on one machine, one right after the other: sums of floating
numbers depend on the processor. `--plant` changes one weight of one cell by 1e-6, which a
comparison must find.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = 32  # procedural images of the networks for pictures
PLANTED = 1e-6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    todo = parser.add_subparsers(dest="todo", required=True)
    one = todo.add_parser("record")
    one.add_argument("file", type=Path)
    one.add_argument("--only", default="*", help="pattern of cells")
    one.add_argument("--all", action="store_true", help="every combination")
    one.add_argument("--jobs", type=int, default=1, help="cells at once, a process each")
    one.add_argument("--plant", action="store_true", help="change one weight by 1e-6")
    two = todo.add_parser("compare")
    two.add_argument("files", type=Path, nargs=2)
    trees = todo.add_parser("trees")
    trees.add_argument("trees", type=Path, nargs=2)
    trees.add_argument("--only", default="*")
    trees.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if options.todo == "record":
        record(options.file, options.only, options.all, options.plant, options.jobs)
        return 0
    if options.todo == "compare":
        return compare(*options.files)
    return compare_trees(*options.trees, options.only, options.jobs)


# ------------------------------------------------------------------------------------ networks


def networks() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Twelve networks with weights drawn from one seed, and what each is called with."""
    import torch

    def picture(size: int = 32) -> Any:
        return torch.randn(2, 3, size, size)

    def vision(name: str, **options: Any) -> tuple[Any, Any]:
        import torchvision

        return torchvision.models.get_model(name, weights=None, **options), picture()

    def transformer(name: str, **sizes: Any) -> tuple[Any, Any]:
        import transformers

        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, **sizes}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
        kind = "CausalLM" if name == "Llama" else "SequenceClassification"
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}For{kind}")(config)
        return model, {"input_ids": torch.randint(3, 64, (2, 16))}

    def vit() -> tuple[Any, Any]:
        from torchvision.models import VisionTransformer

        return VisionTransformer(16, 4, 2, 4, 32, 48, num_classes=10), picture(16)

    def unet() -> tuple[Any, Any]:
        import segmentation_models_pytorch as smp

        return smp.Unet("resnet18", encoder_weights=None, decoder_channels=(32, 16, 16, 8, 8)), (
            picture()
        )

    def folded() -> tuple[Any, Any]:
        from torch.nn.utils.fusion import fuse_conv_bn_weights

        model, x = vision("resnet18", num_classes=10)
        varied(model)
        for norm in [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]:
            name = next(n for n, m in model.named_modules() if m is norm)
            conv_name = name.replace("bn", "conv") if "bn" in name else name[:-1] + "0"
            conv = model.get_submodule(conv_name)
            conv.weight, conv.bias = fuse_conv_bn_weights(
                conv.weight,
                None,
                norm.running_mean,
                norm.running_var,
                norm.eps,
                norm.weight,
                norm.bias,
            )
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, torch.nn.Identity())
        return model, x

    def digits() -> tuple[Any, Any]:
        from safetensors.torch import load_file

        import lbyl

        (file,) = Path(str(lbyl.__file__)).parent.rglob("digits.safetensors")
        model = digits_network()
        model.load_state_dict(load_file(file))
        return model, torch.randn(2, 1, 8, 8)

    def detector() -> tuple[Any, Any]:
        from torchvision.models.detection import ssdlite320_mobilenet_v3_large as ssd

        options = {"weights": None, "weights_backbone": None, "num_classes": 5}
        return ssd(**options), ([torch.rand(3, 320, 320)],)

    return {
        "digits": digits,
        "resnet18": lambda: vision("resnet18", num_classes=10),
        "vgg": lambda: vision("vgg11_bn", num_classes=10),
        "mobilenet": lambda: vision("mobilenet_v2", num_classes=10),
        "efficientnet": lambda: vision("efficientnet_b0", num_classes=10),
        "densenet": lambda: vision("densenet121", num_classes=10),
        "vit": vit,
        "llama": lambda: transformer("Llama", num_key_value_heads=2),
        "bert": lambda: transformer("Bert", num_labels=7),
        "detector": detector,
        "unet": unet,
        "folded": folded,
    }


def digits_network() -> Any:
    """The network that ships with the package, by the names of its weights."""
    from torch import nn

    def block(width: int, out: int) -> nn.Sequential:
        conv = nn.Conv2d(width, out, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU())

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
            self.conv2, self.bn2 = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)

        def forward(self, x: Any) -> Any:
            return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()

    class Digits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.plain1, self.plain2 = block(1, 32), block(32, 48), block(48, 64)
            self.pool, self.block = nn.MaxPool2d(2), Residual()
            self.fc = nn.Linear(64, 10)

        def forward(self, x: Any) -> Any:
            x = self.block(self.pool(self.plain2(self.plain1(self.stem(x)))))
            return self.fc(x.mean((2, 3)))

    return Digits()


def varied(model: Any) -> Any:
    """The model with BatchNorms that are not those of a network nobody trained."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            for name, least in (("running_mean", -0.3), ("running_var", 0.5), ("weight", 0.5)):
                values = getattr(module, name).data
                values.copy_(torch.rand(values.shape, generator=generator) * 0.6 + least)
    return model.eval()


# --------------------------------------------------------------------------------------- cells

Cell = tuple[str, str, str]  # network, setting, method

SETTINGS: dict[str, dict[str, Any]] = {
    "half": {"ratio": 0.5},
    "patterns": {"ratio": {"*": 0.5}},
    "macs": {"budget": {"macs": 0.6}},
    "params": {"budget": {"params": 0.6}},
    "keep": {"budget": {"keep": 0.9}},
    "uniform": {"budget": {"params": 0.75, "uniform": True}},
    "criterion": {"ratio": 0.5, "criterion": "echo"},
    "heads": {"ratio": {"*:heads": 0.5}},
    "qk": {"ratio": {"*:qk": 0.5}},
    "residual": {"ratio": {"*": 0.3}, "residual": True},
    "own": {"ratio": 0.5, "data": "own"},
    "analytic": {"ratio": 0.5, "data": "analytic"},
    "inversion": {"ratio": 0.5, "data": "inversion"},
    "refined": {"ratio": 0.5, "refine": 3},
    "multiple": {"ratio": 0.4, "multiple_of": 8},
}
OF_ATTENTION = ("heads", "qk")
TRANSFORMERS = ("vit", "llama", "bert")
PICTURES_ONLY = ("analytic", "inversion")


def cells(methods: list[str], every: bool) -> Iterator[Cell]:
    """Every network at half, every setting and every method on some; or all of it."""
    names = list(networks())
    if every:
        for network, setting, method in itertools.product(names, SETTINGS, methods):
            if network in TRANSFORMERS or setting not in OF_ATTENTION:
                yield network, setting, method
        return
    for network in names:
        yield network, "half", "echo"
        if network not in ("detector", "digits"):
            yield network, "patterns", "none"
    for method in methods:
        if method != "echo":
            yield "digits", "half", method
            yield "resnet18", "patterns", method
    for setting in SETTINGS:
        if setting not in ("half", *OF_ATTENTION):
            yield "digits", setting, "echo"
    for network, setting in itertools.product(TRANSFORMERS, (*OF_ATTENTION, "residual", "macs")):
        yield network, setting, "echo"
    for network in ("resnet18", "mobilenet", "folded"):
        yield network, "macs", "echo"
    yield from [
        ("llama", "refined", "echo"),
        ("folded", "own", "echo"),
        ("unet", "residual", "echo"),
    ]


def run(cell: Cell) -> dict[str, Any]:
    """The values of one compression."""
    import torch

    import lbyl

    network, setting, method = cell
    torch.manual_seed(0)
    model, x = networks()[network]()
    if network not in ("digits", "folded"):
        varied(model)
    options = dict(SETTINGS[setting])
    amount = lbyl.Budget(**options.pop("budget")) if "budget" in options else options.pop("ratio")
    few = IMAGES if network not in ("digits", *TRANSFORMERS[1:]) else None
    data = options.pop("data", few)
    if data == "own":
        data = torch.randn(64, *x.shape[1:], generator=torch.Generator().manual_seed(2))
    if data is few and method in ("none", "moments"):
        data = None
    result = lbyl.compress(model.eval(), x, amount, method=method, data=data, **options)
    return values(result)


def values(result: Any) -> dict[str, Any]:
    """What a result holds, as tensors by name."""
    import torch

    made = {f"weight {n}": t.detach().clone() for n, t in result.model.state_dict().items()}
    made |= {f"kept {name}": kept for name, kept in result.plan.kept.items()}
    made |= {f"axis {name} {axis}": c for (name, axis), c in result.graph.axes.items()}
    unprunable = "\n".join(sorted(result.graph.unprunable)).encode()
    made["unprunable"] = torch.tensor(list(unprunable), dtype=torch.uint8)
    sizes = [(s.parameters, s.macs, s.bytes) for s in (result.before, result.after)]
    made["sizes"] = torch.tensor(sizes)
    errors = [float("nan") if row.error is None else row.error for row in result.rows]
    made["errors"] = torch.tensor(errors, dtype=torch.float64)
    forecast = [getattr(result.forecast, n, None) for n in ("agreement", "divergence", "inputs")]
    made["scores"] = torch.tensor([float("nan") if f is None else f for f in forecast]).double()
    return made


def record(file: Path, only: str, every: bool, plant: bool, jobs: int) -> None:
    """Run every cell on one thread and write what came of it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from safetensors.torch import save_file

    import lbyl

    wanted = [cell for cell in cells(lbyl.methods.names(), every) if fnmatch("/".join(cell), only)]
    made: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=8) as pool:
        for cell, found, seconds in pool.imap(recorded, wanted):
            name = "/".join(cell)
            print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
            made |= {f"{name}/{key}": value for key, value in found.items()}
    if plant:
        name = next(n for n, x in made.items() if "/weight " in n and x.dtype.kind == "f")
        made[name].reshape(-1)[0] += PLANTED
    save_file({name: _tensor(x) for name, x in made.items()}, file)


def recorded(cell: Cell) -> tuple[Cell, dict[str, Any], float]:
    """A cell with what came of it, as arrays, and the seconds of a processor that it took."""
    import torch

    import lbyl

    torch.set_num_threads(1)
    start = time.process_time()
    try:
        found = run(cell)
    except lbyl.LbylError:
        found = {"refused": torch.ones(1)}
    return cell, {key: x.numpy().copy() for key, x in found.items()}, time.process_time() - start


def _tensor(x: Any) -> Any:
    import torch

    return torch.from_numpy(x)


def compare(one: Path, other: Path) -> int:
    """Print every value that differs; 1 where any does."""
    import torch
    from safetensors.torch import load_file

    first, second = load_file(one), load_file(other)
    bad: dict[str, list[str]] = {}
    for name in sorted(first.keys() | second.keys()):
        cell, _, key = name.rpartition("/") if "/axis" not in name else name.partition("/axis")
        a, b = first.get(name), second.get(name)
        if a is None or b is None:
            bad.setdefault(cell, []).append(f"{key}: only in {two_names(one, other, b is None)}")
        elif a.shape != b.shape or a.dtype != b.dtype:
            bad.setdefault(cell, []).append(f"{key}: {tuple(a.shape)} and {tuple(b.shape)}")
        elif not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            off = (a.double() - b.double()).abs().max().item()
            bad.setdefault(cell, []).append(f"{key}: differs by {off:.2g}")
    for cell, what in bad.items():
        print(f"{cell}: " + "; ".join(what[:4]) + (f" (+{len(what) - 4})" if len(what) > 4 else ""))
    total = len({"/".join(name.split("/")[:3]) for name in first})
    print(f"{total} cells, {len(first)} values, {len(bad)} places differ")
    return int(bool(bad))


def two_names(one: Path, other: Path, first: bool) -> str:
    return str(one if first else other)


def compare_trees(old: Path, new: Path, only: str, jobs: int) -> int:
    """Record both trees with this script, one right after the other, and compare them."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for i, tree in enumerate((old, new)):
            files.append(Path(folder) / f"{i}.safetensors")
            environment: Mapping[str, str] = {
                **os.environ,
                "PYTHONPATH": str(tree.resolve() / "src"),
            }
            command = [sys.executable, __file__, "record", str(files[-1]), "--only", only]
            command += ["--jobs", str(jobs)]
            subprocess.run(command, env=environment, check=True)
        return compare(*files)


if __name__ == "__main__":
    sys.exit(main())
