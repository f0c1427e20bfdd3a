"""What each kind of call does to channels, on networks of a few layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.tracing.labels import Flow
from lbyl.tracing.record import Call
from support import reference

conv, linear, up = nn.Conv2d, nn.Linear, nn.ConvTranspose2d
IMAGE, ROWS, WORDS = torch.randn(2, 3, 8, 8), torch.randn(2, 4), torch.randn(2, 5, 4)


class Net(nn.Module):
    """Layers by name, and a forward given as a function of them."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def between(step: Callable[[Tensor], Tensor], **layers: nn.Module) -> Net:
    """Something between two layers."""
    return Net(lambda m, x: m.b(step(m.a(x))), **{"a": conv(3, 8, 1), "b": conv(8, 2, 1)} | layers)


def checked(model: nn.Module, inputs: Any, **options: Any) -> lbyl.Graph:
    """The graph, after a cut at 40 % was compared with the silenced original."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dtype.is_floating_point:
            tensor.data.uniform_(0.2, 1.0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_()
    model, inputs = reference.in_double(model.eval(), inputs)
    graph = lbyl.trace(model, inputs, **options)
    if graph.units:
        reference.assert_exact(reference.prove_cut(model, inputs, graph, 0.4), graph)
    return graph


def units(graph: lbyl.Graph) -> dict[str, int]:
    return {unit.name: unit.channels for unit in graph}


def squeezed(m: Any, x: Tensor) -> Tensor:
    x = m.a(x)
    return m.c(x * torch.sigmoid(m.up(F.relu(m.down(x.mean((2, 3), keepdim=True))))))


def shuffled(m: Any, x: Tensor) -> Tensor:
    a, b = m.a(x).chunk(2, 1)
    x = torch.cat([a, F.relu(b)], 1)
    n, c, h, w = x.shape
    return m.b(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))


def in_place(x: Tensor) -> Tensor:
    x = F.relu_(x)
    x += 1
    x.mul_(2)
    return F.interpolate(F.pad(x, (1, 1, 1, 1)), scale_factor=2.0, mode="bilinear")


def written_into(x: Tensor) -> Tensor:
    out = torch.zeros((4, *x.shape[1:]), dtype=x.dtype)
    out[torch.tensor([0, 2])] = x
    return out


def with_where(m: Any, x: Tensor) -> Tensor:
    """Positions alone, and a split of a tensor without entries: neither is an error of a rule."""
    x = m.a(x)
    torch.where(x[0, 0] > 1e9)
    return m.b(x) + sum(part.sum() for part in x.mean((2, 3))[:0].split([0], 0))


def chain(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


RELU = nn.ReLU()
Built = tuple[Callable[[], nn.Module], Tensor, dict[str, int]]
# fmt: off
FOUND: dict[str, Built] = {
    "depthwise": (
        chain(conv(3, 8, 1), conv(8, 8, 3, groups=8), nn.ReLU6(), conv(8, 4, 1)), IMAGE, {"0": 8}),
    "grouped": (
        chain(conv(3, 12, 1), conv(12, 24, 3, groups=4), RELU, conv(24, 4, 1)), IMAGE, {"0": 4}),
    "two groups": (
        chain(conv(3, 8, 1), conv(8, 8, 3, groups=2), RELU, conv(8, 4, 1)), IMAGE, {"0": 2}),
    "strided and dilated": (
        chain(conv(3, 8, 3, 2, 1), RELU, conv(8, 6, 2, dilation=2), RELU, conv(6, 2, 1)),
        IMAGE, {"0": 8, "2": 6}),
    "transposed": (
        chain(up(3, 8, 2, 2), nn.ELU(), up(8, 6, 3), nn.GELU(), conv(6, 2, 1)),
        IMAGE, {"0": 8, "2": 6}),
    "grouped transposed": (
        chain(conv(3, 8, 1), up(8, 12, 2, groups=4), RELU, conv(12, 2, 1)), IMAGE, {"0": 4}),
    "flatten": (
        chain(conv(3, 8, 3), RELU, nn.Flatten(), linear(288, 5), linear(5, 2)),
        IMAGE, {"0": 8, "3": 5}),
    "group norm": (
        chain(conv(3, 12, 1), nn.GroupNorm(4, 12), RELU, conv(12, 2, 1)), IMAGE, {"0": 4}),
    "slopes": (chain(conv(3, 8, 1), nn.PReLU(8), conv(8, 2, 1)), IMAGE, {"0": 8}),
    "gated": (chain(linear(4, 12), nn.GLU(), linear(6, 2)), ROWS, {"0": 6}),
    "pixel shuffle": (
        chain(conv(3, 24, 1), nn.PixelShuffle(2), RELU, conv(6, 2, 1)), IMAGE, {"0": 6}),
    "pooling and batch norm": (
        lambda: Net(lambda m, x: m.c(F.relu(m.n(m.b(m.a(x).mean((2, 3)))))), a=conv(3, 8, 3),
                    b=linear(8, 7), n=nn.BatchNorm1d(7), c=linear(7, 2)), IMAGE, {"a": 8, "b": 7}),
    "concatenated": (
        lambda: Net(lambda m, x: m.c(torch.cat([m.a(x), m.b(x), x], 1)), a=conv(3, 4, 1),
                    b=conv(3, 6, 1), c=conv(13, 2, 1)), IMAGE, {"a": 4, "b": 6}),
    "two consumers": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x))) + m.c(m.a(x)), a=conv(3, 8, 1),
                    b=conv(8, 2, 1), c=conv(8, 2, 3, padding=1)), IMAGE, {"a": 8}),
    "squeezed": (
        lambda: Net(squeezed, a=conv(3, 8, 1), down=conv(8, 4, 1), up=conv(4, 8, 1),
                    c=conv(8, 2, 1)), IMAGE, {"a": 8, "down": 4}),
    "shuffled": (lambda: Net(shuffled, a=conv(3, 8, 1), b=conv(8, 2, 1)), IMAGE, {"a": 4}),
    "in place": (lambda: between(in_place, b=conv(8, 2, 3)), IMAGE, {"a": 8}),
    "written into a blank": (lambda: between(written_into), IMAGE, {"a": 8}),
    "shared": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x)) + m.a(x.flip(2))), a=conv(3, 8, 1),
                    b=conv(8, 2, 1)), IMAGE, {"a": 8}),
    "rows that are columns": (
        lambda: Net(lambda m, x: m.c(m.b(F.relu(m.b(m.a(x))))), a=conv(3, 6, 1), b=conv(6, 6, 1),
                    c=conv(6, 2, 1)), IMAGE, {"a": 6}),
    "torch's transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2,
                                      enable_nested_tensor=False),
        torch.randn(2, 5, 16), {"layers.0.linear1": 24, "layers.1.linear1": 24}),
}
# fmt: on


@pytest.mark.parametrize("name", FOUND)
def test_channels_are_found_and_cut_exactly(name: str) -> None:
    build, x, wanted = FOUND[name]
    graph = checked(build(), x)
    assert units(graph) == wanted
    if name in ("depthwise", "slopes"):
        assert graph["0"].between == ("1",)
    if name == "flatten":
        assert graph.columns(graph["0"], graph.consumers["3"]).shape == (8, 36)
    if name == "squeezed":
        assert {p.name for p in graph["a"].producers} == {"a", "up"}


def tied() -> nn.Module:
    net = Net(lambda m, x: F.linear(m.b(F.gelu(m.a(m.t(x)))), m.t.weight), a=linear(4, 8))
    net.t, net.b = nn.Embedding(9, 4), linear(8, 4)
    return net


WRITTEN = "its size is written into the model's code"
NORMED = nn.utils.parametrizations.weight_norm
# fmt: off
REFUSED: dict[str, tuple[Any, ...]] = {
    "layer norm": (
        chain(linear(4, 8), nn.LayerNorm(8), linear(8, 2)), WORDS, {}, "0", "layer_norm"),
    "fixed split": (
        lambda: between(lambda x: sum(x.split(4, 1)), b=conv(4, 2, 1)), IMAGE, {}, "a", ""),
    "size in the code": (
        lambda: Net(lambda m, x: m.c(m.b(F.relu(m.a(x))).view(2, 8, -1).transpose(1, 2)),
                    a=conv(3, 6, 1), b=conv(6, 8, 1), c=linear(8, 2)),
        IMAGE, {"a": 6}, "b", WRITTEN),
    "weight used elsewhere": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x))) + m.a.weight.t().sum(), a=linear(4, 8),
                    b=linear(8, 2)), ROWS, {}, "a", "also used by"),
    "tied table": (tied, torch.randint(9, (2, 5)), {"a": 8}, "b", ""),
    "weight norm": (
        chain(NORMED(linear(4, 8)), linear(8, 2)), ROWS, {}, "0", "forward pass"),
    "recurrent": (
        lambda: Net(lambda m, x: m.c(m.r(F.relu(m.b(F.relu(m.a(x)))))[0]), a=linear(4, 8),
                    b=linear(8, 6), r=nn.GRU(6, 5, batch_first=True), c=linear(5, 2)),
        WORDS, {"a": 8}, "b", "gru"),
    "repeated at an edge": (
        lambda: between(lambda x: F.pad(x, (1, 1), mode="reflect"), a=linear(3, 8),
                        b=linear(10, 2)), torch.randn(2, 5, 3), {}, "a", "repeats channels"),
    "positions": (
        lambda: Net(with_where, a=conv(3, 6, 1), b=conv(6, 2, 1)), IMAGE, {}, "a", ""),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_pruned_has_a_reason(name: str) -> None:
    build, x, others, layer, reason = REFUSED[name]
    graph = checked(build(), x)
    assert units(graph) == others
    assert reason in graph.unprunable[layer]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_of_any_rank_with_batch_norm(dims: int) -> None:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    net = nn.Sequential(layer(3, 8, 3), norm(8), nn.SiLU(), layer(8, 4, 1))
    graph = checked(net, torch.randn(2, 3, *[6] * dims))
    assert units(graph) == {"0": 8} and graph["0"].producers[0].norm is not None
    carried = {name for (name, _), own in graph.axes.items() if graph["0"].owns(own).any()}
    parts = ("weight", "bias", "running_mean", "running_var")
    assert carried == {"0.weight", "0.bias", "3.weight", *(f"1.{part}" for part in parts)}


def test_parallel_branches_and_residual_streams_go_together() -> None:
    layers = {"a": conv(3, 6, 1), "b": conv(3, 6, 3, padding=1), "c": conv(6, 2, 1)}
    graph = checked(Net(lambda m, x: m.c(m.a(x) + m.b(x)), **layers), IMAGE)
    assert units(graph) == {"a": 6} and not graph["a"].residual
    assert [p.name for p in graph["a"].producers] == ["a", "b"]

    def residual(m: Any, x: Tensor) -> Any:
        x = m.stem(x)
        return m.head(x + m.b(F.relu(m.a(x))))

    layers = {"stem": conv(3, 6, 1), "a": conv(6, 8, 1), "b": conv(8, 6, 1), "head": conv(6, 2, 1)}
    graph = checked(Net(residual, **layers), IMAGE)
    assert units(graph) == {"a": 8} and "residual=True" in graph.unprunable["stem"]
    graph = checked(Net(residual, **layers), IMAGE, residual=True)
    assert units(graph) == {"stem": 6, "a": 8} and graph["stem"].residual


def test_inputs_may_be_tuples_and_dicts() -> None:
    class Two(Net):
        def forward(self, x: Tensor, scale: Tensor) -> Any:  # type: ignore[override]
            return {"out": self.b(F.relu(self.a(x)) * scale)}

    inputs = (ROWS, torch.rand(2, 1) + 1)
    for given in (inputs, dict(zip(("x", "scale"), inputs))):
        net = Two(lambda m, x: x, a=linear(4, 8), b=linear(8, 2))
        assert units(checked(net, given)) == {"a": 8}


def test_frozen_batch_norm_is_known_as_a_norm() -> None:
    frozen = pytest.importorskip("torchvision.ops").FrozenBatchNorm2d
    graph = checked(nn.Sequential(conv(3, 8, 1), frozen(8), RELU, conv(8, 4, 1), frozen(4)), IMAGE)
    assert units(graph) == {"0": 8}
    norm = graph["0"].producers[0].norm
    assert norm is not None and norm.mean == "1.running_mean"
    assert graph.consumers["3"].norm is not None


class Wave(nn.Module):
    """A module torch functions hide nothing of, but declared as one anyway."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.width = nn.Parameter(torch.ones(width)), width

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.width
        return torch.sort(x, dim=1).values * 0 + torch.sin(x) * self.scale[:, None, None]


