"""Loads slim networks in a process of its own: one order a line, one answer a line."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import lbyl  # noqa: E402
from support import reference  # noqa: E402
from support.foreign import check  # noqa: E402


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """The distance of what the loaded network computes from what was saved beside it."""
    folder = Path(order["folder"])
    about = torch.load(folder / "about.pt", weights_only=True)
    fresh, _ = check.made(order["name"], order["double"], seed=1)
    model = lbyl.load(folder / "slim", model=fresh).eval()
    return {"distance": reference.distance(check.output(model, about["inputs"]), about["outputs"])}


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    told, sys.stdout = sys.stdout, sys.stderr  # packages print what they like
    for line in sys.stdin:
        try:
            said = answer(json.loads(line))
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=told, flush=True)


if __name__ == "__main__":
    main()
