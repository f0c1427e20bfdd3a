"""Tables and plots of the retraining benchmark, with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import print_table, pyplot

# Initial and final accuracy in the paper; scratch: after 20 (of 80) epochs, and after 80.
PAPER_FINETUNE: dict[float, dict[str, str]] = {
    0.1: {
        "lbyl": "78.14 → 78.30",
        "neuron-merging": "77.28 → 77.57",
        "coreset": "50.28 → 76.55",
        "none": "75.14 → 77.67",
        "scratch": "48.22 (80 epochs: 72.07)",
    },
    0.3: {
        "lbyl": "73.29 → 75.99",
        "neuron-merging": "64.47 → 73.03",
        "coreset": "17.81 → 71.88",
        "none": "39.96 → 73.18",
        "scratch": "46.70 (80 epochs: 72.24)",
    },
    0.5: {
        "lbyl": "52.61 → 71.15",
        "neuron-merging": "25.98 → 65.03",
        "coreset": "1.28 → 62.88",
        "none": "5.22 → 65.72",
        "scratch": "44.00 (80 epochs: 69.33)",
    },
}
# GMACs, million parameters, accuracy: ResNet-50 from CIFAR-100 to CIFAR-10.
PAPER_TRANSFER = {
    "original": (1.31, 23.72, 82.66),
    "none": (0.95, 20.13, 93.98),
    "neuron-merging": (0.90, 20.01, 93.88),
    "lbyl": (0.74, 17.47, 94.05),
}
# ResNet-50/ImageNet, 76.1 before: share of MACs left, accuracy, epochs on 0.1 M images.
PAPER_DATAFREE = (
    ("DeepInversion + 0.1 M images", 100 * 2.9 / 4.1, 74.9, "≤ 22 + 30"),
    ("LBYL + 0.1 M images", 100 * 2.9 / 4.1, 70.9, "0 + 1"),
)
COLUMNS = ("none", "neuron-merging", "coreset", "lbyl", "echo", "scratch")
MARKERS = {"": "*", "tenth": "s", "synthetic": "o"}
COLOURS = dict(zip((*COLUMNS, "original"), "C7 C1 C5 C0 C3 C2 C4".split()))


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def finetune_table(found: dict[str, Any]) -> None:
    rows: list[list[Any]] = []
    for ratio in sorted({run["ratio"] for run in found["runs"].values()}):
        runs = {r["method"]: r for r in found["runs"].values() if r["ratio"] == ratio}
        cells = [_change(runs[name]) if name in runs else None for name in COLUMNS]
        rows.append([f"{100 * ratio:.0f} %", *cells])
        paper = PAPER_FINETUNE.get(ratio, {}) if _published(found) else {}
        if paper:
            rows.append(["  paper", *(paper.get(name) for name in COLUMNS)])
    epochs = found["parameters"]["epochs"]
    title = f"{found['parameters']['network']}, L2: accuracy before and after {epochs} epochs"
    print_table(title, ["removed", *COLUMNS], rows)
    if _published(found):
        print("The paper's figures are of its own ResNet-50/CIFAR-100 (base 78.82).")


def _published(found: dict[str, Any]) -> bool:
    """Whether the paper has figures of this network to stand beside ours."""
    return bool(found["parameters"]["network"] == "resnet50_cifar100")


def _change(run: dict[str, Any]) -> str:
    return f"{run['initial']:.2f} → {run['final']:.2f}"


def transfer_table(found: dict[str, Any]) -> None:
    rows: list[list[Any]] = []
    for name, run in found["runs"].items():
        size = run["size"]
        ours = [size["macs"] / 1e9, size["parameters"] / 1e6, run["source_accuracy"], run["final"]]
        paper = PAPER_TRANSFER.get(name) if _published(found) else None
        rows.append([name, *ours, *(paper or (None,) * 3)])
    columns = ["start", "GMACs", "M parameters", "accuracy before the transfer", "after"]
    columns += ["paper: GMACs", "M parameters", "accuracy"]
    chosen = found["parameters"]
    title = f"{chosen['network']}, WARE up to {chosen['threshold']}, {chosen['epochs']} epochs"
    print_table(title, columns, rows)


def datafree_table(found: dict[str, Any]) -> None:
    rows = [
        [
            name,
            run["images"] or "–",
            run.get("synthetic", "–"),
            run.get("epochs", 0),
            run["points"][-1]["seconds"],
            run["initial"],
            run["final"],
        ]
        for name, run in found["runs"].items()
    ]
    columns = ["way", "real images", "synthetic", "epochs", "seconds", "restored", "final"]
    chosen = found["parameters"]
    print_table(f"{chosen['network']}, {100 * chosen['ratio']:.0f} % by L2", columns, rows)
    title = "the paper: ResNet-50/ImageNet, 76.1 before"
    columns = ["way", "MACs left, %", "accuracy", "epochs of pruning + fine-tuning"]
    print_table(title, columns, [list(row) for row in PAPER_DATAFREE])


TABLES: dict[str, Callable[[dict[str, Any]], None]] = {
    "finetune": finetune_table,
    "transfer": transfer_table,
    "datafree": datafree_table,
}


def plot(part: str, found: dict[str, Any]) -> Any:
    """The figure of a part; None without matplotlib."""
    plt = pyplot()
    if plt is None:
        return None
    return {"finetune": _curves, "transfer": _transfer, "datafree": _times}[part](plt, found)


def _curve(panel: Any, run: dict[str, Any], name: str) -> None:
    points = [(0, run["initial"])] if "initial" in run else []
    points += [
        (row["epoch"], row["eval_accuracy"])
        for row in run["curve"]
        if row["eval_accuracy"] is not None
    ]
    panel.xaxis.get_major_locator().set_params(integer=True)
    wide = 2.5 if name == "echo" else 1.4
    panel.plot(*zip(*points), ".-", label=name, color=COLOURS.get(name), linewidth=wide)


def _curves(plt: Any, found: dict[str, Any]) -> Any:
    """Learning curves, a panel per ratio."""
    ratios = sorted({run["ratio"] for run in found["runs"].values()})
    figure, panels = plt.subplots(
        1, len(ratios), figsize=(4.6 * len(ratios), 3.9), squeeze=False, sharey=True
    )
    for panel, ratio in zip(panels[0], ratios):
        runs = {r["method"]: r for r in found["runs"].values() if r["ratio"] == ratio}
        for name in (name for name in COLUMNS if name in runs):
            _curve(panel, runs[name], name)
        panel.set_title(f"{100 * ratio:.0f} % of the filters removed")
        panel.set_xlabel("epochs of training")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("test accuracy, %")
    panels[0][-1].legend(fontsize=8)
    figure.tight_layout()
    return figure


def _transfer(plt: Any, found: dict[str, Any]) -> Any:
    figure, panel = plt.subplots(figsize=(5.2, 3.9))
    for name, run in found["runs"].items():
        _curve(panel, run, name)
    panel.set_xlabel("epochs on the new data set")
    panel.set_ylabel("test accuracy, %")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    return figure


def _times(plt: Any, found: dict[str, Any]) -> Any:
    """Accuracy against seconds; a line from what was restored to what training made of it."""
    figure, panel = plt.subplots(figsize=(6.2, 4.2))
    for name, run in found["runs"].items():
        x = [point["seconds"] for point in run["points"]]
        y = [point["accuracy"] for point in run["points"]]
        start, _, then = name.partition(" + ")
        panel.plot(x, y, ":" if then == "tenth" else "-", color=COLOURS[start], linewidth=1.4)
        panel.plot(x[-1:], y[-1:], MARKERS[then], color=COLOURS[start], label=name, markersize=8)
    panel.set_xscale("log")
    panel.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("")
    panel.set_xlabel("seconds, synthesis of images included")
    panel.set_ylabel("test accuracy, %")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize=8)
    return figure