def waving(kind: type[Wave]) -> nn.Module:
    return nn.Sequential(conv(3, 8, 1), kind(8), conv(8, 2, 1))


def test_a_declared_module_is_one_call() -> None:
    class Mine(Wave):
        pass

    assert not checked(waving(Mine), IMAGE).units, "sort mixes channels, as far as rules can tell"
    lbyl.declare(Mine, "channelwise", sizes={"width": "scale"})
    graph = checked(waving(Mine), IMAGE)
    assert units(graph) == {"0": 8} and graph["0"].between == ("1",)
    lbyl.declare(Mine, "opaque")
    assert "Mine" in checked(waving(Mine), IMAGE).unprunable["0"]

    def rule(flow: Flow, call: Call) -> list[Tensor]:
        labels = flow.of(call.args[0].value)
        scale = flow.of(call.inputs[1]).reshape(-1, 1, 1)
        flow.atoms.tie(labels, scale, "it meets a fixed scale")
        return [labels]

    lbyl.declare(Mine, rule, sizes={"width": "scale"})
    assert units(checked(waving(Mine), IMAGE)) == {"0": 8}


def test_a_rule_that_raises_is_an_error_in_tests_and_opaque_for_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mine(Wave):
        pass

    def rule(flow: Flow, call: Call) -> list[Tensor]:
        raise ValueError("not foreseen")

    lbyl.declare(Mine, rule)
    with pytest.raises(Exception, match=r"Mine in '1' raised: not foreseen"):
        checked(waving(Mine), IMAGE)
    # private: the suite makes a rule that raises an error; this is what it is for users
    monkeypatch.setattr("lbyl.tracing.rules.base.STRICT", False)
    assert "Mine" in checked(waving(Mine), IMAGE).unprunable["0"]


