"""A directory of Transformers keeps its head, also where its config.json names no architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lbyl.app.cli.app import app

transformers = pytest.importorskip("transformers")
LAYERS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
SIZES: dict[str, Any] = {**LAYERS, "vocab_size": 96}
GPT2: dict[str, Any] = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}
IMAGE: dict[str, Any] = {**LAYERS, "image_size": 32, "patch_size": 8}


def directory(folder: Path, kind: str, config: str, sizes: Any, names: Any = None) -> Path:
    """A directory of a small random network whose config.json names these architectures."""
    torch.manual_seed(0)
    model: Any = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    model.save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text())
    document.pop("architectures", None)
    document |= {} if names is None else {"architectures": names}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def compressed(source: Path, *options: str, code: int = 0) -> Any:
    """What the program says of the directory, which it makes smaller beside it."""
    words = ["compress", f"hf:{source}", "--ratio", "*mlp*=0.25", "--no-report", "--anyway"]
    words += ["--criterion", "l2", "--method", "none", "--out", str(source.parent / "out")]
    ended = CliRunner().invoke(app, [*words, *options])
    assert ended.exit_code == code, ended.output
    return ended


LLAMA = ("LlamaForCausalLM", "LlamaConfig", SIZES)
TIED = ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "tie_word_embeddings": True})


@pytest.mark.parametrize("names", [None, [], ["MyOwnLlama"]])
@pytest.mark.parametrize(("kind", "config", "sizes"), [LLAMA, TIED])
def test_a_language_model_keeps_the_head_that_its_weights_hold(
    kind: str, config: str, sizes: Any, names: Any, tmp_path: Path
) -> None:
    source = directory(tmp_path / "in", kind, config, sizes, names)
    told = compressed(source)
    assert f"taken as {kind}" in " ".join(told.stderr.split())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [kind]
    slim = getattr(transformers, kind).from_pretrained(tmp_path / "out").eval()
    whole = getattr(transformers, kind).from_pretrained(source).eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert slim(tokens).logits.shape == whole(tokens).logits.shape == (1, 12, 96)
    assert torch.equal(slim.lm_head.weight, whole.lm_head.weight)


@pytest.mark.parametrize(
    ("kind", "config", "sizes", "taken"),
    [
        ("GPT2LMHeadModel", "GPT2Config", GPT2, "GPT2LMHeadModel"),
        ("BertForMaskedLM", "BertConfig", SIZES, "BertForMaskedLM"),
        ("BertForSequenceClassification", "BertConfig", SIZES, "BertForSequenceClassification"),
        ("ViTForImageClassification", "ViTConfig", IMAGE, "ViTForImageClassification"),
        ("LlamaModel", "LlamaConfig", SIZES, "LlamaModel"),  # there is no head
        ("BertModel", "BertConfig", SIZES, "BertModel"),
    ],
)
def test_what_was_taken_is_said_with_the_way_to_another(
    kind: str, config: str, sizes: Any, taken: str, tmp_path: Path
) -> None:
    source = directory(tmp_path / "in", kind, config, sizes)
    ended = CliRunner().invoke(app, ["inspect", f"hf:{source}"])
    assert ended.exit_code == 0, ended.output
    told = " ".join(ended.stderr.split())
    assert f"names no architecture: taken as {taken}; --task" in told
    assert "random" not in told and "not used" not in told


def test_a_task_chooses_the_head_and_is_remembered(tmp_path: Path) -> None:
    source = directory(tmp_path / "in", *TIED)
    told = compressed(source, "--task", "feature-extraction")
    assert "taken as" not in told.stderr
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["architectures"] == ["LlamaModel"]
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["network"]["name"] == f"hf:{source}#feature-extraction"


def test_weights_of_a_head_that_are_missing_or_not_used_are_said(tmp_path: Path) -> None:
    source = directory(tmp_path / "in", "LlamaModel", "LlamaConfig", SIZES, ["LlamaForCausalLM"])
    told = " ".join(compressed(source).stderr.split())
    assert "not among the weights, and random: lm_head.weight" in told
    other = directory(tmp_path / "other", *LLAMA, ["LlamaModel"])
    told = " ".join(compressed(other).stderr.split())
    assert "among the weights, and not used: lm_head.weight" in told


def test_a_task_that_there_is_not_is_one_clear_error(tmp_path: Path) -> None:
    source = directory(tmp_path / "in", *LLAMA)
    assert "it is one of" in compressed(source, "--task", "poetry", code=2).stderr
    none = compressed(source, "--task", "image-classification", code=2)
    assert "no image-classification for llama" in none.stderr
    ended = CliRunner().invoke(app, ["inspect", "lbyl:digits", "--task", "fill-mask"])
    assert ended.exit_code == 2 and "hf:DIRECTORY" in ended.stderr


def test_block_by_block_asks_for_the_task_and_takes_it(tmp_path: Path) -> None:
    source = directory(tmp_path / "in", *LLAMA)
    words = ["compress", f"hf:{source}", "--by-block", "--ratio", "0.25", "--out"]
    refused = CliRunner().invoke(app, [*words, str(tmp_path / "none")])
    assert refused.exit_code == 2 and "--task" in refused.stderr
    task = ["--task", "text-generation"]
    ended = CliRunner().invoke(app, [*words, str(tmp_path / "slim"), *task])
    assert ended.exit_code == 0, ended.output
