"""Queries and keys with fewer channels, so that their products stay near what they were.

Nothing but moving and scaling between a layer and the product: with Q = E[q qᵀ] and K the
covariance of keys the best products of r channels come from the singular vectors of Q^½ K^½, and
both layers become mixtures of their rows. With rotary embeddings only what commutes with a
rotation of pairs may be written: every kept pair of a query gets the factor and the turn by which
its products, with those of the other kept pairs, come nearest to the logit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lbyl.graph.unit import Graph, Unit
from lbyl.runtime.notes import note
from lbyl.runtime.tensors import is_finite
from lbyl.statistics.products import ProductMoments, are_pairs, pairs_of
from lbyl.statistics.solve import RIDGE, solve_ridge

State = Mapping[str, Tensor]


def rewritten_products(
    graph: Graph, unit: Unit, kept: Tensor, moments: ProductMoments, state: State
) -> tuple[dict[str, Tensor], float]:
    """New full-size weights and biases of the layers of queries and keys, and the error of logits.

    Rows of kept channels hold what is to be written; those of pruned ones are left as they were.
    """
    facts = unit.attention
    assert facts is not None
    names = dict.fromkeys((facts.query_weight, facts.key_weight))
    producers = {p.weight: p for p in unit.producers}
    new = {n: state[n].detach().double().movedim(producers[n].axis, 0).clone() for n in names}
    biases = {n: producers[n].bias for n in names}
    new |= {b: state[b].detach().double().clone() for b in biases.values() if b is not None}

    def both(weight: str) -> list[str]:
        bias = biases[weight]
        return [weight] if bias is None else [weight, bias]

    missed = total = 0.0
    flags = torch.zeros(unit.channels, dtype=torch.bool)
    flags[kept] = True
    pairs = pairs_of(graph, unit)  # (heads, channels, most places)
    axis = producers[facts.query_weight].axis
    channel = unit.local(graph.axes[facts.query_weight, axis])[facts.query]
    done: set[int] = set()
    for head in range(len(facts.query)):
        members = torch.unique(channel[head])
        here = flags[members]  # by channel of this head
        if facts.plain and pairs.shape[2] == 1:
            sharing = [h for h in range(len(channel)) if int(channel[h].min()) == int(members[0])]
            if head in done:
                continue
            done.update(sharing)
            order = pairs[head, :, 0]
            error, whole = _low_rank(
                [facts.query[h][pairs[h, :, 0]] for h in sharing],
                facts.key[head][order],
                [moments.query[h][pairs[h, :, 0]][:, pairs[h, :, 0]] for h in sharing],
                moments.key[head][order][:, order],
                here,
                [new[n] for n in both(facts.query_weight)],
                [new[n] for n in both(facts.key_weight)],
            )
        else:
            error, whole = _gains(
                moments.gram[head].double(),
                here,
                torch.where(pairs[head] < 0, -1, facts.query[head][pairs[head]]),
                [new[n] for n in both(facts.query_weight)],
            )
        missed, total = missed + error, total + whole
    if not is_finite(*new.values()):
        note("only cut: what queries and keys should take over is not finite")
        return {}, missed / max(total, 1e-300)
    moved = {n: new[n].movedim(0, producers[n].axis) if n in names else new[n] for n in new}
    return moved, missed / max(total, 1e-300)


def _gains(gram: Tensor, kept: Tensor, rows: Tensor, tensors: list[Tensor]) -> tuple[float, float]:
    """Factors and turns of the kept channels of one head's queries, written into `tensors`.

    With features f of all channels and 1 at those of unturned products, coefficients c of the kept
    ones minimise E[(Σf − c·f_P)²] + ε|c − 1|².
    """
    size = len(kept)
    target = gram[:, :size].sum(1)  # E[f Σf]
    whole = float(target[:size].sum())
    features = torch.nonzero(kept.repeat(gram.shape[0] // size)).reshape(-1).to(gram.device)
    inside, count = gram[features][:, features], int(kept.sum())
    straight = torch.zeros(len(features), dtype=gram.dtype, device=gram.device)
    straight[:count] = 1
    right = target[features] - inside @ straight
    found = straight + solve_ridge(right[None], inside, RIDGE)[0]
    error = whole - 2 * float(found @ target[features]) + float(found @ inside @ found)
    places = rows[kept]  # (kept, most places), −1 where there are fewer
    there, twofold = places >= 0, are_pairs(places)
    factors = found[:count].cpu()[:, None].expand_as(places)[there]
    for x in tensors:
        before, shape = x.clone(), (-1, *[1] * (x.dim() - 1))
        x[places[there]] *= factors.to(x).reshape(shape)
        if bool(twofold.any()):
            first, second = places[twofold][:, :2].unbind(1)
            turn = found[count:].cpu()[twofold].to(x).reshape(shape)
            x[first] -= turn * before[second]
            x[second] += turn * before[first]
    return max(error, 0.0), max(whole, 1e-300)


def _low_rank(
    queries: list[Tensor],
    keys: Tensor,
    query_moments: list[Tensor],
    key_moments: Tensor,
    kept: Tensor,
    query_tensors: list[Tensor],
    key_tensors: list[Tensor],
) -> tuple[float, float]:
    """The best products of fewer channels, of all queries that share these keys.

    q·k ≈ (Vᵀ K^½ q)·(Vᵀ K^-½ k), V the first right singular vectors of Q^½ K^½, queries stacked.
    """
    root, inverse = _roots(key_moments.double())
    energy = sum((root @ m.double() @ root for m in query_moments), torch.zeros_like(root))
    values, vectors = torch.linalg.eigh(energy)
    rank = int(kept.sum())
    basis = vectors[:, -rank:].flip(1)  # (channels, rank)
    # A scale between both sides that leaves queries and keys about equally large.
    scale = values[-rank:].flip(0).clamp(min=1e-12 * float(values[-1])).pow(0.25)
    for x in key_tensors:
        mixed = torch.tensordot(((basis * scale).T @ inverse).to(x), x[keys], 1)
        x[keys[kept]] = mixed
    for rows in queries:
        for x in query_tensors:
            mixed = torch.tensordot(((basis / scale).T @ root).to(x), x[rows], 1)
            x[rows[kept]] = mixed
    return float(values[:-rank].clamp(min=0).sum()), float(values.clamp(min=0).sum())


def _roots(moments: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a covariance and its inverse; directions that never occur stay out."""
    values, vectors = torch.linalg.eigh((moments + moments.T) / 2)
    values = values.clamp(min=1e-9 * float(values[-1].clamp(min=1e-300)))
    root = values.sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
