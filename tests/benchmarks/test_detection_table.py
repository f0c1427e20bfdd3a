"""The detection benchmark: pruned backbones in place, tiny BatchNorms, one run from end to end."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lbyl
from benchmarks.detection import build_ssd
from benchmarks.detection import table as benchmark
from lbyl.torchkit.files import read_json

pytest.importorskip("pycocotools")
pytest.importorskip("torchvision")
pytest.importorskip("PIL.Image")


TINY = 1e-8
METHODS = [
    name if name not in ("lbyl", "neuron-merging") else {"name": name, "variant": variant}
    for name in sorted(lbyl.methods.names())
    for variant in (
        ("released", "theorem" if name == "lbyl" else "corrected")
        if name in ("lbyl", "neuron-merging")
        else ("",)
    )
]


def shrink(backbone: nn.Module) -> None:
    """γ and running variances under 1e-6 in every BatchNorm, apart and together; one γ is zero.

    Filters whose output hardly varies are small, as in a network that was trained.
    """
    convolution = nn.Conv2d(1, 1, 1)
    with torch.no_grad():
        for module in backbone.modules():
            if isinstance(module, nn.Conv2d):
                convolution = module
            elif isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.bias.normal_(0, 0.1)
                module.weight[0:3] = TINY
                module.running_var[2:5] = TINY
                convolution.weight[2:5] *= TINY**0.5
                module.running_mean[2:5] *= TINY**0.5
                module.weight[5] = 0.0


@pytest.mark.parametrize(
    ("depth", "ratios"), [(10, (0.1, 0.3)), pytest.param(50, (0.3,), marks=pytest.mark.slow)]
)
def test_tiny_batchnorms_restore_to_finite_weights(depth: int, ratios: tuple[float, ...]) -> None:
    torch.manual_seed(0)
    backbone = build_ssd(3, 64, depth=depth, width=8).get_submodule("backbone").eval()
    shrink(backbone)
    example = torch.zeros(1, 3, 64, 64)
    few = lbyl.prepare(backbone, example, include="layer*", data=8)
    without = lbyl.prepare(backbone, example, include="layer*")
    images = torch.randn(2, 3, 64, 64)
    assert all(value.isfinite().all() for value in backbone(images).values())
    for method in METHODS:
        for ratio in ratios:
            looks = lbyl.methods.resolve(method).needs_statistics
            result = (few if looks else without).compress(ratio, method=method)
            for name, value in result.model.state_dict().items():
                assert value.isfinite().all(), (method, ratio, name)
            for value in result.model(images).values():
                assert value.isfinite().all(), (method, ratio)


def test_the_papers_table_is_complete() -> None:
    rows = [
        {"criterion": criterion, "ratio": ratio, "method": method}
        for criterion in benchmark.CRITERIA
        for ratio in benchmark.RATIOS
        for method in benchmark.COLUMNS
    ]
    for row in rows:
        paper = benchmark.published(row)
        assert (paper is None) == (row["method"] == "echo")
        if paper is not None:
            assert tuple(paper) == benchmark.METRICS
            assert paper["AP75"] < paper["AP50"] < benchmark.paper.DETECTION_BASE[1]
            assert paper["APs"] < paper["APm"]


def test_the_best_row_of_each_cell_is_kept() -> None:
    cell = {"criterion": "l2", "ratio": 0.1, "method": "lbyl, best λ"}
    rows = [{**cell, "AP": ap, "lambda2": ap} for ap in (1.0, 3.0, 2.0)]
    rows.append({**cell, "ratio": 0.2, "AP": 0.5})
    assert [row["AP"] for row in benchmark.best_of(iter(rows))] == [3.0, 0.5]


def test_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(benchmark, "RATIOS", (0.2,))
    monkeypatch.setattr(benchmark, "CRITERIA", ("l2",))
    monkeypatch.setattr(
        benchmark,
        "SMALL",
        benchmark.Setting(64, 12, 6, 10, 8, epochs=1, batch=6, procedural=4),
    )
    folder = ["--data", str(tmp_path / "data"), "--results", str(tmp_path), "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", ["detection", "--small", "--device", "cpu", *folder])
    benchmark.main()
    first = read_json(tmp_path / "detection-small.json")
    assert [row["method"] for row in first["rows"]] == ["none", "neuron-merging", "lbyl", "echo"]
    for row in first["rows"]:
        assert row["macs"] > 0
        assert 0 <= row["AP"] <= row["AP50"] <= 100
    assert (tmp_path / "detection-small.png").stat().st_size > 10_000
    assert "(paper)" in capsys.readouterr().out
    # Neither drawn nor trained again, and the same figures.
    drawn = tmp_path / "data" / "drawn-64px-seed0"
    images = {p: p.stat().st_mtime_ns for p in drawn.rglob("*.png")}
    benchmark.main()
    again = read_json(tmp_path / "detection-small.json")
    assert {p: p.stat().st_mtime_ns for p in drawn.rglob("*.png")} == images
    assert "epoch 1" not in capsys.readouterr().out
    assert [r["AP50"] for r in again["rows"]] == [r["AP50"] for r in first["rows"]]
    assert again["epochs"] == first["epochs"]
    # The folder is laid out as COCO's, and can be given as such.
    monkeypatch.setattr(benchmark, "methods", lambda grid: [("none", "none")])
    more = ["--coco", str(drawn), "--train", "8", "--val", "5"]
    monkeypatch.setattr(sys, "argv", [*sys.argv, *more])
    benchmark.main()
    assert read_json(tmp_path / "detection-coco-small.json")["setting"]["images"] == 5


def test_the_grid_holds_the_stated_choice() -> None:
    class FakeBackbone:
        def slim(self, ratio: float, criterion: str, method: Any) -> Any:
            size = SimpleNamespace(macs=1, parameters=1)
            return method, SimpleNamespace(after=size)

    class FakeJudge:
        def figures(self, method: Any) -> Any:
            figures: Future[dict[str, float]] = Future()
            level = 9.0 if getattr(method, "lambda2", 0) == benchmark.LAMBDAS[1] else 1.0
            figures.set_result({"AP": level})
            return figures

    rows = benchmark.measure(FakeBackbone(), FakeJudge(), grid=True)
    assert len(rows) == len(benchmark.CRITERIA) * len(benchmark.RATIOS) * len(benchmark.COLUMNS)
    for row in rows:
        assert row["AP"] == (9.0 if "lbyl" in row["method"] else 1.0)
        assert row.get("lambda2", 0.05) == 0.05


def test_a_detector_with_a_smaller_backbone_shares_its_head() -> None:
    model = build_ssd(3, 64, depth=10, width=8).eval()
    example = torch.zeros(1, 3, 64, 64)
    backbone = benchmark.Backbone(model, example, 8)
    before = model.backbone
    slim, result = backbone.slim(0.3, "l2", "none")
    assert slim.backbone is result.model
    assert model.backbone is before
    assert slim.head is model.head
    assert result.after.macs < result.before.macs
    assert {name.split(".")[0] for name in result.plan.kept} <= {f"layer{i}" for i in range(1, 5)}
    assert len(slim([torch.rand(3, 64, 64)])) == 1
