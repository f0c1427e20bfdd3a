"""Files: what is saved comes back bit by bit, and nothing half-written is ever seen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lbyl
from support import quick
from support.networks import NETWORKS, build, example, fingerprint, randomise


def result_of(name: str = "chain", ratio: float = 0.5, **options: Any) -> lbyl.Result:
    return quick.compress(build(name), example(name), ratio, criterion="l2", **options)


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_bit_identical_after_loading(tmp_path: Path, name: str) -> None:
    result = result_of(name)
    lbyl.save(result, tmp_path / "out")
    fresh = NETWORKS[name]().eval()
    loaded = lbyl.load(tmp_path / "out", model=fresh)
    assert loaded is fresh and type(loaded) is type(result.model)
    x = example(name, 5)
    assert torch.equal(loaded(x), result.model(x))
    assert repr(loaded) == repr(result.model)  # attributes too
    states = loaded.state_dict(), result.model.state_dict()
    assert list(states[0]) == list(states[1])


def test_biases_that_restoration_made_come_back(tmp_path: Path) -> None:
    result = result_of("biased")
    assert result.model[6].bias is not None
    lbyl.save(result, tmp_path / "out")
    loaded = lbyl.load(tmp_path / "out", NETWORKS["biased"]().eval())
    assert isinstance(loaded[6].bias, nn.Parameter)
    assert torch.equal(loaded[6].bias, result.model[6].bias)


def test_the_files_are_safetensors_and_json_only(tmp_path: Path) -> None:
    out = lbyl.save(result_of(), tmp_path / "out")
    assert sorted(p.name for p in out.iterdir()) == ["model.safetensors", "plan.json"]
    document = json.loads((out / "plan.json").read_text())
    assert document["version"] == 2
    assert document["result"]["method"]["name"] == "echo" and document["criterion"]["name"] == "l2"
    raw = (out / "model.safetensors").read_bytes()
    assert raw[8:9] == b"{" and raw[:2] != b"PK" and b"pickle" not in raw
    umask = os.umask(0)
    os.umask(umask)
    for file in out.iterdir():
        assert file.stat().st_mode & 0o777 == 0o666 & ~umask, file.name
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_save_leaves_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException
) -> None:
    lbyl.save(result_of(ratio=0.2), tmp_path / "out")
    (tmp_path / "out" / "note.txt").write_text("mine")
    before = contents(tmp_path)

    chmod, new = Path.chmod, result_of(ratio=0.6)  # what is set when a file is all written

    for name in ("out", "new"):
        files: list[Path] = []

        def failing(self: Path, mode: int, seen: list[Path] = files) -> None:
            seen.append(self)
            if len(seen) > after:
                raise error
            chmod(self, mode)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "chmod", failing)
            told = lbyl.LbylError if isinstance(error, OSError) else type(error)
            with pytest.raises(told, match="disk full" if isinstance(error, OSError) else None):
                lbyl.save(new, tmp_path / name)
    assert contents(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_saving_into_the_current_directory_and_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, x = result_of(), example("chain")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    lbyl.save(result, ".")
    assert sorted(p.name for p in Path.cwd().iterdir()) == ["model.safetensors", "plan.json"]
    assert torch.equal(lbyl.load(".", build("chain", 9))(x), result.model(x))
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    lbyl.save(result_of(ratio=0.2), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert lbyl.load(tmp_path / "here", build("chain", 9))[0].out_channels == 8


def refused(folder: Path, model: nn.Module, message: str) -> None:
    """Loading fails with that message, and the model given is as it was."""
    before = fingerprint(model)
    with pytest.raises(lbyl.LbylError, match=message):
        lbyl.load(folder, model)
    assert fingerprint(model) == before


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    model = build("chain", 1)
    refused(tmp_path / "nowhere", model, r"no plan\.json in .*nowhere")
    out = lbyl.save(result_of(), tmp_path / "out")
    good = (out / "model.safetensors").read_bytes()
    for broken in (b"", b"nonsense", good[:100], good[:-10], b"\xff" * 64 + good[64:]):
        (out / "model.safetensors").write_bytes(broken)
        refused(out, model, r"model\.safetensors is damaged")
    (out / "model.safetensors").unlink()
    refused(out, model, r"no model\.safetensors in")
    (out / "model.safetensors").write_bytes(good)
    for broken in (b"", b"{", b"\xff\xfe\x00", b"[1, 2"):
        (out / "plan.json").write_bytes(broken)
        refused(out, model, r"plan\.json is not JSON")
    (out / "plan.json").write_text('{"version": 7}')
    refused(out, model, "version 7")
    (out / "plan.json").unlink()
    (out / "plan.json").mkdir()
    refused(out, model, r"plan\.json cannot be read")


class Renamed(nn.Module):
    """The chain under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = NETWORKS["chain"]()


def wider() -> nn.Module:
    """The chain's names with more filters: the saved tensors would fit inside."""
    model = NETWORKS["chain"]()
    model[0], model[1] = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
    model[3] = nn.Conv2d(12, 8, 3, padding=1, bias=False)
    return randomise(model)


def test_the_wrong_class_is_refused(tmp_path: Path) -> None:
    out = lbyl.save(result_of(), tmp_path / "out")
    refused(out, Renamed(), "does not belong to this network")
    refused(out, build("dense"), "does not belong to this network")
    refused(out, wider(), r"0\.weight was \[10, 3, 3, 3\] .* \[12, 3, 3, 3\] here")
    narrow = NETWORKS["chain"]()
    narrow[8] = nn.Linear(8, 3)
    refused(out, randomise(narrow), r"8\.weight")
    slim = result_of(ratio=0.8).model
    refused(out, slim, "does not belong")


def test_files_without_original_sizes_are_still_checked(tmp_path: Path) -> None:
    out = lbyl.save(result_of(ratio=0.3), tmp_path / "out")
    document = json.loads((out / "plan.json").read_text())
    del document["shapes"]
    (out / "plan.json").write_text(json.dumps(document))
    refused(out, result_of(ratio=0.8).model, "does not belong")
    lbyl.load(out, build("chain", 4))
    document["shapes"] = [1]
    (out / "plan.json").write_text(json.dumps(document))
    refused(out, build("chain", 4), "'shapes'")


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(lbyl.LbylError, match="is a file; give a directory"):
        lbyl.save(result_of(), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "a file"


def test_tied_parameters_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = build("dense", 2)
        model.add_module("7", nn.Linear(5, 16, bias=False))
        model.add_module("8", nn.ReLU())
        model.add_module("9", nn.Linear(16, 5, bias=False))
        model.add_module("10", nn.Linear(5, 16, bias=False))
        model[10].weight = model[7].weight
        return model.eval()

    model, x = tied(), example("dense")
    result = quick.compress(model, x, {"0": 0.5})
    lbyl.save(result, tmp_path / "out")
    loaded = lbyl.load(tmp_path / "out", tied())
    assert loaded[10].weight is loaded[7].weight
    assert torch.equal(loaded(x), result.model(x))
