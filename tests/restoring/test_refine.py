"""Refinement: it comes nearer to the original or leaves things alone, and touches nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.app import data
from lbyl.app.sources import zoo
from lbyl.methods import Echo
from support.by_hand import plan_of, repeated
from support.networks import build, consumer_samples, example, fingerprint


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether every parameter and buffer is the same to the last bit."""
    values = other.state_dict()
    return all(torch.equal(value, values[name]) for name, value in one.state_dict().items())


READ = {"chain": ["3", "8"], "flattened": ["5"], "dense": ["3", "6"], "group-normed": ["3"]}
READ |= {"bottleneck": ["conv2", "conv3"], "functional": ["second", "head"]}


@pytest.mark.parametrize(
    "name",
    [*["chain", "bottleneck", "dense"]]
    + [
        pytest.param(n, marks=pytest.mark.slow)
        for n in sorted({*READ} - {"chain", "bottleneck", "dense"})
    ],
)
def test_consumers_come_nearer_to_the_original(name: str) -> None:
    """Outputs of all layers that lost inputs, relative to the variance that they had."""
    model, x = build(name), example(name, 64)
    before = fingerprint(model)
    prepared = lbyl.prepare(model, x[:2], data=repeated(x))
    plain = prepared.compress(0.5)
    refined = prepared.refine(plain, 30)
    told = refined.refinement
    assert told is not None and (told.asked, told.steps) == (30, 30)
    assert told.loss_after < told.loss_before and "refined by 30 steps" in refined.story
    assert refined.seconds["refine"] > 0 and plain.refinement is None
    assert fingerprint(model) == before
    errors = []
    for slim in (plain.model, refined.model):
        off = 0.0
        for layer in READ[name]:
            rows = plain.plan.kept.get(layer, slice(None))
            wanted, said = (consumer_samples(m, layer, x)[1] for m in (model, slim))
            wanted = wanted[:, rows]
            off += float((said - wanted).var(0).sum() / wanted.var(0).sum())
        errors.append(off)
    assert errors[1] < errors[0]
    wanted = model(x)
    assert (refined.model(x) - wanted).norm() < (plain.model(x) - wanted).norm()
    for (key, was), now in zip(plain.model.named_parameters(), refined.model.parameters()):
        cut = was.shape != model.get_parameter(key).shape
        assert torch.equal(was, now) != cut, key  # only what was cut is trained


@pytest.mark.slow
def test_much_accuracy_comes_back_without_data() -> None:
    model, x = zoo.create("digits", "shipped"), torch.zeros(1, *zoo.info("digits").input_shape)
    held, prepared = data.load("digits"), lbyl.prepare(model, x)
    plain = prepared.compress(0.8, criterion="l2")
    models = prepared.refine(plain, 40).model, plain.model
    after, before = (data.evaluate("digits", m, held) for m in models)
    assert after - before > 5


def test_nothing_pruned_and_nothing_lost_is_left_as_it_is() -> None:
    model, x = build("chain"), example("chain")
    prepared = lbyl.prepare(model, x, data=32)
    assert same(prepared.compress(0.0, refine=5).model, prepared.compress(0.0).model)
    with torch.no_grad():
        norm = model[1]
        for tensor in (model[0].weight, norm.weight, norm.bias, *list(norm.buffers())[:2]):
            tensor[5:] = tensor[:5]
    prepared = lbyl.prepare(model, x, data=32)
    plan = plan_of(prepared.graph, {"0": range(5)})
    slim = prepared.compress(plan, method=Echo(ridge=0.0), refine=10).model
    torch.testing.assert_close(slim(x), model(x), rtol=1e-3, atol=1e-3)


def test_it_can_be_repeated_and_flags_modes_and_gradients_stay_as_they_were() -> None:
    model, x = build("chain"), example("chain")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        first, again, other = (
            lbyl.compress(model, x, 0.5, refine=3, seed=seed, data=32).model for seed in (0, 0, 9)
        )
    assert same(first, again) and not same(first, other) and not first.training
    for m in (model, first):
        assert not any(p.requires_grad or p.grad is not None for p in m.parameters())


