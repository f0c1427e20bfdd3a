"""Refinement: it comes nearer to the original or leaves things alone, and touches nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl import data
from lbyl.inputs.batches import FreshInputs, InputBatches
from lbyl.models import zoo
from lbyl.restoring import refine
from lbyl.restoring.recalibrate import batch_moments
from lbyl.surgery.indices import kept_indices
from lbyl.torchkit.tensors import tensors
from support.networks import build, example, fingerprint

NETWORKS = [
    "chain",
    "biased",
    "basic",
    "bottleneck",
    "flattened",
    "dense",
    "functional",
    "group-normed",
]


def distillation(model: nn.Module, result: lbyl.Result) -> refine.Distillation:
    indices = kept_indices(result.graph, result.plan.kept)
    return refine.Distillation(model, result.model, result.graph, indices)


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether every parameter and buffer is the same to the last bit."""
    return all(torch.equal(value, tensors(other)[name]) for name, value in tensors(one).items())


def apart(model: nn.Module, result: lbyl.Result, x: Tensor) -> float:
    """How far consumers' outputs are from the original's, on inputs that no step has seen."""
    inputs = next(FreshInputs(model, x, 1000).endless())
    with torch.no_grad():
        return float(distillation(model, result).loss(inputs))


@pytest.mark.parametrize("name", NETWORKS)
def test_consumers_come_nearer_to_the_original(name: str) -> None:
    model, x = build(name), example(name)
    before = fingerprint(model)
    prepared = lbyl.prepare(model, x)
    plain, refined = (prepared.compress(0.5, refine=steps) for steps in (0, 60))
    assert apart(model, refined, x) < apart(model, plain, x)
    told = refined.refinement
    assert told is not None and (told.asked, told.steps) == (60, 60)
    assert told.loss_after < told.loss_before and "refined by 60 steps" in refined.story
    assert refined.seconds["refine"] > 0 and plain.refinement is None
    assert fingerprint(model) == before


def test_much_accuracy_comes_back_without_data() -> None:
    info = zoo.info("digits")
    model, x = zoo.create("digits", "shipped"), torch.zeros(1, *info.input_shape)
    held = data.load("digits")
    prepared = lbyl.prepare(model, x)
    plain = prepared.compress(0.8, criterion="l2")
    refined = prepared.refine(plain, 40)
    gain = data.evaluate("digits", refined.model, held) - data.evaluate("digits", plain.model, held)
    assert gain > 5


@pytest.mark.parametrize("name", ["chain", "bottleneck"])
def test_nothing_pruned_changes_nothing(name: str) -> None:
    model, x = build(name), example(name)
    result = lbyl.compress(model, x, 0.0, refine=5)
    assert same(result.model, lbyl.compress(model, x, 0.0).model)


