"""The plainer methods by their definitions, and what each method says of itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from support.delivery import close, layer, some_kept
from support.networks import NETWORKS, build, example

FLAGS = ("needs_statistics", "chooses", "by_unit", "restores_products")
SAID = {
    "none": "by_unit",
    "lbyl": "by_unit",
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
        assert method.source == ("analytic" if name == "moments" else "procedural")
    with pytest.raises(lbyl.LbylError, match="wonder"):
        lbyl.methods.resolve("wonder")


# ------------------------------------------------------------------------ none, one-to-one


@pytest.mark.parametrize("name", NETWORKS)
def test_none_is_zeroing_at_the_consumers(name: str) -> None:
    model, x = build(name).double(), example(name, 3).double()
    result = lbyl.compress(model, x, 0.5, method="none")
    handles = []
    for consumer in result.graph.consumers.values():
        dead = torch.zeros(len(consumer.channel), dtype=torch.bool)
        for unit in result.graph:
            gone = sorted(set(range(unit.channels)) - set(result.plan.kept[unit.name].tolist()))
            dead |= torch.isin(consumer.channel, torch.tensor(gone) + unit.start)

        def zero(module: nn.Module, args: tuple[Tensor], dead: Tensor = dead) -> tuple[Tensor]:
            return (args[0].masked_fill(dead.reshape(-1, *[1] * (args[0].dim() - 2)), 0),)

        handles.append(model.get_submodule(consumer.name).register_forward_pre_hook(zero))
    expected = model(x)
    for handle in handles:
        handle.remove()
    close(result.model(x).detach(), expected.detach(), 1e-10)
    assert not torch.allclose(expected, model(x))


@pytest.mark.parametrize("kind", ["conv", "linear", "bare conv", "bare linear"])
def test_one_to_one_adds_outgoing_weights_to_the_nearest_filter(kind: str) -> None:
    of = layer(kind, 3)
    kept, _ = some_kept(10)
    nearest = torch.cdist(of.folded, of.folded[kept]).argmin(1)
    close(of.delivered(kept, "one-to-one"), F.one_hot(nearest, 5).double())


# --------------------------------------------------------------------------------- coreset


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("kind", ["conv", "bare linear"])
def test_coreset_weighs_by_how_often_it_drew_against_the_chance(kind: str, scale: float) -> None:
    """A channel drawn n times of N with the chance p has its weights times n/(pN).

    The chance is as the largest weight that reads it times the length of its folded filter. Draws
    stop with the last distinct channel, which has thus been drawn once.
    """
    of = layer(kind, 5, repeats=False)
    with torch.no_grad():
        of.model[3].weight.mul_(scale)
    chance = of.reader.abs().amax(0) * of.folded.norm(dim=1)
    chance = chance / chance.sum()
    seen = set()
    for seed in range(6):
        method = lbyl.methods.Coreset(seed=seed)
        result = of.cut(4, method)
        kept = result.plan.kept["0"]
        carried = of.carried(result)
        factors = carried[kept].diagonal()
        close(carried, torch.zeros(10, 4).double().index_put((kept, torch.arange(4)), factors))
        shares = factors * chance[kept]  # n/N of each
        assert float(shares.sum()) == pytest.approx(1, abs=1e-9)
        counts = shares / shares.min()
        close(counts, counts.round())
        again = of.cut(4, method)
        assert torch.equal(kept, again.plan.kept["0"])
        seen.add(tuple(kept.tolist()))
    assert len(seen) > 1


def test_coreset_draws_more_channels_by_drawing_on() -> None:
    of, method = layer(seed=5), lbyl.methods.Coreset(seed=2)
    last: set[int] = set()
    for count in range(1, 10, 2):
        kept = of.cut(count, method).plan.kept["0"].tolist()
        assert len(kept) == count and last < set(kept)
        last = set(kept)


def test_coreset_keeps_what_is_all_but_never_drawn_by_size() -> None:
    of = layer(seed=2)
    with torch.no_grad():
        of.model[3].weight.zero_()
        of.model[3].weight[0, 3] = 1.0
        of.model[3].weight[0, 7] = 1e-9
    assert of.cut(2, "coreset").plan.kept["0"].tolist() == [3, 7]
    with torch.no_grad():  # nothing is sensitive: all have the same chance
        of.model[3].weight.zero_()
    assert len(of.cut(4, "coreset").plan.kept["0"]) == 4


def test_coreset_under_a_plan_of_another_method_weighs_nothing() -> None:
    of = layer(seed=1)
    kept, _ = some_kept(10)
    close(of.delivered(kept, "coreset"), torch.eye(10).double()[:, kept])
