"""Tables and plots of the retraining benchmark, with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.common import paper
from benchmarks.common.plots import pyplot
from benchmarks.common.tables import print_table

COLUMNS = ("none", "neuron-merging", "coreset", "lbyl", "echo", "scratch")
MARKERS = {"": "*", "tenth": "s", "synthetic": "o", "refinement": "D"}
COLOURS = dict(zip((*COLUMNS, "original"), "C7 C1 C5 C0 C3 C2 C4".split()))


def percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def finetune_table(content: dict[str, Any]) -> None:
    rows: list[list[Any]] = []
    for ratio in sorted({run["ratio"] for run in content["runs"].values()}):
        runs = {r["method"]: r for r in content["runs"].values() if r["ratio"] == ratio}
        cells = [_change(runs[name]) if name in runs else None for name in COLUMNS]
        rows.append([f"{100 * ratio:.0f} %", *cells])
        beside = paper.FINETUNE.get(ratio, {}) if _published(content) else {}
        if beside:
            rows.append(["  paper", *(beside.get(name) for name in COLUMNS)])
    epochs = content["parameters"]["epochs"]
    title = f"{content['parameters']['network']}, L2: accuracy before and after {epochs} epochs"
    print_table(title, ["removed", *COLUMNS], rows)
    if _published(content):
        print("The paper's figures are of its own ResNet-50/CIFAR-100 (base 78.82).")


def _published(content: dict[str, Any]) -> bool:
    """Whether the paper has figures of this network to stand beside ours."""
    return bool(content["parameters"]["network"] == "resnet50_cifar100")


def _change(run: dict[str, Any]) -> str:
    return f"{run['initial']:.2f} → {run['final']:.2f}"


def transfer_table(content: dict[str, Any]) -> None:
    rows: list[list[Any]] = []
    for name, run in content["runs"].items():
        size = run["size"]
        ours = [size["macs"] / 1e9, size["parameters"] / 1e6, run["source_accuracy"], run["final"]]
        beside = paper.TRANSFER.get(name) if _published(content) else None
        rows.append([name, *ours, *(beside or (None,) * 3)])
    columns = ["start", "GMACs", "M parameters", "accuracy before the transfer", "after"]
    columns += ["paper: GMACs", "M parameters", "accuracy"]
    chosen = content["parameters"]
    title = f"{chosen['network']}, WARE up to {chosen['threshold']}, {chosen['epochs']} epochs"
    print_table(title, columns, rows)


def datafree_table(content: dict[str, Any]) -> None:
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
        for name, run in content["runs"].items()
    ]
    columns = ["way", "real images", "synthetic", "epochs", "seconds", "restored", "final"]
    chosen = content["parameters"]
    print_table(f"{chosen['network']}, {100 * chosen['ratio']:.0f} % by L2", columns, rows)
    title = "the paper: ResNet-50/ImageNet, 76.1 before"
    columns = ["way", "MACs left, %", "accuracy", "epochs of pruning + fine-tuning"]
    print_table(title, columns, [list(row) for row in paper.DATAFREE])


TABLES: dict[str, Callable[[dict[str, Any]], None]] = {
    "finetune": finetune_table,
    "transfer": transfer_table,
    "datafree": datafree_table,
}


def plot(part: str, content: dict[str, Any]) -> Any:
    """The figure of a part; None without matplotlib."""
    plt = pyplot()
    if plt is None:
        return None
    return {"finetune": _curves, "transfer": _transfer, "datafree": _times}[part](plt, content)


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


def _curves(plt: Any, content: dict[str, Any]) -> Any:
    """Learning curves, a panel per ratio."""
    ratios = sorted({run["ratio"] for run in content["runs"].values()})
    figure, panels = plt.subplots(
        1, len(ratios), figsize=(4.6 * len(ratios), 3.9), squeeze=False, sharey=True
    )
    for panel, ratio in zip(panels[0], ratios):
        runs = {r["method"]: r for r in content["runs"].values() if r["ratio"] == ratio}
        for name in (name for name in COLUMNS if name in runs):
            _curve(panel, runs[name], name)
        panel.set_title(f"{100 * ratio:.0f} % of the filters removed")
        panel.set_xlabel("epochs of training")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("test accuracy, %")
    panels[0][-1].legend(fontsize=8)
    figure.tight_layout()
    return figure


def _transfer(plt: Any, content: dict[str, Any]) -> Any:
    figure, panel = plt.subplots(figsize=(5.2, 3.9))
    for name, run in content["runs"].items():
        _curve(panel, run, name)
    panel.set_xlabel("epochs on the new data set")
    panel.set_ylabel("test accuracy, %")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    return figure


def _times(plt: Any, content: dict[str, Any]) -> Any:
    """Accuracy against seconds; a line from what was restored to what training made of it."""
    figure, panel = plt.subplots(figsize=(6.2, 4.2))
    for name, run in content["runs"].items():
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
