"""Units of attention: heads, the channels of queries and keys, the channels of values.

Heads are cut for good where the network's code runs with fewer of them, which a trial run decides.
Elsewhere, and for channels inside heads, what surrounds the layers keeps its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.graph.patterns import listed, matches, names_attention
from lbyl.graph.unit import AttentionRows, Axis, Consumer, Graph, Layer, Producer, Unit
from lbyl.runtime.run import Inputs
from lbyl.runtime.session import one_thread
from lbyl.surgery.cut import cut_for_trial
from lbyl.surgery.indices import kept_indices
from lbyl.surgery.modules.masked import can_be_masked
from lbyl.tracing.attention.find import Attention, Rows, find_attentions
from lbyl.tracing.dry_run import COMPUTED_WITH
from lbyl.tracing.follow import follow
from lbyl.tracing.group import bias_behind, norm_behind
from lbyl.tracing.labels import Flow, connected
from lbyl.tracing.record import DoesNotRun
from lbyl.tracing.values import Exactness, some, widths

KINDS = ("heads", "qk", "v", "queries")
QUERIES = "queries"  # single heads of those that share keys and values; instead of whole groups


@dataclass
class _Part:
    """A unit in the making: its channels as classes of rows, and the block of each."""

    kind: str
    rows: Tensor  # (n,): row numbers
    channel: Tensor  # (n,): the channel of each, counted within the unit
    block: Tensor  # (m,)
    columns: dict[str, Tensor] = field(default_factory=dict)  # weight → channel of each input, −1


@dataclass
class _Builder:
    """Adds units of attention to a graph."""

    model: nn.Module
    inputs: Inputs
    flow: Flow
    graph: Graph
    rows: Rows
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.classes = self.rows.classes()
        self.layer_of: dict[str, Layer] = {x.weight: x for x in reversed(self.flow.layers)}
        self.weights = list(self.rows.first)
        self.firsts = torch.tensor([*self.rows.first.values()] or [1])
        bad = torch.zeros(self.rows.count, dtype=torch.bool)
        for row in self.rows.elsewhere:
            bad[self.classes[row]] = True
        self.bad = bad

    def weight_of(self, rows: Tensor) -> list[str]:
        """The weights that these rows belong to, in order."""
        index = torch.searchsorted(self.firsts, rows.flatten().contiguous(), right=True) - 1
        return [self.weights[i] for i in dict.fromkeys(index.tolist())]

    def why_not(self, rows: Tensor) -> str | None:
        """Why rows cannot go: something else reads one of them."""
        classes = torch.unique(self.classes[rows])
        if not bool(self.bad[classes].any()):
            return None
        spoilt = {int(r) for r in self.rows.elsewhere if bool(self.bad[self.classes[r]])}
        mine = set(classes[self.bad[classes]].tolist())
        return next(self.rows.elsewhere[r] for r in spoilt if int(self.classes[r]) in mine)

    def channels(self, kind: str, attention: Attention) -> _Part | str:
        """The channels of queries and keys, or of values; a reason where they cannot go."""
        sources = (attention.query, attention.key) if kind == "qk" else (attention.value,)
        why = self.why_not(torch.cat([x.flatten() for x in sources]))
        if why:
            return why
        if kind == "qk" and self.is_bent(sources):
            return "its zeros do not stay zeros on the way to the product"
        by_head = self.classes[torch.cat(sources, 1)]  # (heads, ·)
        group = _groups([by_head])
        rows = self.members(by_head)
        if self.is_shared(attention, by_head):
            return "its channels are shared with another attention"
        order: list[Tensor] = []
        blocks: list[int] = []
        for g in range(int(group.max()) + 1):
            members = _in_order(by_head[group == g].flatten())
            order.append(members)
            blocks += [g] * len(members)
        sizes = {len(members) for members in order}
        if len(sizes) > 1 or min(sizes) < 2:
            return "its heads differ in their channels"
        number = torch.full((self.rows.count,), -1)
        number[torch.cat(order)] = torch.arange(len(blocks))
        return _Part(kind, rows, number[self.classes[rows]], torch.tensor(blocks))

    def members(self, classes: Tensor) -> Tensor:
        """All rows of these classes."""
        return torch.nonzero(torch.isin(self.classes, torch.unique(classes))).reshape(-1)

    def is_shared(self, attention: Attention, classes: Tensor) -> bool:
        """Whether another attention computes with rows of these classes."""
        for other in self.rows.attentions:
            if torch.equal(other.query, attention.query):
                continue
            theirs = torch.cat([x.flatten() for x in (other.query, other.key, other.value)])
            if bool(torch.isin(self.classes[theirs], classes).any()):
                return True
        return False

    def is_bent(self, sources: Sequence[Tensor]) -> bool:
        return any(int(row) in self.rows.bent for x in sources for row in x.flatten())

    def heads(self, attention: Attention) -> _Part | str:
        """Whole heads: of those that share keys or values, all together."""
        parts = (attention.query, attention.key, attention.value)
        flat = torch.cat([x.flatten() for x in parts])
        why = self.why_not(flat)
        if why:
            return why
        classes = [self.classes[x] for x in parts]
        group = _groups(classes)
        count = int(group.max()) + 1
        if count < 2:
            return "its heads share what they attend to: they can only go all together"
        number = torch.full((self.rows.count,), -1)
        for x in classes:
            number[x] = group[:, None].expand_as(x)
        rows = self.members(self.classes[flat])
        if self.is_shared(attention, self.classes[flat]):
            return "its heads are shared with another attention"
        return _Part("heads", rows, number[self.classes[rows]], torch.zeros(count).long())

    def queries(self, attention: Attention) -> _Part | str:
        """Single heads of those that share keys and values: what they ask, and their columns."""
        shared = _groups([self.classes[x] for x in (attention.key, attention.value)])
        heads = len(attention.query)
        if int(shared.max()) + 1 == heads:
            return "no heads share keys and values: see :heads"
        rows = attention.query.flatten()
        why = self.why_not(rows)
        if why or len(torch.unique(rows)) < len(rows):
            return why or "its heads share queries"
        # Products tie queries to the keys that heads share; nothing but those may hang on them.
        known = torch.cat([rows, attention.key.flatten()])
        if not bool(torch.isin(self.members(self.classes[rows]), known).all()):
            return "its queries are used elsewhere"
        if self.is_shared(attention, self.classes[rows]):
            return "its heads are shared with another attention"
        number = torch.arange(heads).repeat_interleave(attention.query.shape[1])
        order = torch.argsort(rows)
        # Values are the same for several heads: whose columns they are is told by their order.
        values = self.classes[attention.value]
        columns = {
            weight: torch.arange(heads).repeat_interleave(values.shape[1])
            for weight, several in self.rows.read.items()
            if any(torch.equal(self.classes[x], values.flatten()) for x in several)
        }
        if not columns:
            return "no layer reads its heads one after the other"
        block = torch.zeros(heads).long()
        return _Part("heads", rows[order], number[order], block, columns)

    def facts(self, module: str, attention: Attention) -> AttentionRows:
        """What a unit remembers of the attention that it is part of."""
        names = [self.weight_of(x)[0] for x in (attention.query, attention.key)]
        query, key = (
            x - self.rows.first[n] for x, n in zip((attention.query, attention.key), names)
        )
        sizes = None
        if names[0] == f"{module}.in_proj_weight" or (not module and names[0] == "in_proj_weight"):
            width = query.shape[1]
            sizes = (len(query), width, attention.value.shape[1], width)
        same = [a for a in self.rows.attentions if torch.equal(a.query, attention.query)]
        return AttentionRows(
            module,
            tuple(dict.fromkeys(a.module for a in same)),
            tuple(a.product for a in same),
            query,
            key,
            names[0],
            names[1],
            attention.plain,
            sizes,
        )

    def why_not_cut(self, part: _Part, facts: AttentionRows) -> str | None:
        """Why the layers of a unit cannot lose rows, None where they can."""
        if part.columns:  # what surrounds single heads keeps its size
            return self.why_not_masked(part)
        if facts.sizes is not None:
            return None
        names = self.weight_of(part.rows)
        if part.kind == "qk" and set(names) > {facts.query_weight, facts.key_weight}:
            return "its queries or keys are made by several layers"
        if part.kind != "qk" and not self.columns(part):
            return "no layer reads its channels"
        if part.kind == "heads":
            return None  # a trial decides
        return self.why_not_masked(part)

    def why_not_masked(self, part: _Part) -> str | None:
        """Why the layers around a unit cannot lose rows while all else keeps its size."""
        names = [*self.weight_of(part.rows), *self.columns(part)]
        layers = [self.layer_of[n] for n in names]
        for layer in layers:
            if layer.kind != "linear" or not can_be_masked(_module(self.model, layer.name)):
                return f"{layer.name} is no plain linear layer, and its size is written into code"
        return None

    def columns(self, part: _Part) -> dict[str, Tensor]:
        """Layers that read the unit, by weight: for every input column its channel or −1."""
        if part.columns:
            return part.columns
        number = torch.full((self.rows.count,), -1)
        number[self.classes[part.rows]] = part.channel
        number[0] = -1
        read = {}
        for weight, several in self.rows.read.items():
            channel = number[self.classes[several[0]]]
            if bool((channel >= 0).any()):
                read[weight] = channel
        return read


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _named(builder: _Builder) -> list[tuple[str, Attention]]:
    """Every attention with the module that holds its layers; one that is run twice counts once."""
    found: dict[str, Attention] = {}
    for attention in builder.rows.attentions:
        parts = (attention.query, attention.key, attention.value)
        names = [n.removesuffix(".weight") for x in parts for n in builder.weight_of(x)]
        module = _common_module(names)
        before = found.get(module)
        if before is None:
            found[module] = attention
        elif not torch.equal(before.query, attention.query):
            builder.reasons[module] = "it holds several attentions"
    return [(m, a) for m, a in found.items() if m not in builder.reasons]


def _groups(classes: Sequence[Tensor]) -> Tensor:
    """(heads,): the group of each head; heads with a class in common are one group."""
    heads = classes[0].shape[0]
    pairs: list[tuple[int, int]] = []
    for x in classes:
        first: dict[int, int] = {}
        for head, row in enumerate(x.tolist()):
            pairs += [(head, first.setdefault(c, head)) for c in set(row)]
    together = connected(heads, [torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T])
    return torch.unique(together, return_inverse=True)[1]


def _in_order(values: Tensor) -> Tensor:
    return torch.tensor(list(dict.fromkeys(values.tolist())), dtype=torch.long)


def _common_module(names: Sequence[str]) -> str:
    """The module that holds all of these layers."""
    parts = [name.split(".")[:-1] for name in names]
    common = []
    for words in zip(*parts):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    return ".".join(common)


@one_thread()
def offer(
    model: nn.Module, inputs: Inputs, flow: Flow, graph: Graph, patterns: str | Sequence[str]
) -> Graph:
    """The graph with the units of attention that the patterns name; others stay out of it."""
    asked = [p for p in listed(patterns) if names_attention(p)]
    known: list[str] = []
    rows = find_attentions(flow)
    builder = _Builder(model, inputs, flow, graph, rows)
    made: list[tuple[str, _Part, AttentionRows]] = []
    refused: dict[str, str] = {}
    for module, attention in _named(builder):
        facts = builder.facts(module, attention)
        for kind in KINDS:
            name = f"{module}:{kind}"
            known.append(name)
            whole = kind == QUERIES and matches(f"{module}:heads", asked)  # one or the other
            if whole or not matches(name, asked):
                continue
            part = _part(builder, kind, attention)
            why = part if isinstance(part, str) else builder.why_not_cut(part, facts)
            if isinstance(part, str) or why:
                refused[name] = str(why)
            else:
                made.append((name, part, facts))
    for pattern in asked:
        if not any(matches(name, pattern) for name in known):
            there = f"; there are {', '.join(known[:3])}, …" if known else ""
            raise LbylError(f"include={pattern!r} fits no attention of this network{there}")
    graph = replace(graph, unprunable={**graph.unprunable, **refused})
    return _verified(builder, _added(builder, graph, made))


def _part(builder: _Builder, kind: str, attention: Attention) -> _Part | str:
    """A unit of this kind in the making, or why there is none."""
    if kind == "heads":
        return builder.heads(attention)
    return builder.queries(attention) if kind == QUERIES else builder.channels(kind, attention)


def _added(
    builder: _Builder, graph: Graph, made: Sequence[tuple[str, _Part, AttentionRows]]
) -> Graph:
    """The graph with further units, their axes and their consumers."""
    start = max([unit.range.stop for unit in graph.units], default=0)
    start = max([start, *(int(c.max()) + 1 for c in graph.axes.values())])
    axes, consumers, units = dict(graph.axes), dict(graph.consumers), list(graph.units)
    for name, part, facts in made:
        block = part.block if part.kind != "heads" and int(part.block.max()) else None
        producers: list[Producer] = []
        for weight in builder.weight_of(part.rows):
            layer, first = builder.layer_of[weight], builder.rows.first[weight]
            size = builder.rows.sizes[weight]
            channel = torch.full((size,), -1)
            mine = (part.rows >= first) & (part.rows < first + size)
            channel[part.rows[mine] - first] = part.channel[mine] + start
            bias, _ = bias_behind(builder.flow, layer)
            _put(axes, (weight, layer.output_axis), channel, part.kind)
            if bias is not None:
                _put(axes, (bias, 0), channel, part.kind)
            producers.append(
                Producer(layer.name, weight, layer.output_axis, bias, None, layer.kind)
            )
        readers: list[str] = []
        for weight, local in ({} if part.kind == "qk" else builder.columns(part)).items():
            layer = builder.layer_of[weight]
            channel = torch.where(local >= 0, local + start, -1)
            _put(axes, (weight, layer.input_axis), channel, part.kind)
            readers.append(layer.name)
            consumers[layer.name] = _consumer(builder.flow, layer, consumers.get(layer.name))
            consumers[layer.name] = replace(
                consumers[layer.name], channel=axes[weight, layer.input_axis]
            )
        count = len(part.block)
        units.append(
            Unit(
                name,
                start,
                count,
                tuple(producers),
                tuple(readers),
                (),
                ("attention",),
                kind=part.kind,
                block=block,
                masked=bool(part.columns) or (facts.sizes is None and part.kind != "heads"),
                attention=facts,
            )
        )
        start += count
    offered = {p.name for unit in units for p in unit.producers}
    unprunable = {n: r for n, r in graph.unprunable.items() if n not in offered}
    return replace(graph, units=tuple(units), axes=axes, consumers=consumers, unprunable=unprunable)


def _put(axes: dict[Axis, Tensor], axis: Axis, channel: Tensor, kind: str) -> None:
    """Enter channels of an axis; heads beside the channels that it has already."""
    before = axes.get(axis, torch.full_like(channel, -1))
    column = 1 if kind == "heads" else 0
    if before.dim() == 1 and column:
        before = torch.stack([before, torch.full_like(before, -1)], 1)
    if before.dim() == 1:
        axes[axis] = torch.where(channel >= 0, channel, before)
        return
    parts = list(before.unbind(1))
    parts[column] = torch.where(channel >= 0, channel, parts[column])
    axes[axis] = torch.stack(parts, 1)


def _consumer(flow: Flow, layer: Layer, known: Consumer | None) -> Consumer:
    if known is not None:
        return known
    bias, out = bias_behind(flow, layer)
    calls = sum(other.weight == layer.weight for other in flow.layers)
    return Consumer(
        layer.name,
        layer.weight,
        bias,
        layer.input_axis,
        layer.output_axis,
        norm_behind(flow, out) if calls == 1 else None,
        layer.kind,
        torch.empty(0),
        calls,
    )


def _verified(builder: _Builder, graph: Graph) -> Graph:
    """Heads that a trial shows cannot be cut for good are masked instead, or given up."""
    tried = [u for u in graph.units if u.attention is not None and not u.masked]
    by_class: dict[type, list[Unit]] = {}
    for unit in tried:
        assert unit.attention is not None
        by_class.setdefault(type(builder.model.get_submodule(unit.attention.module)), []).append(
            unit
        )
    instead: dict[str, Unit | str] = {}
    for units in by_class.values():
        if _holds(builder, graph, units):
            continue
        for unit in units:
            instead[unit.name] = _otherwise(builder, graph, unit)
    return _computing_alike(builder, _exchanged(graph, instead))


def _exchanged(graph: Graph, instead: Mapping[str, Unit | str]) -> Graph:
    """The graph with other units in place of some, or the reasons why there are none."""
    if not instead:
        return graph
    dropped = {n: why for n, why in instead.items() if isinstance(why, str)}
    final = [instead.get(u.name, u) for u in graph.units]
    return replace(
        graph,
        units=tuple(u for u in final if isinstance(u, Unit)),
        unprunable={**graph.unprunable, **dropped},
    )


def _computing_alike(builder: _Builder, graph: Graph) -> Graph:
    """Units whose size the network computes with are masked instead, or given up."""
    exactness = Exactness(builder.model, builder.inputs, graph)
    for kept in widths(graph, [u for u in graph.units if u.attention is not None]):
        kept = {name: channels for name, channels in kept.items() if name in exactness.graph.names}
        while bad := exactness.wrong(kept):
            graph = exactness.graph
            graph = _exchanged(graph, {n: _unlike(builder, graph, graph[n]) for n in bad})
            kept = {name: channels for name, channels in kept.items() if name in graph.names}
            exactness.graph = graph
    return exactness.graph


def _unlike(builder: _Builder, graph: Graph, unit: Unit) -> Unit | str:
    """A unit that does not compute alike once it is cut, masked; or the reason to give it up."""
    masked = COMPUTED_WITH if unit.masked else _otherwise(builder, graph, unit)
    return COMPUTED_WITH if isinstance(masked, str) else masked


BAKED = "its size is written into the model's code"


def _otherwise(builder: _Builder, graph: Graph, unit: Unit) -> Unit | str:
    """A unit that the network's code does not run without, masked; or why that cannot be."""
    if unit.attention is None or unit.attention.sizes is not None:
        return BAKED
    names = {p.name for p in unit.producers} | set(unit.consumers)
    plain = all(can_be_masked(_module(builder.model, name)) for name in names)
    return replace(unit, masked=True) if plain else BAKED


