"""The network given is never changed, bit for bit, whatever its `forward` writes."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lbyl
from lbyl.rivals.errors import layer_errors


class Writes(nn.Module):
    """Two convolutions and a head; `write` is called with what the first one gives."""

    def __init__(self, write: Callable[[Any, Tensor], Tensor], **state: Any) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12)
        self.b, self.head = nn.Conv2d(12, 12, 3), nn.Linear(12, 5)
        self.write = write
        for name, value in state.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value, persistent=not name.startswith("aside"))
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.a(x)))
        h = self.write(self, h)
        return self.head(F.relu(self.b(h)).mean((2, 3)))


def counts(net: Any, h: Tensor) -> Tensor:
    net.n += 1
    return h


def counts_plainly(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    net.held.items["last"] = net.calls
    net.held.best = max(net.held.best, net.calls)
    return h


def averages(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.ema.mul_(0.9).add_(0.1 * h.mean())
        net.aside_ema.data.lerp_(h.mean(), 0.5)
    return h


def remembers(net: Any, h: Tensor) -> Tensor:
    net.mem = torch.zeros_like(h[:, :1])
    return h


def grows(net: Any, h: Tensor) -> Tensor:
    net.mem.resize_(len(h), 3)
    return h


def appends(net: Any, h: Tensor) -> Tensor:
    net.seen.append(h.mean())
    net.recent.append(len(net.seen))
    net.by_name["last"] = h.sum()
    net.names.add(len(h))
    net.by_name["inner"][0] += 1
    return h


def normalises_weights(net: Any, h: Tensor) -> Tensor:
    net.head.weight.data.mul_(0.99)
    with torch.no_grad():
        net.b.bias.add_(0.01)
    return h


def counts_in_numpy(net: Any, h: Tensor) -> Tensor:
    net.total += len(h)
    return h


def swaps_weights(net: Any, h: Tensor) -> Tensor:
    net.head.weight.data = net.head.weight.data * 0.99
    net.head.bias.requires_grad_(False)
    return h


def replaces(net: Any, h: Tensor) -> Tensor:
    net.extra = nn.Parameter(torch.zeros(2))
    net.twin = nn.Linear(2, 2)
    return h


def states() -> dict[str, dict[str, Any]]:
    return {
        "counts": {"n": torch.tensor(0)},
        "counts_plainly": {"calls": 0, "held": SimpleNamespace(items={}, best=0)},
        "averages": {"ema": torch.zeros(()), "aside_ema": torch.tensor(float("nan"))},
        "remembers": {"mem": torch.zeros(4, 1, 14, 14)},
        "grows": {"mem": torch.zeros(4, 3)},
        "appends": {"seen": [], "recent": deque([1]), "by_name": {"inner": [0]}, "names": {1}},
        "counts_in_numpy": {"total": np.zeros(3)},
        "normalises_weights": {},
        "swaps_weights": {},
        "replaces": {},
    }


WRITES = (
    counts,
    counts_plainly,
    averages,
    remembers,
    grows,
    appends,
    counts_in_numpy,
    normalises_weights,
    swaps_weights,
    replaces,
)


def build(write: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Writes(write, **states()[write.__name__])
    return model.eval(), torch.randn(4, 3, 16, 16)


def told(value: Any, seen: dict[int, str] | None = None, place: str = "") -> Any:
    """All that is kept on a module, to be compared: tensors bit for bit, numbers with their type.

    Where something stands twice the place at which it stood first is told.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        dense = value.detach().contiguous()
        bits = dense.reshape(-1).view(torch.uint8).tolist() if dense.numel() else []
        gradient = value.grad if value.is_leaf else None
        return (
            id(value),
            value.data_ptr(),
            value.shape,
            value.dtype,
            value.requires_grad,
            bits,
            gradient,
        )
    if isinstance(value, (int, float, str, bool, type(None))):
        return type(value), repr(value)
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = place
    if isinstance(value, dict):
        return [(k, told(v, seen, f"{place}.{k}")) for k, v in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [told(v, seen, f"{place}.{i}") for i, v in enumerate(value)]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, set):
        return sorted(map(repr, value))
    if isinstance(value, (nn.Module, SimpleNamespace)):
        return type(value), told(vars(value), seen, place)
    return repr(type(value))


def quick(model: nn.Module, x: Tensor) -> lbyl.Prepared:
    return lbyl.prepare(model, x, data=8)


def alone(model: nn.Module, x: Tensor) -> object:
    prepared = quick(model, x)
    return prepared.alone(prepared.plan(0.5, method="none"), "none")


