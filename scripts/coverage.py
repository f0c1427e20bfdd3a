"""Measures what can be pruned in published networks, and writes docs/coverage.md from the rows.

python scripts/coverage.py                      # all, about a quarter of an hour on two cores
python scripts/coverage.py --only 'timm/.*vit'  # some; the rows of others are kept
python scripts/coverage.py --page               # only write the page again from the rows
python scripts/coverage.py --page --sweep sweep.xml  # rows and outcomes of the sweep

`pytest -m slow tests/test_networks_sweep.py --junitxml=sweep.xml` writes the last one's file: the
sweep measures the same rows, and what becomes of the cut networks besides. The page counts; the
rows are in docs/results. Those of small networks come from `scripts/sweep_small.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from lbyl.runtime.files import whole_file, write_json  # noqa: E402
from support import published, reference  # noqa: E402

PAGE = ROOT / "docs" / "coverage.md"
ROWS = ROOT / "docs" / "results" / "coverage.json"
SMALL = ROOT / "docs" / "results" / "coverage-small.jsonl"
ATTENTION = ROOT / "docs" / "results" / "coverage-small-attention.jsonl"
MINILM = ROOT / "docs" / "results" / "minilm.json"
MINILM_TEXT = """all-MiniLM-L6-v2 less some of its MLP neurons: mean cosine similarity of the
embeddings of 200 English sentences before and after (`python -m benchmarks.minilm`). Random tokens
need no data: trained tokens by Zipf's law, most of a sequence near one topic
(`lbyl.inputs.text.tokens`). How tokens are drawn was chosen on 100 of these sentences,
so that row is a little optimistic.
"""
# Rows that were measured earlier name these reasons otherwise.
REWORDED = {
    "residual stream": "residual",
    "residual stream that is fixed elsewhere": "residual, fixed elsewhere",
}
RATIO = 0.3
DOUBLE_LIMIT = 60_000_000  # parameters up to which float64 fits comfortably
COMMON = ("residual", "attention", "it reaches")  # reasons that most networks have
OFTEN = 4  # networks that a reason stands in before the page names it

Rows = dict[str, dict[str, Any]]

HEAD = f"""# What can be pruned

Networks of other packages with weights drawn at random, cut with `method="none"` and compared with
the original whose pruned channels are silenced wherever they are read. *Exact* means that the two
outputs differ by less than 1e-4 of the largest entry (in float64 most differ by 1e-15).

## Networks as published

{RATIO:.0%} of every unit is cut. Ratio 0 leaves the output equal to the last bit; parameters and
multiplications fall; saved and loaded again a network computes the same bits; `torch.export` and
`torch.compile` take it where they take the original, and a step of SGD moves its weights. Rows:
[coverage.json](results/coverage.json); `python scripts/coverage.py` measures them,
`pytest -m slow tests/test_networks_sweep.py` asks all of this.
"""

SMALL_HEAD = """
## Small configurations of other packages

Half of every unit is cut. The given model is unchanged; a process that has compressed nothing loads
what was saved and computes the same; one step of SGD moves the weights, where the original takes a
step. All packages install with pip; diffusers and MONAI come with `lbyl[sweep-networks]`. Rows:
[coverage-small.jsonl](results/coverage-small.jsonl); `python scripts/sweep_small.py` measures them,
`pytest -m slow tests/test_networks_small.py` asks all of this.
"""

REASONS_HEAD = f"""
## What is unprunable, and why

Layers outside units, by the reason that `trace` gives; reasons of fewer than {OFTEN} networks are
in the rows. Channels that additions tie across layers are pruned with `residual=True`, parts of
attention by name (`"*:heads"`).
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


