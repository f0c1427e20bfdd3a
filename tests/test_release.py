"""What is released: its metadata, what it pulls in, and one version everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import lbyl
from lbyl.app.cli.errors import EXTRAS  # private: no text lists all extras that are named

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {"torch", "numpy", "safetensors", "typer", "rich"}
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "tokenizers": "transformers"}  # by module


@pytest.fixture(scope="module")
def project() -> Any:
    tomllib = pytest.importorskip("tomllib", reason="in the standard library from 3.11 on")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    """Packages of a list of requirements, without versions."""
    return {re.split(r"[\[<>=!~; ]", line)[0] for line in requirements}


def test_installing_pulls_five_packages_in_and_no_more(project: Any) -> None:
    assert names(project["dependencies"]) == NEEDED


def test_one_version_is_told_everywhere(project: Any) -> None:
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited is not None
    assert lbyl.__version__ == project["version"] == cited[1]


def test_an_extra_that_is_named_brings_what_was_missing(project: Any) -> None:
    extras = project["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        brought = {name.replace("-", "_") for name in names(extras[extra])}
        wanted = {PACKAGES.get(name, name).replace("-", "_") for name in modules}
        assert wanted <= brought, f"lbyl[{extra}] does not bring {wanted - brought}"


@pytest.mark.slow
def test_wheel_and_source_hold_everything_and_say_what_they_are(tmp_path: Path) -> None:
    """Built as a release is; needs an index that has hatchling."""
    program = "from hatchling.build import build_sdist, build_wheel; import sys; "
    program += "build_wheel(sys.argv[1]); build_sdist(sys.argv[1])"
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    installed = subprocess.run(
        [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "hatchling"],
        capture_output=True, text=True,
    )  # fmt: skip
    if installed.returncode:
        pytest.skip(f"no index with hatchling: {installed.stderr.strip().splitlines()[-1]}")
    dist = tmp_path / "dist"
    subprocess.run([venv / "bin" / "python", "-c", program, dist], cwd=ROOT, check=True)
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        (about,) = (n for n in inside if n.endswith("dist-info/METADATA"))
        told = Parser().parsestr(archive.read(about).decode())
    source_files = {
        p.relative_to(ROOT / "src").as_posix()
        for p in (ROOT / "src" / "lbyl").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert source_files <= inside  # pages, styles, weights and the mark of types among them
    assert "lbyl/py.typed" in inside and "lbyl/report/style.css" in inside
    assert told["Version"] == lbyl.__version__ and told["Requires-Python"] == ">=3.10"
    assert told["License-Expression"] == "Apache-2.0" and told["Summary"] and told["Keywords"]
    assert told.get_payload().startswith("# lbyl")  # the README
    required = [line for line in told.get_all("Requires-Dist") if "extra ==" not in line]
    assert names(required) == NEEDED
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "src/lbyl/__init__.py"} <= held
