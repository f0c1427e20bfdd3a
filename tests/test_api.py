"""Compressing: what comes out is a true, smaller, trainable network with its story."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lbyl
from support import quick
from support.networks import NETWORKS, build, example

OWN = ("coreset", "fold")  # which choose channels themselves


def check_attributes(model: nn.Module) -> None:
    """Every layer must say of itself what its tensors are."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            rows, columns = module.weight.shape[:2]
            assert (module.out_channels, module.in_channels) == (rows, columns * module.groups)
            assert module.bias is None or module.bias.shape == (rows,)
        elif isinstance(module, nn.Linear):
            assert (module.out_features, module.in_features) == module.weight.shape
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is not None and tensor.shape == (module.num_features,)
        elif isinstance(module, nn.GroupNorm):
            assert module.num_channels == len(module.weight)
            assert module.num_channels % module.num_groups == 0


@pytest.mark.parametrize("name", NETWORKS)
def test_attributes_are_true_and_the_network_trains(name: str) -> None:
    model, x = build(name), example(name, 8)
    result = quick.compress(model, x, 0.5)
    slim = result.model
    assert type(slim) is type(model)
    check_attributes(slim)
    for unit in result.graph:
        assert len(result.plan.kept[unit.name]) == unit.channels // 2
    slim.train()
    optimizer = torch.optim.SGD(slim.parameters(), lr=0.01)
    before = [p.detach().clone() for p in slim.parameters()]
    loss = nn.functional.cross_entropy(slim(x), torch.arange(8) % slim(x).shape[1])
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in slim.parameters())
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, slim.parameters()))


def test_sizes_before_and_after_are_those_of_the_models() -> None:
    model, x = build("chain"), example("chain")
    result = lbyl.compress(model, x, 0.5, method="none")
    for size, m in ((result.before, model), (result.after, result.model)):
        assert size.parameters == sum(p.numel() for p in m.parameters())
        state = [*m.parameters(), *m.buffers()]
        assert size.bytes == sum(t.numel() * t.element_size() for t in state)
        assert size.macs == 64 * (m[0].weight.numel() + m[3].weight.numel()) + m[8].weight.numel()


def test_macs_do_not_depend_on_the_batch() -> None:
    model = build("chain")
    sizes = [lbyl.compress(model, example("chain", n), 0.5, method="none").after for n in (1, 7)]
    assert sizes[0] == sizes[1]


def test_the_result_is_plain_data_and_readable() -> None:
    model, x = build("bottleneck"), example("bottleneck")
    result = quick.compress(model, x, 0.5)
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (
        document["method"]["name"] == "echo" and document["plan"]["units"]["conv1"]["channels"] == 8
    )
    assert {"trace", "images", "collect", "restore"} <= document["seconds"].keys()
    assert all(seconds >= 0 for seconds in document["seconds"].values())
    text = str(result)
    assert " ".join(text.split()).startswith(str(result.forecast))  # what people ask first
    assert "echo" in text and "parameters" in text and "MACs" in text and "bytes" in text
    assert "4/8" in text and "5/10" in text and "conv1" in text
    assert max(map(len, text.splitlines())) < 100
    assert "model=" not in repr(result) or len(repr(result)) < 2000


def test_compressing_again_and_again() -> None:
    """A slim network is a network: it can be made slimmer still."""
    model, x = build("chain"), example("chain")
    for wanted in (5, 2):
        model = quick.compress(model, x, 0.5).model
        assert model[0].out_channels == wanted
        check_attributes(model)
    assert bool(model(x).isfinite().all())


@dataclass(frozen=True)
class Merge(lbyl.methods.Method):
    """A method that also rewrites the kept channels: pairs averaged, then made `gain` times."""

    name: ClassVar[str] = "merge"
    gain: float = 1.0

    def deliver(self, weights: Any, kept: Tensor, statistics: Any) -> lbyl.methods.Delivery:
        pairs = torch.eye(5, dtype=torch.float64).repeat(2, 1)  # channels 5…9 are 0…4 again
        gains = torch.full((5,), self.gain, dtype=torch.float64)
        return lbyl.methods.Delivery(pairs / self.gain, pairs.T / 2, gains)


