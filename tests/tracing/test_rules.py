"""What each kind of call does to channels, on networks of a few layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.errors import LbylError
from lbyl.graph.declare import declare
from lbyl.surgery.indices import kept_indices
from lbyl.tracing.labels import Flow
from lbyl.tracing.record import Call
from lbyl.tracing.rules.base import RuleError
from support import reference


class Net(nn.Module):
    """Layers by name, and a forward given as a function of them."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def checked(model: nn.Module, inputs: Any, **options: Any) -> lbyl.Graph:
    """The graph, after a cut at 40 % was compared with the silenced original."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dtype.is_floating_point:
            tensor.data.uniform_(0.2, 1.0).mul_(torch.randn(tensor.shape).sign().abs())
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


IMAGE = torch.randn(2, 3, 8, 8)
conv = nn.Conv2d


def test_depthwise_convolution_lies_between_producer_and_consumer() -> None:
    net = nn.Sequential(conv(3, 8, 1), conv(8, 8, 3, groups=8), nn.ReLU6(), conv(8, 4, 1))
    graph = checked(net, IMAGE)
    assert units(graph) == {"0": 8}
    assert graph["0"].between == ("1",)


def test_groups_of_a_grouped_convolution_go_as_a_whole() -> None:
    net = nn.Sequential(conv(3, 12, 1), conv(12, 24, 3, groups=4), nn.ReLU(), conv(24, 4, 1))
    assert units(checked(net, IMAGE)) == {"0": 4}


def test_two_groups_can_become_one() -> None:
    net = nn.Sequential(conv(3, 8, 1), conv(8, 8, 3, groups=2), nn.ReLU(), conv(8, 4, 1))
    graph = checked(net, IMAGE)
    assert units(graph) == {"0": 2}


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_of_any_rank_with_batch_norm(dims: int) -> None:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    net = nn.Sequential(layer(3, 8, 3), norm(8), nn.SiLU(), layer(8, 4, 1))
    graph = checked(net, torch.randn(2, 3, *[6] * dims))
    assert units(graph) == {"0": 8}
    assert graph["0"].producers[0].norm is not None


def test_transposed_convolutions_produce_and_consume() -> None:
    up = nn.ConvTranspose2d
    net = nn.Sequential(up(3, 8, 2, 2), nn.ELU(), up(8, 6, 3, groups=1), nn.GELU(), conv(6, 2, 1))
    assert units(checked(net, IMAGE)) == {"0": 8, "2": 6}


def test_grouped_transposed_convolution_goes_by_groups() -> None:
    up = nn.ConvTranspose2d(8, 12, 2, groups=4)
    graph = checked(nn.Sequential(conv(3, 8, 1), up, nn.ReLU(), conv(12, 2, 1)), IMAGE)
    assert units(graph) == {"0": 4}


def test_linear_behind_flatten_loses_a_block_of_columns_per_channel() -> None:
    net = nn.Sequential(
        conv(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5), nn.Linear(5, 2)
    )
    graph = checked(net, IMAGE)
    assert units(graph) == {"0": 8, "3": 5}
    assert graph.columns(graph["0"], graph.consumers["3"]).shape == (8, 36)


def test_linear_behind_global_pooling_and_batch_norm_1d() -> None:
    net = Net(
        lambda m, x: m.c(F.relu(m.n(m.b(m.a(x).mean((2, 3)))))),
        a=conv(3, 8, 3), b=nn.Linear(8, 7), n=nn.BatchNorm1d(7), c=nn.Linear(7, 2),
    )  # fmt: skip
    assert units(checked(net, IMAGE)) == {"a": 8, "b": 7}


def test_group_norm_ties_the_channels_of_a_group() -> None:
    net = nn.Sequential(conv(3, 12, 1), nn.GroupNorm(4, 12), nn.ReLU(), conv(12, 2, 1))
    graph = checked(net, IMAGE)
    assert units(graph) == {"0": 4}


def test_layer_norm_over_channels_leaves_them_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    graph = checked(net, torch.randn(2, 5, 4))
    assert not graph.units
    assert "layer_norm" in graph.unprunable["0"]


def test_concatenation_keeps_branches_apart() -> None:
    net = Net(
        lambda m, x: m.c(torch.cat([m.a(x), m.b(x), x], 1)),
        a=conv(3, 4, 1), b=conv(3, 6, 1), c=conv(13, 2, 1),
    )  # fmt: skip
    assert units(checked(net, IMAGE)) == {"a": 4, "b": 6}


def test_parallel_branches_that_meet_in_a_sum_go_together() -> None:
    net = Net(
        lambda m, x: m.c(m.a(x) + m.b(x)), a=conv(3, 6, 1), b=conv(3, 6, 3, padding=1),
        c=conv(6, 2, 1),
    )  # fmt: skip
    graph = checked(net, IMAGE)
    assert units(graph) == {"a": 6}
    assert [p.name for p in graph["a"].producers] == ["a", "b"]
    assert not graph["a"].residual


def _residual(m: Any, x: Tensor) -> Any:
    x = m.stem(x)
    return m.head(x + m.b(F.relu(m.a(x))))


def test_residual_streams_are_opt_in() -> None:
    layers = {"stem": conv(3, 6, 1), "a": conv(6, 8, 1), "b": conv(8, 6, 1), "head": conv(6, 2, 1)}
    graph = checked(Net(_residual, **layers), IMAGE)
    assert units(graph) == {"a": 8}
    assert "residual=True" in graph.unprunable["stem"]
    graph = checked(Net(_residual, **layers), IMAGE, residual=True)
    assert units(graph) == {"stem": 6, "a": 8}
    assert graph["stem"].residual


def test_squeeze_and_excitation_gates_follow_their_channels() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        x = m.a(x)
        return m.c(x * torch.sigmoid(m.up(F.relu(m.down(x.mean((2, 3), keepdim=True))))))

    layers = {"a": conv(3, 8, 1), "down": conv(8, 4, 1), "up": conv(4, 8, 1), "c": conv(8, 2, 1)}
    graph = checked(Net(forward, **layers), IMAGE)
    assert units(graph) == {"a": 8, "down": 4}
    assert {p.name for p in graph["a"].producers} == {"a", "up"}


def test_channel_shuffle_and_chunk() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        a, b = m.a(x).chunk(2, 1)
        x = torch.cat([a, F.relu(b)], 1)
        n, c, h, w = x.shape
        return m.b(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))

    graph = checked(Net(forward, a=conv(3, 8, 1), b=conv(8, 2, 1)), IMAGE)
    assert units(graph) == {"a": 4}


def test_gates_of_a_gated_linear_unit_go_together() -> None:
    net = nn.Sequential(nn.Linear(4, 12), nn.GLU(), nn.Linear(6, 2))
    assert units(checked(net, torch.randn(2, 4))) == {"0": 6}


def test_pixel_shuffle_takes_whole_blocks() -> None:
    net = nn.Sequential(conv(3, 24, 1), nn.PixelShuffle(2), nn.ReLU(), conv(6, 2, 1))
    assert units(checked(net, IMAGE)) == {"0": 6}


def test_prelu_slopes_are_sliced_along() -> None:
    net = nn.Sequential(conv(3, 8, 1), nn.PReLU(8), conv(8, 2, 1))
    graph = checked(net, IMAGE)
    assert graph["0"].between == ("1",)


def test_in_place_calls_and_upsampling_are_followed() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        x = F.relu_(m.a(x))
        x += 1
        x.mul_(2)
        return m.b(F.interpolate(F.pad(x, (1, 1, 1, 1)), scale_factor=2.0, mode="bilinear"))

    assert units(checked(Net(forward, a=conv(3, 8, 1), b=conv(8, 2, 3)), IMAGE)) == {"a": 8}


def test_writing_into_a_blank_tensor_of_the_same_channels() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        x = m.a(x)
        out = torch.zeros((4, *x.shape[1:]), dtype=x.dtype)
        out[torch.tensor([0, 2])] = x
        return m.b(out)

    assert units(checked(Net(forward, a=conv(3, 8, 1), b=conv(8, 2, 1)), IMAGE)) == {"a": 8}


def test_a_size_written_into_the_code_is_found_out() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.c(m.b(F.relu(m.a(x))).view(2, 8, -1).transpose(1, 2))

    net = Net(forward, a=conv(3, 6, 1), b=conv(6, 8, 1), c=nn.Linear(8, 2))
    graph = checked(net, IMAGE)
    assert units(graph) == {"a": 6}
    assert graph.unprunable["b"] == "its size is written into the model's code"


def test_split_at_fixed_sizes_is_unprunable() -> None:
    net = Net(
        lambda m, x: m.b(sum(m.a(x).split(4, 1))), a=conv(3, 8, 1), b=conv(4, 2, 1)
    )  # fmt: skip
    graph = checked(net, IMAGE)
    assert not graph.units and "a" in graph.unprunable


def test_a_shared_layer_is_treated_once() -> None:
    net = Net(lambda m, x: m.b(F.relu(m.a(x)) + m.a(x.flip(2))), a=conv(3, 8, 1), b=conv(8, 2, 1))
    graph = checked(net, IMAGE)
    assert units(graph) == {"a": 8}
    net = Net(
        lambda m, x: m.c(m.b(F.relu(m.b(m.a(x))))),
        a=conv(3, 6, 1),
        b=conv(6, 6, 1),
        c=conv(6, 2, 1),
    )
    graph = checked(net, IMAGE)  # its rows and columns are one set of channels
    assert all(u.name == "a" for u in graph)


def test_a_weight_also_used_as_a_plain_matrix_is_unprunable() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.b(F.relu(m.a(x))) + m.a.weight.t().sum()

    graph = checked(Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 2)), torch.randn(2, 4))
    assert not graph.units
    assert "also used by" in graph.unprunable["a"]


def test_tied_embedding_and_output_are_unprunable() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.a, self.b = nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.b(F.gelu(self.a(self.table(x)))), self.table.weight)

    assert units(checked(Tied(), torch.randint(9, (2, 5)))) == {"a": 8}


def test_weight_norm_is_unprunable() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 2))
    graph = checked(net, torch.randn(2, 4))
    assert not graph.units
    assert "forward pass" in graph.unprunable["0"]


def test_recurrent_layers_are_opaque_but_harmless() -> None:
    net = Net(
        lambda m, x: m.c(m.r(F.relu(m.b(F.relu(m.a(x)))))[0]),
        a=nn.Linear(4, 8), b=nn.Linear(8, 6), r=nn.GRU(6, 5, batch_first=True), c=nn.Linear(5, 2),
    )  # fmt: skip
    graph = checked(net, torch.randn(2, 7, 4))
    assert units(graph) == {"a": 8}
    assert "gru" in graph.unprunable["b"]


def test_torch_transformer_layers_lose_hidden_neurons() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    graph = checked(net, torch.randn(2, 5, 16))
    assert units(graph) == {"layers.0.linear1": 24, "layers.1.linear1": 24}


def test_inputs_may_be_tuples_and_dicts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
            return {"out": self.b(F.relu(self.a(x)) * scale)}

    inputs = (torch.randn(2, 4), torch.rand(2, 1) + 1)
    assert units(checked(Two(), inputs)) == {"a": 8}
    assert units(checked(Two(), dict(zip(("x", "scale"), inputs)))) == {"a": 8}


def test_frozen_batch_norm_is_known_as_a_norm() -> None:
    ops = pytest.importorskip("torchvision.ops")
    net = nn.Sequential(conv(3, 8, 1), ops.FrozenBatchNorm2d(8), nn.ReLU(), conv(8, 4, 1),
                        ops.FrozenBatchNorm2d(4))  # fmt: skip
    graph = checked(net, IMAGE)
    assert units(graph) == {"0": 8}
    norm = graph["0"].producers[0].norm
    assert norm is not None and norm.mean == "1.running_mean"
    assert graph.consumers["3"].norm is not None


class Wave(nn.Module):
    """A module torch functions hide nothing of, but declared as one anyway."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.width
        return torch.sort(x, dim=1).values * 0 + torch.sin(x) * self.scale[:, None, None]