def test_wrong_declarations_and_models_that_do_not_run_say_so() -> None:
    class Lengthy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)

    lbyl.declare(Lengthy, "channelwise")
    net = nn.Sequential(conv(3, 8, 1), Lengthy(), linear(8 * 64, 2))
    assert "moves its channels" in checked(net, IMAGE).unprunable["0"]
    with pytest.raises(lbyl.LbylError, match=r"nn\.Module"):
        lbyl.declare(int, "opaque")  # type: ignore[arg-type]
    with pytest.raises(lbyl.LbylError, match="channelwise"):
        lbyl.declare(Wave, "sideways")
    with pytest.raises(lbyl.LbylError, match="does not run on the example inputs"):
        lbyl.trace(linear(3, 2), ROWS)


Step = Callable[[Tensor], Tensor]
DROPPED: dict[str, Step] = {
    "method": lambda x: x.max(dim=2).values,
    "function": lambda x: torch.max(x, 2)[0],
    "min": lambda x: x.min(dim=-1)[0],
    "median": lambda x: torch.median(x, dim=3).values,
    "keyword": lambda x: torch.max(input=x, dim=2).values,
    "axis": lambda x: torch.mean(x, axis=2),  # type: ignore[call-overload]
    "indices": lambda x: x.max(dim=2).indices.to(x),
    "amax": lambda x: x.amax(2),
    "twice": lambda x: torch.var_mean(x, 2)[1],
}
KEPT: dict[str, Step] = {
    "max": lambda x: x.max(dim=2, keepdim=True).values,
    "min": lambda x: torch.min(x, 3, True)[0],
    "median": lambda x: x.median(2, keepdim=True).values,
    "of two": lambda x: torch.max(x, other=x * x),
    "type": lambda x: x * len(x.type()),
    "cast like another": lambda x: x.to(x.mean((2, 3))).type_as(x.amax(2)),
    "normalize": lambda x: F.normalize(x, dim=(2, 3)),  # type: ignore[arg-type]
    "softmax over positions": lambda x: x.flatten(2).softmax(-1).view_as(x),
    "roll of positions": lambda x: x.roll((1, 2), (2, 3)),
    "in place": lambda x: x.unsqueeze_(0).squeeze_(0),
    "pad by keyword": lambda x: F.pad(input=x, pad=(1, 1, -1, 0), mode="reflect"),
}
MIXED: dict[str, Step] = {
    "max": lambda x: x - x.max(dim=1, keepdim=True).values,
    "softmax without a dimension": lambda x: F.softmax(x),
    "softmax along an axis": lambda x: torch.softmax(x, axis=1),  # type: ignore[call-overload]
    "cumsum along an axis": lambda x: torch.cumsum(x, axis=1),  # type: ignore[call-overload]
    "variance of all": lambda x: x / x.var(False),
    "roll": lambda x: x.roll(1, 1),
    "crop and pad": lambda x: F.pad(x, (0, 0, 0, 0, -1, 1)),
}


