"""Text that replaces data: written by the network where it can, random tokens where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from support.networks import fingerprint, randomise
from support.seen import collected, watched

SIZE, GAP = 12, 7  # tokens of the vocabulary, and the one that stands for a gap


class Chain(nn.Module):
    """Scores of the next token by the last one alone, and two layers to prune."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZE, SIZE)
        self.wide, self.narrow = nn.Linear(SIZE, 30), nn.Linear(30, SIZE)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.narrow(self.wide(self.table(input_ids)).relu())


class Output(dict[str, Any]):
    logits = property(lambda self: self["logits"])
    past_key_values = property(lambda self: self["past_key_values"])


class Cached(Chain):
    """The same with the last tokens averaged in, which a cache hands on."""

    broken = False

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False
    ) -> Any:
        x = self.table(input_ids)
        if past_key_values is not None and not self.broken:
            x = torch.cat([past_key_values, x], 1)
        mean = (x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])[:, -input_ids.shape[1] :]
        scores = self.narrow(self.wide(x[:, -input_ids.shape[1] :] + mean).relu())
        return Output(logits=scores, past_key_values=x if use_cache else None)


class Placed(Chain):
    """Has 14 places, of which two are kept for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(14, SIZE)

    def forward(self, input_ids: Tensor) -> Tensor:
        at = torch.arange(2, 2 + input_ids.shape[1])
        return self.narrow(self.wide(self.table(input_ids) + self.places(at)).relu())


class Gaps(Chain):
    """Fills gaps in a language in which every token follows the one before it in number."""

    def forward(self, input_ids: Tensor) -> Tensor:
        known = F.one_hot(input_ids, SIZE).float()
        known[..., GAP] = 0  # a gap tells nothing of itself
        after = F.pad(known, (0, 0, 1, 0))[:, :-1].roll(1, -1)
        before = F.pad(known, (0, 0, 0, 1))[:, 1:].roll(-1, -1)
        scores = 8 * known + 4 * after + 4 * before + 1e-3 * super().forward(input_ids)
        return scores - 9 * F.one_hot(torch.tensor(GAP), SIZE)


class Answers(Chain):
    """An encoder-decoder: the mean of what is read, and the last token answered."""

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:  # type: ignore[override]
        read = self.table(input_ids).mean(1, keepdim=True)
        return self.narrow(self.wide(self.table(decoder_input_ids) + read).relu())


class Reads(Chain):
    """An encoder that gives one vector for a text, with a mask."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids).mean(1)


def ids(rows: int = 2, length: int = 10, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SIZE, (rows, length), generator=generator)


def text_of(model: nn.Module, x: Any, count: int = 64, **options: Any) -> Any:
    """The texts that a network is collected on."""
    batches = collected(model, x, count, **options)
    if isinstance(batches[0], Tensor):
        return torch.cat(batches)
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


