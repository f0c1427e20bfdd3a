"""Every method and criterion passes the checks, and the checks notice what they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import lbyl
from lbyl.methods.base import identity_rows


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """What a test registers is gone after it."""
    registries: list[Any] = [lbyl.methods.registry, lbyl.criteria.registry]
    before = [dict(registry._classes) for registry in registries]
    yield
    for registry, classes in zip(registries, before):
        registry._classes = classes


@pytest.mark.parametrize("name", lbyl.methods.names())
def test_a_registered_method_passes(name: str) -> None:
    lbyl.methods.check(name)


@pytest.mark.parametrize("name", lbyl.criteria.names())
def test_a_registered_criterion_passes(name: str) -> None:
    lbyl.criteria.check(name)


@pytest.mark.parametrize("name", ["lbyl", "neuron-merging"])
def test_released_variants_pass(name: str) -> None:
    lbyl.methods.check(lbyl.methods.resolve({"name": name, "variant": "released"}))


def test_what_restores_duplicates_is_known() -> None:
    claims = {n for n in lbyl.methods.names() if lbyl.methods.resolve(n).restores_duplicates}
    assert claims == {"fold", "neuron-merging", "one-to-one"}


@pytest.mark.parametrize("name", ["none", "coreset", "lbyl", "moments", "echo"])
def test_no_other_method_could_claim_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`none` and `coreset` lose duplicates; a ridge comes near, not all the way."""
    method = lbyl.methods.resolve(name)
    monkeypatch.setattr(type(method), "restores_duplicates", True)
    with pytest.raises(lbyl.LbylError, match=f"'{name}' fails the check 'duplicates'"):
        lbyl.methods.check(method)


Deliver = Callable[[Any, Tensor], Tensor]


def method_that(deliver: Deliver, claims: bool = False) -> lbyl.methods.Method:
    """A registered method with this delivery matrix."""

    @lbyl.methods.register("mine")
    @dataclass(frozen=True)
    class Mine(lbyl.methods.Method):
        restores_duplicates: ClassVar[bool] = claims

        def deliver(self, weights: Any, kept: Tensor, statistics: Any) -> lbyl.methods.Delivery:
            return lbyl.methods.Delivery(deliver(weights, kept))

    return Mine()


def rows(weights: Any, kept: Tensor) -> Tensor:
    return identity_rows(weights.unit.channels, kept, weights.filters)


def not_finite(weights: Any, kept: Tensor) -> Tensor:
    """Divides by the length of a filter, which may be zero."""
    matrix = rows(weights, kept)
    lengths = weights.filters.norm(dim=1)
    matrix[torch.isin(torch.arange(len(matrix)), kept, invert=True)] = 1 / lengths[kept]
    return matrix


def with_chance(weights: Any, kept: Tensor) -> Tensor:
    matrix = rows(weights, kept)
    gone = torch.isin(torch.arange(len(matrix)), kept, invert=True)
    chance = torch.Generator()
    chance.seed()  # of its own: torch's own is the same in every compression
    matrix[gone] = torch.randn(int(gone.sum()), len(kept), dtype=matrix.dtype, generator=chance)
    return matrix


def greedy(weights: Any, kept: Tensor) -> Tensor:
    """Changes the network's own weights on the way."""
    weights.state[weights.unit.producers[0].weight].data.mul_(1.5)
    return rows(weights, kept)


@pytest.mark.parametrize(
    ("name", "deliver"),
    [
        ("shape", lambda w, kept: rows(w, kept).T),
        ("ratio 0 is the identity", lambda w, kept: 2 * rows(w, kept)),
        ("finite", not_finite),
        ("deterministic", with_chance),
        ("the model is not changed", greedy),
    ],
)
def test_a_method_that_errs_is_named_with_its_check(name: str, deliver: Deliver) -> None:
    with pytest.raises(lbyl.LbylError, match=f"method 'mine' fails the check '{name}'"):
        lbyl.methods.check(method_that(deliver))


def test_a_claim_that_does_not_hold_is_noticed() -> None:
    lbyl.methods.check(method_that(rows))
    with pytest.raises(lbyl.LbylError, match="fails the check 'duplicates': pruning"):
        lbyl.methods.check(method_that(rows, claims=True))


def test_a_method_without_a_name_is_told_to_register() -> None:
    @dataclass(frozen=True)
    class Nameless(lbyl.methods.Method):
        pass

    with pytest.raises(lbyl.LbylError, match="Nameless fails the check 'registered'"):
        lbyl.methods.check(Nameless())


def test_settings_that_json_does_not_know_are_noticed() -> None:
    @lbyl.criteria.register("mine")
    @dataclass(frozen=True)
    class Mine(lbyl.criteria.Criterion):
        weights: Any = None

    with pytest.raises(lbyl.LbylError, match="criterion 'mine' fails the check 'serialisable'"):
        lbyl.criteria.check(Mine(torch.ones(3)))


@pytest.mark.parametrize(
    "select", [lambda n: torch.arange(n).flip(0), lambda n: torch.arange(n + 1), torch.zeros]
)
def test_a_criterion_that_does_not_count_is_noticed(select: Callable[[int], Tensor]) -> None:
    @lbyl.criteria.register("mine")
    @dataclass(frozen=True)
    class Mine(lbyl.criteria.Criterion):
        def select(self, weights: Any, count: int, statistics: Any) -> Tensor:
            return select(count)

    with pytest.raises(lbyl.LbylError, match="criterion 'mine' fails the check 'choice'"):
        lbyl.criteria.check(Mine())


def test_no_method_and_no_criterion_is_refused() -> None:
    with pytest.raises(lbyl.LbylError, match="is no method"):
        lbyl.methods.check(lbyl.criteria.resolve("l2"))
    with pytest.raises(lbyl.LbylError, match="is no criterion"):
        lbyl.criteria.check(lbyl.methods.resolve("none"))
    with pytest.raises(lbyl.LbylError, match="unknown method"):
        lbyl.methods.check("no such method")
