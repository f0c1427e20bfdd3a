"""`neuron-merging`: the published rule, written out pair by pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lbyl
from support.delivery import Layer, close, layer, some_kept

Merging = lbyl.methods.NeuronMerging
VARIANTS = ["corrected", "released"]


def pair_by_pair(
    of: Layer, kept: list[int], j: int, variant: str, balance: float, limit: float
) -> Tensor:
    """The row of S for pruned j, with Python loops and plain numbers."""
    f, (gamma, beta, mean, var, sigma) = of.filters, of.norm
    sigma = var if variant == "released" else sigma
    cosines, distances, scales = [], [], []
    for k in kept:
        ratio = float(f[j].norm() / f[k].norm())
        factor = (gamma[j] / gamma[k]) * (sigma[k] / sigma[j])
        scale = ratio / float(factor) if variant == "released" else ratio * float(factor)
        centre = mean[j] - sigma[j] * beta[j] / gamma[j]
        gap = gamma[k] / sigma[k] * (ratio * centre - mean[k]) + beta[k]
        cosines.append(float(f[j] @ f[k] / (f[j].norm() * f[k].norm())))
        distances.append(abs(float(gap)) / scale)
        scales.append(scale)
    low, high = min(distances), max(distances)
    stretched = [(d - low) / (high - low) for d in distances]
    scores = [balance * (1 - c) + (1 - balance) * d for c, d in zip(cosines, stretched)]
    best = min(range(len(kept)), key=scores.__getitem__)
    row = torch.zeros(len(kept), dtype=torch.float64)
    row[best] = scales[best] if cosines[best] >= limit else 0.0
    return row


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("balance", [None, 0.0, 0.4, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_delivery_is_the_published_rule(variant: str, balance: float | None, seed: int) -> None:
    of = layer("linear" if seed == 3 else "conv", seed, 8 + seed)
    kept, gone = some_kept(of.channels, seed)
    if balance is None:
        method, options = Merging(variant=variant), (0.85, 0.1)
    else:
        method, options = Merging(balance, -0.2, variant), (balance, -0.2)
    found = of.delivered(kept, method)
    for j in gone.tolist():
        close(found[j], pair_by_pair(of, kept.tolist(), j, variant, *options))
    close(found[kept], torch.eye(len(kept)).double())


@pytest.mark.parametrize("kind", ["bare conv", "bare linear"])
def test_without_batchnorm_the_most_similar_neuron_receives(kind: str) -> None:
    of, (kept, gone) = layer(kind, 2), some_kept(10)
    with torch.no_grad():  # some are zeros, and one is all but zeros: they give and receive nothing
        for tensor in of.model[0].parameters():
            tensor[torch.stack([kept[1], gone[2]])] = 0
            tensor[kept[2]] = 1e-32
    found = of.delivered(kept, Merging(threshold=-1.0))
    cosine = torch.cosine_similarity(of.rows[:, None], of.rows[kept], dim=2)
    cosine[:, [1, 2]] = -2
    best = cosine.argmax(1)
    lengths = of.rows.norm(dim=1)
    wanted = torch.zeros(10, 5).double()
    wanted[torch.arange(10), best] = lengths / lengths[kept][best]
    wanted[kept] = torch.eye(5).double()
    close(found, wanted)
    close(of.delivered(kept, Merging(threshold=1.01))[gone], torch.zeros(5, 5).double())


@pytest.mark.parametrize("kind", ["bare linear", "linear"])
def test_where_all_that_stay_are_zeros_nothing_is_given(kind: str) -> None:
    of, kept, nothing = layer(kind), torch.arange(5), torch.zeros(5, 5).double()
    with torch.no_grad():
        for tensor in of.model[0].parameters():
            tensor[:5] = 0
    close(of.delivered(kept, Merging(threshold=-1.0))[5:], nothing)
    if kind == "linear":
        of = layer(kind, 1)
        with torch.no_grad():
            of.model[1].weight[:5] = 0  # switched off, all of them
        close(of.delivered(kept, Merging(threshold=-1.0))[5:], nothing)


@pytest.mark.parametrize("kind, limit", [("linear", 0.1), ("bare linear", 0.45)])
def test_who_is_less_alike_than_the_limit_gives_nothing(kind: str, limit: float) -> None:
    for cosine, given in ((limit + 0.001, True), (limit - 0.001, False)):
        of = layer(kind, channels=3)
        side = (1 - cosine**2) ** 0.5
        with torch.no_grad():
            of.model[0].weight.zero_()
            of.model[0].bias.zero_()
            of.model[0].weight[:, :2] = torch.tensor([[1.0, 0], [-1.0, 0], [cosine, side]])
        row = of.delivered(torch.arange(2), Merging())[2]
        assert bool(row[0].abs() > 1e-3) == given and abs(float(row[1])) < 1e-12


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_channel_switched_off_neither_gives_nor_receives(variant: str) -> None:
    """A γ of less than a millionth; in the published code also what never varied."""
    of = layer(seed=2)
    conv, norm = of.model[0], of.model[1]
    with torch.no_grad():
        conv.weight[5] = conv.weight[0]  # 5's only good match is 0
        norm.weight[0], norm.weight[6] = 5e-7, -5e-7  # a kept one is off, and a pruned one
        norm.weight[7] = 2e-6  # not quite
        norm.running_var[8], norm.running_var[9] = 1e-13, 1e-11
    found = of.delivered(torch.arange(5), Merging(variant=variant, threshold=-1.0))
    gives = (found[5:].abs() > 0).any(1).tolist()
    assert gives == [True, False, True, variant == "corrected", True]
    assert not bool(found[5:, 0].any()) and bool(found.isfinite().all())
    assert float(found[5].abs().max()) < 1e3


@pytest.mark.parametrize("options", [{"variant": "new"}, {"balance": 2.0}, {"balance": -0.1}])
def test_options_that_mean_nothing_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(lbyl.LbylError, match="neuron-merging"):
        Merging(**options)  # type: ignore[arg-type]
