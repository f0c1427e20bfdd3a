"""Options that several commands share, each written once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lbyl import criteria, methods
from lbyl.app.sources.kinds import SOURCES
from lbyl.errors import LbylError
from lbyl.refining.distil import check_steps


def complete_model(incomplete: str) -> list[str]:
    """Names of models, for the shell."""
    prefixes = {f"{prefix}:": source for prefix, source in SOURCES.items() if not source.suffix}
    for prefix, source in prefixes.items():
        if incomplete.startswith(prefix):  # names are fetched only once the source is typed
            return [prefix + n for n in source.names() if (prefix + n).startswith(incomplete)]
    return [prefix for prefix in prefixes if prefix.startswith(incomplete)]


def complete_method(incomplete: str) -> list[str]:
    """Names of methods, for the shell."""
    return [name for name in methods.names() if name.startswith(incomplete)]


def complete_criterion(incomplete: str) -> list[str]:
    """Names of criteria, for the shell."""
    return [name for name in criteria.names() if name.startswith(incomplete)]


def parse_steps(text: str | int) -> Any:
    """A number of steps of refinement, or the word for as many as help."""
    steps = int(text) if str(text).isdecimal() else text  # a default comes as it is
    try:
        check_steps(steps)
    except LbylError as error:
        raise typer.BadParameter(str(error)) from None
    return steps


Model = Annotated[
    str,
    typer.Argument(
        help=f"{', '.join(source.form for source in SOURCES.values())}, FILE.py:FUNCTION, "
        "package.module:FUNCTION, "
        "or a directory that `lbyl compress` wrote.",
        autocompletion=complete_model,
        metavar="MODEL",
        show_default=False,
    ),
]


def option(panel: str, *names: str, metavar: str | None = None, **rest: Any) -> Any:
    """An option under one of the headings of `--help`."""
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, **rest)


_network = partial(option, "Network")
images_option = partial(option, "Images")
_choice = partial(option, "What is pruned")
_method = partial(option, "How it is restored")
_machine = partial(option, "Machine")
output_option = partial(option, "Output")

WEIGHTS = "State dict (.safetensors, .pth, .pt), directory of `lbyl compress`, or IMAGENET1K_V1."
TEST = "Labelled images to measure accuracy on: .npz, torchvision directory or ImageFolder."
DATA = (
    "What statistics come from: procedural (the default), inversion, analytic, a number of "
    "procedural images, or a path of your own images."
)
RATIO = "Fraction of channels pruned: 0.3 (the default), or 'layer4.*=0.5' (may be repeated)."
CORRECTION = "none, mean, mean+variance or recalibrate; else as the method does."

ShownTo = Annotated[
    str | None,
    _network(
        "--model", metavar="MODEL", help="Images as it gets them.", autocompletion=complete_model
    ),
]
Weights = Annotated[str | None, _network(metavar="FILE", help=WEIGHTS)]
Task = Annotated[
    str | None,
    _network(metavar="NAME", help="Of hf:DIR: what its head is for, such as text-generation."),
]
InputSize = Annotated[str | None, _network(metavar="SIZE", help="224, or a shape: 1x28x28.")]
Classes = Annotated[int | None, _network(metavar="N", help="Classes, if not the usual number.")]
Mean = Annotated[str | None, _network(metavar="A,B,C", help="Mean of the inputs.")]
Std = Annotated[str | None, _network(metavar="A,B,C", help="Standard deviation of the inputs.")]
Data = Annotated[str | None, images_option(metavar="SOURCE", help=DATA)]
Test = Annotated[str | None, images_option(metavar="PATH", help=TEST)]
Limit = Annotated[
    int | None, images_option(metavar="N", min=1, help="Use only so many labelled images.")
]
BatchSize = Annotated[int, images_option(metavar="N", min=1, help="Images at once.")]
Ratio = Annotated[list[str] | None, _choice(metavar="FRACTION", help=RATIO)]
Ratios = Annotated[
    list[float],
    _choice(
        "--ratio",
        metavar="FRACTION",
        min=0.0,
        max=0.99,
        help="Fraction of channels pruned (may be repeated).",
    ),
]
Criterion = Annotated[
    str | None,
    _choice(
        metavar="NAME",
        help="Which channels are pruned (l1, l2, l2-gm, random, echo); else as suits the method.",
        autocompletion=complete_criterion,
    ),
]
Criteria = Annotated[
    list[str] | None,
    _choice(
        "--criterion",
        metavar="NAME",
        help="Which channels are pruned; l2 unless given (may be repeated).",
        autocompletion=complete_criterion,
    ),
]
Include = Annotated[
    list[str] | None,
    _choice(metavar="PATTERN", help="Prune only these layers, as 'layer4.*' (may be repeated)."),
]
Exclude = Annotated[
    list[str] | None,
    _choice(metavar="PATTERN", help="Do not prune these layers, as 'layer1.*' (may be repeated)."),
]
Residual = Annotated[
    bool, _choice("--residual", help="Also prune channels that additions tie across layers.")
]
MultipleOf = Annotated[
    int | None,
    _choice(metavar="N", min=1, help="Keep multiples of N channels."),
]
_budget = partial(_choice, metavar="FRACTION")
Macs = Annotated[float | None, _budget(help="Budget: MACs that may stay.")]
Params = Annotated[float | None, _budget(help="Budget: parameters that may stay.")]
Latency = Annotated[float | None, _budget(help="Budget: measured time that may stay.")]
MaxError = Annotated[float | None, _budget(help="Budget: predicted error allowed in a layer.")]
Keep = Annotated[
    float | None,
    _budget(help="Budget: accuracy to keep at least, by the forecast."),
]
Method = Annotated[str, _method(metavar="NAME", help="The method.", autocompletion=complete_method)]
Methods = Annotated[
    list[str],
    _method(
        "--method",
        metavar="NAME",
        help="A method (may be repeated).",
        autocompletion=complete_method,
    ),
]
MethodOption = Annotated[
    list[str] | None,
    _method("--option", metavar="KEY=VALUE", help="Its setting: lambda1=1e-5 (may be repeated)."),
]
Correction = Annotated[str | None, _method(metavar="NAME", help=CORRECTION)]
Refine = Annotated[
    Any,
    _method(
        metavar="STEPS",
        parser=parse_steps,
        help="Gradient steps in which kept filters change too: 100, or auto.",
    ),
]
Device = Annotated[str, _machine(metavar="NAME", help="cpu, cuda, cuda:1, mps or auto.")]
Threads = Annotated[int | None, _machine(metavar="N", min=1, help="CPU threads; else all.")]
Seed = Annotated[int, _machine(metavar="N", help="Of everything random.")]
Out = Annotated[Path | None, output_option(metavar="DIR", help="Directory to write to.")]
Json = Annotated[bool, output_option("--json", help="Print JSON and nothing else.")]
Quiet = Annotated[bool, output_option("--quiet", "-q", help="Print nothing but errors.")]
Debug = Annotated[bool, output_option("--debug", help="Show where an error came from.")]
