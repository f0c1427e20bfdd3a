"""Writes docs/coverage.md: what can be pruned in each published network, and why a layer is not.

python scripts/coverage.py                      # all, about a quarter of an hour on two cores
python scripts/coverage.py --only 'timm/.*vit'  # some; the rows of others are kept
python scripts/coverage.py --page               # only write the page again from the rows
python scripts/coverage.py --page --sweep sweep.xml  # rows and outcomes of the sweep

`pytest -m slow tests/test_networks_sweep.py --junitxml=sweep.xml` writes the last one's file: the
sweep measures the same rows, and what becomes of the cut networks besides.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from lbyl.torchkit.files import whole_file, write_json  # noqa: E402
from support import published, reference  # noqa: E402

PAGE = ROOT / "docs" / "coverage.md"
ROWS = ROOT / "docs" / "results" / "coverage.json"
MINILM = ROOT / "docs" / "results" / "minilm.json"
MINILM_TEXT = """all-MiniLM-L6-v2 less some of its MLP neurons: mean cosine similarity of the
embeddings of 200 English sentences before and after (`python -m benchmarks.minilm`). Random tokens
need no data: trained tokens by Zipf's law, most of a sequence near one topic
(`lbyl.inputs.tokens`). How tokens are drawn was chosen on 100 of these sentences,
so that row is a little optimistic.
"""
# Rows that were measured earlier name these reasons otherwise.
REWORDED = {
    "residual stream": "residual",
    "residual stream that is fixed elsewhere": "residual, fixed elsewhere",
}
RATIO = 0.3
DOUBLE_LIMIT = 60_000_000  # parameters up to which float64 fits comfortably

HEAD = f"""# What can be pruned

Every row is one network with weights drawn at random, cut at {RATIO:.0%} with `method="none"` and
compared with the original whose pruned channels are silenced at every consumer.
*Difference* is the largest relative difference of the two outputs (float64, float32 above
{DOUBLE_LIMIT // 10**6} million parameters); of detectors, of the outputs of their heads. *s* is the
processor time of tracing, the dry run and planning in seconds, with one thread; other work on the
machine does not count. Layers outside units are unprunable and are listed by the reason.
`python scripts/coverage.py` writes this page again.

Channels that additions tie across layers are pruned only with `residual=True`.
"""

SWEEP = """## Still a model

`pytest -m slow tests/test_networks_sweep.py` asks of every network on this page: ratio 0 leaves the
output equal to the last bit; the cut at {ratio:.0%} equals the silenced original to 1e-4;
parameters and MACs fall; saved and loaded again it computes the same bits; `torch.export` takes it;
one step of SGD in training mode, on two examples, has a finite loss and moves the weights; tracing
and planning take less than 30 s of one core. `torch.compile` must capture it, too
(`backend="eager"`: the graph, no generated code).

{passed} of {count} networks passed; {whole} of them have no channel that could be pruned, and only
that is asked of them. Exporting, compiling and training are asked where the original survives them
on the same input. It does not:

"""


def row(build: published.Build) -> dict[str, Any]:
    """Trace, cut and compare one network."""
    torch.manual_seed(0)
    model, inputs = build()
    published.stir(model)
    graph, seconds = reference.traced(model, inputs, RATIO)
    if not len(graph):
        return reference.summary(model, graph, seconds)
    if sum(p.numel() for p in model.parameters()) <= DOUBLE_LIMIT:
        model, inputs = reference.in_double(model, inputs)
    exact_cut = reference.prove_cut(model, inputs, graph, RATIO, unchanged=False)
    return reference.summary(model, graph, seconds, exact_cut)


def line(name: str, figures: dict[str, Any]) -> str:
    """A row of the table."""
    if "error" in figures:
        return f"| {name} | – | – | – | – | – | – | {figures['error']} |"
    after = f"{figures['after'] / figures['before']:.0%} of {figures['before'] / 1e6:.1f} M"
    exact = "–" if figures["exact"] is None else f"{figures['exact']:.0e}"
    reasons = "; ".join(f"{n} × {REWORDED.get(why, why)}" for why, n in figures["alone"].items())
    return (
        f"| {name} | {figures['units']} | {figures['channels']} | {after} | {figures['macs']:.0%} "
        f"| {exact} | {figures['seconds']:.1f} | {reasons} |"
    )


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    lines = [HEAD]
    good = [r for r in rows.values() if r.get("units")]
    exact = [r for r in good if r["exact"] is not None and r["exact"] < 1e-4]
    lines.append(
        f"{len(rows)} networks; {len(good)} have units; of these {len(exact)} are cut exactly.\n"
        f"Measured on {' and '.join(sorted({r['machine'] for r in rows.values()}))}."
    )
    for group in dict.fromkeys(name.partition("/")[0] for name in rows):
        lines += ["", f"## {group}", ""]
        lines += [
            "| network | units | channels | parameters | MACs | difference | s | unprunable |"
        ]
        lines += ["| --- | --: | --: | --: | --: | --: | --: | --- |"]
        lines += [
            line(n.partition("/")[2], r) for n, r in rows.items() if n.startswith(group + "/")
        ]
    return "\n".join(lines) + "\n" + survival(rows) + sentences()


def survival(rows: dict[str, dict[str, Any]]) -> str:
    """The section on what became of the cut networks, where a sweep has told."""
    told = {name: row["sweep"] for name, row in rows.items() if "sweep" in row}
    if not told:
        return ""
    passed = sum(outcome["passed"] for outcome in told.values())
    missed: dict[str, list[str]] = {}
    for name, outcome in told.items():
        for step in outcome["missed"]:
            missed.setdefault(step, []).append(name.partition("/")[2])
    lines = [f"- {step}: {', '.join(names)}" for step, names in missed.items()]
    whole = sum(not rows[name]["units"] for name in told)
    head = SWEEP.format(ratio=RATIO, passed=passed, count=len(told), whole=whole)
    return "\n" + head + "\n".join(lines or ["- nowhere"]) + "\n"


def read_sweep(path: Path) -> dict[str, dict[str, Any]]:
    """Rows and outcomes by network from pytest's XML."""
    rows = {}
    for case in ElementTree.parse(path).iter("testcase"):
        notes = {p.get("name"): json.loads(p.get("value", "")) for p in case.iter("property")}
        bad = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        outcome = {"passed": not bad, "missed": notes.get("missed", [])}
        name = case.get("name", "").partition("[")[2].removesuffix("]")
        rows[name] = {**notes.get("row", {}), "sweep": outcome}
    return rows


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
    parser.add_argument("--sweep", type=Path, nargs="*", default=[], help="pytest's XML files")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = json.loads(options.rows.read_text()) if options.rows.exists() else {}
    every = published.every()
    for name, build in every.items():
        if options.page or not re.search(options.only, name):
            continue
        try:
            rows[name] = row(build)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:200].replace("|", "/")
            rows[name] = {"machine": reference.machine(), "error": reason}
        print(line(name, rows[name]), flush=True)
        write_json(options.rows, rows)
        gc.collect()
    for path in options.sweep:
        for name, swept in read_sweep(path).items():
            rows[name] = {**rows.get(name, {}), **swept}
    write_json(options.rows, rows)
    ordered = {name: rows[name] for name in every if name in rows}
    with whole_file(PAGE) as temporary:
        temporary.write_text(page(ordered))


if __name__ == "__main__":
    main()
