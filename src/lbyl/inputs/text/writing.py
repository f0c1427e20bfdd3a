"""Text that a language model writes itself: it carries its own calibration set.

What a network can write is found by what it does, not by its class. Its scores are an output with
a row for every token of an input and a column for every token of the vocabulary. If a later token
changes no earlier row, it goes on with a text, token by token (causal); if there is another text
besides, it goes on with that one's answer (an encoder-decoder); if all rows change, it fills gaps
(masked). Tokens are drawn from the softmax of its scores as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lbyl.inputs.text.tokens import (
    Text,
    draw,
    drawn_like,
    find_texts,
    free_length,
    in_form,
    main_text,
)
from lbyl.runtime.notes import note
from lbyl.runtime.run import Inputs, Progress, call_model, device_of, evaluation_mode, tensors_in

CAUSAL, FEEDING, FILLING, RANDOM = "written text", "answered text", "filled text", "random text"
"""What a text is called in results: written by itself, answered by itself, gaps filled, drawn."""

LONGEST = 256  # tokens of a text that is written with a cache
SHORT = 48  # and of one for which the network runs over all of it for every token
SEQUENCES = 96  # as many tokens as an MLP of some thousand neurons needs for its covariance
AT_ONCE = 1 << 25  # scores that are held at once
CACHE_BYTES = 1 << 31
ROUNDS, REFILLED = 12, 0.15  # of filling gaps: all, then ever fewer down to this fraction
CANDIDATES, PLACES = 64, 6  # tokens that may stand for a gap, and where each is tried
SAME = 1e-5  # of the deviation of scores: what counts as no change


@dataclass(frozen=True)
class Author:
    """A network that takes token numbers, and what kind of text it can write."""

    model: nn.Module
    example_inputs: Inputs
    kind: str
    text: Text  # what is written; of an encoder-decoder, what the decoder reads
    source: Text | None = None  # what the encoder reads
    vocabulary: int | None = None  # columns of the scores; None: it gives none

    def scores(self, inputs: Inputs) -> Tensor:
        """(sequences, length, vocabulary)"""
        assert self.vocabulary is not None
        found = scores_of(call_model(self.model, inputs), self.vocabulary)
        assert found is not None
        return found

    def form(self, tokens: Tensor, source: Tensor | None = None) -> Inputs:
        written = [(self.text, tokens)]
        if self.source is not None and source is not None:
            written.append((self.source, source))
        return in_form(self.example_inputs, written)

    @cached_property
    def length(self) -> int:
        """Of a text: long where a cache makes it cheap, within what the network has places for."""
        given = self.text.tokens.shape[1]
        if self.kind == RANDOM or not free_length(self.text, self.example_inputs):
            return given
        config = getattr(self.model, "config", None)
        told = getattr(config, "max_position_embeddings", None)
        limits = [x for x in (self.text.longest, told) if isinstance(x, int) and x > 1]
        wanted = LONGEST if self.writes_with_cache else SHORT
        length = min([wanted, *limits])
        return length if length <= given or self._takes(length) else given

    @property
    def writes_with_cache(self) -> bool:
        """Whether each token that is written is read once."""
        return self.kind == CAUSAL and takes_cache(self.model)

    def _takes(self, length: int) -> bool:
        """Whether a text may be so long: some networks say nowhere how many places they have."""
        longer = self.text.tokens[:1, :1].repeat(1, length)
        try:
            with evaluation_mode(self.model), torch.no_grad():
                call_model(self.model, self.form(longer))
        except Exception:  # whatever a network says to too long a text
            return False
        return True

    def rows_at_once(self, length: int) -> int:
        """Sequences that run at once: their scores are what takes memory."""
        return max(1, AT_ONCE // max(1, length * (self.vocabulary or self.text.table.shape[1])))

    @torch.no_grad()
    def write(self, count: int, seed: int, progress: Progress | None = None) -> Inputs:
        """`count` texts in the form of the example."""
        generator = torch.Generator().manual_seed(seed)
        writers: dict[str, Callable[[], Inputs]] = {
            CAUSAL: lambda: self.form(_continue(self, count, generator, progress)),
            FEEDING: lambda: _answer(self, count, generator, progress),
            FILLING: lambda: self.form(_fill(self, count, generator, progress)),
        }
        with evaluation_mode(self.model):
            return writers[self.kind]()


def scores_of(output: Any, vocabulary: int) -> Tensor | None:
    """The output with a score for every token of the vocabulary."""
    for x in tensors_in(output):
        if x.dim() == 3 and x.shape[-1] == vocabulary and x.is_floating_point():
            return x
    return None


def find_author(model: nn.Module, example_inputs: Inputs) -> Author | None:
    """What kind of text a network can write; None where it takes no tokens."""
    device = device_of(model)
    example_inputs = tree_map_only(Tensor, lambda x: x.to(device), example_inputs)
    texts = find_texts(model, example_inputs)
    main = main_text(texts)
    if main is None:
        return None
    with evaluation_mode(model), torch.no_grad():
        found = {id(text.tokens): _reaction(model, example_inputs, text) for text in texts}
        for text in texts:
            causal, vocabulary = found[id(text.tokens)]
            if causal:
                source = next((x for x in texts if x is not text), None)
                kind = CAUSAL if source is None else FEEDING
                return Author(model, example_inputs, kind, text, source, vocabulary)
        causal, vocabulary = found[id(main.tokens)]
        if causal is False and len(texts) == 1:
            return Author(model, example_inputs, FILLING, main, None, vocabulary)
    return Author(model, example_inputs, RANDOM, main)


def _reaction(
    model: nn.Module, example_inputs: Inputs, text: Text
) -> tuple[bool | None, int | None]:
    """Whether scores follow this text causally (None: there are none), and how many a token has."""
    tokens, size = text.tokens, len(text.table)
    if tokens.shape[1] < 2:
        return None, None
    output = call_model(model, example_inputs)
    before = next((x for x in tensors_in(output) if _are_scores(x, text)), None)
    if before is None:
        return None, None
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + size // 2) % size
    inputs = tree_map_only(Tensor, lambda x: changed if x is tokens else x, example_inputs)
    after = scores_of(call_model(model, inputs), before.shape[-1])
    if after is None:  # values decide what it gives
        return None, None
    moved = (after - before).float().abs().amax((0, 2)) > SAME * before.float().std()
    if not bool(moved.any()):  # a last token that nothing looks at tells nothing
        return None, None
    return not bool(moved[:-1].any()), before.shape[-1]


def _are_scores(x: Tensor, text: Text) -> bool:
    """A row for every token and a column for every token of the vocabulary, padded or not."""
    rows, size = text.tokens.shape, len(text.table)
    aligned = x.dim() == 3 and x.shape[:2] == rows and x.is_floating_point()
    return aligned and 0.9 * size <= x.shape[-1] <= 1.1 * size


def sample(scores: Tensor, generator: torch.Generator, size: int) -> Tensor:
    """(n,): a token from the softmax of each row (n, vocabulary), the same on every device."""
    chances = F.softmax(scores[:, :size].double(), 1).cumsum(1)
    at = torch.rand(len(scores), 1, generator=generator, dtype=torch.float64).to(scores.device)
    found = torch.searchsorted(chances, at * chances[:, -1:]).clamp(max=chances.shape[1] - 1)
    return found[:, 0]


# ------------------------------------------------------------------------------- token by token


def takes_cache(model: nn.Module) -> bool:
    """Whether keys and values of what was written before can be handed in."""
    return "past_key_values" in inspect.signature(model.forward).parameters


def first_tokens(author: Author, count: int, generator: torch.Generator) -> Tensor:
    """(count,): where a document begins, if that is known; frequent tokens otherwise."""
    first = draw(author.text.table, (count, 1), generator)[:, 0]
    config = getattr(author.model, "config", None)
    begin = getattr(config, "bos_token_id", None)
    own = author.text.tokens[:, 0].cpu()
    if not isinstance(begin, int) and len(own) > 1 and bool((own == own[0]).all()):
        begin = int(own[0])
    if isinstance(begin, int) and 0 <= begin < len(author.text.table):
        first[:] = begin
    return first


def _continue(
    author: Author, count: int, generator: torch.Generator, progress: Progress | None
) -> Tensor:
    """Texts (count, length) that go on token by token."""
    first = first_tokens(author, count, generator).to(author.text.tokens)
    length = author.length
    if takes_cache(author.model):
        try:
            return _with_cache(author, first, length, generator, progress)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
            note("its cache could not be used to write text: texts are shorter")
    return _without_cache(author, first, None, min(length, SHORT), generator, progress)


def _with_cache(
    author: Author,
    first: Tensor,
    length: int,
    generator: torch.Generator,
    progress: Progress | None,
) -> Tensor:
    """Each token is read once; keys and values of those before are handed in."""
    parts, at_once = [], len(first)
    rest = first
    while len(rest):
        part = rest[:at_once]
        cache: Any = None
        column, written = part[:, None], [part[:, None]]
        for step in range(1, length):
            inputs = _only_tokens(author, column)
            output = author.model(**inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            if step == 1:
                _check_cache(author, part[:2], cache)
                room = max(1, CACHE_BYTES // max(1, _bytes(cache) * length // len(part)))
                if room < len(part):
                    at_once = room
                    break
            scores = scores_of(output, author.vocabulary or 0)
            assert scores is not None
            column = sample(scores[:, -1], generator, len(author.text.table))[:, None].to(part)
            written.append(column)
            if progress:
                done = len(first) - len(rest)
                progress("writing", done * length + len(part) * (step + 1), len(first) * length)
        if len(written) == length:
            parts.append(torch.cat(written, 1))
            rest = rest[len(part) :]
    return torch.cat(parts)


def _only_tokens(author: Author, tokens: Tensor) -> dict[str, Tensor]:
    """Tokens as a keyword argument, without masks and positions, which the cache knows."""
    example = author.example_inputs
    if isinstance(example, Mapping):
        name = next(key for key, x in example.items() if x is author.text.tokens)
        return {name: tokens}
    given = [example] if isinstance(example, Tensor) else list(example)
    place = next(i for i, x in enumerate(given) if x is author.text.tokens)
    return {list(inspect.signature(author.model.forward).parameters)[place]: tokens}


def _check_cache(author: Author, first: Tensor, cache: Any) -> None:
    """A cache that gives other scores than the whole text is of no use."""
    if cache is None:
        raise ValueError("the network returns no cache")
    size = len(author.text.table)
    pair = torch.stack([first, (first + size // 2) % size], 1)
    fresh = author.model(**_only_tokens(author, pair[:, :1]), use_cache=True).past_key_values
    second = _only_tokens(author, pair[:, 1:])
    after = author.model(**second, past_key_values=fresh, use_cache=True)
    wanted = author.scores(author.form(pair))[:, -1].float()
    got = scores_of(after, author.vocabulary or 0)
    if got is None or float((got[:, -1].float() - wanted).abs().max()) > 0.1 * float(wanted.std()):
        raise ValueError("the cache gives other scores")


def _bytes(cache: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in(cache, 6))


def _without_cache(
    author: Author,
    first: Tensor,
    source: Tensor | None,
    length: int,
    generator: torch.Generator,
    progress: Progress | None,
) -> Tensor:
    """The network runs over all places for every token: later ones change no earlier score."""
    tokens = first[:, None].repeat(1, length)
    size = author.rows_at_once(length)
    for step in range(1, length):
        for i in range(0, len(tokens), size):
            rows = slice(i, i + size)
            inputs = author.form(tokens[rows], None if source is None else source[rows])
            scores = author.scores(inputs)[:, step - 1]
            tokens[rows, step] = sample(scores, generator, len(author.text.table)).to(tokens)
        if progress:
            progress("writing", step, length - 1)
    return tokens


def _answer(
    author: Author, count: int, generator: torch.Generator, progress: Progress | None
) -> Inputs:
    """An encoder-decoder answers random text; its answers are what the encoder reads next."""
    assert author.source is not None
    target, given = author.text.tokens, author.source.tokens
    first = target[torch.arange(count) % len(target), 0]
    source = drawn_like(author.source, author.example_inputs, (count, given.shape[1]), generator)
    source = source.to(given)
    length = target.shape[1]
    answered = _without_cache(author, first, source, length, generator, progress)
    if author.source.table.data_ptr() == author.text.table.data_ptr():
        inner = answered[:, 1:].repeat(1, given.shape[1] // max(1, length - 1) + 1)
        source[:, :-1] = inner[:, : given.shape[1] - 1].to(source)
        answered = _without_cache(author, first, source, length, generator, progress)
    return author.form(answered, source)


# -------------------------------------------------------------------------------------- gap by gap


def _fill(
    author: Author, count: int, generator: torch.Generator, progress: Progress | None
) -> Tensor:
    """Texts whose gaps are filled in turn: first all of them, then ever fewer, drawn anew."""
    shape = (count, author.length)
    tokens = drawn_like(author.text, author.example_inputs, shape, generator)
    tokens = tokens.to(author.text.tokens)
    gap = gap_token(author, generator)
    inner = torch.zeros(shape, dtype=torch.bool)
    inner[:, 1:-1] = True
    size = author.rows_at_once(shape[1])
    for turn in range(ROUNDS):
        fraction = max(REFILLED, 1 - 2 * turn / ROUNDS)
        gaps = (torch.rand(shape, generator=generator) < fraction) & inner
        for i in range(0, count, size):
            rows, here = tokens[i : i + size], gaps[i : i + size].to(tokens.device)
            scores = author.scores(author.form(rows.masked_fill(here, gap)))
            scores[..., gap] = -torch.inf  # a gap is no answer
            rows[here] = sample(scores[here], generator, len(author.text.table)).to(rows)
        if progress:
            progress("writing", turn + 1, ROUNDS)
    return tokens


@torch.no_grad()
def gap_token(author: Author, generator: torch.Generator) -> int:
    """The token that stands for a gap: never an answer itself, and where it stands the network
    finds the word that stood there more likely than under any other such token."""
    shape = (PLACES, min(20, author.length))
    tokens = drawn_like(author.text, author.example_inputs, shape, generator)
    tokens = tokens.to(author.text.tokens)
    chances = F.log_softmax(author.scores(author.form(tokens)).float(), -1).mean((0, 1))
    size = min(len(author.text.table), chances.shape[0])
    table = author.text.table.float()
    trained = (table - table.mean(0)).norm(dim=1)[:size]
    chances = chances[:size].masked_fill(trained < 0.5 * trained.median(), torch.inf)
    candidates = chances.topk(min(CANDIDATES, size), largest=False).indices
    places = torch.randint(1, max(2, shape[1] - 1), (PLACES,), generator=generator)
    rows = torch.arange(PLACES)
    words = tokens[rows, places]
    found = []
    for candidate in candidates.tolist():
        tried = tokens.clone()
        tried[rows, places] = candidate
        scores = author.scores(author.form(tried))[rows, places].float()
        found.append(float(F.log_softmax(scores, -1).gather(1, words[:, None]).mean()))
    return int(candidates[max(range(len(found)), key=found.__getitem__)])
