"""Make a pretrained network smaller without its data and without training it.

Names are imported when first used (PEP 562), so that `import lbyl` and `lbyl --help` load no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lbyl import methods
    from lbyl.api import Prepared, compress, estimate, prepare, refine
    from lbyl.app.sources.saved import load
    from lbyl.errors import LbylError
    from lbyl.graph.declare import declare
    from lbyl.graph.unit import Graph
    from lbyl.planning import criteria
    from lbyl.planning.budget import Budget
    from lbyl.planning.plan import Plan
    from lbyl.result import Result
    from lbyl.statistics.moments import Statistics
    from lbyl.storage.files import save
    from lbyl.tracing.trace import trace

__version__ = "0.3.0"

_HOMES = {
    "Budget": "lbyl.planning.budget",
    "Graph": "lbyl.graph.unit",
    "LbylError": "lbyl.errors",
    "Plan": "lbyl.planning.plan",
    "Prepared": "lbyl.api",
    "Result": "lbyl.result",
    "Statistics": "lbyl.statistics.moments",
    "compress": "lbyl.api",
    "declare": "lbyl.graph.declare",
    "estimate": "lbyl.api",
    "load": "lbyl.app.sources.saved",
    "prepare": "lbyl.api",
    "refine": "lbyl.api",
    "save": "lbyl.storage.files",
    "trace": "lbyl.tracing.trace",
}
_MODULES = {"criteria": "lbyl.planning.criteria", "methods": "lbyl.methods"}

__all__ = [
    "Budget",
    "Graph",
    "LbylError",
    "Plan",
    "Prepared",
    "Result",
    "Statistics",
    "compress",
    "criteria",
    "declare",
    "estimate",
    "load",
    "methods",
    "prepare",
    "refine",
    "save",
    "trace",
]


def __getattr__(name: str) -> Any:
    home = _MODULES.get(name) or _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lbyl' has no attribute {name!r}")
    import random

    state = random.getstate()  # some packages draw from it while they are imported
    try:
        module = importlib.import_module(home)
    finally:
        random.setstate(state)
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
