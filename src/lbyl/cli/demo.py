"""`lbyl demo`: see it work, with nothing but what comes along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lbyl.cli import options as o
from lbyl.cli.errors import guarded
from lbyl.cli.screen import Screen, change, human, table

if TYPE_CHECKING:
    from lbyl.demo import Demo

Share = Annotated[float, typer.Option(min=0.0, max=0.95, help="Share of filters that go.")]


@guarded
def demo(
    ratio: Share = 0.5,
    seed: o.Seed = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Prune a small network that comes with lbyl, and see what each method puts back."""
    screen = Screen(json, quiet)
    with screen.stage("pruning and restoring") as tick:
        from lbyl.demo import run

        found = run(ratio, seed, tick.named)
    screen.data(found.to_dict())
    show(screen, found)


def show(screen: Screen, found: Demo) -> None:
    """The methods side by side, then the way to do it to another network."""
    from lbyl.demo import SNIPPET

    rows = [["original, nothing removed", f"{found.original:.2f} %", "", ""]]
    labels = {"none": "none (just removed)", "echo": "echo (the default)"}
    for trial in found.trials:
        lost = trial.accuracy - found.original
        label = labels.get(trial.method, trial.method)
        rows.append([label, f"{trial.accuracy:.2f} %", f"{lost:+.2f}", f"{trial.seconds:.2f} s"])
    chosen = next(i for i, t in enumerate(found.trials, 1) if t.method == "echo")
    screen.say(
        f"\n[bold]Handwritten digits: {100 * found.ratio:.0f} % of the filters removed, "
        f"restored without data and without training[/]"
    )
    screen.say(table(["method", "accuracy", "change", "time"], rows, highlight=chosen))
    sizes = (
        ("parameters", found.before.parameters, found.after.parameters),
        ("MACs", found.before.macs, found.after.macs),
    )
    for noun, was, now in sizes:
        screen.say(f"{noun:<11}{human(was):>9} → {human(now):>9}  ({change(was, now)})")
    screen.say("", "The same to a model of your own:", "")
    screen.say(*(f"    [cyan]{line}[/]" for line in SNIPPET.splitlines()), "")
