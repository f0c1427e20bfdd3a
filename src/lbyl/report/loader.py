"""A short program that loads a saved slim network with torch and safetensors alone.

What the design must satisfy: it is right for exactly this network and says nothing about layers
that it does not have; it can be pasted anywhere, so it imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lbyl.io import MODEL
from lbyl.leaves import sizes_of
from lbyl.result import Result

HEAD = '''"""Load the slim network; needs only torch and safetensors."""

from safetensors.torch import load_file
from torch import nn

{build}


def load_slim(model, path):
    """Give a freshly built network of the original size the slim tensors."""
    slim, made = load_file(path), {{}}
    names = {{id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}}
    for prefix, module in model.named_modules():
        before = getattr(module, "weight", None)
        for table in (module._parameters, module._buffers):
            for key, old in table.items():
                name = names.get(id(old), f"{{prefix}}.{{key}}".lstrip("."))
                if name in slim and name not in made:  # tied tensors stay tied
                    value = slim[name] if old is None else slim[name].to(old)
                    made[name] = value if table is module._buffers else nn.Parameter(value)
                table[key] = made.get(name, old)
        refit(module, before)
    if missing := slim.keys() - made.keys():
        raise ValueError(f"this is another network: it has no {{sorted(missing)[:3]}}")
    return model
'''

FOOT = """
model = load_slim({make}, "{path}").eval()
"""

CONV = """    if isinstance(module, nn.modules.conv._ConvNd):
        rows, columns = module.weight.shape[:2]
        module.groups = module.groups * rows // before.shape[0] if module.groups > 1 else 1
        out, into = (columns, rows) if module.transposed else (rows, columns)
        module.out_channels = out * (module.groups if module.transposed else 1)
        module.in_channels = into * (1 if module.transposed else module.groups)
"""
LINEAR = """    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
"""
BATCH_NORM = """    if isinstance(module, nn.modules.batchnorm._NormBase):
        sized = module.weight if module.weight is not None else module.running_mean
        module.num_features = module.num_features if sized is None else len(sized)
"""
GROUP_NORM = """    if isinstance(module, nn.GroupNorm) and module.weight is not None:
        size = module.num_channels // module.num_groups
        module.num_channels, module.num_groups = len(module.weight), len(module.weight) // size
"""
PRELU = """    if isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
"""
TRANSPOSED_LINEAR = """    if type(module).__name__ == "Conv1D":
        module.nx, module.nf = module.weight.shape
"""


def loader_snippet(result: Result, path: str = MODEL, build: str | None = None) -> str:
    """The program for a result that `lbyl.save` wrote.

    `path` is the file of tensors. `build` are lines of Python that end in naming the network of
    the original size as `original`; by default its class is imported and made without arguments.
    """
    lines, make = _construction(result.model) if build is None else (build.strip(), "original")
    refit = "".join(_cases(result.model)) or "    pass\n"
    head = HEAD.format(build=lines)
    function = (
        f'\n\ndef refit(module, before):\n    """Make sizes say what tensors are."""\n{refit}\n'
    )
    shown = path.replace("\\", "/").replace('"', '\\"')
    return head + function + FOOT.format(make=make, path=shown)


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


def _cases(model: nn.Module) -> Iterable[str]:
    """The lines that refit each kind of layer this network has."""
    modules = list(model.modules())
    known: list[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str]] = [
        (nn.modules.conv._ConvNd, CONV),
        (nn.Linear, LINEAR),
        (nn.modules.batchnorm._NormBase, BATCH_NORM),
        (nn.GroupNorm, GROUP_NORM),
        (nn.PReLU, PRELU),
    ]
    for kind, lines in known:
        if any(isinstance(module, kind) for module in modules):
            yield lines
    if any(type(m).__name__ == "Conv1D" and hasattr(m, "nf") for m in modules):
        yield TRANSPOSED_LINEAR
    for name in dict.fromkeys(type(m).__name__ for m in modules if sizes_of(type(m))):
        yield f'    if type(module).__name__ == "{name}":\n'
        example = next(m for m in modules if type(m).__name__ == name)
        for attribute, follows in sizes_of(type(example)).items():
            yield f"        module.{attribute} = len(module.{follows})\n"


__all__ = ["loader_snippet"]
