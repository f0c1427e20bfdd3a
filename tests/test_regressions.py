"""What was once wrong and must not be again."""

from __future__ import annotations

import copy
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import utils

import lbyl
from support import quick
from support.reference import assert_exact, assert_reloads, flat, prove_cut

IMAGE = torch.zeros(1, 3, 12, 12)
LOSING = ("none", "coreset")  # methods that give nothing back for a channel that goes


class Apart(nn.Module):
    """A consumer whose bias is added in the way that `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.conv = nn.Conv2d(3, 12, 3)
        self.mixed = nn.Conv2d(12, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        mixed, head = self.mixed, self.head
        if self.how == "together":
            return head(F.relu(mixed(x)).mean((2, 3)))
        x = F.conv2d(x, mixed.weight, None) + mixed.bias.view(1, -1, 1, 1)
        x = F.relu(x).mean((2, 3))
        if self.how == "linear":
            return F.linear(x, head.weight) + head.bias
        return x @ head.weight.t() + head.bias


@pytest.mark.parametrize("how", ["linear", "matmul"])
def test_a_bias_that_is_added_apart_is_moved_and_not_overwritten(how: str) -> None:
    images = torch.randn(64, 3, 12, 12)
    include = ("conv", "mixed") if how == "linear" else "conv"
    slim = {
        way: lbyl.compress(
            Apart(way), IMAGE, {"*": 0.5}, criterion="l2", data=images, include=include
        )
        for way in ("together", how)
    }
    together, apart = (slim[way].model(images) for way in ("together", how))
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-5)
    assert slim[how].corrections.mean == slim["together"].corrections.mean > 0


@pytest.mark.parametrize("method", [n for n in lbyl.methods.names() if n not in LOSING])
@pytest.mark.parametrize("how", ["linear", "matmul"])
def test_equal_channels_go_for_nothing_wherever_the_bias_is_added(how: str, method: str) -> None:
    """Whatever a method delivers is corrected, and where nothing is lost nothing is moved."""
    model, images = Apart(how), torch.randn(64, 3, 12, 12)
    with torch.no_grad():
        for tensor in model.conv.parameters():
            tensor[6:] = tensor[:6]
        before = model(images)
        plan = lbyl.Plan({"conv": torch.arange(6)}, {"conv": 12})
        corrected = replace(lbyl.methods.resolve(method), correction="mean")
        slim = lbyl.compress(model, IMAGE, plan, method=corrected, data=images)
        assert slim.corrections.mean == 1
        torch.testing.assert_close(slim.model.mixed.bias, model.mixed.bias, rtol=0, atol=5e-3)
        assert float((slim.model(images) - before).norm() / before.norm()) < 5e-3


class Keeps(nn.Module):
    """Keeps a tensor on itself while it runs, and has a parameter that evaluation does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.unused = nn.Parameter(torch.ones(3))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.kept = x.mean((2, 3))
        return self.last(x)


def test_a_mask_may_hold_minus_infinity() -> None:
    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
            self.register_buffer("mask", torch.full((4,), -torch.inf))

        def forward(self, x: Tensor) -> Tensor:
            return torch.maximum(self.last(F.relu(self.first(x))), self.mask)

    assert lbyl.trace(Masked(), torch.zeros(1, 6)).names == ["first"]
    broken = Masked()
    broken.last.weight.data[0, 0] = torch.inf
    with pytest.raises(lbyl.LbylError, match=r"last\.weight holds NaN or Inf"):
        lbyl.trace(broken, torch.zeros(1, 6))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in directories")
