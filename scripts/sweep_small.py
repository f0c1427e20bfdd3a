"""Cuts the small networks of other packages, one after the other, and keeps each row as it comes.

python scripts/sweep_small.py                     # all that have no row yet
python scripts/sweep_small.py --only 'timm/'      # some
python scripts/sweep_small.py --again             # those of which something did not hold
python scripts/sweep_small.py --all               # every one once more
python scripts/sweep_small.py --attention         # heads, queries and values instead

`scripts/coverage.py --page` writes the page from the rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import foreign  # noqa: E402
from support.foreign import check  # noqa: E402

RESULTS = ROOT / "docs" / "results"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last row of every network."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def row(name: str, elsewhere: check.Elsewhere, attention: bool) -> dict[str, Any]:
    """What was found of one network, or the error that ended it."""
    folder = Path(tempfile.mkdtemp())
    try:
        return check.examine(name, folder, elsewhere, attention)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"[:300]
        return {"name": name, "problems": {"compressed": what}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--again", action="store_true", help="those with problems once more")
    parser.add_argument("--all", action="store_true", help="those that have a row, too")
    parser.add_argument("--attention", action="store_true", help="units of attention")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    path = RESULTS / f"coverage-small{'-attention' if options.attention else ''}.jsonl"
    known = read(path)
    elsewhere = check.Elsewhere()
    for name in foreign.every():
        had = known.get(name)
        wanted = options.all or had is None or (options.again and had["problems"])
        if not wanted or not re.search(options.only, name):
            continue
        found = row(name, elsewhere, options.attention)
        known[name] = found
        with path.open("a") as file:
            print(json.dumps(found), file=file, flush=True)
        print(name, found.get("units"), found["problems"] or "", flush=True)
        gc.collect()
    elsewhere.close()
    known = read(path)  # another process may have added some
    ordered = [known[name] for name in foreign.every() if name in known]
    path.write_text("".join(json.dumps(found) + "\n" for found in ordered))


if __name__ == "__main__":
    main()