def test_a_declared_module_is_one_call() -> None:
    class Mine(Wave):
        pass

    net = nn.Sequential(conv(3, 8, 1), Mine(8), conv(8, 2, 1))
    assert not checked(net, IMAGE).units, "sort mixes channels, as far as rules can tell"
    declare(Mine, "channelwise", sizes={"width": "scale"})
    graph = checked(net, IMAGE)
    assert units(graph) == {"0": 8}
    assert graph["0"].between == ("1",)
    declare(Mine, "opaque")
    assert "Mine" in checked(net, IMAGE).unprunable["0"]


def test_a_rule_can_be_declared() -> None:
    class Mine(Wave):
        pass

    def rule(flow: Flow, call: Call) -> list[Tensor]:
        labels = flow.of(call.args[0].value)
        scale = flow.of(call.inputs[1]).reshape(-1, 1, 1)
        flow.atoms.tie(labels, scale, "it meets a fixed scale")
        return [labels]

    declare(Mine, rule, sizes={"width": "scale"})
    net = nn.Sequential(conv(3, 8, 1), Mine(8), conv(8, 2, 1))
    assert units(checked(net, IMAGE)) == {"0": 8}


def test_a_rule_that_raises_is_an_error_in_tests_and_opaque_for_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mine(Wave):
        pass

    def rule(flow: Flow, call: Call) -> list[Tensor]:
        raise ValueError("not foreseen")

    declare(Mine, rule)
    net = nn.Sequential(conv(3, 8, 1), Mine(8), conv(8, 2, 1))
    with pytest.raises(RuleError, match=r"Mine in '1' raised: not foreseen"):
        checked(net, IMAGE)
    monkeypatch.setattr("lbyl.tracing.rules.base.STRICT", False)
    assert "Mine" in checked(net, IMAGE).unprunable["0"]


