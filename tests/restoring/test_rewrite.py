"""From a plan to new weights: what is delivered, merged, told, and what is left when it fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.graph.weights import UnitWeights
from lbyl.methods.base import Delivery, Method, identity_rows
from lbyl.restoring import rewrite
from lbyl.restoring.rewrite import Restoration, Written, restore
from lbyl.restoring.solving import Solution, Solver
from lbyl.statistics.moments import Statistics
from lbyl.torchkit.fallbacks import noting
from support import quick
from support.networks import build, example

KEPT = torch.tensor([1, 2, 4, 7])


@dataclass(frozen=True)
class Made(Method):
    """Delivers what it is given."""

    delivery: Any = None
    in_threads = False

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        made: Delivery = self.delivery
        return made


def chain() -> tuple[nn.Sequential, lbyl.Graph, lbyl.Plan]:
    model = build("chain", 3)
    assert isinstance(model, nn.Sequential)
    graph = lbyl.trace(model, example("chain"))
    return model, graph, quick.plan_for(graph, {"0": KEPT, "3": torch.arange(8)})


def mixing(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Any matrix by which channels are read, any by which they are mixed, and factors."""
    generator = torch.Generator().manual_seed(seed)
    matrix, merge = (torch.randn(*s, generator=generator).double() for s in ((10, 4), (4, 10)))
    return matrix, merge, torch.rand(4, generator=generator).double() + 0.5


