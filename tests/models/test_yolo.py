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


@pytest.fixture(scope="module", params=["yolo11n.yaml", "yolo26n.yaml"])
def slim(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A slim network of the package's own recipes, and the file that it is kept in."""
    network = resolve(f"ultralytics:{request.param}", input_shape=(SIZE,), classes=8)
    torch.manual_seed(0)
    result = lbyl.compress(network.model, network.example, 0.3, method="none", criterion="l2")
    assert result.after.parameters < 0.9 * result.before.parameters
    path = tmp_path_factory.mktemp("slim") / "yolo.pt"
    as_yolo(result.model, path)
    return path, result.model


@pytest.mark.slow
def test_a_slim_network_predicts_and_is_exported_by_the_package_alone(
    slim: tuple[Path, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exporter puts `forward_split` in the place of `forward`."""
    import onnxruntime
    from ultralytics import YOLO

    path, model = slim
    monkeypatch.chdir(path.parent)
    for yolo in (YOLO(str(path)), as_yolo(model, path.parent / "again.pt")):
        assert len(yolo.predict(torch.rand(2, 3, SIZE, SIZE), imgsz=SIZE, verbose=False)) == 2
        split = {m.c for m in yolo.model.modules() if hasattr(m, "forward_split")}
        assert not split <= {16, 32, 64, 128}, "no such width was cut: this proves nothing"
        x = torch.rand(1, 3, SIZE, SIZE)
        with torch.no_grad():
            expected = yolo.model.float().eval()(x)[0]
        session = onnxruntime.InferenceSession(
            yolo.export(format="onnx", imgsz=SIZE, verbose=False),
            providers=["CPUExecutionProvider"],
        )
        found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
        assert found.shape == expected.shape
        if getattr(yolo.model.model[-1], "end2end", False):  # which box comes first is rounding
            apart = torch.cdist(found[0, :, :4], expected[0, :, :4])
            assert len(apart) == 84 and float(apart.amin(1).max()) < 0.1
        else:
            torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-3)


@pytest.mark.slow
def test_a_slim_network_of_the_package_is_measured_and_trained(
    slim: tuple[Path, torch.nn.Module], drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ultralytics import YOLO

    path, model = slim
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {
        "data": str(drawn), "imgsz": SIZE, "device": "cpu", "workers": 0, "plots": False,
        "verbose": False, "project": str(tmp_path / "runs"),
    }  # fmt: skip
    assert 0 <= YOLO(str(path)).val(**options).box.map50 <= 1
    yolo = as_yolo(model, tmp_path / "slim.pt")
    shapes = {name: x.shape for name, x in yolo.model.state_dict().items()}
    yolo.train(epochs=1, batch=16, **options)
    trained = {name: x.shape for name, x in yolo.model.state_dict().items()}
    assert trained == shapes
    exported = yolo.export(format="torchscript", imgsz=SIZE, device="cpu")
    assert Path(exported).is_file()