def _holds(builder: _Builder, graph: Graph, units: Sequence[Unit]) -> bool:
    """Whether the network runs with these units cut, and computes with the rows that stay."""
    kept = {unit.name: some(graph, unit) for unit in units}
    indices = kept_indices(graph, kept)
    try:
        slim = cut_for_trial(builder.model, graph, kept)
        flow = follow(slim, builder.inputs, spare=True, training=False)
        after = find_attentions(flow)
    except DoesNotRun:
        return False
    return _same(builder.rows, after, indices, {x.weight: x for x in builder.flow.layers})


def _same(
    before: Rows, after: Rows, indices: Mapping[Axis, Tensor], layers: Mapping[str, Layer]
) -> bool:
    """Whether each attention computes with exactly the rows and columns that were kept."""
    if len(before.attentions) != len(after.attentions):
        return False
    back = torch.full((after.count,), 0)  # a row of the cut network → its number before
    for weight, first in after.first.items():
        if weight not in before.first:
            return False
        rows = torch.arange(after.sizes[weight])
        kept = indices.get((weight, layers[weight].output_axis), rows)
        if len(kept) != len(rows):
            return False
        back[first + rows] = before.first[weight] + kept
    alive = torch.zeros(before.count, dtype=torch.bool)
    alive[back] = True
    for old, new in zip(before.attentions, after.attentions):
        for name in ("query", "key", "value"):
            was, now = getattr(old, name), back[getattr(new, name)]
            stays = alive[was].any(1)
            expected = [row[alive[row]] for row in was[stays]]
            if len(expected) != len(now) or any(
                not torch.equal(a, b) for a, b in zip(expected, now)
            ):
                return False
    for weight, several in before.read.items():
        kept = indices.get((weight, layers[weight].input_axis), torch.arange(len(several[0])))
        columns = after.read.get(weight, [])
        if len(columns) != len(several) or any(
            len(b) != len(kept) or not torch.equal(a[kept], back[b])
            for a, b in zip(several, columns)
        ):
            return False
    return True
