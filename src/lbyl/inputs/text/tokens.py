"""Token numbers: where a network takes them in, and random text where it can write none itself.

What is known without data is the table of embeddings. Tokens that were never trained lie near the
table's mean and are left out. Tokenisers number tokens by how frequent they are, so ranks follow
Zipf's law. And text is about something: most tokens of a sequence are drawn near one of them.
What else stands in a text, the network tells: tokens that hardly change what it makes of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.runtime.intercept import Function, Interceptor
from lbyl.runtime.run import Inputs, call_model, call_on_these, evaluation_mode, tensors_in

TOPICAL = 0.7  # fraction of tokens drawn from the neighbourhood of the sequence's topic
NEIGHBOURS = 64
ZIPF_OFFSET = 30  # p ∝ 1 / (rank + offset)
TRAINED = 0.7  # of the median distance to the mean embedding
COMMON = 0.5  # fraction of tokens that hardly change anything, where the network tells which
TELLING, CONTEXTS = 2048, 2  # frequent tokens that are asked about, each in so many texts,
QUIET = 3  # and of which one in three counts as such
WORDS = 1000  # with fewer tokens there are no words
AT_ONCE = 256  # sequences that run at once
LENGTH = 20  # short sequences are mixed less by attention, as real ones are


@dataclass(frozen=True)
class Text:
    """The example input that holds token numbers, and the table it is looked up in."""

    tokens: Tensor
    table: Tensor
    longest: int | None = None  # tokens that there are positions for; None: no table limits them


class _Lookups(Interceptor):
    """Notes which of the given tensors are looked up in which table, and tables of positions."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.inputs = {x.data_ptr(): x for x in inputs}
        self.texts: list[Text] = []
        self.longest: int | None = None

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.embedding:
            tokens, table = args[0], args[1] if len(args) > 1 else kwargs["weight"]
            given = self.inputs.get(tokens.data_ptr())
            if given is not None and given.numel() == tokens.numel():
                self.texts.append(Text(given, table.detach()))
            elif _counts_up(tokens):
                room = len(table) - int(tokens.min())
                self.longest = min(room, self.longest or room)
        return func(*args, **kwargs)


def _counts_up(tokens: Tensor) -> bool:
    """Whether these are positions: each one more than the one before."""
    return tokens.dim() > 0 and tokens.shape[-1] > 1 and bool((tokens.diff(dim=-1) == 1).all())


def find_texts(model: nn.Module, example_inputs: Inputs) -> list[Text]:
    """Every input of token numbers, in the order in which they are looked up."""
    whole = [x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor) and x.dim() == 2]
    whole = [x for x in whole if not x.dtype.is_floating_point and x.dtype != torch.bool]
    if not whole:
        return []
    lookups = _Lookups(whole)
    with evaluation_mode(model), torch.no_grad(), lookups:
        call_on_these(model, example_inputs)
    largest = {id(text.tokens): text for text in sorted(lookups.texts, key=lambda t: len(t.table))}
    found = list(dict.fromkeys(id(text.tokens) for text in lookups.texts))
    return [replace(largest[each], longest=lookups.longest) for each in found]


def find_text(model: nn.Module, example_inputs: Inputs) -> Text | None:
    """The input of token numbers with the largest table, None where there is none."""
    return main_text(find_texts(model, example_inputs))


def main_text(texts: Sequence[Text]) -> Text | None:
    """The one with the largest table."""
    return max(texts, key=lambda text: len(text.table), default=None)


def random_text(
    text: Text, example_inputs: Inputs, count: int, seed: int, common: Tensor | None = None
) -> Inputs:
    """`count` sequences in the form of the example; first and last token are the example's own.

    `common` are tokens that stand between those of a topic.
    """
    generator = torch.Generator().manual_seed(seed)
    length = text.tokens.shape[1]
    if free_length(text, example_inputs):
        length = min(length, LENGTH)
    drawn = drawn_like(text, example_inputs, (count, length), generator, common)
    return in_form(example_inputs, [(text, drawn)])