@pytest.mark.parametrize("gain", [1.0, 2.5])
def test_kept_channels_may_become_mixtures(gain: float) -> None:
    model, x = build("chain", 5), example("chain")
    with torch.no_grad():
        for tensor in (model[0].weight, *model[1].state_dict().values()):
            if tensor.dim():
                tensor[5:] = tensor[:5]
        model[1].bias.zero_()  # so that the gain on γ is one on the channel
    slim = lbyl.compress(model, x, 0.5, method=Merge(gain), criterion="random-3", include="0").model
    torch.testing.assert_close(slim[1].weight, gain * model[1].weight[:5])
    torch.testing.assert_close(slim(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "layer"), [("basic", "stem"), ("bottleneck", "conv3")])
def test_residual_channels_can_be_cut_too(name: str, layer: str) -> None:
    model, x = build(name), example(name)
    for method in lbyl.methods.names():
        options = {"method": method, "criterion": None if method in OWN else "l2"}
        result = quick.compress(model, x, {"*": 0.5}, residual=True, **options)
        assert len(result.plan.kept[layer]) == result.graph[layer].channels // 2
        check_attributes(result.model)
        assert bool(result.model(x).isfinite().all())


def test_defaults_are_three_tenths_with_echo_and_l2_for_other_methods() -> None:
    result = quick.compress(build("chain"), example("chain"))
    assert result.method["name"] == "echo" and result.method["correction"] == "recalibrate"
    # Of the two criteria that are tried the one that diverges less is told.
    assert result.chosen_by in ("l2", "echo") and result.allocation is not None
    assert {"criterion l2", "criterion echo"} <= result.allocation.tried.keys()
    other = lbyl.compress(build("chain"), example("chain"), method="lbyl")
    assert other.criterion == {"name": "l2"} and len(other.plan.kept["0"]) == 7
    assert len(result.plan.kept["0"]) == 7


@pytest.mark.parametrize(
    ("dtype", "method"),
    [(torch.float64, "echo"), (torch.bfloat16, "echo"), (torch.bfloat16, "neuron-merging")],
)
def test_the_type_of_the_weights_is_kept(dtype: torch.dtype, method: str) -> None:
    model, x = build("chain").to(dtype), example("chain").to(dtype)
    result = quick.compress(model, x, 0.5, method=method)
    assert all(p.dtype == dtype for p in result.model.parameters())
    assert result.model(x).dtype == dtype and bool(result.model(x).isfinite().all())


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_example_inputs_of_every_form(form: str) -> None:
    model, x = build("basic"), example("basic")
    inputs: Any = {"tensor": x, "tuple": (x,), "dict": {"x": x}}[form]
    result = quick.compress(model, inputs, 0.5)
    wanted = quick.compress(model, x, 0.5)
    assert torch.equal(result.model(x), wanted.model(x))


def test_progress_is_told_to_the_end() -> None:
    seen: list[tuple[str, int, int]] = []
    model, x = build("bottleneck"), example("bottleneck")
    everywhere = {"*": 0.5}  # by one criterion: nothing is tried beside
    quick.compress(model, x, everywhere, criterion="l2", progress=lambda *s: seen.append(s))
    solving = [step for step in seen if step[0] == "solving"]
    consumers = len({"conv2", "conv3", "head"})
    assert solving == [("solving", step, consumers) for step in range(1, consumers + 1)]
    assert ("collecting", 1, 1) in seen


def test_the_released_methods_come_back_from_json() -> None:
    for method in (
        lbyl.methods.LBYL(0.1, 0.2, "released"),
        lbyl.methods.NeuronMerging(0.5, 0.2, "released"),
        lbyl.methods.Echo(0.1),
        lbyl.methods.Coreset(4),
        lbyl.methods.OneToOne(),
        lbyl.methods.Prune(),
    ):
        data = json.loads(json.dumps(method.to_dict()))
        assert lbyl.methods.resolve(data) == method


def test_echo_recovers_more_than_pruning_on_a_redundant_network() -> None:
    """Filters that are noisy copies of others: most of the error must go."""
    model, x = build("chain", 3), example("chain", 64)
    with torch.no_grad():
        for tensor in (model[0].weight, *model[1].state_dict().values()):
            if tensor.dim():
                tensor[5:] = tensor[:5] + 0.02 * torch.randn_like(tensor[5:])
    errors = {}
    for method in ("none", "lbyl", "neuron-merging", "one-to-one", "echo"):
        options = {"criterion": "random-3", "include": "0", "images": 256}
        slim = quick.compress(model, x, 0.5, method=method, **options).model
        errors[method] = float((slim(x) - model(x)).square().mean().detach())
    for method in ("lbyl", "neuron-merging", "one-to-one", "echo"):
        assert errors[method] < 0.1 * errors["none"], errors
    assert math.isfinite(errors["echo"])