@pytest.mark.filterwarnings("ignore:Implicit dimension")
@pytest.mark.parametrize("kind", ["dropped", "kept", "mixed"])
def test_calls_keep_channels_apart_unless_they_mix_them(kind: str) -> None:
    steps = {"dropped": DROPPED, "kept": KEPT, "mixed": MIXED}[kind]
    behind = {"b": nn.Conv1d(8, 2, 1)} if kind == "dropped" else {}
    for name, step in steps.items():
        found = units(checked(between(step, **behind), IMAGE))
        assert found == ({} if kind == "mixed" else {"a": 8}), name


def _keyword_norm(m: Any, x: Tensor) -> Tensor:
    n, x = m.n, F.conv2d(x, weight=m.a.weight)
    own = {"running_mean": n.running_mean, "running_var": n.running_var}
    return m.b(F.batch_norm(x, bias=n.bias, weight=n.weight, **own))


def _torch_norm(m: Any, x: Tensor) -> Tensor:
    n, x = m.n, torch.conv2d(weight=m.a.weight, input=x)
    tensors = (n.weight, n.bias, n.running_mean, n.running_var)
    return m.b(torch.batch_norm(x, *tensors, False, 0.1, 1e-5, False))


@pytest.mark.parametrize("forward", [_keyword_norm, _torch_norm])
def test_tensors_of_a_norm_are_known_by_keyword_and_order(forward: Callable[..., Any]) -> None:
    net = Net(forward, a=conv(3, 8, 1, bias=False), n=nn.BatchNorm2d(8), b=conv(8, 2, 1))
    graph = checked(net, IMAGE)
    assert units(graph) == {"a": 8}
    norm = graph["a"].producers[0].norm
    assert norm is not None
    names = [norm.mean, norm.var, norm.weight, norm.bias]
    assert names == ["n.running_mean", "n.running_var", "n.weight", "n.bias"]


