"""A short program that loads a saved slim network with torch and safetensors alone.

What the design must satisfy: it can be pasted anywhere, so it imports nothing of this package; and
what makes attributes such as `out_channels` true is the package's own code, not written again.
"""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from lbyl.graph.declare import sizes_of
from lbyl.result import Result
from lbyl.storage.files import MODEL
from lbyl.surgery import refit

PROGRAM = '''"""Load the slim network; needs only torch and safetensors."""

import copy

from safetensors.torch import load_file
from torch import Tensor, nn

{build}


def load_slim(model, path):
    """Give a freshly built network of the original size the slim tensors."""
    slim, made, original = load_file(path), {{}}, copy.deepcopy(model)
    names = {{id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, old in table.items():
                name = names.get(id(old), f"{{prefix}}.{{key}}".lstrip("."))
                if name in slim and name not in made:  # tied tensors stay tied
                    value = slim[name] if old is None else slim[name].to(old)
                    made[name] = value if table is module._buffers else nn.Parameter(value)
                table[key] = made.get(name, old)
    if missing := slim.keys() - made.keys():
        raise ValueError(f"this is another network: it has no {{sorted(missing)[:3]}}")
    refit_attributes(model, original)
    return model


{refit}

def sizes_of(kind):
    """Attributes of a class that hold a number of channels, with the tensor they follow."""
    return {sizes}.get(kind.__name__, {{}})


model = load_slim({make}, "{path}").eval()
'''


def loader_snippet(result: Result, path: str = MODEL, build: str | None = None) -> str:
    """The program for a result that `lbyl.save` wrote.

    `path` is the file of tensors. `build` are lines of Python that end in naming the network of
    the original size as `original`; by default its class is imported and made without arguments.
    """
    lines, make = _construction(result.model) if build is None else (build.strip(), "original")
    return PROGRAM.format(
        build=lines,
        refit=_refit_source(),
        sizes=_declared_sizes(result.model),
        make=make,
        path=path.replace("\\", "/").replace('"', '\\"'),
    )


def _refit_source() -> str:
    """`refit_attributes` and all that it calls or names of this package, as it stands there."""
    found: dict[str, str] = {}
    _gather(refit.refit_attributes, found)
    return "\n\n".join(found.values())


def _gather(function: Any, found: dict[str, str]) -> None:
    """Add the source of a function, of those that it calls and of constants that it names."""
    found[function.__name__] = inspect.getsource(function)
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        if name in found or value is sizes_of:  # which the program has as data
            continue
        if isinstance(value, FunctionType) and value.__module__.startswith("lbyl."):
            _gather(value, found)
        elif isinstance(value, (str, int, float)) and name.isupper():
            found[name] = f"{name} = {value!r}\n"


def _names_in(code: CodeType) -> list[str]:
    """Names that a function looks up, those of functions inside of it too."""
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _names_in(c)]
    return [*code.co_names, *inner]


def _declared_sizes(model: nn.Module) -> dict[str, dict[str, str]]:
    """What was declared of this network's classes: class → attribute → tensor."""
    kinds = {type(module) for module in model.modules()}
    return {k.__name__: sizes_of(k) for k in sorted(kinds, key=str) if sizes_of(k)}


def _construction(model: nn.Module) -> tuple[str, str]:
    """Lines that make the class known, and the call that builds it."""
    kind = type(model)
    nameless = "<locals>" in kind.__qualname__ or kind.__module__ in ("__main__", "builtins")
    if nameless or kind.__module__.startswith("torch.nn"):
        return (
            "# Build the network as before it was compressed: this line is yours to write.\n"
            "original = build_network()",
            "original",
        )
    outer = kind.__qualname__.split(".")[0]
    return f"from {kind.__module__} import {outer}", f"{kind.__qualname__}()"