@torch.no_grad()
def common_tokens(model: nn.Module, example_inputs: Inputs, text: Text) -> Tensor | None:
    """Frequent tokens, in the order of their numbers, that change a text's meaning least.

    Each is put into the middle of some texts. How far the outputs turn, the mean over tokens, is
    what it counts for: an encoder has learnt which words tell nothing, and these are the ones that
    stand in every text. None where a text cannot be longer or there are no words.
    """
    trained = trained_tokens(text.table)
    if len(trained) < WORDS or not free_length(text, example_inputs):
        return None
    asked, generator = trained[:TELLING], torch.Generator().manual_seed(0)
    shape = (CONTEXTS, min(text.tokens.shape[1], LENGTH))
    texts = drawn_like(text, example_inputs, shape, generator)
    middle = shape[1] // 2
    turned = torch.zeros(len(asked), dtype=torch.float64)
    with evaluation_mode(model):
        for own in texts:
            whole = _meaning(model, example_inputs, text, own[None])
            for at in range(0, len(asked), AT_ONCE):
                some = asked[at : at + AT_ONCE]
                before, after = (x.expand(len(some), -1) for x in (own[:middle], own[middle:]))
                longer = torch.cat([before, some[:, None], after], 1)
                found = _meaning(model, example_inputs, text, longer)
                if whole is None or found is None:
                    return None
                turned[at : at + AT_ONCE] += 1 - (found @ whole.T)[:, 0].cpu()
    if not bool(torch.isfinite(turned).all()):
        return None
    return asked[turned.argsort(stable=True)[: len(asked) // QUIET].sort().values]


def _meaning(model: nn.Module, example_inputs: Inputs, text: Text, tokens: Tensor) -> Tensor | None:
    """(sequences, width): the first output for every token, the mean over them, at unit length."""
    out = call_model(model, in_form(example_inputs, [(text, tokens)]))
    for x in tensors_in(out):
        if x.dim() == 3 and x.shape[:2] == tokens.shape and x.is_floating_point():
            return F.normalize(x.double().mean(1), dim=1)
    return None


def drawn_like(
    text: Text,
    example_inputs: Inputs,
    shape: tuple[int, int],
    generator: torch.Generator,
    common: Tensor | None = None,
) -> Tensor:
    """Random tokens (sequences, length) between the first and the last of the example."""
    rows = torch.arange(shape[0]) % len(text.tokens)
    drawn = draw(text.table, shape, generator, common)
    if shape[1] > 2:
        drawn[:, 0] = text.tokens.cpu()[rows, 0]
        drawn[:, -1] = _last(text, example_inputs)[rows]
    return drawn


def free_length(text: Text, example_inputs: Inputs) -> bool:
    """Whether sequences may be longer or shorter: nothing else in the example has a length."""
    others = [x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor)]
    return all(x.shape == text.tokens.shape for x in others)


def in_form(example_inputs: Inputs, written: Sequence[tuple[Text, Tensor]]) -> Inputs:
    """The example with other tokens (sequences, length) in the place of its own."""
    tokens = {id(text.tokens): drawn for text, drawn in written}
    count = len(written[0][1])
    lengths = {text.tokens.shape: drawn.shape[1] for text, drawn in written}

    def like(x: Tensor) -> Tensor:
        if id(x) in tokens:
            return tokens[id(x)].to(x)
        if x.shape not in lengths:
            return x[:1].expand(count, *x.shape[1:]) if x.dim() else x
        # Of masks and positions the row that is fullest, so that no token is padding.
        return resized(x[int(x.sum(1).argmax())], lengths[x.shape])[None].expand(count, -1)

    return tree_map_only(Tensor, like, example_inputs)


def resized(row: Tensor, length: int) -> Tensor:
    """A row of a mask, of types or of positions, cut off or gone on with as it ends."""
    more = length - len(row)
    if more <= 0:
        return row[:length]
    step = int(row[-1]) - int(row[-2]) if len(row) > 1 else 0
    return torch.cat([row, row[-1] + step * torch.arange(1, more + 1).to(row)])


def _last(text: Text, example_inputs: Inputs) -> Tensor:
    """The last token of every example that a mask of zeros and ones does not hide."""
    tokens = text.tokens.cpu()
    for x in tree_flatten(example_inputs)[0]:
        mask = x.cpu() if isinstance(x, Tensor) and x.shape == tokens.shape else None
        if mask is not None and x is not text.tokens and bool((mask[:, 0] == 1).all()):
            ends = (mask != 0).sum(1) - 1
            return tokens.gather(1, ends[:, None])[:, 0]
    return tokens[:, -1]


def trained_tokens(table: Tensor) -> Tensor:
    """Numbers of the tokens whose embeddings were trained, in order."""
    table = table.float().cpu()
    distance = (table - table.mean(0)).norm(dim=1)
    return torch.nonzero(distance >= TRAINED * distance.median()).reshape(-1)


def draw(
    table: Tensor,
    shape: tuple[int, int],
    generator: torch.Generator,
    common: Tensor | None = None,
) -> Tensor:
    """Token numbers (sequences, length) for a table of embeddings (tokens, width)."""
    trained = trained_tokens(table)
    count, length = shape

    def pick(number: int, total: int) -> Tensor:
        likely = 1 / (torch.arange(total) + float(ZIPF_OFFSET))
        return torch.multinomial(likely, number, replacement=True, generator=generator)

    every = trained if common is None else common
    loose = every[pick(count * length, len(every))].reshape(shape)
    directions = F.normalize(table.float().cpu()[trained], dim=1)
    near = min(NEIGHBOURS, len(trained))
    topics = directions[pick(count, len(trained))]
    around = torch.cat(
        [(part @ directions.T).topk(near, dim=1).indices for part in topics.split(64)]
    )
    bound = around.gather(1, torch.randint(near, shape, generator=generator))
    topical = TOPICAL if common is None else 1 - COMMON
    return torch.where(torch.rand(shape, generator=generator) < topical, trained[bound], loose)
