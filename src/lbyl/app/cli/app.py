"""All commands by name. Help and the completion of their names need none of them imported."""

from __future__ import annotations

import functools
import importlib
import signal
import sys
import warnings
from types import FrameType
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.main import get_command

import lbyl
from lbyl.app.cli.errors import OneLineGroup
from lbyl.errors import LostWarning


class Entry(NamedTuple):
    """What `lbyl --help` says of a command; its function lies in `lbyl.app.cli.<name>`."""

    panel: str
    help: str


START, BEFORE, AFTER, BEHIND = (
    "Start here", "Before deciding", "Afterwards", "Behind the scenes",
)  # fmt: skip
COMMANDS = {
    "demo": Entry(
        START, "Prune a small network that comes with lbyl, and see what each method restores."
    ),
    "compress": Entry(
        START, "Make a network smaller and restore its accuracy: no data, no training."
    ),
    "inspect": Entry(
        BEFORE, "Show which channels can be pruned, who consumes them, and which layers cannot."
    ),
    "estimate": Entry(
        BEFORE, "Forecast how much accuracy is kept at several ratios; nothing is written."
    ),
    "compare": Entry(
        BEFORE, "Try several methods, criteria and ratios on one network, side by side."
    ),
    "sweep": Entry(
        BEFORE, "Compress several networks in many ways, on all cores or a cluster; resumable."
    ),
    "evaluate": Entry(
        AFTER, "Measure the accuracy of a network, original or compressed, on labelled images."
    ),
    "export": Entry(
        AFTER,
        "Write a network for other runtimes: ONNX, int8, torch.export, ExecuTorch, OpenVINO.",
    ),
    "report": Entry(AFTER, "Write the report of a saved compression, or of a sweep."),
    "images": Entry(BEHIND, "Write a contact sheet of the procedural images that replace data."),
}


@functools.cache
def load_command(name: str) -> Any:
    """The command itself, with all its options; imports its module and what that needs."""
    module = importlib.import_module(f"lbyl.app.cli.{name}")
    single = typer.Typer(add_completion=False)
    single.command(name)(getattr(module, name))
    return get_command(single)


class LazyGroup(OneLineGroup):
    """Lists commands from the table and imports one only when it is run or completed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else command, rest


app = typer.Typer(
    cls=LazyGroup,
    name="lbyl",
    help="Make a pretrained network smaller without its data and without training it.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _named() -> None:
    """Stands for a command in lists of their names."""


for _name, _entry in COMMANDS.items():
    app.command(_name, help=_entry.help, rich_help_panel=_entry.panel)(_named)


def _version(wanted: bool) -> None:
    if wanted:
        print(lbyl.__version__)
        raise typer.Exit


@app.callback()
def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """The program `lbyl`."""
    signal.signal(signal.SIGTERM, _end)
    warnings.simplefilter("ignore", LostWarning)  # the commands say it in their own words
    app(prog_name="lbyl")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Asked to end: through all that tidies up, so that no temporary file is left."""
    sys.exit(128 + number)
