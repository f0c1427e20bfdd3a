"""Collected moments against those of every window, unfolded in the test; files and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import lbyl
from support.delivery import close
from support.networks import build, example, fingerprint, randomise


class Called(nn.Conv2d):
    """Neither stride nor padding nor dilation is said."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias)


class Readers(nn.Module):
    """Channels read by layers of every geometry."""

    def __init__(self, normed: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if normed else nn.Identity()
        self.plain = nn.Conv2d(6, 2, 3, padding=1)
        self.uneven = nn.Conv2d(6, 2, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2))
        self.same = nn.Conv2d(6, 2, (2, 4), padding="same")
        self.pixels = nn.Conv2d(6, 2, 1, stride=(2, 3))
        self.halved = nn.Conv2d(6, 2, 3, stride=2)
        self.called = Called(6, 2, 3)
        self.wider = nn.ConvTranspose2d(6, 2, 3, stride=2)
        self.tokens = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.norm(self.first(x)).relu()
        readers = self.plain, self.uneven, self.same, self.pixels, self.wider
        readers += self.halved, self.called
        return *(reader(x) for reader in readers), self.tokens(x.movedim(1, -1))


class Deep(nn.Sequential):
    """Of one or three dimensions."""

    def __init__(self, dims: int) -> None:
        conv = nn.Conv1d if dims == 1 else nn.Conv3d
        super().__init__(conv(3, 4, 1), nn.ReLU(), conv(4, 2, 2, stride=2, padding=1))


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "normed": (Readers, (3, 8, 7)),
    "bare": (lambda: Readers(normed=False), (3, 8, 7)),
    "signals": (lambda: Deep(1), (3, 9)),
    "volumes": (lambda: Deep(3), (3, 4, 5, 6)),
}


def network(name: str, count: int = 20) -> tuple[nn.Module, Tensor]:
    make, shape = NETWORKS[name]
    return randomise(make(), 1).double(), torch.randn(count, *shape).double()