def test_declared_channelwise_but_not_so_is_unprunable() -> None:
    class Lengthy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)

    declare(Lengthy, "channelwise")
    net = nn.Sequential(conv(3, 8, 1), Lengthy(), nn.Linear(8 * 64, 2))
    assert "moves its channels" in checked(net, IMAGE).unprunable["0"]


def test_declaring_nonsense_says_so() -> None:
    with pytest.raises(LbylError, match=r"nn\.Module"):
        declare(int, "opaque")  # type: ignore[arg-type]
    with pytest.raises(LbylError, match="channelwise"):
        declare(Wave, "sideways")


def test_a_model_that_does_not_run_says_so() -> None:
    with pytest.raises(LbylError, match="does not run on the example inputs"):
        lbyl.trace(nn.Linear(3, 2), torch.randn(2, 4))


def test_ties_are_transitive_and_pins_spread() -> None:
    net = nn.Sequential(conv(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 2, 1))
    graph = lbyl.trace(net.eval(), IMAGE)
    kept = {"0": torch.tensor([0, 3, 5])}
    indices = kept_indices(graph, kept)
    cut = {name for (name, _), index in indices.items() if index.tolist() == [0, 3, 5]}
    assert cut == {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var",
                   "3.weight"}  # fmt: skip


Step = Callable[[Tensor], Tensor]

