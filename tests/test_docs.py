"""What README and the pages show is run: Python executed, commands parsed, links followed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lbyl

# private: commands are parsed here without being run
from lbyl.app.cli.app import COMMANDS, load_command
from lbyl.app.sources import zoo

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "lbyl"
PAGES = {
    page.relative_to(ROOT).as_posix(): page for page in [ROOT / "README.md", *DOCS.rglob("*.md")]
}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash", "shell")
TUTORIAL = "docs/tutorial.md"  # a program with what it printed; it is run by `render`

Scope = dict[str, Any]


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page that are in one of some languages."""
    return [text for kind, text in FENCE.findall(page.read_text("utf-8")) if kind in languages]


class Small(nn.Module):
    """Stages named like a ResNet's, so that patterns of layer names fit."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = self._block(3, 8)
        self.layer3 = self._block(8, 8)
        self.layer4 = self._block(8, 16)
        self.layer5 = self._block(16, 16)
        self.fc = nn.Linear(16, classes)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer5(self.layer4(self.layer3(self.stem(x))))
        return self.fc(x.mean((2, 3)))


class Words(nn.Module):
    """As much of a language model as pruning needs: an embedding and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.norm(self.embedding(input_ids) * attention_mask[..., None])
        return x + self.down(torch.relu(self.up(x)))


def tokenizer(texts: list[str], **_: Any) -> dict[str, Tensor]:
    length = max(len(text.split()) for text in texts)
    ids = torch.arange(len(texts) * length).reshape(len(texts), length) % 50
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


NAMED = ("MyActivation", "MyNorm", "MyMixer", "SwapHalves")  # modules of the reader's own


def small() -> Scope:
    """What a page leaves to its reader: a model, an example of its inputs, a loader."""
    torch.manual_seed(0)
    model = Small().eval()
    batches = [(torch.randn(8, 3, 16, 16), torch.zeros(8)) for _ in range(2)]
    return {"lbyl": lbyl, "model": model, "x": torch.randn(1, 3, 16, 16), "loader": batches}


def language() -> Scope:
    texts = [tokenizer(["one two three four"] * 4) for _ in range(2)]
    return {
        **small(),
        "tokenizer": tokenizer,
        "language_model": Words().eval(),
        "batch_of_text": texts[0],
        "another_batch": texts[1],
        **{name: type(name, (nn.Module,), {}) for name in NAMED},
    }


def readme() -> Scope:
    class MyNetwork(Small):
        """Takes images of 224 pixels without taking long."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.avg_pool2d(x, 8))

    return {"model": MyNetwork().eval(), "MyNetwork": MyNetwork}


SET_UP: dict[str, Callable[[], Scope]] = {
    "README.md": readme,
    "docs/quickstart.md": dict,  # stands on its own
    "docs/your-own-model.md": language,
}


@pytest.fixture
def untouched() -> Iterator[None]:
    """What a page registers or declares is gone after it."""
    from lbyl.graph import declare  # private: nothing takes back what a page declares

    registries: list[Any] = [lbyl.methods.registry, lbyl.criteria.registry]
    before = [dict(registry._classes) for registry in registries]
    declared = dict(declare._DECLARED)
    yield
    for registry, classes in zip(registries, before):
        registry._classes = classes
    declare._DECLARED.clear()
    declare._DECLARED.update(declared)


@pytest.mark.parametrize(
    "name", [n for n, page in PAGES.items() if n != TUTORIAL and blocks(page, "python")]
)
@pytest.mark.usefixtures("untouched", "few_images")
def test_the_python_of_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a page share a namespace, as a reader types them one after the other."""
    if name in ("docs/report.md", "docs/quickstart.md"):
        pytest.importorskip("jinja2")
    if name == "docs/training.md":
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    scope = {"__name__": "__main__", **SET_UP.get(name, small)()}
    for number, block in enumerate(blocks(PAGES[name], "python"), 1):
        exec(compile(block, f"{name}, block {number}", "exec"), scope)


def commands(page: Path) -> list[list[str]]:
    """The arguments of every `lbyl …` in the shell blocks of a page."""
    lines = "\n".join(blocks(page, *SHELLS)).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == ["lbyl"]]


