"""Writes docs/coverage.md: what can be pruned in each published network, and why a layer is not.

python scripts/coverage.py                      # all, about a quarter of an hour on two cores
python scripts/coverage.py --only 'timm/.*vit'  # some; the rows of others are kept
python scripts/coverage.py --page               # only write the page again from the rows
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import lbyl  # noqa: E402
import published  # noqa: E402
import reference  # noqa: E402
from lbyl.io import whole_file, write_json  # noqa: E402

PAGE = ROOT / "docs" / "coverage.md"
ROWS = ROOT / "docs" / "results" / "coverage.json"
MINILM = ROOT / "docs" / "results" / "minilm.json"
MINILM_TEXT = """all-MiniLM-L6-v2 less a share of its MLP neurons: mean cosine similarity of the
embeddings of 200 English sentences before and after (`python benchmarks/minilm.py`). Random tokens
need no data: trained tokens by Zipf's law, most of a sequence near one topic
(`lbyl.statistics.tokens`). How tokens are drawn was settled on 100 of these sentences,
so that row is a little optimistic.
"""
RATIO = 0.3
DOUBLE_LIMIT = 60_000_000  # parameters up to which float64 fits comfortably

HEAD = f"""# What can be pruned

Every row is one network with weights drawn at random, cut at {RATIO:.0%} with `method="none"` and
compared with the original whose pruned channels are silenced at every layer that reads them.
*Difference* is the largest relative difference of the two outputs (float64, float32 above
{DOUBLE_LIMIT // 10**6} million parameters); of detectors, of the outputs of their heads. *Seconds*
are those of tracing, the trial cut and planning on one busy core. Layers outside units are listed
by the reason they are left alone for. `python scripts/coverage.py` writes this page again.

Residual streams are left alone unless asked for with `streams=True`.
"""

GENERAL = (
    (r"its channels are added to others' \(.*", "residual stream"),
    (r"it meets a tensor of fixed size at.*", "residual stream that is fixed elsewhere"),
    (r"it enters scaled_dot_product_attention.*|it enters \S*attention\S*.*", "attention"),
    (r"it enters (?:layer|rms)_norm.*", "normalised together (LayerNorm)"),
    (r"it enters (\w+).*, which (.*)", r"\1 \2"),
    (r" (?:in|at|at the input of) [\w.]+$", ""),
)


def short(reason: str) -> str:
    """A reason without the names of layers, so that equal reasons are counted together."""
    for pattern, instead in GENERAL:
        reason = re.sub(pattern, instead, reason)
    return reason


def row(build: published.Build) -> dict[str, Any]:
    """Trace, cut and compare one network."""
    torch.manual_seed(0)
    model, inputs = build()
    published.stir(model)
    start = time.perf_counter()
    graph = lbyl.trace(model, inputs)
    seconds = time.perf_counter() - start
    reasons = Counter(short(r) for r in graph.left_alone.values())
    found: dict[str, Any] = {"units": len(graph), "channels": graph.channels}
    found |= {"seconds": seconds, "alone": dict(reasons.most_common())}
    size = sum(p.numel() for p in model.parameters())
    if not len(graph):
        return found | {"before": size, "after": size, "macs": 1.0, "exact": None}
    if size <= DOUBLE_LIMIT:
        model, inputs = reference.in_double(model, inputs)
    proof = reference.prove_cut(model, inputs, graph, RATIO, unchanged=False)
    result = proof.result
    found["seconds"] += result.seconds["plan"]
    found |= {"before": result.before.parameters, "after": result.after.parameters}
    return found | {"macs": result.after.macs / result.before.macs, "exact": proof.exact}


def line(name: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    if "error" in found:
        return f"| {name} | – | – | – | – | – | – | {found['error']} |"
    after = f"{found['after'] / found['before']:.0%} of {found['before'] / 1e6:.1f} M"
    exact = "–" if found["exact"] is None else f"{found['exact']:.0e}"
    alone = "; ".join(f"{n} × {reason}" for reason, n in found["alone"].items())
    return (
        f"| {name} | {found['units']} | {found['channels']} | {after} | {found['macs']:.0%} "
        f"| {exact} | {found['seconds']:.1f} | {alone} |"
    )


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    lines = [HEAD]
    good = [r for r in rows.values() if r.get("units")]
    exact = [r for r in good if r["exact"] is not None and r["exact"] < 1e-4]
    lines.append(
        f"{len(rows)} networks; {len(good)} have units; of these {len(exact)} are cut exactly."
    )
    for group in dict.fromkeys(name.partition("/")[0] for name in rows):
        lines += ["", f"## {group}", ""]
        lines += [
            "| network | units | channels | parameters | MACs | difference | s | left alone |"
        ]
        lines += ["| --- | --: | --: | --: | --: | --: | --: | --- |"]
        lines += [
            line(n.partition("/")[2], r) for n, r in rows.items() if n.startswith(group + "/")
        ]
    return "\n".join(lines) + "\n" + sentences()


def sentences() -> str:
    """The section on a language model, where its benchmark has left figures."""
    if not MINILM.exists():
        return ""
    figures = json.loads(MINILM.read_text())
    ratios = figures.pop("ratios")
    lines = ["", "## A language model with its text", "", MINILM_TEXT]
    lines += [
        "| | " + " | ".join(f"{r:.0%}" for r in ratios) + " |",
        "| --- |" + " --: |" * len(ratios),
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{x:.3f}" for x in row) + " |" for name, row in figures.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--rows", type=Path, default=ROWS, help="where measured rows are kept")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = json.loads(chosen.rows.read_text()) if chosen.rows.exists() else {}
    every = published.every()
    for name, build in every.items():
        if chosen.page or not re.search(chosen.only, name):
            continue
        try:
            rows[name] = row(build)
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:200].replace("|", "/")}
        print(line(name, rows[name]), flush=True)
        write_json(chosen.rows, rows)
        gc.collect()
    ordered = {name: rows[name] for name in every if name in rows}
    with whole_file(PAGE) as temporary:
        temporary.write_text(page(ordered))


if __name__ == "__main__":
    main()
