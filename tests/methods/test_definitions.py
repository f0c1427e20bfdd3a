"""Small parts of the methods by their definitions: what each says of itself, and their edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.graph.weights import UnitWeights, unit_weights
from lbyl.methods.base import Method, Rewrite, identity_rows
from lbyl.methods.lbyl import eigen, reciprocal, ridge
from lbyl.methods.neuron_merging import SHORTEST, TINY, normalised
from support.networks import build, example

FLAGS = ("needs_statistics", "chooses", "by_unit", "restores_products", "in_threads")
SAID = {
    "none": "by_unit",
    "lbyl": "by_unit in_threads",
    "neuron-merging": "by_unit",
    "one-to-one": "by_unit",
    "coreset": "by_unit chooses",
    "fold": "by_unit chooses",
    "moments": "needs_statistics restores_products",
    "echo": "needs_statistics restores_products",
}


def test_methods_say_what_they_are() -> None:
    assert set(SAID) == set(lbyl.methods.names())
    for name, said in SAID.items():
        method = lbyl.methods.resolve(name)
        assert {flag for flag in FLAGS if getattr(method, flag)} == set(said.split()), name
        assert method.corrects == (method.correction != "none") == (name in ("echo", "moments"))
        assert method.tries == (name == "echo")
        assert method.source == ("analytic" if name == "moments" else "procedural")
    assert not any(getattr(Method, flag) for flag in FLAGS if flag != "by_unit")
    assert Method().by_unit and not Method.restores_duplicates


def chain(seed: int = 2) -> nn.Sequential:
    model = build("chain", seed)
    assert isinstance(model, nn.Sequential)
    return model


def weights_of(model: nn.Module, name: str = "0") -> UnitWeights:
    return unit_weights(lbyl.trace(model, example("chain")), model)[name]


# --------------------------------------------------------------------------------- coreset


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_chances_are_sensitivities_at_every_scale(scale: float) -> None:
    model = chain()
    with torch.no_grad():
        model[3].weight *= scale
        model[3].weight[:, 4] = 0
    weights = weights_of(model)
    largest = weights.consumer_weights.abs().max(1).values
    expected = largest * weights.folded.square().sum(1).sqrt()
    found = lbyl.methods.Coreset()._probabilities(weights)
    assert float(found.sum()) == pytest.approx(1) and 0 < float(found[4]) < 1e-11
    torch.testing.assert_close(found, expected / expected.sum(), rtol=1e-9, atol=1e-11)


def test_where_nothing_is_sensitive_all_have_the_same_chance() -> None:
    model = chain()
    with torch.no_grad():
        model[3].weight.zero_()
    assert lbyl.methods.Coreset()._probabilities(weights_of(model)).tolist() == [0.1] * 10


def test_draws_stop_with_the_last_distinct_channel() -> None:
    weights, method = weights_of(chain()), lbyl.methods.Coreset(seed=5)
    for count in range(1, 10):
        draws = method._draws(weights, count)
        assert int((draws > 0).sum()) == count
        less = method._draws(weights, count - 1) if count > 1 else torch.zeros(10)
        assert bool((draws >= less).all())
        new = (draws > 0) & (less == 0)  # the last draw was the first of its channel
        assert draws[new].tolist() == [1] and int(draws.sum()) >= count
    assert method.select(weights, 10).tolist() == list(range(10))
    kept = method.select(weights, 4)
    draws = method._draws(weights, 4).double()
    chance = method._probabilities(weights)
    matrix = method.deliver(weights, kept, None).matrix
    wanted = torch.zeros(10, 4).double()
    wanted[kept, torch.arange(4)] = (draws / chance / draws.sum())[kept]
    torch.testing.assert_close(matrix, wanted)


def test_channels_that_are_all_but_never_drawn_come_by_size() -> None:
    model = chain()
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].weight[0, 3] = 1.0
        model[3].weight[0, 7] = 1e-9
    kept = lbyl.methods.Coreset().select(weights_of(model), 2)
    assert kept.tolist() == [3, 7]


# ------------------------------------------------------------------------- neuron merging


@pytest.mark.parametrize(("variant", "off"), [("released", True), ("corrected", False)])
def test_what_never_varied_is_off_in_the_published_code_alone(variant: str, off: bool) -> None:
    model = chain()
    with torch.no_grad():
        model[1].running_var[2] = 1e-13
        model[1].weight[5] = 0.5 * TINY
        model[1].weight[6] = -0.5 * TINY
        model[1].weight[7] = 2 * TINY
    norm = weights_of(model).norm
    assert norm is not None
    found = lbyl.methods.NeuronMerging(variant=variant)._switched_off(norm)
    assert torch.nonzero(found).flatten().tolist() == ([2, 5, 6] if off else [5, 6])


@pytest.mark.parametrize("bias", [True, False])
def test_zeros_neither_give_nor_receive(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 8, bias=bias), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for tensor in model[0].parameters():
            tensor[[1, 6]] = 0
            tensor[2] = SHORTEST / 10
    weights = unit_weights(lbyl.trace(model, torch.zeros(1, 5)), model)["0"]
    method = lbyl.methods.NeuronMerging(threshold=-1.0)
    matrix = method.deliver(weights, torch.arange(4), None).matrix
    assert float(matrix[6].abs().max()) < 1e-25 and not bool(matrix[4:, [1, 2]].any())
    assert bool((matrix[[4, 5, 7]] != 0).sum(1).eq(1).all())


@pytest.mark.parametrize("normed", [True, False])
def test_where_all_that_stay_are_zeros_nothing_is_given(normed: bool) -> None:
    norm = nn.BatchNorm1d(4) if normed else nn.Identity()
    model = nn.Sequential(nn.Linear(5, 4, bias=False), norm, nn.ReLU(), nn.Linear(4, 3)).eval()
    with torch.no_grad():
        model[0].weight[:2] = 0
    weights = unit_weights(lbyl.trace(model, torch.zeros(1, 5)), model)["0"]
    method = lbyl.methods.NeuronMerging(threshold=-1.0)
    assert not bool(method.deliver(weights, torch.arange(2), None).matrix[2:].any())
    if normed:
        with torch.no_grad():
            model[0].weight[:2] = 1
            norm.weight[:2] = 0  # switched off, all of them
        weights = unit_weights(lbyl.trace(model, torch.zeros(1, 5)), model)["0"]
        assert not bool(method.deliver(weights, torch.arange(2), None).matrix[2:].any())


@pytest.mark.parametrize(("normed", "limit"), [(True, 0.1), (False, 0.45)])
def test_who_is_less_alike_than_the_limit_gives_nothing(normed: bool, limit: float) -> None:
    for cosine, given in ((limit + 0.01, True), (limit - 0.01, False)):
        norm = nn.BatchNorm1d(3) if normed else nn.Identity()
        first = nn.Linear(2, 3, bias=False)
        model = nn.Sequential(first, norm, nn.ReLU(), nn.Linear(3, 2)).eval()
        with torch.no_grad():
            side = (1 - cosine**2) ** 0.5
            first.weight.copy_(torch.tensor([[1.0, 0], [-1.0, 0], [cosine, side]]))
        weights = unit_weights(lbyl.trace(model, torch.zeros(1, 2)), model)["0"]
        matrix = lbyl.methods.NeuronMerging().deliver(weights, torch.arange(2), None).matrix
        assert matrix[:2].tolist() == [[1, 0], [0, 1]]
        assert bool(matrix[2].any()) == given and matrix[2, 1] == 0


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_the_balance_is_between_direction_and_constant(balance: float) -> None:
    weights, kept = weights_of(chain(4)), torch.arange(5)
    method = lbyl.methods.NeuronMerging(balance=balance, threshold=-2.0)
    best = method.deliver(weights, kept, None).matrix[5:].abs().argmax(1)
    norm, f = weights.norm, weights.filters
    assert norm is not None
    lengths = f.norm(dim=1)
    scale = lengths[5:, None] / lengths[:5]
    delivered, distance = method._scale(norm, scale, kept, torch.arange(5, 10))
    cosine = (f[5:] @ f[:5].T) / (lengths[5:, None] * lengths[:5])
    assert best.tolist() == (distance.argmin(1) if balance == 0 else cosine.argmax(1)).tolist()
    g = norm.gamma / norm.sigma
    torch.testing.assert_close(delivered, scale * g[5:, None] / g[:5])
    # At the centre of a pruned channel, where it is zero, its receiver is off by the distance.
    centre = scale * (norm.mean - norm.beta / g)[5:, None]
    off = (g[:5] * (centre - norm.mean[:5]) + norm.beta[:5]).abs()
    torch.testing.assert_close(distance * delivered, off)


def test_rows_are_stretched_to_one() -> None:
    rows = torch.tensor([[2.0, 3.0, 6.0], [4.0, 4.0, 4.0], [-1.0, 1.0, 0.0]]).double()
    assert normalised(rows).tolist() == [[0, 0.25, 1], [0, 0, 0], [0, 1, 0.5]]
    torch.testing.assert_close(normalised(1e-20 * rows), normalised(rows))


# ------------------------------------------------------------------------------------ lbyl


def test_directions_without_information_count_for_nothing() -> None:
    scale = torch.tensor([2.0, 1.0]).double()
    x = torch.tensor([4.0, 1e-12, 2e-13, 1e-13, 0.0, -1.0]).double()
    assert reciprocal(x, scale).tolist() == pytest.approx([0.25, 1e12, 0, 0, 0, 0])
    tiny = 1e-200 * scale
    assert reciprocal(tiny, tiny).tolist() == pytest.approx([5e199, 1e200])
    assert reciprocal(0 * scale, 0 * scale).tolist() == [0, 0]


def test_ridge_regression_of_rows_on_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    known, targets = (torch.randn(n, 9, generator=generator).double() for n in (4, 3))
    values, vectors = eigen(known @ known.T)
    torch.testing.assert_close(vectors @ torch.diag(values) @ vectors.T, known @ known.T)
    inner = known @ known.T + 0.3 * torch.eye(4).double()
    expected = torch.linalg.solve(inner, known @ targets.T).T
    torch.testing.assert_close(ridge(known, targets, 0.3), expected)
    twice = torch.cat([known, known])  # of two equal rows each takes half
    torch.testing.assert_close(ridge(twice, targets, 0.0)[:, :4], ridge(known, targets, 0.0) / 2)


def test_a_gram_matrix_that_cannot_be_decomposed_delivers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError("no convergence")  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    rows = torch.randn(3, 4).double()
    for product in (rows @ rows.T, torch.stack([rows @ rows.T] * 2)):
        values, vectors = eigen(product)
        assert values.shape == product.shape[:-1] and vectors.shape == product.shape
        assert not bool(values.any()) and not bool(vectors.any())
    assert not bool(ridge(rows, rows, 0.1).any())


# ------------------------------------------------------------------------------------ base


def test_kept_channels_are_themselves() -> None:
    matrix = identity_rows(4, torch.tensor([1, 3]), torch.zeros(1))
    assert matrix.dtype == torch.float64
    assert matrix.tolist() == [[0, 0], [1, 0], [0, 0], [0, 1]]


def test_one_to_one_takes_the_nearest_and_changes_nothing_else() -> None:
    weights, kept = weights_of(chain(3)), torch.tensor([1, 4, 6, 7])
    matrix = lbyl.methods.OneToOne().deliver(weights, kept, None).matrix
    for j in range(10):
        nearest = (weights.folded[j] - weights.folded[kept]).norm(dim=1).argmin()
        assert matrix[j].tolist() == [float(i == nearest) for i in range(4)]
    every = lbyl.methods.OneToOne().deliver(weights, torch.arange(10), None).matrix
    assert torch.equal(every, torch.eye(10).double())


def test_a_consumer_that_reads_other_units_too_keeps_their_columns() -> None:
    """Only the columns of a unit with a plan are mixed; all others that are kept stay."""
    graph = lbyl.trace(chain(), example("chain"))
    consumer, unit = graph.consumers["3"], graph["0"]
    weight = torch.randn(8, 10, 9).double()
    kept = torch.tensor([0, 1, 2, 5, 8])
    columns = torch.isin(torch.arange(10), kept)
    delivery = lbyl.methods.OneToOne().deliver(weights_of(chain()), kept, None)

    def rewritten(**given: object) -> Tensor:
        deliveries = {unit.name: delivery}
        plans = {unit.name: kept}
        rewrite = Rewrite(graph, consumer, weight, columns, deliveries, plans, None)
        for name, value in given.items():
            object.__setattr__(rewrite, name, value)
        return lbyl.methods.OneToOne().rewrite(rewrite)

    expected = torch.einsum("omk,mt->otk", weight, delivery.matrix)
    torch.testing.assert_close(rewritten(), expected)
    assert torch.equal(rewritten(kept={}), weight[:, columns])
    assert torch.equal(rewritten(deliveries={}), weight[:, columns])


def test_a_ridge_may_be_nothing_and_not_less() -> None:
    assert lbyl.methods.Echo(ridge=0.0).ridge == 0
    with pytest.raises(lbyl.LbylError, match="ridge"):
        lbyl.methods.Echo(ridge=-1e-9)
    with pytest.raises(lbyl.LbylError, match="taps"):
        lbyl.methods.Echo(taps="none")