@pytest.mark.parametrize("name", [n for n, page in PAGES.items() if commands(page)])
def test_the_commands_of_a_page_can_be_parsed(name: str) -> None:
    click = pytest.importorskip("click")
    for command, *arguments in commands(PAGES[name]):
        assert command in COMMANDS, f"{name}: there is no `lbyl {command}`"
        parser = load_command(command)
        try:
            parser.parse_args(click.Context(parser, info_name=command), arguments)
        except click.UsageError as error:
            pytest.fail(f"{name}: lbyl {command} {shlex.join(arguments)}: {error.format_message()}")


def test_options_named_in_the_text_exist() -> None:
    known = {
        option
        for command in COMMANDS
        for parameter in load_command(command).params
        for option in [*parameter.opts, *parameter.secondary_opts]
    } | {"--help", "--version"}
    for name in ("choosing", "budgets", "report", "training", "how-it-works", "index"):
        text = FENCE.sub("", (DOCS / f"{name}.md").read_text("utf-8"))
        for code in re.findall(r"`(-[^`]*|lbyl [^`]*)`", text):
            for option in re.findall(r"(?<!\w)--[a-z][a-z-]*", code):
                assert option in known, f"{name}.md names {option}"


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


@pytest.mark.slow
def test_the_tutorial_runs_and_shows_what_it_promises(renderer: ModuleType) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("jinja2")
    executed = renderer.run(renderer.SCRIPT.read_text(encoding="utf-8"))
    printed = "".join(text for _, text in executed)
    accuracies = dict(re.findall(r"^(none|neuron-merging|lbyl|echo) +([\d.]+) %$", printed, re.M))
    assert float(accuracies["none"]) < 50 < 95 < float(accuracies["echo"])
    assert "the same outputs: True" in printed


def test_the_tutorial_page_is_up_to_date(renderer: ModuleType) -> None:
    cells = renderer.cells(renderer.SCRIPT.read_text(encoding="utf-8"))
    text = PAGES[TUTORIAL].read_text(encoding="utf-8")
    assert len(cells) > 10
    for cell in cells:
        assert cell.text in text, "run: python examples/render.py"


def test_the_notebook_is_the_tutorial(renderer: ModuleType) -> None:
    told = json.loads(renderer.NOTEBOOK.read_text(encoding="utf-8"))
    cells = renderer.cells(renderer.SCRIPT.read_text(encoding="utf-8"))
    kinds = ["markdown" if cell.prose else "code" for cell in cells]
    assert [cell["cell_type"] for cell in told["cells"]] == kinds
    assert ["".join(cell["source"]) for cell in told["cells"]] == [cell.text for cell in cells]
    assert sum(bool(cell.get("outputs")) for cell in told["cells"]) >= 5


@pytest.mark.slow
def test_the_notebook_runs_in_jupyter(renderer: ModuleType) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.read(renderer.NOTEBOOK, as_version=4)
    nbformat.validate(book)
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    printed = "".join(
        output.get("text", "") for cell in book.cells for output in cell.get("outputs", [])
    )
    assert "the same outputs: True" in printed


def test_every_method_and_criterion_is_explained() -> None:
    choosing = (DOCS / "choosing.md").read_text(encoding="utf-8")
    for name in [*lbyl.methods.names(), *lbyl.criteria.names()]:
        assert f"`{name}`" in choosing, name


def weights_of_a_unit() -> set[str]:
    """What a criterion is given to look at, by the one that looks."""
    seen: set[str] = set()

    @dataclass(frozen=True)
    class Looks(lbyl.criteria.Criterion):
        name: ClassVar[str] = "looks"

        def score(self, weights: Any) -> Tensor:
            seen.update(dir(weights))
            return torch.arange(float(weights.unit.channels))

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    lbyl.compress(model, torch.zeros(1, 4), 0.5, method="none", criterion=Looks())
    return seen


def test_what_a_method_may_look_at_and_say_is_there() -> None:
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    tables = {
        "| of `weights` |": weights_of_a_unit(),
        "What a class says": set(vars(lbyl.methods.Method)),
    }
    for start, known in tables.items():
        table = text[text.index(start) :].partition("| --- |")[2].partition("\n\n")[0]
        first = "".join(re.findall(r"^\|([^|]*)\|", table, re.M))
        named = re.findall(r"`(\w+)`", first)
        assert named and set(named) <= known, f"{set(named) - known}"


