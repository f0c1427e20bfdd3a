"""Options that several commands share, each written once."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lbyl.cli.errors import UsageError

SOURCES = ("torchvision:", "timm:", "lbyl:", "hf:")


def complete_model(incomplete: str) -> list[str]:
    """Names of models, for the shell; a source's list is fetched only once its name is typed."""
    source, colon, _ = incomplete.partition(":")
    if not colon:
        return [name for name in SOURCES if name.startswith(incomplete)]
    if source == "lbyl":
        from lbyl import zoo

        names = zoo.names()
    elif source == "torchvision":
        from torchvision import models

        names = models.list_models()
    elif source == "timm":
        import timm

        names = timm.list_models()
    else:
        names = []
    return [f"{source}:{n}" for n in names if f"{source}:{n}".startswith(incomplete)]


def complete_method(incomplete: str) -> list[str]:
    """Names of methods, for the shell."""
    from lbyl import methods

    return [name for name in methods.names() if name.startswith(incomplete)]


def complete_criterion(incomplete: str) -> list[str]:
    """Names of criteria, for the shell."""
    from lbyl import criteria

    return [name for name in criteria.names() if name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Argument(
        help="torchvision:NAME, timm:NAME, lbyl:NAME, hf:DIRECTORY, FILE.py:FUNCTION, "
        "or a directory that `lbyl compress` wrote.",
        autocompletion=complete_model,
        metavar="MODEL",
        show_default=False,
    ),
]


def _option(panel: str, *names: str, metavar: str | None = None, **rest: Any) -> Any:
    """An option under one of the headings of `--help`."""
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, **rest)


_network = partial(_option, "Network")
_images = partial(_option, "Images")
_choice = partial(_option, "What goes")
_method = partial(_option, "How it is restored")
_machine = partial(_option, "Machine")
output_option = partial(_option, "Output")

WEIGHTS = "State dict (.safetensors, .pth, .pt), directory of `lbyl compress`, or IMAGENET1K_V1."
DATA = "Labelled images: an .npz file, a torchvision directory or an ImageFolder."
CALIBRATION = "Your own images, without labels, instead of procedural ones."
COUNT = "How many procedural images, or 'inversion' (slower, better)."
RATIO = "Share of filters that go: 0.3, or 'layer4.*=0.5' (may be repeated)."

ShownTo = Annotated[
    str | None,
    _network(
        "--model", metavar="MODEL", help="Images as it gets them.", autocompletion=complete_model
    ),
]
Weights = Annotated[str | None, _network(metavar="FILE", help=WEIGHTS)]
InputSize = Annotated[str | None, _network(metavar="SIZE", help="224, or a shape: 1x28x28.")]
Classes = Annotated[int | None, _network(metavar="N", help="Classes, if not the usual number.")]
Mean = Annotated[str | None, _network(metavar="A,B,C", help="Mean of the inputs.")]
Std = Annotated[str | None, _network(metavar="A,B,C", help="Deviation of the inputs.")]
Data = Annotated[str | None, _images(metavar="PATH", help=DATA)]
Limit = Annotated[int | None, _images(metavar="N", min=1, help="Use only so many images.")]
BatchSize = Annotated[int, _images(metavar="N", min=1, help="Images at once.")]
Calibration = Annotated[str | None, _images(metavar="PATH", help=CALIBRATION)]
Images = Annotated[str | None, _images(metavar="N", help=COUNT)]
Ratio = Annotated[list[str] | None, _choice(metavar="SHARE", help=RATIO)]
Criterion = Annotated[
    str, _choice(metavar="NAME", help="Which filters go.", autocompletion=complete_criterion)
]
Skip = Annotated[
    list[str] | None, _choice(metavar="NAME", help="Leave alone, as 'layer1.*' (repeatable).")
]
Modules = Annotated[
    list[str] | None, _choice(metavar="NAME", help="Only these, as 'layer4.*' (repeatable).")
]
Streams = Annotated[bool, _choice("--streams", help="Prune residual streams too.")]
RoundTo = Annotated[
    int | None,
    _choice(metavar="N", min=1, help="Keep multiples of N filters (with --onnx: 8 if not given)."),
]
Macs = Annotated[float | None, _choice(metavar="SHARE", help="Budget: MACs that stay.")]
Params = Annotated[float | None, _choice(metavar="SHARE", help="Budget: parameters that stay.")]
Latency = Annotated[float | None, _choice(metavar="SHARE", help="Budget: time that stays.")]
MaxError = Annotated[float | None, _choice(metavar="ERROR", help="Budget: error allowed a layer.")]
Method = Annotated[str, _method(metavar="NAME", help="The method.", autocompletion=complete_method)]
MethodOption = Annotated[
    list[str] | None,
    _method("--option", metavar="KEY=VALUE", help="Its setting, as lambda1=1e-5 (repeatable)."),
]
Repair = Annotated[
    str | None,
    _method(metavar="NAME", help="network, mean+variance, mean or none; else as the method does."),
]
Refine = Annotated[
    int,
    _method(metavar="N", min=0, help="Gradient steps in which kept filters bend too: 100, say."),
]
Device = Annotated[str, _machine(metavar="NAME", help="cpu, cuda, cuda:1, mps or auto.")]
Threads = Annotated[int | None, _machine(metavar="N", min=1, help="CPU threads; else all.")]
Seed = Annotated[int, _machine(metavar="N", help="Of everything random.")]
Out = Annotated[Path | None, output_option(metavar="DIR", help="Directory to write to.")]
Json = Annotated[bool, output_option("--json", help="Print JSON and nothing else.")]
Quiet = Annotated[bool, output_option("--quiet", "-q", help="Print nothing but errors.")]
Debug = Annotated[bool, output_option("--debug", help="Show where an error came from.")]


