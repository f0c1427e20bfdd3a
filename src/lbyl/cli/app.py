"""All commands put together."""

from __future__ import annotations

from typing import Annotated

import typer

from lbyl.cli.compare import compare
from lbyl.cli.compress import compress
from lbyl.cli.demo import demo
from lbyl.cli.errors import OneLineGroup
from lbyl.cli.estimate import estimate
from lbyl.cli.evaluate import evaluate
from lbyl.cli.export import export
from lbyl.cli.finetune import finetune
from lbyl.cli.images import images
from lbyl.cli.inspect import inspect
from lbyl.cli.report import report

app = typer.Typer(
    cls=OneLineGroup,
    name="lbyl",
    help="Make a pretrained network smaller without its data and without training it.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command(rich_help_panel="Start here")(demo)
app.command(rich_help_panel="Start here")(compress)
app.command(rich_help_panel="Before deciding")(inspect)
app.command(rich_help_panel="Before deciding")(estimate)
app.command(rich_help_panel="Before deciding")(compare)
app.command(rich_help_panel="Afterwards")(evaluate)
app.command(rich_help_panel="Afterwards")(finetune)
app.command(rich_help_panel="Afterwards")(export)
app.command(rich_help_panel="Afterwards")(report)
app.command(rich_help_panel="Behind the scenes")(images)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("lbyl"))
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
    app(prog_name="lbyl")
