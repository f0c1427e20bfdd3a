"""Text that a network writes itself, and which kind of text it can write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.inputs import batches, writing
from lbyl.inputs.batches import FreshInputs
from lbyl.inputs.loader import own_batches
from lbyl.inputs.writing import find_author, gap_token, sample
from lbyl.restoring.divergence import Divergence
from support.networks import fingerprint, randomise

SIZE = 12  # tokens of the vocabulary
GAP = 7


class Chain(nn.Module):
    """Scores of the next token by the last one alone, and two layers to prune."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZE, SIZE)
        self.table.weight.data.copy_(torch.eye(SIZE))
        self.wide, self.narrow = nn.Linear(SIZE, 30), nn.Linear(30, SIZE)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.narrow(self.wide(self.table(input_ids)).relu())


class Cached(Chain):
    """The same with the last tokens averaged in, which a cache hands on."""

    broken = False

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False
    ) -> Any:
        x = self.table(input_ids)
        if past_key_values is not None and not self.broken:
            x = torch.cat([past_key_values, x], 1)
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        mean = (x.cumsum(1) / count)[:, -input_ids.shape[1] :]
        now = x[:, -input_ids.shape[1] :]
        scores = self.narrow(self.wide(now + mean).relu())
        return Output(scores, x if use_cache else None)


class Output:
    def __init__(self, scores: Tensor, cache: Tensor | None) -> None:
        self.logits, self.past_key_values = scores, cache


class Gaps(nn.Module):
    """Fills gaps in a language in which every token follows the one before it in number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZE, SIZE)
        self.table.weight.data.copy_(torch.eye(SIZE))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        known = x.clone()
        known[..., GAP] = 0  # a gap tells nothing of itself
        after = F.pad(known, (0, 0, 1, 0))[:, :-1].roll(1, -1)
        before = F.pad(known, (0, 0, 0, 1))[:, 1:].roll(-1, -1)
        scores = 8 * known + 4 * after + 4 * before
        scores[..., GAP] = -9
        return scores


class Answers(nn.Module):
    """An encoder-decoder: the mean of what is read, and the last token answered."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZE, 16)
        self.wide, self.head = nn.Linear(16, 24), nn.Linear(24, SIZE)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        read = self.table(input_ids).mean(1, keepdim=True)
        return self.head(self.wide(self.table(decoder_input_ids) + read).relu())