@contextmanager
def seen_by(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What layers read while the model runs, by name."""
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, a, name=name: seen.update({name: a[0].detach()}))
        for name, module in model.named_modules()
    ]
    with torch.no_grad():
        yield seen
    for handle in handles:
        handle.remove()


def windows(module: Any, x: Tensor) -> Tensor:
    """(positions, inputs, taps), by a convolution whose filters are one tap of one input each."""
    if isinstance(module, nn.Linear):
        return x.reshape(-1, x.shape[-1], 1)
    if "Transpose" in type(module).__name__:
        return x.movedim(1, -1).flatten(0, -2)[..., None]
    shape = module.weight.shape[1:]
    filters = torch.eye(shape.numel()).to(x).reshape(-1, *shape)
    seen = module._conv_forward(x, filters, None)
    return seen.movedim(1, -1).flatten(0, -2).unflatten(1, (shape[0], -1))


def moments_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.mean(0), torch.cov(rows.flatten(1).T, correction=0)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("parts", [None, 7])
def test_moments_are_those_of_all_windows_with_as_many_data_free_ones_as_promised(
    name: str, parts: int | None
) -> None:
    """C = w C_own + (1 − w) C_free, w = n/(n + 64), or n/(n + 16) where no norm tells the scale."""
    model, x = network(name)
    data = x if parts is None else list(x.split(parts))
    found = lbyl.prepare(model, x[:2], data=data).statistics()
    free = lbyl.prepare(model, x[:2]).statistics()
    weight = 20 / (20 + (64 if name == "normed" else 16))
    assert found.source == "own and procedural" and free.source == "procedural"
    with seen_by(model) as seen:
        model(x)
    assert len(found.moments) == (8 if name in ("normed", "bare") else 1)
    for reader, moments in found.moments.items():
        mean, covariance = moments_of(windows(model.get_submodule(reader), seen[reader]))
        close(moments.mean, torch.lerp(free.moments[reader].mean, mean, weight))
        close(moments.covariance, torch.lerp(free.moments[reader].covariance, covariance, weight))
        assert moments.taps == mean.shape[1] and moments.mixed is None


@pytest.mark.parametrize("taps", ["auto", "channels"])
def test_data_free_moments_are_those_under_batch_statistics(taps: str) -> None:
    model, x = network("normed", 2)
    prepared = lbyl.prepare(model, x, data=48, seed=2)
    (images,) = prepared.fresh.collection().batches
    with seen_by(model.train()) as seen:
        model(images)
    model.eval()
    for reader, moments in prepared.statistics(taps=taps).moments.items():
        rows = windows(model.get_submodule(reader), seen[reader])
        if taps == "channels" and rows.shape[2] > 1:
            centred = (rows - rows.mean((0, 2), keepdim=True)).flatten(0, 1)
            product = centred.T @ centred
            root = product.diagonal().sqrt()
            close(moments.spatial, product / torch.outer(root, root))
            rows = rows.transpose(1, 2).flatten(0, 1)[..., None]
        mean, covariance = moments_of(rows)
        close(moments.mean, mean)
        close(moments.covariance, covariance)


def test_beyond_the_limit_inputs_of_a_flatten_are_grouped_by_channel() -> None:
    side = 25  # 8 · 625 = 5,000 inputs, more than have a covariance of them all
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * side * side, 6),
    )  # fmt: skip
    randomise(model).double()
    x = torch.randn(2, 3, side, side).double()
    prepared = lbyl.prepare(model, x, data=16)
    (images,) = prepared.fresh.collection().batches
    moments = prepared.statistics().moments["4"]
    assert moments.columns.tolist() == torch.arange(5000).reshape(8, -1).tolist()
    with torch.no_grad():
        seen = model[:3].train()(images).movedim(1, -1).flatten(0, -2)
    model.eval()
    close(moments.mean[:, 0], seen.mean(0))
    close(moments.covariance, torch.cov(seen.T, correction=0))
    assert moments.spatial.shape == (625, 625)
    plan = lbyl.Plan({"0": torch.arange(4)}, {"0": 8})
    restored, cut = (
        prepared.compress(plan, method=m).model(images).detach() for m in ("echo", "none")
    )
    wanted = model(images).detach()
    assert float((restored - wanted).norm()) < float((cut - wanted).norm())


@pytest.mark.parametrize(("batch", "taps"), [(9, 9), (8, 1)])
def test_taps_are_told_apart_where_windows_outnumber_them(batch: int, taps: int) -> None:
    """Maps of 8 pixels and 72 features."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    x = torch.zeros(1, 3, 4, 2)
    moments = lbyl.prepare(model, x, data=batch).statistics().moments["2"]
    assert (moments.taps, len(moments.covariance)) == (taps, 8 * taps)


@pytest.mark.parametrize("kernel", [1, 3])
def test_of_many_positions_those_looked_at_are_spread_evenly(kernel: int) -> None:
    """65,536 of 81,920: what is known of every one by its place comes out as if all were seen.

    And all are seen where sums over all windows take less than so many windows would.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1, bias=False), nn.Identity(), nn.Conv2d(3, 2, kernel)
    ).double()
    count, side = 80, 32
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3).reshape(3, 3, 1, 1))
    x = torch.zeros(count, 3, side, side).double()
    x[:, 0] = (torch.arange(side) % 4 == 0).double()
    x[:, 1] = (torch.arange(side) < 11).double()[:, None]
    x[:, 2] = torch.arange(count)[:, None, None] / count
    found = lbyl.prepare(model, x[:2], data=x).statistics().moments["2"]
    free = lbyl.prepare(model, x[:2]).statistics().moments["2"]
    weight = count / (count + 16)
    mean, covariance = moments_of(windows(model[2], x))
    own = (found.mean - (1 - weight) * free.mean) / weight
    torch.testing.assert_close(own, mean, rtol=0.02, atol=0.003)
    own = (found.covariance - (1 - weight) * free.covariance) / weight
    torch.testing.assert_close(own, covariance, rtol=0.05, atol=0.005)
    assert torch.allclose(own, covariance, rtol=1e-9, atol=1e-9) == (kernel == 3)


@pytest.mark.parametrize(("scale", "dtype"), [(1e-18, 32), (1e25, 32), (1e3, 16)])
def test_many_own_inputs_speak_for_themselves_whatever_their_scale(
    scale: float, dtype: int
) -> None:
    """Every fourth of 1,400 is held out; each of the seven that differ is as often as before."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Identity(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
    kind = torch.float32 if dtype == 32 else torch.bfloat16
    base = (scale * (1 + torch.randn(7, 4))).to(kind)
    prepared = lbyl.prepare(model.to(kind), base[:2], data=[base.repeat(4, 1)] * 50)
    statistics = prepared.statistics()
    mean, covariance = moments_of(base.double())
    moments, largest = statistics.moments["2"], float(covariance.abs().max())
    assert statistics.source == "own"
    torch.testing.assert_close(moments.mean[:, 0], mean, rtol=1e-5, atol=0)
    torch.testing.assert_close(moments.covariance, covariance, rtol=1e-4, atol=1e-5 * largest)


class Padded(nn.Module):
    """Two layers on every token; the mask is looked at by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).relu())
        return out


def test_tokens_that_a_mask_hides_are_not_counted() -> None:
    model, x = Padded().double(), torch.randn(4, 5, 3).double()
    batch = {"x": x, "mask": torch.rand(4, 5) > 0.4}
    assert 0 < int(batch["mask"].sum()) < 20
    found = lbyl.prepare(model, batch, data=[batch]).statistics()
    free = lbyl.prepare(model, batch).statistics().moments["last"]
    mean, covariance = moments_of(model.first(x[batch["mask"]]).relu().detach())
    close(found.moments["last"].mean[:, 0], torch.lerp(free.mean[:, 0], mean, 4 / 68))
    close(found.moments["last"].covariance, torch.lerp(free.covariance, covariance, 4 / 68))


def test_inputs_that_are_not_finite_have_no_statistics_and_are_named() -> None:
    model, x = build("dense", 1), example("dense", 8)
    with torch.no_grad():
        model[0].weight[3] = 2e38
    statistics = lbyl.prepare(model, x, data=16).statistics()
    assert statistics.get("3") is None
    assert "3: it has no statistics: its inputs are not finite" in statistics.fallbacks


@pytest.mark.parametrize("name", ["normed", "bare"])
def test_collecting_changes_nothing_and_is_decided_by_the_seed(name: str) -> None:
    model, x = network(name)
    model.train()
    model.norm.eval()
    before, state = fingerprint(model), torch.random.get_rng_state()
    told: list[tuple[str, int, int]] = []
    three = [
        lbyl.prepare(model, x, data=16, seed=seed, progress=lambda *step: told.append(step))
        .statistics().moments["plain"].covariance
        for seed in (0, 0, 1)
    ]  # fmt: skip
    assert torch.equal(three[0], three[1]) and not torch.equal(three[0], three[2])
    assert [step for step in told if step[0] == "collecting"] == [("collecting", 1, 1)] * 3
    lbyl.prepare(model, x[:2], data=x).statistics()
    assert fingerprint(model) == before and torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("taps", ["auto", "channels"])
def test_everything_comes_back_from_a_file_and_serves_as_before(tmp_path: Path, taps: str) -> None:
    model, x = build("chain", 1), example("chain", 4)
    statistics = lbyl.prepare(model, x, data=16).statistics(taps=taps)
    path = tmp_path / "statistics.safetensors"
    statistics.save(path)
    assert list(tmp_path.iterdir()) == [path] and b"pickle" not in path.read_bytes()
    for again in (lbyl.Statistics.load(path), statistics.to("cpu")):
        assert (again.source, again.fallbacks) == (statistics.source, statistics.fallbacks)
        for name, one in statistics.moments.items():
            two = again.moments[name]
            assert one.taps == two.taps and torch.equal(one.covariance, two.covariance)
            assert torch.equal(one.mean, two.mean)
            assert (one.spatial is None) == (two.spatial is None)
        method = lbyl.methods.Echo(taps=taps, correction="mean")
        fresh, reused = (
            lbyl.prepare(model, x, data=data).compress(0.5, criterion="l2", method=method).model(x)
            for data in (16, again)
        )
        torch.testing.assert_close(fresh, reused, rtol=1e-5, atol=1e-5)


def test_files_that_hold_no_statistics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(lbyl.LbylError, match="no statistics file"):
        lbyl.Statistics.load(tmp_path / "absent")
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(lbyl.LbylError, match="holds no statistics"):
        lbyl.Statistics.load(tmp_path / "other.safetensors")
    path = tmp_path / "found.safetensors"
    lbyl.prepare(build("chain"), example("chain"), data=16).statistics().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(lbyl.LbylError, match=r"found.safetensors.*again"):
        lbyl.Statistics.load(path)


def test_statistics_of_another_model_or_of_fewer_layers_are_refused() -> None:
    model, x = build("chain", 1), example("chain")
    own = lbyl.prepare(model, x, data=16).statistics()
    moments = own.moments["3"]
    cut = replace(moments, mean=moments.mean[:9], covariance=moments.covariance[:81, :81])
    taps = replace(moments, mean=moments.mean[:, :3], covariance=torch.eye(30), taps=3)
    foreign = lbyl.prepare(build("basic", 1), x, data=16).statistics()
    for statistics, said in (
        (foreign, "none of its layers"),
        (lbyl.Statistics({**own.moments, "3": cut}), "belong to another model: 3 reads 10"),
        (lbyl.Statistics({**own.moments, "3": taps}), "belong to another model"),
        (lbyl.Statistics({"3": moments}), "know nothing of 8: collect"),
    ):
        with pytest.raises(lbyl.LbylError, match=said):
            lbyl.compress(model, x, 0.5, data=statistics)
    told = lbyl.Statistics({"3": moments}, fallbacks=("8: its inputs are not finite",))
    assert lbyl.compress(model, x, 0.5, data=told).model(x).shape == (2, 5)
    with pytest.raises(lbyl.LbylError, match="taps is 'all'"):
        lbyl.prepare(model, x).statistics(taps="all")


@pytest.mark.parametrize("kind", ["pairs", "lists", "loader", "generator"])
def test_own_data_come_in_any_form_and_labels_are_ignored(kind: str) -> None:
    model, x = build("dense", 1), example("dense", 40)
    labels = torch.arange(40)
    data = torch.utils.data.TensorDataset(x, labels)
    sources: dict[str, Any] = {
        "pairs": [(x[:20], labels[:20]), (x[20:], labels[20:])],
        "lists": [[x[:20], labels[:20]], [x[20:], labels[20:]]],
        "loader": torch.utils.data.DataLoader(data, batch_size=20),
        "generator": (batch for batch in x.split(20)),
    }
    found, wanted = (
        lbyl.prepare(model, x[:2], data=given).statistics().moments["3"].covariance
        for given in (sources[kind], x)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    for data, said in (([], "no batch"), (["image.png"], "batches of data= must be")):
        with pytest.raises(lbyl.LbylError, match=said):
            lbyl.compress(model, x, 0.5, data=data)


@pytest.mark.parametrize(("free", "held"), [(0, ["head"]), (8000, ["head", "conv3"])])
def test_statistics_that_memory_cannot_hold_wait_on_the_disk_and_serve_alike(
    free: int, held: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last that were asked for stay, in a fourth of what is free: 800 + 1152 bytes."""
    model, x = build("bottleneck").double(), example("bottleneck").double()
    whole = lbyl.prepare(model, x, data=16).statistics()
    wanted = lbyl.compress(model, x, 0.5, data=16).model.state_dict()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    # private: how much memory is free is the machine's to say
    monkeypatch.setattr("lbyl.statistics.collect.free_bytes", lambda device: free)
    split = lbyl.prepare(model, x, data=16).statistics()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == len(split.moments) == len(whole.moments)
    assert list(split.moments) == list(whole.moments) and split.get("absent") is None
    for name, one in whole.moments.items():
        for _ in range(2):
            close(split.moments[name].covariance, one.covariance)
            close(split.moments[name].mean, one.mean)
    last = {name: split.moments[name] for name in ("conv2", "conv3", "head")}
    assert [name for name in reversed(last) if split.moments[name] is last[name]] == held
    for name, value in lbyl.compress(model, x, 0.5, data=16).model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-8)
    split.save(tmp_path / "kept")
    assert list(lbyl.Statistics.load(tmp_path / "kept").moments) == list(whole.moments)
    del split
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


class Chooses(nn.Module):
    """Large inputs go another way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.usual, self.rare = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        out: Tensor = self.rare(h) if x.mean() > 100 else self.usual(h)
        return out


def test_statistics_serve_their_network_where_no_input_reaches_a_layer() -> None:
    model, x = Chooses().eval(), torch.randn(4, 6)

    def examples() -> Iterator[Any]:
        return iter([x, x + 1000])

    found = lbyl.prepare(model, examples(), data=16).statistics()
    assert set(found.moments) == {"usual"}
    result = lbyl.compress(model, examples(), 0.5, data=found)
    assert "rare: it has no statistics: no input reaches it" in result.fallbacks
    assert len(result.plan.kept["first"]) == 4
