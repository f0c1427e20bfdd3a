"""What the documentation shows is run."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name: str) -> list[str]:
    return BLOCK.findall((DOCS / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def renderer() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "examples_render", ROOT / "examples" / "render.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = blocks("quickstart.md")
    assert len(found) >= 7
    scope: dict[str, object] = {}
    for number, block in enumerate(found):
        exec(compile(block, f"quickstart.md, block {number + 1}", "exec"), scope)
    assert (Path(str(scope["folder"])) / "report.html").is_file()


@pytest.mark.parametrize("name", ["index.md", "choosing.md", "budgets.md", "report.md"])
def test_other_blocks_are_python(name: str) -> None:
    found = blocks(name)
    assert found
    for block in found:
        compile(block, name, "exec")


def test_the_tutorial_runs_and_shows_what_it_promises(renderer: ModuleType) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("jinja2")
    done = renderer.run(renderer.SCRIPT.read_text(encoding="utf-8"))
    printed = "".join(text for _, text in done)
    accuracies = dict(re.findall(r"^(none|neuron-merging|lbyl|echo) +([\d.]+) %$", printed, re.M))
    assert float(accuracies["none"]) < 50 < 95 < float(accuracies["echo"])
    assert "the same outputs: True" in printed


def test_the_tutorial_page_is_up_to_date(renderer: ModuleType) -> None:
    cells = renderer.cells(renderer.SCRIPT.read_text(encoding="utf-8"))
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    assert len(cells) > 10
    for cell in cells:
        assert cell.text in text, "run: python examples/render.py"


def test_every_method_and_criterion_is_explained() -> None:
    import lbyl

    choosing = (DOCS / "choosing.md").read_text(encoding="utf-8")
    for name in [*lbyl.methods.names(), *lbyl.criteria.names()]:
        assert f"`{name}`" in choosing, name


def test_links_between_pages_lead_somewhere() -> None:
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
