"""Bad input gives one clear error that names the culprit, and the model is left as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import lbyl
from support import quick
from support.networks import build, example, fingerprint


def refused(message: str, model: nn.Module | None = None, **options: Any) -> str:
    model = build("chain") if model is None else model
    model.train()
    next(iter(model.modules())).training = False
    before = fingerprint(model)
    options = {"example_inputs": example("chain"), "ratio": 0.5, **options}
    with pytest.raises(lbyl.LbylError, match=message) as caught:
        lbyl.compress(model, **options)
    assert fingerprint(model) == before
    assert "\n\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("ratio", [1.0, -0.5, float("nan"), 30])
def test_ratio(ratio: float) -> None:
    assert str(ratio) in refused("at least 0 and below 1", ratio=ratio)


def test_names_list_what_there_is() -> None:
    message = refused("unknown method 'ecko'", method="ecko")
    assert all(name in message for name in lbyl.methods.names())
    message = refused("unknown criterion 'l3'", criterion="l3")
    assert all(name in message for name in lbyl.criteria.names())
    method = {"name": "echo", "correction": "median"}
    message = refused("unknown correction 'median'", method=method)
    assert all(name in message for name in ("recalibrate", "mean+variance", "mean", "none"))


def test_methods_and_criteria_are_told_apart() -> None:
    refused("is no criterion.*l2-gm", criterion=lbyl.methods.Echo())
    refused("is no method.*echo", method=lbyl.criteria.resolve("l2"))
    refused("unknown method", method=lbyl.methods.Echo)  # the class instead of an instance
    refused("does not take these options.*lambda9", method={"name": "lbyl", "lambda9": 1})


@pytest.mark.parametrize(
    ("name", "value"), [("3.weight", math.nan), ("4.running_var", math.inf), ("8.bias", math.nan)]
)
def test_weights_that_are_not_finite_are_named(name: str, value: float) -> None:
    model = build("chain")
    model.state_dict()[name].flatten()[0] = value
    assert name in refused("NaN or Inf", model)


def test_a_model_with_nothing_to_prune() -> None:
    single = nn.Sequential(nn.Linear(12, 5))
    refused("nothing in this model can be pruned.*0: ", single, example_inputs=torch.zeros(1, 12))
    refused("no layers", nn.Sequential(nn.ReLU()), example_inputs=torch.zeros(1, 12))
    refused("nothing in this model can be pruned", exclude="*")


def test_no_model_at_all() -> None:
    with pytest.raises(lbyl.LbylError, match=r"torch\.nn\.Module, not dict"):
        lbyl.compress({}, torch.zeros(1), 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "inputs", [torch.zeros(1, 4, 8, 8), torch.zeros(1, 3), {"image": torch.zeros(1, 3, 8, 8)}, ()]
)
def test_example_inputs_that_do_not_fit(inputs: Any) -> None:
    refused("does not run on the example inputs", example_inputs=inputs)


@pytest.mark.parametrize("stage", ["collecting", "solving", "refining", "forecasting"])
def test_the_model_is_whole_after_an_error_halfway(stage: str) -> None:
    model, x = build("bottleneck"), example("bottleneck")
    model.train()
    model.bn1.eval()
    model.conv1.weight.requires_grad_(False)
    before = fingerprint(model)

    def breaking(at: str, step: int, steps: int) -> None:
        if at == stage:
            raise RuntimeError("the power went out")

    with pytest.raises(RuntimeError, match="power"):
        lbyl.compress(model, x, {"*": 0.5}, data=16, refine=2, progress=breaking)
    assert fingerprint(model) == before


class Failing(nn.Module):
    """Runs while it is traced, and fails at the large batch of a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("chain")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            raise RuntimeError("out of memory")
        return self.inner(x)


def test_the_model_is_whole_after_failing_in_its_own_forward() -> None:
    model = Failing().train()
    before = fingerprint(model)
    with pytest.raises(Exception, match="out of memory"):
        lbyl.compress(model, example("chain"), 0.5, data=16)
    assert fingerprint(model) == before


def test_half_precision_that_would_overflow_is_only_cut() -> None:
    model = build("dense").half()
    with torch.no_grad():
        model[3].weight.fill_(60000.0)
        model[0].weight.copy_(torch.ones_like(model[0].weight))
        model[0].bias.zero_()
    inputs = torch.zeros(1, 12, dtype=torch.half)
    result = lbyl.compress(model, inputs, 0.5, method="one-to-one", include="0")
    assert [line for line in result.fallbacks if line.startswith("3: only cut")]
    assert all(value.isfinite().all() for value in result.model.state_dict().values())


@pytest.mark.parametrize("method", lbyl.methods.names())
def test_the_model_is_whole_after_success_too(method: str) -> None:
    model = build("basic")
    model.train()
    model.bn1.eval()
    model.head.bias.requires_grad_(False)
    before = fingerprint(model)
    result = quick.compress(model, example("basic"), 0.5, method=method, images=16)
    assert fingerprint(model) == before
    modes = {name: module.training for name, module in model.named_modules()}
    assert {name: module.training for name, module in result.model.named_modules()} == modes
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    found = {name: p.requires_grad for name, p in result.model.named_parameters()}
    assert {name: found[name] for name in flags} == flags
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {p.data_ptr() for p in result.model.parameters()}
