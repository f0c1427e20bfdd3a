"""From the text of options to what the library takes; contradictions are refused here."""

from __future__ import annotations

import ast
import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lbyl import Budget, LbylError, criteria, methods
from lbyl.api import SOURCES, check_data, check_data_used
from lbyl.app.cli.errors import UsageError, usage
from lbyl.methods import Method
from lbyl.planning.criteria import Criterion
from lbyl.planning.task import Task
from lbyl.refining.distil import Steps


@dataclass(frozen=True)
class OwnImages:
    """`--data` names images of the user's own."""

    path: str


Source = str | int | OwnImages | None


def parse_data(text: str | None) -> Source:
    """What statistics come from: a word, a number of procedural images, or own images."""
    if text is None or text in SOURCES:
        return text
    if text.isdecimal():
        with usage():
            check_data(int(text))
        return int(text)
    if text == "digits" or Path(text).expanduser().exists():
        return OwnImages(text)
    raise UsageError(
        f"--data {text!r}: there is no file or folder of that name; write {', '.join(SOURCES)}, "
        "a number of procedural images, or a path of your own images"
    )


def check_limit(test: str | None, limit: int | None) -> None:
    """`--limit` is refused where there are no labelled images to limit."""
    if limit is not None and test is None:
        raise UsageError("--limit is of labelled images: add --test PATH")


def parse_ratio(given: Sequence[str] | None) -> float | dict[str, float] | None:
    """One number, patterns with a number each, or both: the number is for all other layers."""
    if not given:
        return None
    numbers: list[float] = []
    patterns: dict[str, float] = {}
    for text in given:
        pattern, equals, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            raise UsageError(f"--ratio {text!r}: write 0.3, or 'layer4.*=0.5'") from None
        if not 0 <= value < 1:
            raise UsageError(f"--ratio {text}: the fraction pruned is at least 0 and below 1")
        if equals:
            if pattern in patterns:
                raise UsageError(f"--ratio is given twice for {pattern!r}")
            patterns[pattern] = value
        else:
            numbers.append(value)
    if len(numbers) > 1:
        raise UsageError("--ratio is given twice; one number for all layers, others as NAME=NUMBER")
    if not patterns:
        return numbers[0]
    return ({"*": numbers[0]} if numbers else {}) | patterns


def parse_amount(
    ratio: Sequence[str] | None, **budgets: float | None
) -> float | dict[str, float] | Budget | None:
    """How much is pruned: ratios or a budget, None where neither is given."""
    given = {name: value for name, value in budgets.items() if value is not None}
    options = ["--" + name.replace("_", "-") for name in given]
    if ratio and given:
        raise UsageError(f"--ratio and {options[0]} both say how much is pruned: give one of them")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(options)} are several budgets: give one of them")
    if given:
        with usage():
            amounts: dict[str, Any] = dict(given)
            return Budget(**amounts)
    return parse_ratio(ratio)


def typed(command: str, model: str, **options: Any) -> str:
    """Another command on the same network, as it is typed; what is None or False is left out."""
    words = ["lbyl", command, model]
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        for each in value if isinstance(value, list) else [value]:
            words += [] if each is None or isinstance(each, bool) else [option, str(each)]
    return shlex.join(words)


def parse_numbers(text: str | None, name: str) -> tuple[float, ...] | None:
    """Numbers between commas."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--{name} {text!r}: write numbers between commas") from None


def parse_method(
    name: str, settings: Sequence[str] | None = None, correction: str | None = None
) -> Method:
    """A method with its settings, checked against the fields it has."""
    with usage():
        default = methods.resolve(name)
    assert dataclasses.is_dataclass(default)
    fields = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    values: dict[str, Any] = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals or key not in fields:
            known = ", ".join(fields) or "none"
            raise UsageError(f"--option {text!r}: the settings of {name} are {known}, as KEY=VALUE")
        if key in values:
            raise UsageError(f"--option {key} is given twice")
        values[key] = _like(fields[key], value, text)
    if correction is not None:
        if "correction" in values:
            raise UsageError("--correction and --option correction=… both say the same: give one")
        values["correction"] = correction
    with usage():
        return methods.resolve({"name": name, **values})


def parse_criterion(name: str | None, seed: int = 0) -> Criterion | None:
    """A criterion; a random one gets the seed. None where none is given."""
    if name is None:
        return None
    with usage():
        criterion = criteria.resolve(name)
        if hasattr(criterion, "seed"):
            return criteria.resolve({"name": name, "seed": seed})
    return criterion


def parse_task(
    amount: Any, criterion: Criterion | None, method: Method, multiple_of: int | None
) -> Task:
    """One compression, refused where two options contradict each other."""
    with usage():
        return Task.of(amount, criterion, method, multiple_of)


def check_source_used(source: Source, tasks: Sequence[Task], refine: Steps) -> None:
    """`--data` that no task would look at is refused before anything is done."""
    data: Any = [] if isinstance(source, OwnImages) else source
    problems = []
    for task in tasks:
        try:
            check_data_used(data, task, refine)
        except LbylError as error:
            problems.append(str(error))
    if problems and len(problems) == len(tasks):
        raise UsageError(problems[0])


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