@pytest.mark.parametrize("with_gain", [True, False])
def test_what_is_merged_and_what_is_read(with_gain: bool) -> None:
    model, graph, plan = chain()
    matrix, merge, gain = mixing()
    method = Made(delivery=Delivery(matrix, merge, gain if with_gain else None))
    slim = restore(model, graph, plan, method, None).model
    assert isinstance(slim, nn.Sequential)
    old, new = model.double(), slim.double()
    wanted = torch.einsum("tm,m...->t...", merge, old[0].weight)
    torch.testing.assert_close(new[0].weight, wanted, rtol=1e-5, atol=1e-5)
    for name in ("bias", "running_mean", "running_var"):
        wanted = merge @ getattr(old[1], name)
        torch.testing.assert_close(getattr(new[1], name), wanted, rtol=1e-5, atol=1e-5)
    wanted = merge @ old[1].weight * (gain if with_gain else 1)
    torch.testing.assert_close(new[1].weight, wanted, rtol=1e-5, atol=1e-5)
    wanted = torch.einsum("omkl,mt->otkl", old[3].weight, matrix)
    torch.testing.assert_close(new[3].weight, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(new[4].weight, old[4].weight)


def test_units_that_stay_whole_are_not_asked_for() -> None:
    model, graph, plan = chain()
    matrix, merge, _ = mixing()
    done = restore(model, graph, plan, Made(delivery=Delivery(matrix, merge)), None)
    assert list(done.deliveries) == ["0"] and set(done.consumers) == {"3"}
    assert set(done.weights) == {"0", "3"}


@pytest.mark.parametrize("part", ["matrix", "merge", "gain"])
def test_what_is_not_finite_is_not_delivered(part: str) -> None:
    model, graph, plan = chain()
    parts = dict(zip(("matrix", "merge", "gain"), mixing()))
    parts[part].flatten()[3] = torch.nan
    with noting() as notes:
        done = restore(model, graph, plan, Made(delivery=Delivery(**parts)), None)
    assert [note for note in notes if "not finite" in note and note.startswith("0: ")]
    cut = restore(model, graph, plan, lbyl.methods.resolve("none"), None).model
    for name, value in cut.state_dict().items():
        assert torch.equal(done.model.state_dict()[name], value)
    like = torch.zeros(1)
    assert torch.equal(done.deliveries["0"].matrix, identity_rows(10, KEPT, like))


def test_mixtures_too_large_for_the_model_are_not_made() -> None:
    model, graph, plan = chain()
    matrix, merge, gain = mixing()
    with noting() as notes:
        done = restore(
            model, graph, plan, Made(delivery=Delivery(matrix, 1e39 * merge, gain)), None
        )
    assert [note for note in notes if "no channels are merged" in note]
    assert torch.equal(done.deliveries["0"].matrix, identity_rows(10, KEPT, torch.zeros(1)))
    assert torch.equal(done.model[0].weight, model[0].weight[KEPT])  # type: ignore[index]
    assert torch.equal(done.model[3].weight, model[3].weight[:, KEPT])  # type: ignore[index]


def test_weights_too_large_for_the_model_are_only_cut() -> None:
    model, graph, plan = chain()
    matrix, _, _ = mixing()
    with noting() as notes:
        done = restore(model, graph, plan, Made(delivery=Delivery(1e39 * matrix)), None)
    assert [note for note in notes if note.startswith("3: only cut")]
    assert torch.equal(done.model[3].weight, model[3].weight[:, KEPT])  # type: ignore[index]
    assert done.consumers["3"] == Written()


def test_progress_is_told_for_every_consumer() -> None:
    model, graph, _ = chain()
    plan = quick.plan_for(graph, {"0": KEPT, "3": [0, 5]})
    told: list[tuple[str, int, int]] = []
    restore(model, graph, plan, lbyl.methods.resolve("none"), None, lambda *s: told.append(s))
    assert told == [("solving", 1, 2), ("solving", 2, 2)]


@pytest.mark.parametrize("correction", ["none", "mean", "mean+variance"])
def test_what_was_put_back_is_told(correction: str) -> None:
    model, graph, _ = chain()
    plan = quick.plan_for(graph, {"0": KEPT, "3": [0, 5]})
    measured = quick.statistics(model, example("chain"))
    done = restore(model, graph, plan, quick.correcting("echo", correction), measured)
    for name, written in done.consumers.items():
        assert written.error is not None and 0 < written.error < 1
        assert written.mean == (correction != "none")
        assert written.variance == (correction == "mean+variance" and name == "3")
    assert done.deliveries == {}  # each consumer was solved on its own


def test_the_error_of_a_unit_is_the_largest_at_its_consumers() -> None:
    model, graph, _ = chain()
    unit = graph["0"]
    done = Restoration(model, {}, {}, {"3": Written(0.2), "other": Written(0.9)}, {"0": 0.1})
    assert done.error_of(unit) == 0.2 and done.error_of(graph["3"]) is None
    done = Restoration(model, {}, {}, {"3": Written(0.2)}, {"0": 0.4})
    assert done.error_of(unit) == 0.4
    assert Restoration(model, {}, {}, {"3": Written()}).error_of(unit) is None


@pytest.mark.parametrize(("error", "told"), [(0.25, 0.25), (float("inf"), None), (None, None)])
def test_errors_that_are_no_numbers_are_not_told(error: float | None, told: float | None) -> None:
    model, graph, _ = chain()
    solver = Solver(model, graph, lbyl.methods.resolve("echo"), None)
    consumer = graph.consumers["3"]
    norm = consumer.norm
    assert norm is not None
    for names, mean, variance in (
        ([consumer.weight], False, False),
        ([consumer.weight, norm.mean], True, False),
        ([consumer.weight, norm.mean, norm.var], True, True),
    ):
        solution = Solution(dict.fromkeys(names, torch.zeros(1)), error, True, ())
        assert rewrite._told(consumer, solution, solver) == Written(told, mean, variance)


def test_units_are_measured_where_all_their_consumers_are() -> None:
    model, graph, _ = chain()
    measured = quick.statistics(model, example("chain"))
    assert rewrite._all_measured(graph["0"], measured)
    assert not rewrite._all_measured(graph["0"], None)
    assert not rewrite._all_measured(graph["0"], Statistics({"8": measured.moments["8"]}))


def test_rows_of_channels_that_differ_in_size_are_refused() -> None:
    _, graph, _ = chain()
    unit = graph["0"]
    even = unit.start + torch.tensor([i for i in range(10) for _ in range(2)])
    assert rewrite._rows_of(even, unit).tolist() == [[2 * i, 2 * i + 1] for i in range(10)]
    with pytest.raises(lbyl.LbylError, match="differ in size"):
        rewrite._rows_of(even[:-1], unit)
