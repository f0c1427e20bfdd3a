"""Random text: tokens that were trained, frequent ones more often, about one topic a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.inputs import tokens
from lbyl.inputs.batches import FreshInputs, procedural
from lbyl.inputs.tokens import Text, draw, find_text, random_text
from support.networks import fingerprint, randomise

VOCABULARY = 60


class Reader(nn.Module):
    """Embeds token numbers and positions, and reads them with two layers."""

    def __init__(self, keyword: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, 12), nn.Embedding(32, 12)
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 6)
        self.keyword = keyword

    def forward(
        self, input_ids: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        if self.keyword:
            x = nn.functional.embedding(input_ids, weight=self.words.weight)
        else:
            x = self.words(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x = self.second(self.first(x + self.places(position_ids)).relu())
        return x if mask is None else x * mask[..., None]


def ids(rows: int = 2, length: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, VOCABULARY, (rows, length), generator=generator)


@pytest.mark.parametrize("keyword", [False, True])
def test_the_input_that_is_looked_up_is_found_with_its_table(keyword: bool) -> None:
    model, x = randomise(Reader(keyword)), ids()
    before = fingerprint(model)
    positions = torch.arange(10).expand(2, -1).contiguous()
    given = {"input_ids": x, "mask": torch.ones_like(x), "position_ids": positions}
    text = find_text(model, given)
    assert text is not None and text.tokens is x
    assert torch.equal(text.table, model.words.weight)  # the larger of the two tables
    assert not text.table.requires_grad and fingerprint(model) == before


@pytest.mark.parametrize(
    "inputs",
    [
        torch.zeros(2, 12),  # numbers, but not whole ones
        torch.ones(2, 12, dtype=torch.bool),
        torch.zeros(2, 3, 4, dtype=torch.long),
        torch.zeros(2, dtype=torch.long),
    ],
)
def test_other_inputs_hold_no_text(inputs: Tensor) -> None:
    assert find_text(nn.Identity(), inputs) is None


def test_whole_numbers_that_are_not_looked_up_are_no_text() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    assert find_text(Scaled(), torch.ones(2, 5, dtype=torch.long)) is None


# ------------------------------------------------------------------------------------ what is drawn


def table(size: int = 200, width: int = 16, untrained: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(size, width, generator=generator)
    if untrained:
        made[-untrained:] = made[:-untrained].mean(0) + 1e-3 * torch.randn(
            untrained, width, generator=generator
        )
    return made


def drawn(rows: Tensor, count: int = 400, length: int = 20, seed: int = 0) -> Tensor:
    return draw(rows, (count, length), torch.Generator().manual_seed(seed))


def test_tokens_are_numbers_of_the_table() -> None:
    found = drawn(table())
    assert found.shape == (400, 20) and found.dtype == torch.long
    assert int(found.min()) >= 0 and int(found.max()) < 200
    assert torch.equal(found, drawn(table())) and not torch.equal(found, drawn(table(), seed=1))


def test_untrained_tokens_are_left_out() -> None:
    assert int(drawn(table(untrained=40)).max()) < 160


def test_small_numbers_come_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without topics ranks follow Zipf's law with its offset."""
    monkeypatch.setattr(tokens, "TOPICAL", 0.0)
    rows = table(200, 256)  # so wide that all are about as far from their mean: none is left out
    counts = torch.bincount(drawn(rows, 4000).flatten(), minlength=200).double()
    wanted = 1 / (torch.arange(200) + float(tokens.ZIPF_OFFSET))
    wanted = wanted / wanted.sum() * counts.sum()
    assert float(((counts - wanted) / wanted.sqrt()).square().mean()) == pytest.approx(1, abs=0.5)


