"""Errors as one red line with the remedy, and the exit code by their kind.

2 where what was given does not fit (options, a file, a network), 1 where the work itself failed;
`lbyl compress` has one of its own for a network that is lost.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from lbyl.errors import LbylError

F = TypeVar("F", bound=Callable[..., Any])

EXTRAS = {
    "vision": ("torchvision", "timm", "PIL"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "report": ("jinja2",),
    "train": ("accelerate",),
    "text": ("transformers", "tokenizers"),
    "detect": ("ultralytics",),
    "segment": ("segmentation_models_pytorch",),
    "demo": ("sklearn",),
    "plot": ("matplotlib",),
}
"""Which extra of this package brings a module that is not installed."""

ARGUMENTS = "ratio criterion method data include exclude residual multiple_of refine".split()
_BARE = re.compile(rf"\b({'|'.join(ARGUMENTS)})=(?![\w'\"])")


class UsageError(Exception):
    """Options that cannot be understood or contradict each other; the message says the remedy."""


@contextmanager
def usage() -> Iterator[None]:
    """What the library refuses inside is a matter of how the command was written."""
    try:
        yield
    except LbylError as error:
        raise UsageError(str(error)) from None


def as_options(message: str) -> str:
    """A message of the library in the words of the command line: `data=` is `--data`."""
    return _BARE.sub(lambda match: "--" + match[1].replace("_", "-"), message)


def guarded(command: F) -> F:
    """Turn what a command raises into one line; with its option `--debug`, raise it as it is."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("debug"):
            return command(*args, **kwargs)
        try:
            return command(*args, **kwargs)
        except typer.Exit:
            raise
        except BrokenPipeError:  # whoever read the output has seen enough
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 (for the flush at exit)
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            fail("interrupted; nothing was left half written", 130)
        except UsageError as error:
            fail(as_options(str(error)), 2)
        except Exception as error:
            fail(_message(error), _code(error))

    return run  # type: ignore[return-value]


def fail(message: str, code: int) -> NoReturn:
    """Say what went wrong on stderr and end."""
    line = " ".join(message.split())  # whatever raised it may have used several lines
    text = Text.assemble(("error: ", "bold red"), (line, "red"))
    Console(stderr=True, soft_wrap=True, highlight=False).print(text)
    raise typer.Exit(code)


def _code(error: Exception) -> int:
    """An `LbylError` is about what was given, unless the file system refused to write."""
    given = isinstance(error, LbylError) and not isinstance(error.__cause__, OSError)
    return 2 if given else 1


def _message(error: Exception) -> str:
    if isinstance(error, LbylError):
        return as_options(str(error))
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        extra = next((e for e, names in EXTRAS.items() if package in names), None)
        wanted = f'"lbyl[{extra}]"' if extra else package
        return f"{package} is not installed: pip install {wanted}"
    text = str(error).strip() or "no message"
    if "out of memory" in text.lower():
        return "out of memory: use --device cpu, a smaller --input-size or a smaller --batch-size"
    return f"{type(error).__name__}: {text} (run it again with --debug to see where)"


class OneLineGroup(TyperGroup):
    """A group of commands whose usage errors are one line as well."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.pop("standalone_mode", True):
            return super().main(*args, standalone_mode=False, **kwargs)  # type: ignore[misc]
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)  # type: ignore[misc]
        except typer.Abort:
            code = _said("interrupted", 130)
        except Exception as error:
            # Old and new versions of typer have these errors in different modules.
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            path = context.command_path if context is not None else "lbyl"
            message = error.format_message().rstrip(".")
            code = _said(f"{message}; see {path} --help", getattr(error, "exit_code", 2))
        sys.exit(code if isinstance(code, int) else 0)


def _said(message: str, code: int) -> int:
    try:
        fail(message, code)
    except typer.Exit as end:
        return end.exit_code