def test_saving_into_a_directory_touches_our_files_only(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.write_text("pointed to")
    (out / "link").symlink_to(elsewhere)
    (out / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(out / "pipe")
    out.chmod(0o751)
    result = lbyl.compress(Keeps(), IMAGE, 0.5, method="none")
    with (out / "run.log").open("w") as log:
        log.write("before\n")
        log.flush()
        lbyl.save(result, out)
        log.write("after\n")
    assert (out / "run.log").read_text() == "before\nafter\n"
    assert (out / "link").is_symlink() and (out / "dangling").is_symlink()
    assert not (tmp_path / "nowhere").exists() and out.stat().st_mode & 0o777 == 0o751
    names = ["model.safetensors", "plan.json", "link", "dangling", "pipe", "run.log"]
    assert sorted(p.name for p in out.iterdir()) == sorted(names)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows ends processes otherwise")
def test_a_process_that_is_asked_to_end_leaves_nothing_half_written(tmp_path: Path) -> None:
    """SIGTERM in the midst of writing, by the command itself."""
    lbyl.save(lbyl.compress(Keeps(), IMAGE, 0.5, method="none"), tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    program = f"""
import os, runpy, signal, sys
import safetensors.torch

write = safetensors.torch.save_file

def ended(*given):
    write(*given)
    os.kill(os.getpid(), signal.SIGTERM)

safetensors.torch.save_file = ended
options = "compress lbyl:digits --weights shipped --method lbyl --no-report --out"
sys.argv = ["lbyl", *options.split(), {str(tmp_path / "out")!r}]
runpy.run_module("lbyl", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    now = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert now == before


class Cast(nn.Linear):
    """Casts its weights in every call, as networks do that also run in half precision."""

    def __init__(self, *sizes: int, how: str = "to") -> None:
        super().__init__(*sizes)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        like = {"to": x.dtype, "type": x.dtype, "type_as": x, "to tensor": x}.get(self.how)
        given = [] if like is None else [like]
        weight, bias = (getattr(p, self.how.split()[0])(*given) for p in (self.weight, self.bias))
        return F.linear(x, weight, bias)


@pytest.mark.parametrize("how", ["to", "to tensor", "type", "type_as", "double"])
def test_layers_that_cast_their_weights_to_the_type_they_have_are_pruned(how: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.double)
    model = nn.Sequential(Cast(6, 8, how=how), nn.GELU(), Cast(8, 3, how=how)).double().eval()
    graph = lbyl.trace(model, x)
    assert [unit.name for unit in graph] == ["0"]
    assert_exact(prove_cut(model, x, graph), graph)


def test_layers_that_cast_their_weights_to_another_type_are_left_alone() -> None:
    class Half(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(torch.bfloat16).to(x), self.bias)

    model = nn.Sequential(Half(6, 8), nn.ReLU(), Half(8, 3)).eval()
    assert not len(lbyl.trace(model, torch.randn(4, 6)))


class Doubled(nn.Module):
    """The last layer reads the channels of `left` twice, those of `right` once."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)
        self.sum, self.last = nn.Linear(6, 16), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        both = torch.cat([left, self.right(x)], dim=1) + self.sum(x)
        return self.last(F.relu(torch.cat([both, left], dim=1)))


@pytest.mark.parametrize("method", ["neuron-merging", "lbyl", "moments", "one-to-one"])
def test_a_consumer_that_reads_channels_unevenly_is_only_cut(method: str) -> None:
    model, x = Doubled().eval(), torch.randn(4, 6)
    graph = lbyl.trace(model, x, residual=True)
    plan = quick.plan_for(graph, {unit.name: [0, 1, 7, 9, 15] for unit in graph})
    result = lbyl.compress(model, x, plan, method=method, residual=True)
    assert any(line.startswith("last: the channels of") for line in result.fallbacks)
    assert torch.equal(result.model.last.weight, model.last.weight[:, [0, 1, 7, 9, 15, 16, 17, 23]])


def test_a_unit_with_more_channels_than_its_first_layer_is_loaded(tmp_path: Path) -> None:
    model, x = Doubled().eval(), torch.randn(4, 6)
    result = lbyl.compress(model, x, {"*": 0.3}, method="none", residual=True)
    (unit,) = result.graph.units
    assert unit.channels == 16 and result.model.left.out_features < 8
    lbyl.save(result, tmp_path / "out")
    assert torch.equal(lbyl.load(tmp_path / "out", Doubled().eval())(x), result.model(x))


class Joined(nn.Module):
    """A residual stream of two layers' channels side by side, read as a whole and in parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.few, self.many = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 10, 3, padding=1)
        self.block, self.of_few = nn.Conv2d(12, 12, 3, padding=1), nn.Conv2d(2, 4, 1)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        few = self.few(x)
        stream = torch.cat([few, self.many(x)], 1)
        stream = stream + self.block(stream).relu()
        return self.head(torch.cat([stream, self.of_few(few)], 1))


@pytest.mark.parametrize("criterion", ["random-2", "random-3", "l2"])
@pytest.mark.parametrize("ratio", [0.5, 0.95])
def test_no_layer_is_left_without_channels(criterion: str, ratio: float) -> None:
    model, images = Joined().double(), torch.randn(2, 3, 12, 12).double()
    graph = lbyl.trace(model, images, residual=True)
    assert graph["few"].channels == 12
    assert set(graph.parts["few"]) >= {("few.weight", 0), ("many.weight", 0), ("of_few.weight", 1)}
    slim = lbyl.Prepared(model, images, graph).compress(ratio, criterion=criterion, method="none")
    kept = slim.plan.kept["few"]
    assert len(kept) == (6 if ratio == 0.5 else 2)
    assert kept[0] < 2 <= kept[-1]
    assert slim.model(images).shape == (2, 5, 12, 12)
    assert_exact(prove_cut(model, images, graph, ratio), graph)


def test_a_plan_that_leaves_a_layer_without_channels_is_refused() -> None:
    graph = lbyl.trace(Joined(), IMAGE, residual=True)
    kept = {unit.name: torch.arange(unit.channels) for unit in graph.units}
    plan = lbyl.Plan({**kept, "few": torch.arange(2, 12)}, {u.name: u.channels for u in graph})
    with pytest.raises(lbyl.LbylError, match=r"few\.weight without any channel.*one of 0, 1$"):
        lbyl.compress(Joined(), IMAGE, plan, method="none", residual=True)


class Scales(Keeps):
    """Changes its input in place, as networks for images of 0 to 255 do."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 255
        return super().forward(x)


def test_inputs_that_a_network_changes_in_place_stay_as_they_were() -> None:
    images = torch.rand(1400, 3, 12, 12)  # so many that nothing drawn, which is as large, is added
    before, own = images.clone(), Scales()
    graph = lbyl.trace(own, images[:8])
    assert_exact(prove_cut(own, images[:8], graph), graph)
    slim = lbyl.compress(own, images[:8], 0.5, criterion="l2", data=images, refine=2).model
    assert torch.equal(images, before)
    plain = Keeps()
    plain.load_state_dict(own.state_dict())
    same = lbyl.compress(plain, 255 * images[:8], 0.5, criterion="l2", data=255 * images, refine=2)
    assert torch.allclose(slim(images.clone()), same.model(255 * images), rtol=1e-4)


class TwoWays(Keeps):
    """Has a way for each mode, as graphs of torch.fx may, and forgets its mode when copied."""

    way = "training"

    def train(self, mode: bool = True) -> TwoWays:
        self.way = "training" if mode else "evaluation"
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.way == "evaluation" else torch.zeros_like(out)

    def __deepcopy__(self, memo: dict[int, Any]) -> TwoWays:
        twin = TwoWays()
        memo[id(self)] = twin
        twin._parameters = copy.deepcopy(self._parameters, memo)
        twin._modules = copy.deepcopy(self._modules, memo)
        return twin


@pytest.mark.parametrize("training", [False, True])
def test_what_a_network_does_with_its_mode_is_done_to_copies_and_undone(training: bool) -> None:
    model = TwoWays().train(training)
    slim = lbyl.compress(model, IMAGE, 0.5, method="none").model
    assert model.training is training and model.way == ("training" if training else "evaluation")
    assert isinstance(slim, TwoWays) and (slim.training, slim.way) == (training, model.way)


@pytest.mark.parametrize("affine", [False, True])
def test_groups_without_a_weight_of_their_own_keep_their_size(affine: bool) -> None:
    """A grouped convolution behind them ties what they tie, and hid that their number stayed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.GroupNorm(4, 8, affine=affine)),
        *(nn.Conv1d(8, 8, 1, groups=2), nn.Tanh(), nn.Conv1d(8, 3, 1)),
    ).double()
    x = torch.randn(2, 3, 5).double()
    graph = lbyl.trace(model, x)
    assert len(graph.units) == int(affine)
    if affine:
        assert prove_cut(model, x, graph, 0.5).exact < 1e-9
    else:
        assert "number of groups" in graph.unprunable["0"]


class Asserts(nn.Module):
    """Branches whose code knows sizes, by a view and by an assertion, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        for kind in ("viewed", "asserted", "free"):
            self.add_module(kind, nn.ModuleList(nn.Linear(8, 9) for _ in range(3)))
        self.mixed = nn.ModuleList(nn.Linear(9, 4) for _ in range(9))
        self.check = Checked()

    def forward(self, x: Tensor) -> Tensor:
        made = [layer(x).relu().view(-1, 9) for layer in self.viewed]
        made += [self.check(layer(x).relu()) for layer in self.asserted]
        made += [layer(x).relu() for layer in self.free]
        return torch.stack([mix(y) for mix, y in zip(self.mixed, made)]).sum(0)


class Checked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == 9
        return x


def test_sizes_in_the_code_are_found_one_by_one() -> None:
    graph = lbyl.trace(Asserts(), torch.zeros(2, 8))
    assert graph.names == [f"free.{i}" for i in range(3)]
    known = [f"{kind}.{i}" for kind in ("viewed", "asserted") for i in range(3)]
    assert set(known) <= set(graph.unprunable)


class Matches(nn.Module):
    """How many features it gives depends on their values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 12), nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.second(self.first(x).relu())
        found = self.last(x.relu())
        return {"found": found[found[:, 0] > 0.9 * found[:, 0].mean()]}


def test_networks_whose_output_sizes_depend_on_values_are_compared_as_far_as_both_go() -> None:
    model, x = Matches().eval(), torch.randn(64, 6)
    result = lbyl.compress(model, x[:8], 0.5, data=x)
    assert result.allocation is not None
    assert all(0 < score < math.inf for score in result.allocation.tried.values())
    graph = lbyl.trace(model.double(), x.double())
    cut = prove_cut(model, x.double(), graph)
    assert cut.exact < 1e-9 and graph.names == ["first", "second"]


def test_a_feature_extractor_is_cut_and_loaded(tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision.models")
    extraction = pytest.importorskip("torchvision.models.feature_extraction")

    def extractor() -> nn.Module:
        nodes = {"layer1": "early", "avgpool": "late"}
        made: nn.Module = extraction.create_feature_extractor(models.resnet18(), nodes).eval()
        return made

    model, images = extractor(), torch.randn(1, 3, 32, 32)
    graph = lbyl.trace(model, images)
    cut = prove_cut(model, images, graph)
    assert_exact(cut, graph)
    assert_reloads(cut.result, images, extractor(), tmp_path / "out")


class Parametrised(nn.Module):
    """Two plain layers before two whose weights are computed in every forward."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 8, 3)
        self.third, self.last = norm(nn.Conv2d(8, 6, 3)), norm(nn.Conv2d(6, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.second(self.first(x).relu()).relu()).relu())


NORMS = [utils.weight_norm, utils.spectral_norm]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("norm", NORMS, ids=lambda n: f"{n.__module__}.{n.__name__}")
def test_parametrised_networks_are_cut_saved_and_loaded(norm: Any, tmp_path: Path) -> None:
    images = torch.randn(2, 3, 12, 12)
    model, fresh = Parametrised(norm), Parametrised(norm)
    for one in (model, fresh):
        one(images)  # with gradients, so that its computed weights hang on a graph
    model, fresh = model.eval(), fresh.eval()
    graph = lbyl.trace(model, images)
    assert graph.names == ["first"]
    assert graph.unprunable["third"] == "its weight is computed in the forward pass"
    result = lbyl.compress(model, images, 0.5, criterion="l2", data=images)
    assert_reloads(result, images, fresh, tmp_path / "out")
    assert len(flat(copy.deepcopy(fresh.eval())(images))) == 1


class Draws(nn.Module):
    """Its dropout runs in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 12), nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x).relu(), 0.5, training=True)
        return self.last(self.second(x).relu())


def test_random_numbers_that_a_network_draws_are_the_same_in_every_run() -> None:
    model, x = Draws().eval(), torch.randn(64, 6)
    assert not torch.equal(model(x), model(x))
    before = torch.get_rng_state()
    first, second = (lbyl.compress(model, x, 0.5, data=x).model for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


def test_randomness_is_told_from_error() -> None:
    """Two runs of one network differ by what it draws; a cut is compared with that held still."""
    model, x = Draws().double().eval(), torch.randn(8, 6).double()
    graph = lbyl.trace(model, x)
    assert graph.names == ["first", "second"]
    cut = prove_cut(model, x, graph, 0.5)
    assert cut.random > 0.01
    assert_exact(cut, graph)
