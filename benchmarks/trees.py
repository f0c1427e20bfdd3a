"""Processor time of a compression in two trees of this repository, in turns, and their ratio.

    python -m benchmarks.trees ../old . --networks resnet50,vgg16,vit --runs 5

Each run is a process of its own, the trees take turns, and what is compared are medians: a machine
that slows down slows both. Weights are drawn at random, BatchNorms are not those of a network that
nobody trained. Memory of a layer is kept or given back as glibc's environment variables say, for
both trees alike.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

PROGRAM = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[3]))
sys.path.insert(0, sys.argv[1])
from benchmarks.trees import network
model, x = network(sys.argv[2])
sys.path.insert(0, sys.argv[4])
import lbyl
lbyl.compress(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), torch.zeros(1, 3))
start = time.process_time()
lbyl.compress(model, x, 0.5)
print(time.process_time() - start)
"""
NETWORKS = ("resnet50", "vgg16", "resnet18", "vit", "llama")


def network(name: str) -> tuple[Any, Any]:
    """A network with weights drawn from one seed, and its example."""
    import torch

    torch.manual_seed(0)
    if name == "llama":
        import transformers

        sizes: dict[str, Any] = {
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
        }
        sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096}
        sizes |= {"num_hidden_layers": 6}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        return model.eval(), {"input_ids": torch.randint(3, 4096, (1, 64))}
    import torchvision

    if name == "vit":
        sizes = {"image_size": 32, "patch_size": 4, "num_layers": 8, "num_heads": 6}
        model = torchvision.models.VisionTransformer(**sizes, hidden_dim=192, mlp_dim=768)
        return model.eval(), torch.zeros(1, 3, 32, 32)
    model = torchvision.models.get_model("vgg16_bn" if name == "vgg16" else name, weights=None)
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(norm.get_buffer("running_mean"), -0.3, 0.3)
            torch.nn.init.uniform_(norm.get_buffer("running_var"), 0.5, 1.5)
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return model.eval(), torch.zeros(1, 3, *(2 * (224 if name == "resnet50" else 64,)))


def seconds(tree: Path, name: str, threads: int) -> float:
    here = Path(__file__).resolve().parents[1]
    arguments = [str(here), name, str(threads), str(tree.resolve() / "src")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree.resolve() / "src"), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs=2, type=Path)
    parser.add_argument("--networks", default="resnet50")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    for name in options.networks.split(","):
        took: list[list[float]] = [[], []]
        for _ in range(options.runs):
            for times, tree in zip(took, options.trees, strict=True):
                times.append(seconds(tree, name, options.threads))
            print(name, *(f"{times[-1]:.1f} s" for times in took), flush=True)
        old, new = map(median, took)
        print(f"{name}: {old:.1f} s and {new:.1f} s of a processor, ratio {new / old:.3f}")


if __name__ == "__main__":
    main()
