"""Memory and time of a checkpoint that is compressed block by block.

    python -m benchmarks.blocks

A random Llama of a billion parameters in bfloat16 is written to disk, a block at a time, and 30 %
of its MLP neurons are pruned. Weights say nothing here; memory and time do. The peak is of the
whole process, Python and torch included.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.environment import environment, results_dir
from lbyl.app.streaming import INDEX, Shards, compress_blocks
from lbyl.runtime.files import write_json

SIZES = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def random_checkpoint(folder: Path, sizes: dict[str, int]) -> int:
    """Write a random Llama in bfloat16, never all of it in memory; how many parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    named: dict[str, Any] = {**sizes, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config = LlamaConfig(**named)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in LlamaForCausalLM(config).state_dict().items()}
    parts: dict[str, list[str]] = {}
    for name in shapes:
        parts.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else name, []).append(
            name
        )
    shards = Shards(len(parts))
    generator = torch.Generator().manual_seed(0)
    for names in parts.values():
        values = {}
        for name in names:
            if len(shapes[name]) == 1:
                values[name] = torch.ones(shapes[name], dtype=torch.bfloat16)
            else:
                drawn = torch.empty(shapes[name], dtype=torch.bfloat16)
                values[name] = drawn.normal_(0, 0.02, generator=generator)
        shards.write(folder, values)
    shards.finish(folder)
    assert (folder / INDEX).is_file()
    return shards.parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--sequences", type=int, default=32, help="of text, each of 128 tokens")
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    options = parser.parse_args()
    sizes = {**SIZES, "num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in", Path(folder) / "out"
        parameters = random_checkpoint(source, sizes)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(sizes["vocab_size"], (options.sequences, 128), generator=generator)
        report = compress_blocks(
            source,
            out,
            {"*mlp*": options.ratio},
            data=tokens,
            progress=lambda *step: print(*step, flush=True),
        )
    print(report)
    figures = {
        "environment": environment(),
        "sizes": sizes,
        "parameters": [parameters, report.parameters[1]],
        "tokens": tokens.numel(),
        "seconds": report.seconds,
        "one pass": report.forward,
        "peak bytes": report.peak,
    }
    write_json(results_dir() / "blocks.json", figures)


if __name__ == "__main__":
    main()