def test_steps_that_break_are_taken_back() -> None:
    """Inputs of which later ones are no numbers."""
    model, x = build("basic"), example("basic", 64)
    prepared = lbyl.prepare(model, x[:2], data=32)
    plain = prepared.compress(0.5)
    broken = [x[:16], *[torch.full_like(x[:16], torch.nan)] * 7]
    result = lbyl.refine(model, x[:2], plain, 3, data=broken)
    assert result.refinement is not None
    assert (result.refinement.asked, result.refinement.steps) == (3, 0)
    assert same(result.model, plain.model)
    assert "taken back" in result.story and "refined by" not in str(result)


def test_activations_in_place_change_nothing() -> None:
    def network(inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        first, second = ((nn.BatchNorm2d(8), nn.ReLU(inplace)) for _ in range(2))
        layers = nn.Conv2d(3, 8, 3), *first, nn.Conv2d(8, 8, 3), *second, nn.Conv2d(8, 4, 1)
        return nn.Sequential(*layers).eval()

    x = torch.zeros(1, 3, 8, 8)
    plain, inplace = (
        lbyl.compress(network(i), x, 0.5, refine=5, data=32).model.state_dict()
        for i in (False, True)
    )
    for name, value in plain.items():
        torch.testing.assert_close(value, inplace[name])


def test_a_loader_that_can_be_gone_through_once_is_enough() -> None:
    model, x = build("chain"), example("chain")
    images = torch.randn(128, *x.shape[1:])

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        for part in images.split(32):
            yield part, torch.zeros(len(part))

    plain = lbyl.compress(model, x, 0.5, data=images)
    refined = lbyl.compress(model, x, 0.5, data=loader(), refine=20)
    wanted = model(images)
    assert (refined.model(images) - wanted).norm() < (plain.model(images) - wanted).norm()


@pytest.mark.slow
def test_left_to_itself_it_stops_when_inputs_it_has_not_seen_stop_improving() -> None:
    model, x = build("dense"), example("dense")
    prepared = lbyl.prepare(model, x, data=64)
    told = prepared.compress(0.5, refine="auto").refinement
    once = prepared.compress(0.5, refine=100).refinement
    assert told is not None and once is not None
    assert told.asked in (100, 300, 700, 1500) and told.steps <= told.asked
    assert told.loss_after <= 1.02 * once.loss_after


@pytest.mark.parametrize("steps", [-1, 2.5, True, "many"])
def test_a_wrong_number_of_steps_is_said(steps: object) -> None:
    model, x = build("chain"), example("chain")
    with pytest.raises(lbyl.LbylError, match="give a number of steps"):
        lbyl.compress(model, x, 0.5, refine=steps)  # type: ignore[arg-type]


def test_without_gradients_it_says_so() -> None:
    model, x = build("chain"), example("chain")
    with torch.inference_mode(), pytest.raises(lbyl.LbylError, match="inference_mode"):
        lbyl.compress(model, x, 0.5, refine=2, data=16)


class Attending(nn.Module):
    """A causal language model of one attention, and what a mask hides is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 20)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.table(input_ids)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.attention(x, x, x, attn_mask=later, need_weights=False)[0]
        return torch.as_tensor(self.head(4 * (x + self.down(self.up(x).relu()))))


def attending() -> nn.Module:
    torch.manual_seed(0)
    model = Attending().eval()
    with torch.no_grad():
        model.attention.in_proj_weight.mul_(4)  # so that it matters who attends to whom
    return model


def test_a_language_model_is_refined_by_its_answers_also_where_no_consumer_is_cut() -> None:
    prepared = lbyl.prepare(attending(), torch.randint(20, (4, 8)), include=["*", "*:qk"], data=24)
    plain = prepared.compress({"*:qk": 0.75})
    refined = prepared.refine(plain, 20)
    told = refined.refinement
    assert told is not None and told.loss_after < 0.9 * told.loss_before


def test_what_a_mask_hides_is_no_part_of_what_is_refined() -> None:
    """Padding of other tokens leads to the same network."""
    model, tokens = attending(), torch.randint(20, (16, 8))
    mask = torch.ones_like(tokens)
    mask[:, 5:] = 0
    plan, found = lbyl.Plan({"up": torch.arange(12)}, {"up": 24}), []
    plain = lbyl.compress(model, tokens, plan, method="none")
    for other in (tokens, torch.where(mask == 0, (tokens + 7) % 20, tokens)):
        batches = [{"input_ids": other, "attention_mask": mask}] * 3
        found.append(lbyl.refine(model, batches[0], plain, 4, data=batches).model)
    assert not same(found[0], plain.model)
    for a, b in zip(found[0].parameters(), found[1].parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
