"""Networks of Ultralytics: built, read, made smaller, and back in the package's own hands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("YOLO_OFFLINE", "true")  # read when the package is imported
os.environ.setdefault("YOLO_AUTOINSTALL", "false")
pytest.importorskip("ultralytics")

import yaml
from typer.testing import CliRunner

import lbyl
from benchmarks.detection.yolo import TINY, yolo_set
from lbyl import LbylError
from lbyl.app.cli.app import app
from lbyl.app.sources import resolve
from lbyl.app.sources.yolo import as_yolo

SIZE = 64


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("yolo") / "tiny.yaml"
    path.write_text(TINY)
    return path


def test_a_yaml_gives_the_network_with_as_many_classes_as_asked_for() -> None:
    network = resolve("ultralytics:yolo11n.yaml", input_shape=(SIZE,), classes=6)
    assert network.input_shape == (3, SIZE, SIZE) and network.mean == (0.0, 0.0, 0.0)
    assert network.model.task == "detect" and len(network.model.names) == 6
    with torch.no_grad():
        assert network.model(network.example)[0].shape == (1, 4 + 6, 84)


def test_weights_are_read_without_running_the_pickle(recipe: Path, tmp_path: Path) -> None:
    made = resolve(f"ultralytics:{recipe}", input_shape=(SIZE,))
    made.model.names = dict(enumerate("abcdef"))
    state = {name: x.clone() for name, x in made.model.state_dict().items()}
    as_yolo(made.model, tmp_path / "w.pt")
    again = resolve(f"ultralytics:{tmp_path / 'w.pt'}", input_shape=(SIZE,))
    assert again.model.names == dict(enumerate("abcdef")) and again.weights
    filled = resolve(f"ultralytics:{recipe}", tmp_path / "w.pt", (SIZE,))
    for read in (again, filled):
        assert all(torch.equal(state[n], x) for n, x in read.model.state_dict().items())


def test_a_state_dict_alone_asks_for_its_yaml(recipe: Path, tmp_path: Path) -> None:
    made = resolve(f"ultralytics:{recipe}")
    torch.save(made.model.state_dict(), tmp_path / "state.pt")
    with pytest.raises(LbylError, match=r"name ultralytics:NAME.yaml and give --weights"):
        resolve(f"ultralytics:{tmp_path / 'state.pt'}")
    for name in ("none.yaml", "none.pt", "yolo11n"):
        with pytest.raises(LbylError) as error:
            resolve(f"ultralytics:{name}")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "__import__('os').system('true')"},
        {"activation": "nn.SiLU().__class__()"},
        {"backbone": [[-1, 1, "torch_safe_load", ["evil.pt"]]]},
        {"backbone": [[-1, 1, "nn.Module.__subclasses__", []]]},
        {"head": "none"},
    ],
)
def test_a_recipe_that_names_more_than_layers_is_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    fine = yaml.safe_load(TINY) | {"activation": "torch.nn.LeakyReLU(0.1, inplace=True)"}
    for name, content in (("fine", fine), ("hostile", fine | change)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    resolve(f"ultralytics:{tmp_path}/fine.yaml", input_shape=(SIZE,))
    with pytest.raises(LbylError):
        resolve(f"ultralytics:{tmp_path}/hostile.yaml", input_shape=(SIZE,))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drawn shapes in Ultralytics' format."""
    return yolo_set(tmp_path_factory.mktemp("drawn"), {"train": 64, "val": 16}, SIZE)


@pytest.mark.slow
def test_training_validation_and_export_go_on_with_the_slim_network(
    recipe: Path, drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ultralytics import YOLO

    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {
        "data": str(drawn), "imgsz": SIZE, "device": "cpu", "workers": 0, "plots": False,
        "verbose": False, "project": str(tmp_path / "runs"),
    }  # fmt: skip
    original = YOLO(str(recipe))
    original.train(epochs=2, batch=16, **options)
    weights = original.trainer.last
    ran = CliRunner().invoke(
        app,
        ["compress", f"ultralytics:{weights}", "--ratio", "*=0.3", "--criterion", "l2",
         "--data", "32", "--out", str(tmp_path / "slim"), "--no-report"],
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert "of boxes agree in class and place" in " ".join(ran.output.split())
    slim = lbyl.load(tmp_path / "slim")
    assert 0.4 * count(original.model) < count(slim) < 0.85 * count(original.model)
    # Whoever has the package alone opens the file beside it.
    alone = YOLO(str(tmp_path / "slim" / "yolo.pt"))
    assert count(alone.model) == count(slim)
    assert 0 <= alone.val(**options).box.map50 <= 1
    yolo = as_yolo(slim, tmp_path / "again.pt")
    before = {name: x.clone() for name, x in yolo.model.state_dict().items()}
    yolo.train(epochs=1, batch=16, **options)
    after = yolo.model.state_dict()
    assert {n: x.shape for n, x in after.items()} == {n: x.shape for n, x in before.items()}
    assert any(not torch.equal(after[n].float(), x.float()) for n, x in before.items())
    assert 0 <= yolo.val(**options).box.map50 <= 1
