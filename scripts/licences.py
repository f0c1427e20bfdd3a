"""The licences of everything that installing lbyl brings along, from what is installed here.

python scripts/licences.py                # what `pip install lbyl` brings
python scripts/licences.py --extra dev    # with an extra
python scripts/licences.py --check        # an error for a licence that is not permissive
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import metadata

# Weak copyleft of whole files is fine for a library that is only imported.
PERMISSIVE = re.compile(
    r"apache|bsd|mit\b|mit license|psf|python software|isc|zlib|mpl|mozilla|unlicense|hpnd|"
    r"public domain|cc0|expat|0bsd|cnri",
    re.I,
)
# Builds of torch for CUDA bring NVIDIA's libraries, under NVIDIA's terms; those for the CPU do not.
CUDA = re.compile(r"nvidia-|cuda-")


def requirements(name: str, extras: set[str]) -> set[str]:
    """Names of what a distribution asks for, without what other platforms or extras need."""
    from packaging.requirements import Requirement

    found = set()
    for line in metadata.requires(name) or []:
        wanted = Requirement(line)
        marker = wanted.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in (*extras, "")):
            found.add(wanted.name)
            if wanted.name == "lbyl":  # an extra made of extras
                found |= requirements("lbyl", set(wanted.extras))
    return found


def closure(extras: set[str]) -> list[str]:
    """Everything that is installed with lbyl, without lbyl itself."""
    todo, seen = requirements("lbyl", extras), {"lbyl"}
    while todo:
        name = todo.pop().lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            todo |= requirements(name, set())
        except metadata.PackageNotFoundError:
            continue
    return sorted(seen - {"lbyl"})


def licence(name: str) -> str:
    about = metadata.metadata(name)
    said = about.get("License-Expression") or ""
    classes = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or []]
    named = [c for c in classes if "License" in c or c in ("MIT", "BSD")]
    listed = [
        c.rpartition(" :: ")[2]
        for c in about.get_all("Classifier") or []
        if c.startswith("License ::")
    ]
    first = (about.get("License") or "").strip().splitlines()
    return said or ", ".join(listed or named) or (first[0][:60] if first else "") or "not said"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[], help="an extra of lbyl")
    parser.add_argument("--check", action="store_true", help="fail where one is not permissive")
    options = parser.parse_args()
    doubtful = 0
    for name in closure(set(options.extra)):
        try:
            said, version = licence(name), metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # for another platform
        unclear = not PERMISSIVE.search(said)
        of_cuda = unclear and CUDA.match(name) is not None
        doubtful += unclear and not of_cuda
        told = "  (with torch's builds for CUDA only)" if of_cuda else "  ← look at this one"
        print(f"{name} {version}: {said}{told if unclear else ''}")
    return int(options.check and doubtful > 0)


if __name__ == "__main__":
    sys.exit(main())