KEYWORDS: list[Callable[[Tensor, Any], Tensor]] = [
    lambda x, m: F.conv2d(x, weight=m.weight, bias=m.bias, stride=2),
    lambda x, m: F.conv2d(input=x, weight=m.weight, bias=m.bias),
    lambda x, m: F.conv2d(bias=m.bias, weight=m.weight, input=x, groups=1),
    lambda x, m: F.linear(input=x, weight=m.weight, bias=m.bias),
    lambda x, m: F.linear(bias=m.bias, weight=m.weight, input=x),
    lambda x, m: torch.addmm(m.bias, mat1=x, mat2=m.weight),
]


@pytest.mark.parametrize("layer", KEYWORDS)
def test_layers_take_keywords(layer: Callable[[Tensor, Any], Tensor]) -> None:
    kind, x = (conv, IMAGE) if KEYWORDS.index(layer) < 3 else (linear, ROWS)
    layers = (kind(3, 8, 1), kind(8, 2, 1)) if kind is conv else (kind(4, 8), kind(8, 2))
    net = Net(lambda m, x: layer(F.relu(layer(x, m.a)), m.b), **dict(zip("ab", layers)))
    if layer is KEYWORDS[-1]:  # weights that stand alone, the other way round
        for each in layers:
            each.weight = nn.Parameter(each.weight.detach().T.contiguous())
    assert units(checked(net, x)) == {"a": 8}
    result = lbyl.compress(net, x.double(), 0.5, data=32)  # what gathers hears keywords too
    assert result.model.get_parameter("a.bias").shape == (4,)


def test_attention_without_a_batch_is_counted() -> None:
    net = Net(lambda m, x: m.r(x, x, x)[0], r=nn.MultiheadAttention(8, 2))
    alone, batched = (lbyl.trace(net, x).macs() for x in (torch.randn(5, 8), torch.randn(5, 1, 8)))
    assert alone == batched > 0