class Reads(nn.Module):
    """An encoder without a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide = nn.Embedding(SIZE, 8), nn.Linear(8, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.wide(self.table(input_ids)).mean(1)


def ids(rows: int = 2, length: int = 10, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SIZE, (rows, length), generator=generator)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LONGEST", 24)
    monkeypatch.setattr(writing, "SHORT", 16)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (Chain(), writing.CAUSAL),
        (Cached(), writing.CAUSAL),
        (Gaps(), writing.FILLING),
        (Reads(), writing.RANDOM),
    ],
)
def test_what_a_network_can_write_is_found_by_what_it_does(model: nn.Module, kind: str) -> None:
    randomise(model) if kind != writing.FILLING else model
    before = fingerprint(model)
    author = find_author(model, ids())
    assert author is not None and author.kind == kind
    assert author.vocabulary == (None if kind == writing.RANDOM else SIZE)
    assert fingerprint(model) == before


def test_an_encoder_decoder_is_told_from_the_two_texts_that_it_reads() -> None:
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(2, 10, 2)}
    author = find_author(randomise(Answers()), inputs)
    assert author is not None and author.kind == writing.FEEDING
    assert author.text.tokens is author.example_inputs["decoder_input_ids"]
    assert author.source is not None
    assert author.source.tokens is author.example_inputs["input_ids"]


def test_images_are_no_text() -> None:
    assert find_author(nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8)) is None


def test_tokens_are_drawn_by_their_chances() -> None:
    scores = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(0)).expand(20_000, -1)
    drawn = sample(scores, torch.Generator().manual_seed(1), SIZE)
    counts = torch.bincount(drawn, minlength=SIZE) / len(drawn)
    assert torch.allclose(counts, scores[0].softmax(0), atol=0.012)


@pytest.mark.usefixtures("short")
def test_text_follows_the_networks_own_chances() -> None:
    """How often a token follows another is what the network says of it."""
    model = randomise(Chain())
    model.narrow.weight.data *= 3
    author = find_author(model, ids())
    assert author is not None
    text = author.write(4000, seed=0)
    assert text.shape == (4000, writing.SHORT)  # without a cache texts are short
    pairs = torch.zeros(SIZE, SIZE)
    pairs.index_put_((text[:, :-1].flatten(), text[:, 1:].flatten()), torch.ones(()), True)
    wanted = model(torch.arange(SIZE)[None])[0].softmax(1)
    often = pairs.sum(1) > 2000
    assert bool(often.any())
    got = pairs / pairs.sum(1, keepdim=True)
    assert torch.allclose(got[often], wanted[often], atol=0.04)
    assert torch.equal(text, author.write(4000, seed=0))
    assert not torch.equal(text, author.write(4000, seed=1))


@pytest.mark.usefixtures("short")
def test_with_a_cache_the_same_text_is_written_and_more_of_it() -> None:
    model = randomise(Cached())
    author = find_author(model, ids())
    assert author is not None
    text = author.write(6, seed=3)
    assert text.shape == (6, writing.LONGEST)
    generator = torch.Generator().manual_seed(3)
    first = writing.first_tokens(author, 6, generator)
    plain = writing._without_cache(author, first, None, writing.LONGEST, generator, None)
    assert torch.equal(text, plain)


@pytest.mark.usefixtures("short")
def test_a_cache_larger_than_its_room_is_filled_a_few_texts_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "CACHE_BYTES", 3 * writing.LONGEST * SIZE * 4)
    author = find_author(randomise(Cached()), ids())
    assert author is not None and author.write(7, seed=0).shape == (7, writing.LONGEST)


@pytest.mark.usefixtures("short")
def test_a_cache_that_gives_other_scores_is_not_used() -> None:
    model = randomise(Cached())
    model.broken = True
    author = find_author(model, ids())
    assert author is not None and author.write(6, seed=3).shape == (6, writing.SHORT)


def test_the_token_that_stands_for_a_gap_is_found() -> None:
    author = find_author(Gaps(), ids())
    assert author is not None and gap_token(author, torch.Generator().manual_seed(0)) == GAP


@pytest.mark.usefixtures("short")
def test_gaps_are_filled_with_what_fits_their_neighbours() -> None:
    author = find_author(Gaps(), ids(4, 20))
    assert author is not None
    text = author.write(200, seed=0)
    inner = text[:, 2:-2]
    follow = ((inner[:, 1:] - inner[:, :-1]) == 1).float().mean()
    drawn = ((ids(200, 20)[:, 1:] - ids(200, 20)[:, :-1]) == 1).float().mean()
    assert float(follow) > 5 * float(drawn) and int((inner == GAP).sum()) < 0.02 * inner.numel()


def test_answers_are_what_the_encoder_reads_next() -> None:
    inputs = {"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 6, 2)}
    author = find_author(randomise(Answers()), inputs)
    assert author is not None
    made = author.write(30, seed=0)
    assert made["input_ids"].shape == (30, 9) and made["decoder_input_ids"].shape == (30, 6)
    first = inputs["decoder_input_ids"][torch.arange(30) % 2, 0]
    assert torch.equal(made["decoder_input_ids"][:, 0], first)


@pytest.mark.usefixtures("short")
def test_no_more_tokens_are_written_than_there_are_positions_for() -> None:
    class Placed(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(14, SIZE)

        def forward(self, input_ids: Tensor) -> Tensor:
            at = torch.arange(2, 2 + input_ids.shape[1])  # two are kept for padding
            x = self.table(input_ids) + self.places(at)
            return self.narrow(self.wide(x).relu())

    author = find_author(randomise(Placed()), ids())
    assert author is not None and author.write(4, seed=0).shape == (4, 12)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("GPT2LMHeadModel", "written"), ("BertForMaskedLM", "filled"), ("T5", "answered")],
)
def test_kinds_of_transformers_are_told_apart(name: str, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    x: Any = ids(2, 8)
    if name == "T5":
        config = transformers.T5Config(
            vocab_size=SIZE, d_model=16, d_kv=4, d_ff=20, num_layers=1, num_heads=2
        )
        model = transformers.T5ForConditionalGeneration(config)
        x = {"input_ids": x, "decoder_input_ids": x[:, :5].clone()}
    elif name == "GPT2LMHeadModel":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=SIZE, n_positions=20, n_embd=16, n_layer=1, n_head=2)
        )
    else:
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=SIZE,
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=20,
            )
        )
    author = find_author(model, x)
    assert author is not None and author.kind == f"{kind} text"
    made = author.write(3, seed=0)
    assert len(made if isinstance(made, Tensor) else made["input_ids"]) == 3


# ---------------------------------------------------------------------------- a whole compression


@pytest.mark.usefixtures("short")
def test_collecting_judging_and_refining_use_texts_that_differ() -> None:
    fresh = FreshInputs(randomise(Cached()), ids(), seed=0)
    collected = torch.cat(list(fresh.collection().batches))
    judged = torch.cat(fresh.judging(4))
    assert len(collected) == writing.SEQUENCES and len(judged) == writing.SEQUENCES // 4
    rows = {tuple(row) for row in collected.tolist()}
    assert not rows & {tuple(row) for row in judged.tolist()}
    steps = fresh.endless()
    held = {tuple(row) for row in next(steps).tolist()}
    assert all(held.isdisjoint(map(tuple, next(steps).tolist())) for _ in range(5))
    assert held <= rows


@pytest.mark.usefixtures("short")
def test_many_steps_of_refinement_get_texts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_TEXTS", 2 * writing.SEQUENCES)
    fresh = FreshInputs(randomise(Cached()), ids(), seed=0)
    rows = {tuple(row) for row in torch.cat(list(fresh.collection().batches)).tolist()}
    steps = fresh.endless(10_000)
    seen = [tuple(row) for _ in range(3) for row in next(steps).tolist()]
    assert rows.isdisjoint(seen) and len(set(seen)) > writing.SEQUENCES
    # A number of texts that was asked for holds for refinement, too.
    asked = FreshInputs(fresh.model, fresh.example_inputs, seed=0, count=writing.SEQUENCES)
    assert all(tuple(row) in rows for row in next(asked.endless(10_000)).tolist())


@pytest.mark.usefixtures("short")
def test_a_result_says_that_the_network_wrote_its_text() -> None:
    seen = []
    result = lbyl.compress(
        randomise(Cached()), ids(), 0.5, refine=3, progress=lambda *step: seen.append(step)
    )
    assert result.data == "written text" and "on written text statistics" in result.story
    assert result.seconds["writing"] >= 0 and "writing" in {name for name, *_ in seen}
    assert result.refinement is not None


def test_networks_with_a_vocabulary_are_compared_by_the_chances_of_tokens() -> None:
    model, other = randomise(Cached()), randomise(Cached())
    x = ids(3)
    other.narrow.weight.data *= 1.5
    found = Divergence(model, [x], (False,), SIZE)
    wanted = model(x).logits.log_softmax(-1)
    got = other(x).logits.log_softmax(-1)
    kl = (wanted.exp() * (wanted - got)).sum(-1).mean()
    assert found(other) == pytest.approx(kl.item(), rel=1e-4)


def test_own_tokens_may_come_with_masks_and_padding_is_not_counted() -> None:
    class Masked(Chain):
        def forward(  # type: ignore[override]
            self, input_ids: Tensor, attention_mask: Tensor | None = None
        ) -> Tensor:
            return super().forward(input_ids)

    model = randomise(Masked())
    whole = [{"input_ids": ids(4, 6), "attention_mask": torch.ones(4, 6, dtype=torch.long)}]
    padded = {
        "input_ids": torch.cat([ids(4, 6), torch.zeros(4, 3, dtype=torch.long)], 1),
        "attention_mask": torch.cat([torch.ones(4, 6), torch.zeros(4, 3)], 1).long(),
    }
    first, second = (lbyl.prepare(model, whole[0], data=d).statistics() for d in (whole, [padded]))
    for name, moments in first.moments.items():
        assert torch.allclose(moments.mean, second.moments[name].mean)
        assert torch.allclose(moments.covariance, second.moments[name].covariance)


def test_a_tensor_of_own_tokens_comes_in_small_batches() -> None:
    batches = list(own_batches(Chain(), ids(40, 256)).batches)
    assert len(batches) > 1 and torch.equal(torch.cat(batches), ids(40, 256))
