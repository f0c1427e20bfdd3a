"""An altered file loads to a network that runs as saved, or gives one clear error."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import lbyl
from lbyl.app.cli.app import app
from support.fuzz.files import heads

Document = dict[str, Any]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose plan says which network it was."""
    out = tmp_path_factory.mktemp("digits") / "slim"
    words = ["compress", "lbyl:digits", "--weights", "shipped", "--ratio", "0.5", "--anyway"]
    ended = CliRunner().invoke(app, [*words, "--method", "none", "--no-report", "--out", str(out)])
    assert ended.exit_code == 0, ended.output
    return out


def with_plan(folder: Path, out: Path, change: Callable[[Document], object]) -> Path:
    """A copy of a directory whose plan was changed."""
    shutil.copytree(folder, out)
    document = json.loads((out / "plan.json").read_text())
    change(document)
    (out / "plan.json").write_text(json.dumps(document))
    return out


def entries(key: str, *values: Any) -> list[tuple[str, Any]]:
    return [(key, value) for value in values]


WRONG = [
    *entries("", [1], "x", 3, None, {}, True, 1.5, []),
    *entries("name", 3, [1], "", "lbyl:", "torchvision:nothing", "torchvision:vit_h_14"),
    *entries("input_shape", "x", 1.5, -1, 3, {}, True, [], [0], [-1, 8, 8], [1.5, 8, 8], ["a"]),
    *entries("input_shape", [1, 1000000, 1000000], [2**62] * 3, [[1]], [1, 8, 8, 8, 8], [None]),
    *entries("classes", "x", -1, 0, 10**9, 1.5, [1], True),
    *entries("mean", "x", 3, [None], {"a": 1}, [float("nan")]),
    *entries("std", "abc", [10**400], [[1]]),
]
HARMLESS = [
    *entries("input_shape", None, [5], [1, 99, 99]),
    *entries("weights", 3, [1], None),
    *entries("mean", None, [1, 2, 3]),
]


def alter(key: str, value: Any) -> Callable[[Document], object]:
    if not key:
        return lambda document: document.update(network=value)
    return lambda document: document["network"].update({key: value})


@pytest.mark.parametrize(("key", "value"), WRONG, ids=str)
def test_a_wrong_description_of_the_network_is_one_clear_error(
    key: str, value: Any, digits: Path, tmp_path: Path
) -> None:
    altered = with_plan(digits, tmp_path / "altered", alter(key, value))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(lbyl.LbylError):
        lbyl.load(altered)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024  # KiB


@pytest.mark.parametrize(("key", "value"), HARMLESS, ids=str)
def test_what_loading_does_not_need_may_be_otherwise(
    key: str, value: Any, digits: Path, tmp_path: Path
) -> None:
    altered = with_plan(digits, tmp_path / "altered", alter(key, value))
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(lbyl.load(altered)(x), lbyl.load(digits)(x))


@pytest.mark.parametrize("content", ["[]", "3", '"x"', "null", "{}"])
def test_a_plan_that_is_no_object_is_one_clear_error(
    content: str, digits: Path, tmp_path: Path
) -> None:
    altered = with_plan(digits, tmp_path / "altered", lambda document: None)
    (altered / "plan.json").write_text(content)
    with pytest.raises(lbyl.LbylError):
        lbyl.load(altered)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a network that lost two of four heads and half of a layer."""
    torch.manual_seed(0)
    ratio = {"*:heads": 0.5, "mlp": 0.5}
    result = lbyl.compress(heads(), torch.randn(2, 6, 16), ratio, progress=False)
    return lbyl.save(result, tmp_path_factory.mktemp("attention") / "slim")


def refused(folder: Path) -> None:
    model = heads()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(lbyl.LbylError):
        lbyl.load(folder, model)
    assert model.num_heads == 4
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said["attributes"][""].update(num_heads=4),
        lambda said: said["attributes"][""].update(num_heads=3),
        lambda said: said["attributes"].clear(),
        lambda said: said["tensors"].pop("mlp.weight"),
        lambda said: said["tensors"].update({"mlp.weight": [12, 15]}),
        lambda said: said.update(tensors=3),
        lambda said: said.update(attributes=[1]),
    ],
)
def test_a_plan_that_contradicts_the_weights_changes_nothing(
    change: Callable[[Document], object], attention: Path, tmp_path: Path
) -> None:
    """The weights say themselves how they were saved."""
    said = json.loads((attention / "plan.json").read_text())["attributes"]
    assert said[""]["num_heads"] == 2
    altered, x = with_plan(attention, tmp_path / "altered", change), torch.randn(2, 6, 16)
    wanted = lbyl.load(attention, heads())(x)
    assert torch.equal(lbyl.load(altered, heads())(x), wanted)


def test_weights_and_a_plan_of_two_savings_load_as_the_weights(tmp_path: Path) -> None:
    """A process may be killed between the two files."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 16)
    ratios = {"*:heads": 0.5, "mlp": 0.25}, {"*:heads": 0.25, "mlp": 0.5}
    old, new = (lbyl.compress(heads(), x, ratio, progress=False) for ratio in ratios)
    lbyl.save(old, tmp_path / "old")
    lbyl.save(new, tmp_path / "new")
    shutil.copy(tmp_path / "old" / "plan.json", tmp_path / "new" / "plan.json")
    assert torch.equal(lbyl.load(tmp_path / "new", heads())(x), new.model(x))


def alterations(name: str, x: Tensor) -> dict[str, Any]:
    """Ways to alter one tensor of a file, each of which keeps the file sound."""
    return {
        "left out": None,
        "shorter": x.narrow(0, 0, len(x) - 1).contiguous(),
        "empty": x.narrow(0, 0, 0).contiguous(),
        "longer": torch.cat([x, x]),
        "flat": x.flatten() if x.dim() > 1 else x[None],
        "whole numbers": x.long(),
        "complex": x.to(torch.complex64),
        "one number": x.flatten()[0].clone(),
    }


NAMES = ["q.weight", "q.bias", "o.weight", "mlp.weight", "mlp.bias", "last.weight", "last.bias"]


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_contradict_the_plan_are_one_clear_error(
    name: str, attention: Path, tmp_path: Path
) -> None:
    values = load_file(attention / "model.safetensors")
    for word, altered in alterations(name, values[name]).items():
        folder = tmp_path / word
        shutil.copytree(attention, folder)
        rest = {key: x for key, x in values.items() if key != name}
        made = rest if altered is None else {**rest, name: altered}
        with safe_open(str(attention / "model.safetensors"), "pt") as file:
            notes = file.metadata()
        for kept in ({"format": "pt"}, notes):
            save_file(made, folder / "model.safetensors", kept)
            refused(folder)


def test_weights_written_anew_in_half_precision_still_load(attention: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(attention, folder)
    values = load_file(folder / "model.safetensors")
    save_file({k: x.half() for k, x in values.items()}, folder / "model.safetensors")
    x = torch.randn(2, 6, 16)
    slim, half = lbyl.load(attention, heads()), lbyl.load(folder, heads())
    assert torch.allclose(slim(x), half(x), atol=1e-2)
