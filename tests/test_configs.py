"""Directories that Transformers loads by itself: a config.json of the new sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lbyl
from lbyl.app.cli.app import app
from support import quick

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
NO_BIAS = lbyl.methods.Echo(new_bias=False)


def ids() -> Tensor:
    return torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))


def build(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    heads = {} if kind == "Bert" else {"num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **heads, **changes})
    head = "Model" if kind == "Bert" else "ForCausalLM"
    model: nn.Module = getattr(transformers, kind + head)(config)
    return model.eval()


def compressed(
    model: nn.Module, ratio: Any, method: lbyl.methods.Echo | None = None
) -> lbyl.Result:
    x, wide = ids(), any(":" not in name and "o_proj" in name for name in ratio)
    options: Any = {"method": method or "echo", "data": [x], "residual": wide}
    return lbyl.compress(model, x, ratio, criterion="l2", **options)


@pytest.mark.parametrize(
    ("kind", "ratio", "method", "changes", "said"),
    [
        # A bias was added, which Llama's configuration can ask for.
        ("Llama", {"*mlp*": 0.25}, None, {}, {"intermediate_size": 48, "mlp_bias": True}),
        ("Llama", {"*mlp*": 0.25}, NO_BIAS, {"tie_word_embeddings": True}, {"mlp_bias": False}),
        pytest.param(
            *("Mistral", {"*mlp*": 0.25}, NO_BIAS, {}, {"intermediate_size": 48}),
            marks=pytest.mark.slow,
        ),
        ("Bert", {"*intermediate*": 0.25}, None, {}, {"intermediate_size": 48}),
        # The width of the stream, experts in one tensor.
        ("Qwen3", {"*o_proj": 0.25}, NO_BIAS, {"head_dim": 8}, {"hidden_size": 24, "head_dim": 8}),
        ("Mixtral", {"*experts*": 0.25}, None, {}, {"intermediate_size": 48}),
    ],
)
def test_transformers_load_a_slim_network_by_themselves(
    kind: str, ratio: Any, method: lbyl.methods.Echo | None, changes: Any, said: Any, tmp_path: Path
) -> None:
    model = build(kind, **changes)
    result = compressed(model, ratio, method)
    lbyl.save(result, tmp_path / "out")
    loaded, told = type(model).from_pretrained(  # type: ignore[attr-defined]
        tmp_path / "out", output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.items() >= said.items()
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids())[0], result.model(ids())[0])
        again = lbyl.load(tmp_path / "out", build(kind, **changes))
        assert torch.equal(again(ids())[0], result.model(ids())[0])


@pytest.mark.parametrize(
    ("kind", "ratio"),
    [
        ("Llama", {"*mlp*": 0.25, "model.layers.0.mlp*": 0.5}),  # widths differ by layer
        ("Mistral", {"*mlp*": 0.25}),  # a bias was added, of which Mistral knows nothing
    ],
)
def test_what_no_configuration_can_say_is_loaded_by_lbyl(
    kind: str, ratio: Any, tmp_path: Path
) -> None:
    result = compressed(build(kind), ratio)
    lbyl.save(result, tmp_path)
    assert not (tmp_path / "config.json").exists()
    with torch.no_grad():
        again = lbyl.load(tmp_path, build(kind))
        assert torch.equal(again(ids())[0], result.model(ids())[0])


def test_without_a_new_bias_the_mean_is_part_of_what_is_fitted() -> None:
    """The weight is the least-squares solution without an intercept."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4, bias=False))
    x = torch.randn(4000, 6, generator=generator) + 1
    plan = lbyl.prepare(model, x[:2]).plan(0.4, criterion="l2", method="none")
    method = lbyl.methods.Echo(ridge=0.0, new_bias=False)
    slim = lbyl.compress(
        model, x[:2], plan, method=method, data=quick.own_statistics(model, x[:2], x)
    ).model
    assert slim[2].bias is None  # type: ignore[index]
    with torch.no_grad():
        hidden, wanted = slim[:2](x), model(x)  # type: ignore[index]
        best = torch.linalg.lstsq(hidden.double(), wanted.double()).solution.T
    assert torch.allclose(slim[2].weight.double(), best, atol=1e-3)  # type: ignore[index]


def test_the_command_writes_a_directory_like_the_one_it_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    model = build("Llama", max_position_embeddings=24)
    model.save_pretrained(source, max_shard_size="30KB")  # type: ignore[operator]
    assert len(list(source.glob("*.safetensors"))) > 1
    (source / "tokenizer.json").write_text("{}")
    words = ["compress", f"hf:{source}", "--ratio", "*mlp*=0.25", "--criterion", "l2"]
    with pytest.raises(SystemExit) as ended:
        app([*words, "--data", "8", "--out", str(out), "--no-report"])
    assert ended.value.code == 0
    assert (out / "tokenizer.json").read_text() == "{}"
    assert "from_pretrained" in capsys.readouterr().out
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    again = lbyl.load(out, build("Llama", max_position_embeddings=24))
    with torch.no_grad():
        assert torch.equal(loaded(ids())[0], again(ids())[0])
    assert loaded.config.intermediate_size == 48


def test_timm_rebuilds_a_slim_network_from_its_own_text(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    from timm.models._prune import adapt_model_from_string

    torch.manual_seed(0)
    out, x = tmp_path / "out", torch.randn(2, 3, 32, 32)
    words = ["timm:resnet10t", "--input-size", "32", "--ratio", "*=0.3", "--method", "none"]
    app(["compress", *words, "--anyway", "--no-report", "--out", str(out)], standalone_mode=False)
    fresh = timm.create_model("resnet10t")
    made = adapt_model_from_string(fresh, (out / "timm.txt").read_text()).eval()
    made.load_state_dict(load_file(out / "model.safetensors"))
    with torch.no_grad():
        assert torch.allclose(made(x), lbyl.load(out)(x), atol=1e-5)