def test_duplicated_filters_need_no_refinement() -> None:
    model, x = build("chain"), example("chain")
    first, norm, second = (m for m in list(model.children())[:4] if not isinstance(m, nn.ReLU))
    with torch.no_grad():
        half = first.weight.shape[0] // 2
        for tensor in (first.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor[half:] = tensor[:half]
    assert isinstance(second, nn.Conv2d)
    unit = lbyl.trace(model, x).names[0]
    kept = {unit: torch.arange(half)}
    plan = lbyl.Plan(kept, {unit: 2 * half})
    slim = lbyl.compress(model, x, plan, method=lbyl.methods.Echo(ridge=0.0), refine=10).model
    images = torch.randn(8, *x.shape[1:])
    torch.testing.assert_close(slim(images), model(images), rtol=1e-3, atol=1e-3)


def test_only_what_was_cut_is_trained() -> None:
    model, x = build("bottleneck"), example("bottleneck")
    plain, refined = (lbyl.compress(model, x, 0.5, refine=steps).model for steps in (0, 5))
    originals = dict(model.named_parameters())
    for (name, was), now in zip(plain.named_parameters(), refined.parameters()):
        cut = was.shape != originals[name].shape
        assert torch.equal(was, now) != cut, name


def test_what_does_not_help_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("basic"), example("basic")
    prepared = lbyl.prepare(model, x)
    plain = prepared.compress(0.5)
    monkeypatch.setattr(refine, "RATE", 1e8)
    for steps in (3, 10):  # less and more than a trial takes
        wild = prepared.compress(0.5, refine=steps)
        assert same(wild.model, plain.model)
        told = wild.refinement
        assert told is not None and (told.asked, told.steps) == (steps, 0)
        assert told.loss_after == told.loss_before
        assert "taken back" in wild.story and "refined by" not in str(wild)


def test_steps_too_large_begin_again_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("basic"), example("basic")
    prepared = lbyl.prepare(model, x)
    plain = prepared.compress(0.5)
    usual = refine.RATE
    monkeypatch.setattr(refine, "RATE", usual * refine.SMALLER**4)
    refined = prepared.compress(0.5, refine=60)
    assert apart(model, refined, x) < apart(model, plain, x)
    monkeypatch.setattr(refine, "TRIES", 1)
    assert same(prepared.compress(0.5, refine=60).model, plain.model)


def test_steps_that_break_are_taken_back() -> None:
    model, x = build("basic"), example("basic")
    plain = lbyl.compress(model, x, 0.5)
    result = lbyl.compress(model, x, 0.5)
    indices = kept_indices(result.graph, result.plan.kept)

    def inputs() -> Iterator[Tensor]:
        yield torch.randn(16, *x.shape[1:])
        while True:
            yield torch.full((16, *x.shape[1:]), float("nan"))

    second_pass = InputBatches([torch.randn(16, *x.shape[1:])], 1, True, "procedural")
    graph, slim = result.graph, result.model
    told = refine.refine(model, slim, graph, indices, 2, inputs(), second_pass)
    assert told.steps == 0 and told.asked == 2
    assert same(slim, plain.model)


def test_activations_in_place_change_nothing() -> None:
    class Block(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(3, 8, 3),
                nn.BatchNorm2d(8),
                nn.ReLU(inplace),
                nn.Conv2d(8, 8, 3),
                nn.BatchNorm2d(8),
                nn.ReLU(inplace),
                nn.Conv2d(8, 4, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    plain, inplace = Block(False).eval(), Block(True).eval()
    inplace.load_state_dict(plain.state_dict())
    x = torch.zeros(1, 3, 8, 8)
    found = [tensors(lbyl.compress(m, x, 0.5, refine=5).model) for m in (plain, inplace)]
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])


def test_flags_modes_and_gradients_stay_as_they_were() -> None:
    model, x = build("chain"), example("chain")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        slim = lbyl.compress(model, x, 0.5, refine=3).model
    assert not any(p.requires_grad or p.grad is not None for p in slim.parameters())
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert not slim.training


def test_it_can_be_repeated() -> None:
    model, x = build("chain"), example("chain")
    first, again, other = (
        lbyl.compress(model, x, 0.5, refine=4, seed=seed).model for seed in (0, 0, 9)
    )
    assert same(first, again) and not same(first, other)


def test_a_users_own_inputs_are_used() -> None:
    model, x = build("chain"), example("chain")
    images = torch.randn(128, *x.shape[1:])

    def loader() -> Iterator[tuple[Tensor, Tensor]]:  # can be gone through only once
        for part in images.split(32):
            yield part, torch.zeros(len(part))

    plain = lbyl.compress(model, x, 0.5, data=images)
    refined = lbyl.compress(model, x, 0.5, data=loader(), refine=20)
    wanted = model(images)
    assert (refined.model(images) - wanted).norm() < (plain.model(images) - wanted).norm()


def relative_error(output: Tensor, target: Tensor, axis: int) -> Tensor:
    return refine.relative_error(output, target, refine.mean_variance(target, axis))


def test_the_loss_is_relative() -> None:
    wanted = torch.randn(64, 5, 4, 4)
    said = wanted + 0.1 * torch.randn_like(wanted)
    here = relative_error(said, wanted, 1)
    plain = (said - wanted).square().mean() / wanted.var((0, 2, 3), correction=0).mean()
    torch.testing.assert_close(here, plain)
    torch.testing.assert_close(relative_error(7 * said, 7 * wanted, 1), here)
    rows = relative_error(said.movedim(1, -1), wanted.movedim(1, -1), -1)
    torch.testing.assert_close(rows, here)
    assert float(relative_error(wanted, wanted, 1)) == 0


def test_the_gradient_of_the_loss_is_that_of_autograd_in_half_precision_too() -> None:
    said = torch.randn(8, 5, 4, 4, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn(8, 5, 4, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: relative_error(x, wanted, 1), said, atol=1e-6)
    half = said.detach().bfloat16().requires_grad_(True)
    error = relative_error(half, wanted.bfloat16(), 1)
    assert error.dtype == torch.float32
    (exact,) = torch.autograd.grad(relative_error(said, wanted, 1), said)
    (rounded,) = torch.autograd.grad(error, half)
    torch.testing.assert_close(rounded.double(), exact, rtol=0.05, atol=0.01 * float(exact.std()))


@pytest.mark.parametrize("name", ["chain", "basic", "bottleneck"])
def test_running_statistics_follow_the_weights(name: str) -> None:
    """Refined by the batch, yet better in the ordinary mode, in which networks are used."""
    model, x = build(name), example(name)
    images = next(FreshInputs(model, x, 500).endless())
    seen = batch_moments(model, InputBatches([images], 1, True, "procedural"))
    for norm_name, (mean, variance) in seen.items():  # a network that was trained on such images
        tensors(model)[norm_name].copy_(mean)
        tensors(model)[norm_name.replace("mean", "var")].copy_(variance)
    prepared = lbyl.prepare(model, x)
    plain, refined = (
        prepared.compress(0.5, criterion="l2", refine=steps).model for steps in (0, 60)
    )
    wanted = model(images)
    assert (refined(images) - wanted).norm() < (plain(images) - wanted).norm()


def test_left_to_itself_it_stops_when_inputs_it_has_not_seen_stop_improving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = build("basic"), example("basic")
    prepared = lbyl.prepare(model, x)
    monkeypatch.setattr(refine, "ROUNDS", (10, 20, 40))
    results = {}
    for enough in (0.0, 0.999999, 0.7):  # after one round, after all of them, in between
        monkeypatch.setattr(refine, "ENOUGH", enough)
        results[enough] = prepared.compress(0.5, refine="auto").refinement
    one, all_of_them, between = results.values()
    assert one is not None and all_of_them is not None and between is not None
    assert (one.asked, one.steps) == (10, 10)
    assert all_of_them.asked == 70 and all_of_them.loss_after < one.loss_after
    assert 10 <= between.asked <= 70
    assert between.loss_after >= all_of_them.loss_after


def test_a_round_that_does_not_help_is_undone_and_earlier_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = build("basic"), example("basic")
    prepared = lbyl.prepare(model, x)
    monkeypatch.setattr(refine, "ROUNDS", (10, 3))
    monkeypatch.setattr(refine, "ENOUGH", 1.0)
    once = prepared.compress(0.5, refine=10)
    usual = refine.Descent.run

    def run(self: refine.Descent, steps: int, first: float) -> float:
        monkeypatch.setattr(refine, "RATE", 0.03 if steps == 10 else 1e8)
        return usual(self, steps, first)

    monkeypatch.setattr(refine.Descent, "run", run)
    twice = prepared.compress(0.5, refine="auto")
    assert twice.refinement is not None and twice.refinement.asked == 13
    assert twice.refinement.steps == 10
    assert same(once.model, twice.model)


@pytest.mark.parametrize("steps", [-1, 2.5, True, "many"])
def test_a_wrong_number_of_steps_is_said(steps: object) -> None:
    model, x = build("chain"), example("chain")
    with pytest.raises(lbyl.LbylError, match="give a number of steps"):
        lbyl.compress(model, x, 0.5, refine=steps)  # type: ignore[arg-type]


def test_without_gradients_it_says_so() -> None:
    model, x = build("chain"), example("chain")
    with torch.inference_mode(), pytest.raises(lbyl.LbylError, match="inference_mode"):
        lbyl.compress(model, x, 0.5, refine=2)


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


def test_a_language_model_is_refined_by_its_answers_also_where_no_consumer_is_cut() -> None:
    torch.manual_seed(0)
    model = Attending().eval()
    with torch.no_grad():
        model.attention.in_proj_weight.mul_(4)  # so that it matters who attends to whom
    prepared = lbyl.prepare(model, torch.randint(20, (4, 8)), include=["*", "*:qk"], data=24)
    plain = prepared.compress({"*:qk": 0.75})
    refined = prepared.refine(plain, 30)
    assert refined.refinement is not None
    assert refined.refinement.loss_after < 0.9 * refined.refinement.loss_before
    assert prepared.judges.whole(refined.model) < prepared.judges.whole(plain.model)


def test_what_a_mask_hides_is_no_part_of_the_loss() -> None:
    torch.manual_seed(0)
    model = Attending().eval()
    tokens = torch.randint(20, (4, 8))
    graph = lbyl.trace(model, tokens)
    plan = lbyl.Plan({"up": torch.arange(12)}, {"up": 24})
    indices = kept_indices(graph, plan.kept)
    slim = lbyl.compress(model, tokens, plan, method="none").model
    task = refine.Distillation(model, slim, graph, indices, False, 20)
    mask = torch.ones_like(tokens)
    mask[:, 5:] = 0
    other = torch.where(mask == 0, (tokens + 7) % 20, tokens)
    task.loss({"input_ids": tokens, "attention_mask": mask})  # the scale of errors is measured once
    hidden = [task.loss({"input_ids": x, "attention_mask": mask}) for x in (tokens, other)]
    whole = [task.loss({"input_ids": x}) for x in (tokens, other)]
    short = task.loss({"input_ids": tokens[:, :5]})
    assert torch.allclose(hidden[0], hidden[1]) and torch.allclose(hidden[0], short)
    assert not torch.allclose(whole[0], whole[1])
