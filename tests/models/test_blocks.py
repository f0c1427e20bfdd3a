"""A checkpoint compressed block by block, without ever holding all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lbyl
from lbyl.app.cli.app import app
from lbyl.app.streaming import compress_blocks
from lbyl.methods import Echo
from support import quick

transformers = pytest.importorskip("transformers")


def ids(rows: int = 8, length: int = 12) -> Tensor:
    return torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(0))


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, **changes,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder, max_shard_size="40KB")
    (folder / "tokenizer.json").write_text("{}")
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_block_by_block_is_what_the_whole_network_gives(tied: bool, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "in", tie_word_embeddings=tied)
    report = compress_blocks(tmp_path / "in", tmp_path / "out", {"*mlp*": 0.25}, data=ids())
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    whole = lbyl.compress(
        model,
        ids(),
        {"*mlp*": 0.25},
        criterion="l2",
        method=Echo(new_bias=False),
        data=quick.own_statistics(model, ids(), [ids()]),
    ).model
    with torch.no_grad():
        wanted, got = whole(ids()).logits, loaded.eval()(ids()).logits
    assert torch.allclose(got, wanted, atol=1e-5 * float(wanted.abs().max()))
    assert loaded.config.intermediate_size == 48
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert report.blocks == 3 and len(report.drift) == 3 and report.drift[-1] < 0.2
    assert report.parameters[1] == report.parameters[0] - 3 * 3 * 32 * 16
    assert "3 blocks" in str(report)


def test_weights_stay_in_the_checkpoints_precision(tmp_path: Path) -> None:
    checkpoint(tmp_path / "in", torch.bfloat16)
    compress_blocks(tmp_path / "in", tmp_path / "out", {"*mlp*": 0.25})  # tokens are drawn
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4


def test_the_command_goes_block_by_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "in")
    words = ["compress", f"hf:{tmp_path / 'in'}", "--by-block", "--ratio", "*mlp*=0.5"]
    with pytest.raises(SystemExit) as refused:
        app(words)
    assert refused.value.code == 2 and "--out" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        app([*words, "--out", str(tmp_path / "out")])
    assert ended.value.code == 0 and "3 blocks" in capsys.readouterr().out
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.intermediate_size == 32


def test_what_is_no_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(lbyl.LbylError, match=r"no config\.json"):
        compress_blocks(tmp_path, tmp_path / "out")
    checkpoint(tmp_path / "in")
    with pytest.raises(lbyl.LbylError, match="no prunable layer"):
        compress_blocks(tmp_path / "in", tmp_path / "out", {"*nothing*": 0.5}, data=ids())
    assert not (tmp_path / "out").exists()