PAIR = {"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 6, 2)}


@pytest.mark.parametrize(
    ("model", "x", "said", "length"),
    [
        (Chain(), ids(), "written text", 48),
        (Cached(), ids(), "written text", 256),
        (Placed(), ids(), "written text", 12),
        (Gaps(), ids(), "filled text", 48),
        (Answers(), PAIR, "answered text", 9),
        (Reads(), ids(), "random text", 10),
    ],
)
def test_what_a_network_can_write_is_found_by_what_it_does(
    model: nn.Module, x: Any, said: str, length: int
) -> None:
    before = fingerprint(randomise(model))
    seen: list[str] = []
    options: Any = {"data": 8, "refine": 2, "progress": lambda name, *at: seen.append(name)}
    result = lbyl.compress(model, x, 0.5, **options)
    assert result.data == said and f"on {said} statistics" in result.story
    assert ("writing" in seen) == (said != "random text") and result.refinement is not None
    assert fingerprint(model) == before
    made = text_of(model, x, 8)
    made = made["input_ids"] if isinstance(made, dict) else made
    assert made.shape == (8, length) and 0 <= int(made.min()) <= int(made.max()) < SIZE


def test_text_follows_the_networks_own_chances() -> None:
    """How often a token follows another is what the network says of it."""
    model = randomise(Chain())
    text = text_of(model, ids(), 1200)
    pairs = torch.zeros(SIZE, SIZE)
    pairs.index_put_((text[:, :-1].flatten(), text[:, 1:].flatten()), torch.ones(()), True)
    wanted = model(torch.arange(SIZE)[None])[0].softmax(1)
    often = pairs.sum(1) > 2000
    assert int(often.sum()) > 3
    assert torch.allclose((pairs / pairs.sum(1, keepdim=True))[often], wanted[often], atol=0.04)
    text, again, other = (text_of(model, ids(), 8, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(text, again) and not torch.equal(text, other)


def test_with_a_cache_the_same_network_writes_more_unless_the_cache_gives_other_scores() -> None:
    model = randomise(Cached()).requires_grad_(False)
    whole = text_of(model, ids(), 6)
    model.broken = True
    short = text_of(model, ids(), 6)
    assert whole.shape == (6, 256) and short.shape == (6, 48)
    model.broken = False
    scores = model(whole).logits[:, :-1].log_softmax(-1)
    told = scores.gather(2, whole[:, 1:, None]).mean()
    assert float(told) == pytest.approx(float((scores.exp() * scores).sum(-1).mean()), abs=0.1)


def test_gaps_are_filled_with_what_fits_their_neighbours() -> None:
    text = text_of(randomise(Gaps()), ids(4, 20), 200)[:, 2:-2]
    drawn = ids(200, 20)
    follow, chance = (((t[:, 1:] - t[:, :-1]) == 1).double().mean() for t in (text, drawn))
    assert float(follow) > 5 * float(chance) and int((text == GAP).sum()) < 0.02 * text.numel()


def test_answers_begin_as_the_example_does_and_are_what_is_read_next() -> None:
    made = text_of(randomise(Answers()), PAIR, 30)
    assert made["input_ids"].shape == (30, 9) and made["decoder_input_ids"].shape == (30, 6)
    first = PAIR["decoder_input_ids"][torch.arange(30) % 2, 0]
    assert torch.equal(made["decoder_input_ids"][:, 0], first)


def test_collecting_judging_and_refining_use_texts_that_differ() -> None:
    model = randomise(Chain())
    whole = [tuple(row) for row in text_of(model, ids(), 32).tolist()]
    with watched(model) as seen:
        lbyl.compress(model, ids(), 0.5, data=32, refine=3)
    full = {tuple(row) for x in seen[-20:] for row in x.tolist() if x.shape[1] == 48}
    assert set(whole) & full and len(full - set(whole)) >= 8


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_kinds_of_transformers_are_told_apart(name: str) -> None:
    hf = pytest.importorskip("transformers")
    if name == "GPT2LMHeadModel":
        config = hf.GPT2Config(vocab_size=SIZE, n_positions=20, n_embd=16, n_layer=1, n_head=2)
    else:
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 20}
        config = hf.BertConfig(vocab_size=SIZE, num_hidden_layers=1, **sizes)
    model = getattr(hf, name)(config).eval()
    said = "written text" if name == "GPT2LMHeadModel" else "filled text"
    assert lbyl.prepare(model, ids(2, 8), data=4).statistics().source == said


# ------------------------------------------------------------------------------- random tokens


class Encoder(nn.Module):
    """Reads words one by one, and gives one vector for all of them to every token."""

    def __init__(self, table: Tensor, quiet: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(*table.shape)
        self.up, self.down = nn.Linear(table.shape[1], 16), nn.Linear(16, 8)
        self.words.weight.data.copy_(table)
        self.up.weight.data[:, len(table[0]) - quiet :] = 0
        for layer in (self.up, self.down):
            layer.bias.data.zero_()

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Tensor:
        read = self.down(self.up(self.words(input_ids)).relu()).sum(1, keepdim=True)
        return read.expand(-1, input_ids.shape[1], -1)


def test_random_tokens_were_trained_come_by_rank_and_are_about_something() -> None:
    table = torch.randn(200, 64)
    table[160:] = table[:160].mean(0) + 1e-3 * torch.randn(40, 64)  # never trained
    x = torch.randint(160, (3, 30))
    text = text_of(nn.Sequential(Encoder(table), Mean()).eval(), x, 1000)
    assert text.shape == (1000, 20) and int(text[:, 1:-1].max()) < 160
    rows = torch.arange(1000) % 3
    assert torch.equal(text[:, 0], x[rows, 0]) and torch.equal(text[:, -1], x[rows, -1])
    inner = text[:, 1:-1]
    counts = torch.bincount(inner.flatten(), minlength=160)
    assert counts[:40].sum() > 1.2 * counts[80:120].sum()  # small numbers come more often
    found = F.normalize(table[inner], dim=2)
    overall = found.flatten(0, 1).mean(0).square().sum()
    assert float((found @ found.mT).mean() - overall) > 0.05  # words of a text are alike


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def test_masks_show_every_token_and_tell_where_a_text_ends() -> None:
    model, x, mask = Encoder(torch.randn(60, 8)), ids(2), torch.ones(2, 10, dtype=torch.long)
    mask[0, 6:] = 0
    made = text_of(model.eval(), {"input_ids": x, "attention_mask": mask}, 4)
    assert made["input_ids"][0, -1] == x[0, 5] and made["input_ids"][1, -1] == x[1, 9]
    assert made["attention_mask"].shape == (4, 10) and bool((made["attention_mask"] == 1).all())


def test_tokens_that_change_nothing_are_the_common_ones() -> None:
    table = torch.randn(3000, 8)
    silent = torch.arange(0, 1400, 2)
    table[silent, :4] = 0  # what the layers do not read is as far from the mean as the rest
    table[silent, 4:] *= 1.4
    text = text_of(Encoder(table, quiet=4).eval(), torch.zeros(2, 12, dtype=torch.long), 256)
    assert float(torch.isin(text[:, 1:-1], silent).double().mean()) > 0.55


def test_own_tokens_may_come_with_masks_and_padding_is_not_counted() -> None:
    class Masked(Chain):
        def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Tensor:
            return super().forward(input_ids)

    model, ones = randomise(Masked()), torch.ones(4, 6, dtype=torch.long)
    whole = {"input_ids": ids(4, 6), "attention_mask": ones}
    padded = {name: F.pad(values, (0, 3)) for name, values in whole.items()}
    first, second = (lbyl.prepare(model, whole, data=[d]).statistics() for d in (whole, padded))
    for name, moments in first.moments.items():
        assert torch.allclose(moments.mean, second.moments[name].mean)
        assert torch.allclose(moments.covariance, second.moments[name].covariance)