def test_sequences_are_about_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a sequence lie nearer to each other than those of different ones."""

    def likeness(rows: Tensor, found: Tensor) -> float:
        directions = nn.functional.normalize(rows[found], dim=2)  # (sequences, length, width)
        overall = directions.flatten(0, 1).mean(0).square().sum()
        return float((directions @ directions.mT).mean() - overall)

    rows = table(600)
    about = likeness(rows, drawn(rows))
    monkeypatch.setattr(tokens, "TOPICAL", 0.0)
    assert about > likeness(rows, drawn(rows)) + 0.05


def test_tables_smaller_than_a_neighbourhood_do() -> None:
    assert drawn(table(5), 10, 4).unique().numel() > 1


# ---------------------------------------------------------------------- in the example's form


def test_first_and_last_token_are_the_examples_own() -> None:
    x = ids(3)
    made = random_text(Text(x, table(VOCABULARY)), x, 7, 0)
    assert made.shape == (7, 10)
    rows = torch.arange(7) % 3
    assert torch.equal(made[:, 0], x[rows, 0]) and torch.equal(made[:, -1], x[rows, -1])


def test_the_last_token_is_the_last_that_a_mask_shows() -> None:
    x, mask = ids(2), torch.ones(2, 10, dtype=torch.long)
    mask[0, 6:] = 0
    made = random_text(Text(x, table(VOCABULARY)), {"input_ids": x, "attention_mask": mask}, 4, 0)
    assert made["input_ids"][0, -1] == x[0, 5] and made["input_ids"][1, -1] == x[1, 9]
    assert bool((made["attention_mask"] == 1).all())  # no token is padding
    assert made["attention_mask"].shape == (4, 10)


def test_long_examples_are_cut_short_and_pairs_stay() -> None:
    x = ids(2, 30)
    assert random_text(Text(x, table(VOCABULARY)), x, 4, 0).shape == (4, tokens.LENGTH)
    other, scale = torch.randn(2, 30, 3), torch.tensor(2.0)
    made = random_text(Text(x, table(VOCABULARY)), (x, other, scale), 4, 0)
    assert made[0].shape == (4, 30)  # something else has that length too
    assert torch.equal(made[1], other[:1].expand(4, -1, -1)) and made[2] is scale


@pytest.mark.parametrize("length", [1, 2])
def test_short_examples_do(length: int) -> None:
    x = ids(2, length)
    assert random_text(Text(x, table(VOCABULARY)), x, 5, 0).shape == (5, length)


# ---------------------------------------------------------------------------------- a whole network


def test_language_networks_are_collected_on_random_text() -> None:
    model, x = randomise(Reader()), ids()
    inputs: Any = {"input_ids": x, "mask": torch.ones_like(x)}
    batches = procedural(model, inputs, count=40, seed=3)
    assert batches.source == "random text"
    seen = torch.cat([batch["input_ids"] for batch in batches.batches])
    assert seen.shape == (40, 10) and int(seen.max()) < VOCABULARY
    assert seen[:, 1:-1].unique().numel() > 20
    again = next(iter(FreshInputs(model, inputs, 3).collection(40).batches))
    assert torch.equal(again["input_ids"], seen)


def test_a_language_network_is_compressed_and_refined() -> None:
    model, x = randomise(Reader()), ids()
    plain, refined = (lbyl.compress(model, x, 0.5, data=64, refine=n) for n in (0, 3))
    assert plain.graph.names and plain.model.first.weight.shape[0] == 10
    none = lbyl.compress(model, x, 0.5, method="none").model
    fresh = procedural(model, x, count=64, seed=9).batches[0]  # type: ignore[index]
    with torch.no_grad():
        wanted = model(fresh)
        gaps = [float((m(fresh) - wanted).norm()) for m in (plain.model, none)]
    assert gaps[0] < 0.8 * gaps[1]
    assert refined.refinement is not None


class Encoder(nn.Module):
    """Of 1,200 words every other one of the first 60 is silent."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1200, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(1200, 8, generator=generator)
        table[:60:2, :4] = 0  # what the layers do not read is as far from the mean as the rest
        table[:60:2, 4:] *= 1.4
        self.words.weight.data.copy_(table)
        self.up.weight.data.copy_(torch.randn(16, 8, generator=generator))
        self.up.weight.data[:, 4:] = 0
        self.up.bias.data.zero_()
        self.down.bias.data.zero_()

    def forward(self, input_ids: Tensor) -> Tensor:
        # One vector for the whole text, given to every token.
        read = self.down(self.up(self.words(input_ids)).relu()).sum(1, keepdim=True)
        return read.expand(-1, input_ids.shape[1], -1)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Encoder:
    monkeypatch.setattr(tokens, "TELLING", 90)
    return Encoder().eval()


def test_tokens_that_change_nothing_are_the_common_ones(encoder: Encoder) -> None:
    fresh = FreshInputs(encoder, torch.zeros(2, 12, dtype=torch.long), count=64)
    common = fresh.common
    assert common is not None and len(common) == tokens.TELLING // tokens.QUIET
    trained = set(tokens.trained_tokens(encoder.words.weight.detach()).tolist())
    silent = trained & set(range(0, 60, 2))
    assert len(silent & set(common.tolist())) >= 0.9 * min(len(silent), len(common))
    text = torch.cat(list(fresh.collection().batches))[:, 1:-1]
    found = torch.isin(text, common).float().mean()
    assert tokens.COMMON - 0.05 < float(found) < tokens.COMMON + 0.15


def test_networks_that_tell_nothing_get_text_as_before(encoder: Encoder) -> None:
    x = torch.zeros(2, 12, dtype=torch.long)
    few = Reader().eval()
    assert FreshInputs(few, x % VOCABULARY).common is None  # a vocabulary too small for words
    pooled = nn.Sequential(encoder, nn.Flatten(1)).eval()
    assert FreshInputs(pooled, x).common is None  # no output for each token
    assert FreshInputs(nn.Linear(4, 2), torch.randn(2, 4)).common is None