def table(head: str, lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table; what is no text stands to the right."""
    names = head.split(" | ")
    rows = [list(map(str, line)) for line in lines]
    rule = ["---"] + ["--:"] * (len(names) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [names, rule, *rows]) + "\n"


def by_package(rows: Iterable[str]) -> dict[str, list[str]]:
    """Names of networks by what stands before their first slash."""
    found: dict[str, list[str]] = {}
    for name in rows:
        found.setdefault(name.partition("/")[0], []).append(name)
    return found


def middle(values: Iterable[float]) -> str:
    """The median as a percentage."""
    known = list(values)
    return f"{statistics.median(known):.0%}" if known else "–"


def published_part(rows: Rows) -> str:
    """Counts of published networks, and which of them the original does not survive either."""
    lines = []
    for package, names in by_package(rows).items():
        own = [rows[name] for name in names]
        cut = [r for r in own if r["units"]]
        exact = sum(r["exact"] is not None and r["exact"] < 1e-4 for r in cut)
        kept = middle(r["after"] / r["before"] for r in cut)
        passed = sum(r.get("sweep", {}).get("passed", False) for r in own)
        lines.append((package, len(own), len(cut), exact, passed, kept))
    head = "package | networks | with units | exact | still models | parameters left"
    missed: dict[str, list[str]] = {}
    for name, found in rows.items():
        for step in found.get("sweep", {}).get("missed", []):
            missed.setdefault(step, []).append(name)
    tail = "".join(
        f"\nThe original does not survive {step} either: {len(names)} networks "
        f"({', '.join(by_package(names))}).\n"
        for step, names in missed.items()
    )
    measured = " and ".join(sorted({r["machine"] for r in rows.values()}))
    return f"\nMeasured on {measured}.\n\n" + table(head, lines) + tail


def small_part(rows: Rows, attention: Rows) -> str:
    """Counts of small networks by package."""
    lines = []
    for package, names in by_package(rows).items():
        own = [rows[name] for name in names]
        cut = [r for r in own if r.get("units")]
        exact = sum("exact" in r for r in cut)
        loaded = sum(r.get("loaded") is not None for r in cut)
        trained = sum(bool(r.get("trained")) for r in cut)
        kept = middle(r["kept"] for r in cut)
        versions = ", ".join(sorted({r["version"] for r in own if "version" in r}))
        called = f"{package} {versions}"
        lines.append((called, len(own), len(cut), exact, loaded, trained, kept))
    head = "package | networks | with units | exact | loaded afresh | trained | parameters left"
    wrong = [f"- {name}: {r['problems']}\n" for name, r in rows.items() if r["problems"]]
    text = SMALL_HEAD + "\n" + table(head, lines)
    untrained = [n for n, r in rows.items() if r.get("units") and r.get("trained") is False]
    if untrained:
        text += f"\nThe original takes no step of training either: {', '.join(untrained)}.\n"
    if attention:
        cut = [r for r in attention.values() if r.get("units")]
        exact = sum("exact" in r for r in cut)
        text += (
            f"\nAttention: {len(attention)} of them were asked for all units of attention "
            f'(`include="*:*"`); {len(cut)} have some, {exact} of these are cut exactly.\n'
        )
    return text + ("\nWhat does not hold:\n\n" + "".join(wrong) if wrong else "")


def reasons_part(rows: Rows, small: Rows) -> str:
    """Why layers are in no unit, and the networks that have none."""
    layers: Counter[str] = Counter()
    networks: Counter[str] = Counter()
    for found in [*rows.values(), *small.values()]:
        for why, count in found.get("reasons", found.get("alone", {})).items():
            why = REWORDED.get(why, why)
            layers[why] += count
            networks[why] += 1
    often = [
        (why.partition(" (a mixture")[0], layers[why], n)
        for why, n in networks.most_common()
        if n >= OFTEN
    ]
    text = REASONS_HEAD + "\n" + table("reason | layers | networks", often)
    lines = []
    for name, found in {**rows, **small}.items():
        if found.get("units") == 0:
            reasons = found.get("reasons", found.get("alone", {}))
            rare = [why for why in reasons if not why.startswith(COMMON)] or list(reasons)
            said = [why.partition(" (")[0].partition(", and")[0] for why in rare]
            lines.append((name, "; ".join(said[:3])))
    head = "\nNetworks without any unit, and what stands in the way:\n\n"
    return text + head + table("network | reason", lines).replace("--:", "---")


def page(rows: Rows) -> str:
    """The whole page."""
    small, attention = jsonl(SMALL), jsonl(ATTENTION)
    parts = [HEAD, published_part(rows), small_part(small, attention)]
    return "".join([*parts, reasons_part(rows, small), sentences()])


def jsonl(path: Path) -> Rows:
    """Rows by the name of the network."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {found["name"]: found for found in map(json.loads, lines)}


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
        f"| {name} | " + " | ".join(f"{x:.3f}" for x in row) + " |"
        for name, row in figures.items()
        if isinstance(row, list)
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
        print(name, {k: v for k, v in rows[name].items() if k != "alone"}, flush=True)
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
