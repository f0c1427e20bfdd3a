"""Networks of hubs in one call: `lbyl compress` by their names, and what Python loads back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.cli.app import COMMANDS, load_command
from lbyl.models import resolve
from lbyl.planning.task import DEFAULT_RATIO

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


def test_a_checkpoint_of_a_trainer_is_read_by_every_command(run_json: Any, tmp_path: Path) -> None:
    network = resolve("lbyl:digits", "shipped")
    state = {f"model.{name}": x for name, x in network.model.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "last.ckpt")
    test = ["--test", "digits", "--limit", "100"]
    given = run_json("evaluate", "lbyl:digits", "--weights", tmp_path / "last.ckpt", *test)
    assert given["accuracy"] == run_json(
        "evaluate", "lbyl:digits", "--weights", "shipped", *test
    )["accuracy"]  # fmt: skip
    arguments = ["--weights", tmp_path / "last.ckpt", "--method", "lbyl", *test]
    assert run_json("compress", "lbyl:digits", *arguments)["accuracy"]["original"] > 90


def test_options_mean_the_same_in_every_command() -> None:
    defaults: dict[str, set[Any]] = {}
    for name in COMMANDS:
        for parameter in load_command(name).params:
            if parameter.name in ("device", "threads", "quiet", "json", "debug", "weights"):
                defaults.setdefault(parameter.name, set()).add(str(parameter.default))
    assert {name: len(values) for name, values in defaults.items() if len(values) > 1} == {}
    assert defaults["device"] == {"auto"}


def test_the_ratio_that_holds_where_none_is_given_is_in_the_help() -> None:
    (ratio,) = (p for p in load_command("compress").params if p.name == "ratio")
    assert f"{DEFAULT_RATIO:g} (the default)" in ratio.help


# --------------------------------------------------------------------------------------- detectors


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


# ----------------------------------------------------------------------------------- segmentation


def discs(seed: int, side: int = 64) -> tuple[Tensor, Tensor]:
    """An image of a disc (1) and a square (2) on noisy ground (0), and which pixel is which."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    (a, b, c, d), r = torch.randint(14, side - 14, (4,), generator=generator).tolist(), 10
    disc, square = (x - a) ** 2 + (y - b) ** 2 < r * r, (x - c).abs().max((y - d).abs()) < r
    labels = torch.where(square, 2, torch.where(disc, 1, 0))
    colours = torch.tensor([[0.2, 0.2, 0.2], [1.0, 0.6, 0.2], [0.2, 0.6, 1.0]])
    noise = 0.3 * torch.randn(3, side, side, generator=generator)
    return noise + colours[labels].permute(2, 0, 1), labels


def drawn(seeds: range) -> tuple[Tensor, Tensor]:
    pairs = [discs(seed) for seed in seeds]
    return torch.stack([image for image, _ in pairs]), torch.stack([labels for _, labels in pairs])


@pytest.mark.slow
def test_a_trained_segmenter_keeps_what_it_learned(run_json: Any, tmp_path: Path) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch")
    torch.manual_seed(0)
    model = smp.Unet(
        "resnet18", encoder_weights=None, classes=3, decoder_channels=(64, 32, 16, 16, 8)
    )
    best = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(60):
        images, labels = drawn(range(8 * step, 8 * step + 8))
        best.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        best.step()
    model.eval().save_pretrained(tmp_path / "whole")
    images, labels = drawn(range(10_000, 10_032))

    def correct(network: nn.Module) -> float:
        """The mean over classes of pixels that are found."""
        with torch.no_grad():
            found = network(images).argmax(1)
        return float(
            torch.stack([(found[labels == k] == k).float().mean() for k in range(3)]).mean()
        )

    truth = {"whole": correct(model)}
    assert truth["whole"] > 0.85
    for method, more in (("none", []), ("echo", ["--data", "64"])):
        arguments = ["--ratio", "*=0.3", "--criterion", "l2", "--method", method, "--no-report"]
        size = ["--input-size", "64", "--out", tmp_path / method]
        told = run_json("compress", f"smp:{tmp_path / 'whole'}", *arguments, *more, *size)
        assert told["forecast"]["kept"] is None and told["forecast"]["agreement"] > 0  # of pixels
        truth[method] = correct(lbyl.load(tmp_path / method))
    assert truth["echo"] > truth["none"] + 0.2, truth