def test_every_check_is_explained() -> None:
    from lbyl.checks import CRITERION_CHECKS, METHOD_CHECKS

    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    for name in ["registered", *METHOD_CHECKS, *CRITERION_CHECKS]:
        assert f"\n| {name} |" in text, name


def test_every_public_name_is_in_the_reference() -> None:
    reference = (DOCS / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: ([\w.]+)$", reference, re.M))
    for name in lbyl.__all__:
        value = getattr(lbyl, name)
        home = value.__name__ if isinstance(value, ModuleType) else f"{value.__module__}.{name}"
        assert home in shown, f"{name} is missing: add `::: {home}`"


def test_links_between_pages_lead_somewhere() -> None:
    for name, page in PAGES.items():
        for target in re.findall(r"\]\(([^)#:\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{name} links to {target}"


def test_files_named_on_pages_exist() -> None:
    """Paths of the repository, and modules of the benchmarks."""
    pattern = r"`((?:src|tests|benchmarks|scripts|examples|docs)/[\w./-]+)`"
    for name, page in [*PAGES.items(), ("CONTRIBUTING.md", ROOT / "CONTRIBUTING.md")]:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(pattern, text):
            assert (ROOT / path).exists(), f"{name} names {path}"
        for module in re.findall(r"python -m (benchmarks(?:\.\w+)+)", text):
            path = module.replace(".", "/")
            found = (ROOT / f"{path}.py").exists() or (ROOT / path / "__main__.py").exists()
            assert found, f"{name} names {module}"


def walk() -> list[tuple[str, str]]:
    """The files and functions of the walk on the architecture page."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^\| \d+ \| `([\w/.]+)` \| `([\w.]+)` \|", text, re.M)


def entered(call: Callable[[], Any]) -> set[tuple[str, str]]:
    """The functions of the package that a call enters, by file."""
    seen: set[tuple[str, str]] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            seen.add((path.relative_to(SOURCE).as_posix(), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.slow
def test_the_walk_of_the_architecture_page_is_the_way_that_a_call_takes() -> None:
    """Every file named once, every function really entered, no file left out."""
    model, x = zoo.create("digits", weights="shipped"), torch.zeros(1, 1, 8, 8)
    # private: what importing enters is no part of the way
    importlib.import_module("lbyl.api")
    vars(lbyl).pop("compress", None)  # so that the name is looked up as for the first time
    seen = entered(lambda: lbyl.compress(model, x, 0.5))
    hops = walk()
    files = [file for file, _ in hops]
    assert len(files) == len(set(files)), "a file is visited twice"
    for file, function in hops:
        module = importlib.import_module(
            f"lbyl.{file[:-3].replace('/', '.')}".removesuffix(".__init__")
        )
        value: Any = module
        for part in function.split("."):
            value = getattr(value, part)
        if not isinstance(value, type):  # of a dataclass nothing in its file is entered
            assert (file, function.rpartition(".")[2]) in seen, f"{file}: {function}"
    shown = {file for file in files if not file.startswith("tracing/rules/")}
    taken = {file for file, _ in seen if not file.startswith(("app/sources/", "tracing/rules/"))}
    assert taken <= shown, f"left out: {sorted(taken - shown)}"


def test_rooms_named_on_the_architecture_page_are_there() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = text[text.index("## The rooms") : text.index("## A walk")]
    rows = re.findall(r"^\| (`[^|]+) \|([^|]*)\|", table, re.M)
    named = {room for cell, _ in rows for room in re.findall(r"`([\w./]+)`", cell)}
    there = {p.name + "/" for p in SOURCE.iterdir() if (p / "__init__.py").exists()}
    there |= {p.name for p in SOURCE.glob("*.py")} - {"__init__.py"}
    assert named == there
    for cell, files in rows:
        room = SOURCE / cell.strip("`")
        for name in re.findall(r"`([\w/]+)`", files):
            assert (room / name).exists() or (room / f"{name}.py").exists(), f"{cell} has no {name}"
