"""`lbyl demo`: see it work, with nothing but what comes along.

Half of a small network's channels are pruned, and every method restores what it can. All that is
needed comes with the package and with scikit-learn: a network trained on 8×8 digits, and the
digits it has not seen.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

import lbyl
from lbyl import methods
from lbyl.app import data
from lbyl.app.cli import options as o
from lbyl.app.cli.errors import guarded
from lbyl.app.cli.screen import Screen, table
from lbyl.app.report.fill import COMPARED
from lbyl.app.sources import resolve, zoo
from lbyl.result import Size
from lbyl.runtime.format import human, percent_change
from lbyl.runtime.run import Progress

NETWORK = "digits"
SNIPPET = """\
import lbyl
result = lbyl.compress(model, example_inputs, ratio=0.5)
lbyl.save(result, "out/")  # result.model is ready, `model` is as it was"""

Ratio = Annotated[
    float, typer.Option(metavar="FRACTION", min=0.0, max=0.95, help="Fraction of channels pruned.")
]


@guarded
def demo(
    ratio: Ratio = 0.5,
    seed: o.Seed = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Prune a small network that comes with lbyl, and see what each method restores."""
    screen = Screen(json, quiet)
    with screen.stage("pruning and restoring") as tick:
        outcome = run(ratio, seed, tick.named)
    screen.data(outcome.to_dict())
    show(screen, outcome)


@dataclass(frozen=True)
class Trial:
    """One method's outcome."""

    method: str
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class Demo:
    """The outcome of every method."""

    ratio: float
    original: float
    before: Size
    after: Size
    images: int
    trials: tuple[Trial, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def run(ratio: float, seed: int, progress: Progress) -> Demo:
    """Prune the demonstration network with every registered method and measure each."""
    images = data.load("digits")
    network = resolve(f"lbyl:{NETWORK}", "shipped")
    names = [*COMPARED, *(name for name in methods.names() if name not in COMPARED)]
    progress("running the network on procedural images", 0, len(names))
    prepared = lbyl.prepare(network.model, network.example, seed=seed, progress=False)
    prepared.statistics()
    info = zoo.info(NETWORK)
    trials: list[Trial] = []
    for index, name in enumerate(names):
        progress(name, index, len(names))
        start = time.perf_counter()
        result = prepared.compress(ratio, method=name)
        seconds = time.perf_counter() - start
        trials.append(Trial(name, data.evaluate(info, result.model, images), seconds))
    progress("measured", len(names), len(names))
    original = data.evaluate(info, network.model, images)
    return Demo(ratio, original, result.before, result.after, len(images), tuple(trials))


def show(screen: Screen, outcome: Demo) -> None:
    """The methods side by side, then the way to do it to another network."""
    rows = [["original, nothing pruned", f"{outcome.original:.2f} %", "", ""]]
    labels = {"none": "none (just pruned)", "echo": "echo (the default)"}
    for trial in outcome.trials:
        lost = trial.accuracy - outcome.original
        label = labels.get(trial.method, trial.method)
        rows.append([label, f"{trial.accuracy:.2f} %", f"{lost:+.2f}", f"{trial.seconds:.2f} s"])
    default = next(i for i, t in enumerate(outcome.trials, 1) if t.method == "echo")
    screen.say(
        f"\n[bold]Handwritten digits: {100 * outcome.ratio:.0f} % of the channels pruned, "
        f"restored without data and without training[/]"
    )
    screen.say(table(["method", "accuracy", "change", "time"], rows, highlight=default))
    sizes = (
        ("parameters", outcome.before.parameters, outcome.after.parameters),
        ("MACs", outcome.before.macs, outcome.after.macs),
    )
    for noun, was, now in sizes:
        screen.say(f"{noun:<11}{human(was):>9} → {human(now):>9}  ({percent_change(was, now)})")
    screen.say("", "The same to a model of your own:", "")
    screen.say(*(f"    [cyan]{line}[/]" for line in SNIPPET.splitlines()), "")