def parse_ratio(given: Sequence[str] | None) -> float | dict[str, float] | None:
    """One number, patterns with a number each, or both: the number is for all other layers."""
    if not given:
        return None
    plain: list[float] = []
    patterns: dict[str, float] = {}
    for text in given:
        pattern, equals, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            raise UsageError(f"--ratio {text!r}: write 0.3, or 'layer4.*=0.5'") from None
        if not 0 <= value < 1:
            raise UsageError(f"--ratio {text}: the share that goes is at least 0 and below 1")
        if equals:
            patterns[pattern] = value
        else:
            plain.append(value)
    if len(plain) > 1:
        raise UsageError("--ratio is given twice; one number for all layers, others as NAME=NUMBER")
    if not patterns:
        return plain[0]
    return ({"*": plain[0]} if plain else {}) | patterns


def parse_images(text: str | None) -> int | str | None:
    """A number of images, or the name of their kind."""
    return int(text) if text is not None and text.isdecimal() else text


def parse_numbers(text: str | None, name: str) -> tuple[float, ...] | None:
    """Numbers between commas."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--{name} {text!r}: write numbers between commas") from None


def parse_method(name: str, options: Sequence[str] | None = None) -> Any:
    """A method with its settings, checked against the fields it has."""
    import dataclasses

    from lbyl import methods

    method = methods.resolve(name)
    fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for text in options or ():
        key, equals, value = text.partition("=")
        if not equals or key not in fields:
            known = ", ".join(fields) or "none"
            raise UsageError(f"--option {text!r}: the settings of {name} are {known}, as KEY=VALUE")
        values[key] = _like(fields[key], value, text)
    return methods.resolve({"name": name, **values})


def parse_criterion(name: str, seed: int = 0) -> Any:
    """A criterion; one that draws lots gets the seed."""
    from lbyl import criteria

    criterion = criteria.resolve(name)
    if hasattr(criterion, "seed"):
        return criteria.resolve({"name": name, "seed": seed})
    return criterion


def _like(default: Any, value: str, text: str) -> Any:
    """A value written as text, of the type its default has."""
    if isinstance(default, str):
        return value
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        read = {"true": True, "false": False, "none": None}.get(value.lower(), value)
    if isinstance(default, float) and type(read) is int:
        read = float(read)
    if default is not None and type(read) is not type(default):
        raise UsageError(f"--option {text!r}: {type(default).__name__} is expected")
    return read


def check_budget(**budgets: float | None) -> dict[str, float]:
    """The budgets that were given, each a share of what the network needs now."""
    for name, value in budgets.items():
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} {value}: it must be more than 0")
    return given(**budgets)


def given(**options: Any) -> dict[str, Any]:
    """Only the options that were given, to leave all others at the library's own defaults."""
    return {name: value for name, value in options.items() if value is not None}