REDUCED: dict[str, Step] = {
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


@pytest.mark.parametrize("name", REDUCED)
def test_reductions_that_drop_a_dimension_keep_channels(name: str) -> None:
    net = Net(lambda m, x: m.b(REDUCED[name](m.a(x))), a=conv(3, 8, 1), b=nn.Conv1d(8, 2, 1))
    assert units(checked(net, IMAGE)) == {"a": 8}


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


@pytest.mark.parametrize("name", KEPT)
def test_calls_that_keep_channels_apart(name: str) -> None:
    net = Net(lambda m, x: m.b(KEPT[name](m.a(x))), a=conv(3, 8, 1), b=conv(8, 2, 1))
    assert units(checked(net, IMAGE)) == {"a": 8}


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
@pytest.mark.parametrize("name", MIXED)
def test_calls_that_mix_channels_leave_them_alone(name: str) -> None:
    net = Net(lambda m, x: m.b(MIXED[name](m.a(x))), a=conv(3, 8, 1), b=conv(8, 2, 1))
    assert not checked(net, IMAGE).units


def test_channels_repeated_at_an_edge_are_unprunable() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.b(F.pad(m.a(x), (1, 1), mode="reflect"))

    net = Net(forward, a=nn.Linear(3, 8), b=nn.Linear(10, 2))
    assert "repeats channels" in checked(net, torch.randn(2, 5, 3)).unprunable["a"]


def _keyword_norm(m: Any, x: Tensor) -> Tensor:
    n = m.n
    x = F.conv2d(x, weight=m.a.weight)
    return m.b(
        F.batch_norm(
            x, running_mean=n.running_mean, running_var=n.running_var, bias=n.bias, weight=n.weight
        )
    )


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


KEYWORDS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "weight": lambda x, m: F.conv2d(x, weight=m.weight, bias=m.bias, stride=2),
    "input": lambda x, m: F.conv2d(input=x, weight=m.weight, bias=m.bias),
    "reversed": lambda x, m: F.conv2d(bias=m.bias, weight=m.weight, input=x, groups=1),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_convolutions_take_keywords(name: str) -> None:
    layer = KEYWORDS[name]
    net = Net(lambda m, x: layer(F.relu(layer(x, m.a)), m.b), a=conv(3, 8, 1), b=conv(8, 2, 1))
    assert units(checked(net, IMAGE)) == {"a": 8}
    result = lbyl.compress(net, IMAGE.double(), 0.5)  # what gathers statistics hears keywords too
    assert result.model.get_parameter("a.weight").shape[0] == 4


LINEAR: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "linear": lambda x, m: F.linear(input=x, weight=m.weight, bias=m.bias),
    "reversed": lambda x, m: F.linear(bias=m.bias, weight=m.weight, input=x),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_take_keywords(name: str) -> None:
    layer = LINEAR[name]
    net = Net(lambda m, x: layer(layer(x, m.a).relu(), m.b), a=nn.Linear(3, 8), b=nn.Linear(8, 2))
    assert units(checked(net, torch.randn(4, 3))) == {"a": 8}


class Matrices(nn.Module):
    """Weights that stand alone, multiplied by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 8)), nn.Parameter(torch.randn(8, 2))
        self.c = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.c, mat1=torch.matmul(x, other=self.a).relu(), mat2=self.b)


def test_products_take_keywords() -> None:
    assert units(checked(Matrices(), torch.randn(4, 3))) == {"a": 8}


def test_attention_without_a_batch_is_counted() -> None:
    net = Net(lambda m, x: m.r(x, x, x)[0], r=nn.MultiheadAttention(8, 2))
    alone, batched = (lbyl.trace(net, x).macs() for x in (torch.randn(5, 8), torch.randn(5, 1, 8)))
    assert alone == batched > 0


def test_where_with_a_condition_alone_and_splits_of_nothing_are_opaque() -> None:
    """They tell positions, or divide a tensor without entries: handled, not an error of a rule."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.a(x)
        torch.where(x[0, 0] > 1e9)
        empty = x.mean((2, 3))[:0]
        return m.b(x) + sum(part.sum() for part in empty.split([0], 0))

    graph = lbyl.trace(Net(forward, a=conv(3, 6, 1), b=conv(6, 2, 1)), IMAGE)
    assert "a" in graph.unprunable
