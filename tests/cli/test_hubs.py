"""Networks of hubs in one call: `lbyl compress` by their names, and what Python loads back."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lbyl
from lbyl.app.sources import resolve

QUICK = ["--ratio", "*=0.3", "--criterion", "l2", "--data", "16", "--no-report"]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_timm(run_json: Any, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    name = ["timm:mobilenetv2_035", "--classes", "7", "--input-size", "32"]
    told = run_json("compress", *name, *QUICK, "--out", tmp_path)
    slim, whole = lbyl.load(tmp_path), resolve("timm:mobilenetv2_035", classes=7).model
    assert type(slim) is type(whole)
    assert count(slim) == told["after"]["parameters"] < 0.9 * count(whole)
    assert slim(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_a_classifier_of_transformers_comes_back_by_from_pretrained(
    run: Any, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        image_size=32, patch_size=8, num_labels=5,
    )  # fmt: skip
    whole = transformers.ViTForImageClassification(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    shown = run("compress", f"hf:{tmp_path / 'whole'}", *QUICK, "--out", tmp_path / "slim")
    assert "keeps about" in shown.stdout and "from_pretrained(" in shown.stdout
    slim = transformers.ViTForImageClassification.from_pretrained(tmp_path / "slim").eval()
    assert slim.config.intermediate_size == 44  # of 64
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        near, far = (slim(x).logits, whole(x.flip(0)).logits)
        assert (near - whole(x).logits).norm() < (far - whole(x).logits).norm()


def test_a_language_model_of_transformers(run: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "whole")
    shown = run("compress", f"hf:{tmp_path / 'whole'}", *QUICK, "--out", tmp_path / "slim")
    assert "equal answers" in shown.stdout  # of tokens: there is no accuracy to forecast
    slim = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "slim")
    assert slim.config.intermediate_size == 44
    assert slim(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 64)


REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"  # is held to the program


def test_options_mean_the_same_in_every_command_and_the_default_ratio_is_told(
    run_json: Any, small: list[str]
) -> None:
    text = REFERENCE.read_text()
    for option in ("device", "threads", "quiet", "json", "debug", "weights"):
        rows = re.findall(rf"^\| `--{option}\b.*", text, re.M)
        assert len(rows) > 3 and len({row.partition("Default:")[2] for row in rows}) == 1, rows
    (ratio,) = re.findall(r"([\d.]+) \(the default\)", text)
    plain = ["compress", *small, "--method", "none"]
    ours, theirs = run_json(*plain), run_json(*plain, "--ratio", ratio)
    assert ours["rows"] == theirs["rows"]


def test_a_detector_is_compressed_and_opened_by_its_own_package(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ.setdefault("YOLO_OFFLINE", "true")  # read when the package is imported
    os.environ.setdefault("YOLO_AUTOINSTALL", "false")
    ultralytics = pytest.importorskip("ultralytics")
    from benchmarks.detection.yolo import TINY

    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    name = ["ultralytics:tiny.yaml", "--input-size", "64"]
    shown = run("compress", *name, *QUICK, "--out", "slim")
    assert "boxes agree in class and place" in " ".join(shown.stdout.split())
    slim, alone = lbyl.load("slim"), ultralytics.YOLO("slim/yolo.pt").model
    assert count(slim) == count(alone) < 0.85 * count(resolve(name[0]).model)
