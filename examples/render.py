"""Render a percent-cell script as a page: `python examples/render.py` writes docs/tutorial.md.

Cells run one after the other in one namespace; what each prints stands under it.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT, PAGE = ROOT / "examples" / "tutorial.py", ROOT / "docs" / "tutorial.md"


@dataclass(frozen=True)
class Cell:
    """Prose or code, without its marker."""

    prose: bool
    text: str


def cells(source: str) -> list[Cell]:
    """Divide a script at its `# %%` lines."""
    return [_cell(part) for part in f"\n{source}".split("\n# %%")[1:]]


def _cell(part: str) -> Cell:
    kind, _, body = part.partition("\n")
    if "[markdown]" not in kind:
        return Cell(False, body.strip("\n"))
    lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
    return Cell(True, "\n".join(lines))


def run(source: str) -> list[tuple[Cell, str]]:
    """Execute all code; each cell with what it printed."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for cell in cells(source):
        printed = io.StringIO()
        if not cell.prose:
            with contextlib.redirect_stdout(printed):
                exec(compile(cell.text, SCRIPT.name, "exec"), scope)
        outputs.append((cell, printed.getvalue()))
    return outputs


def page(outputs: list[tuple[Cell, str]]) -> str:
    """Markdown of cells and outputs."""
    parts = []
    for cell, printed in outputs:
        parts.append(cell.text if cell.prose else f"```python\n{cell.text}\n```")
        if printed.strip():
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(run(SCRIPT.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