VERBS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "trace": lambda m, x: lbyl.trace(m, x),
    "compress": lambda m, x: lbyl.compress(m, x, 0.5, data=8),
    "compress by own data": lambda m, x: lbyl.compress(
        m, x, 0.5, data=torch.randn(40, *x.shape[1:])
    ),
    "compress in sequence": lambda m, x: lbyl.compress(
        m, x, 0.5, data=torch.randn(40, *x.shape[1:]), method=lbyl.methods.Echo(sequential=True)
    ),
    "refine": lambda m, x: lbyl.refine(m, x, lbyl.compress(m, x, 0.5, method="none"), 2, data=8),
    "estimate": lambda m, x: lbyl.estimate(m, x, [0.5], data=8),
    "budget": lambda m, x: lbyl.compress(m, x, lbyl.Budget(macs=0.6), data=8),
    "latency budget": lambda m, x: quick(m, x).plan(lbyl.Budget(latency=0.9), method="none"),
    "plan": lambda m, x: quick(m, x).plan(0.5),
    "statistics": lambda m, x: quick(m, x).statistics(),
    "alone": alone,
    "layer errors": lambda m, x: layer_errors(quick(m, x), [0.5]),
    "forecast": lambda m, x: quick(m, x).forecast(copy.deepcopy(m)),
}


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
@pytest.mark.parametrize("verb", ["trace", "compress"])
def test_nothing_that_forward_writes_stays_on_the_model(
    verb: str, write: Callable[[Any, Tensor], Tensor]
) -> None:
    model, x = build(write)
    before = told(model)
    with suppress(lbyl.LbylError):
        VERBS[verb](model, x)
    assert told(model) == before


@pytest.mark.parametrize(
    ("verb", "mode"),
    [
        pytest.param(verb, mode, marks=() if (i + mode) % 2 else pytest.mark.slow)
        for i, verb in enumerate(VERBS)
        for mode in (True, False)
    ],
)
def test_no_verb_changes_the_model(verb: str, mode: bool) -> None:
    def write(net: Any, h: Tensor) -> Tensor:
        return appends(net, counts(net, averages(net, h)))

    given = {**states()["counts"], **states()["averages"], **states()["appends"]}
    model = Writes(write, **given).train(mode)
    model.a.eval()
    before = told(model)
    with suppress(lbyl.LbylError) if verb == "latency budget" else nullcontext():
        VERBS[verb](model, torch.randn(4, 3, 16, 16))  # times of small networks are mostly chance
    assert told(model) == before


@pytest.mark.parametrize(
    "write", [counts, averages, remembers, counts_plainly, appends, counts_in_numpy]
)
def test_the_slim_network_has_the_state_that_was_given(
    write: Callable[[Any, Tensor], Tensor], tmp_path: Path
) -> None:
    model, x = build(write)
    result = lbyl.compress(model, x, 0.5, data=8)
    assert result.plan.pruned
    for name in states()[write.__name__]:
        here, there = (told(getattr(m, name)) for m in (model, result.model))
        if isinstance(getattr(model, name), Tensor):  # another tensor, of the same numbers
            here, there = here[2:], there[2:]
        assert here == there, name
    lbyl.save(result, tmp_path / "slim")
    again = lbyl.load(tmp_path / "slim", build(write)[0])
    assert torch.equal(again(x), result.model(x))


@pytest.mark.parametrize("after", [1, 5, 20])
@pytest.mark.parametrize("verb", ["compress", "refine"])
def test_an_error_leaves_the_model_as_it_was(verb: str, after: int) -> None:
    runs = []

    def write(net: Any, h: Tensor) -> Tensor:
        net.n += 1
        net.training = True
        runs.append(1)
        if len(runs) > after:
            raise RuntimeError("no more")
        return h

    model = Writes(write, n=torch.tensor(0)).eval()
    before = told(model)
    try:
        VERBS[verb](model, torch.randn(4, 3, 16, 16))
    except lbyl.LbylError as error:
        assert "no more" in str(error) or "nothing in this model" in str(error)
    assert told(model) == before


def test_an_embedding_that_renormalises_its_rows_keeps_them() -> None:
    model = nn.Sequential(
        nn.Embedding(20, 16, max_norm=1.0), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)
    ).eval()
    before = told(model)
    result = lbyl.compress(model, torch.randint(20, (4, 6)), 0.5)
    assert told(model) == before
    assert torch.equal(result.model[0].weight, model[0].weight)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_the_vectors_of_spectral_norm_do_not_advance(old: bool, mode: bool) -> None:
    normed = nn.utils.spectral_norm if old else parametrizations.spectral_norm
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), normed(nn.Conv2d(16, 8, 3))
    )
    model.append(nn.Conv2d(8, 8, 1)).append(nn.ReLU()).append(nn.Conv2d(8, 4, 1))
    model.train(mode)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    result = lbyl.compress(model, torch.randn(4, 3, 16, 16), 0.5, data=8)
    assert result.plan.pruned
    after = model.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert all(m.training == mode for m in (*model.modules(), *result.model.modules()))
    vectors = [n for n in before if n.endswith(("_u", "_v"))]
    assert vectors
    assert all(torch.equal(before[n], result.model.state_dict()[n]) for n in vectors)


def test_weights_that_evaluation_merges_are_not_changed() -> None:
    class Adapted(nn.Linear):
        """A layer that adds an update to its weights in evaluation, as some adapters do."""

        def train(self, mode: bool = True) -> Adapted:
            if mode != self.training:
                self.weight.data += 0.1 if not mode else -0.1
            return super().train(mode)

    torch.manual_seed(0)
    model = nn.Sequential(Adapted(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    before = told(model)
    lbyl.compress(model, torch.randn(4, 8), 0.5)
    assert told(model) == before


def test_weights_are_shared_and_not_copied_to_be_run() -> None:
    model, x = build(counts)
    prepared = lbyl.prepare(model, x)
    given = dict(model.named_parameters())
    for name, parameter in prepared.model.named_parameters():
        assert parameter.data_ptr() == given[name].data_ptr()
