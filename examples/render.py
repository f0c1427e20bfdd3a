"""Render a percent-cell script as a page and a notebook.

`python examples/render.py` writes docs/tutorial.md and examples/tutorial.ipynb.

Cells run one after the other in one namespace; what each prints stands under it.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT, PAGE = ROOT / "examples" / "tutorial.py", ROOT / "docs" / "tutorial.md"
NOTEBOOK = SCRIPT.with_suffix(".ipynb")


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


def notebook(outputs: list[tuple[Cell, str]]) -> dict[str, Any]:
    """The same as Jupyter has it (nbformat 4.5)."""
    made: list[dict[str, Any]] = []
    for number, (cell, printed) in enumerate(outputs):
        kind = "markdown" if cell.prose else "code"
        entry: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        entry["source"] = cell.text.splitlines(keepends=True)
        if not cell.prose:
            text = {"output_type": "stream", "name": "stdout", "text": printed.splitlines(True)}
            entry |= {"execution_count": None, "outputs": [text] if printed else []}
        made.append(entry)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    ran = run(SCRIPT.read_text(encoding="utf-8"))
    PAGE.write_text(page(ran), encoding="utf-8")
    NOTEBOOK.write_text(json.dumps(notebook(ran), indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)} and {NOTEBOOK.relative_to(ROOT)}")
