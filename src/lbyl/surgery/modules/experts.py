"""Mixtures of experts whose weights are slices of one tensor, taken apart and put together again.

Transformers keep the experts of a layer in two parameters: `gate_up_proj` (experts, 2 · neurons,
width) and `down_proj` (experts, width, neurons). Apart, every expert has matrices of its own, runs
on all tokens, and its neurons are multiplied by what the router gives it (0 for most tokens) before
the second matrix. That computes the same, and whoever looks at the inputs of that matrix sees each
token with the weight that it has in the output.

Which modules these are is found by the form of their parameters and proven by a trial.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lbyl.runtime.copies import deep_copy
from lbyl.runtime.tensors import tensors

GATED, DOWN = "gate_up_proj", "down_proj"
ALIGNED = 16  # bytes
SAME = 1e-4  # of the largest output: what a trial may differ by


class SplitExperts(nn.Module):
    """Experts with matrices of their own; `fused` is what they were taken out of."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        gated, down = _parameters(fused)
        self.gate_up_proj = nn.ParameterList(_own(x, gated) for x in gated)
        self.down_proj = nn.ParameterList(_own(x, down) for x in down)
        self.act_fn: Any = fused.act_fn
        # A list hides it from torch: its parameters are not this module's.
        self.fused = [fused]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum of all experts' answers, each times the router's weight for it."""
        count = len(self.gate_up_proj)
        routed = hidden_states.new_zeros(len(hidden_states), count + 1)  # the last one: no expert
        routed = routed.scatter_add(1, top_k_index, top_k_weights.to(routed))
        parts = []
        for i in range(count):
            gate, up = F.linear(hidden_states, self.gate_up_proj[i]).chunk(2, dim=-1)
            neurons = self.act_fn(gate) * up * routed[:, i : i + 1]
            parts.append(F.linear(neurons, self.down_proj[i]))
        return torch.stack(parts).sum(0)


def _own(slice_: Tensor, like: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(slice_.detach(), like.requires_grad)


def _parameters(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    gated, down = module._parameters[GATED], module._parameters[DOWN]
    assert gated is not None and down is not None
    return gated, down


def is_fused(module: nn.Module) -> bool:
    """Whether a module has the parameters of fused experts and nothing besides."""
    if GATED not in module._parameters:  # the usual case, found at once
        return False
    own = dict(module.named_parameters())
    if set(own) != {GATED, DOWN} or not callable(getattr(module, "act_fn", None)):
        return False
    gated, down = own[GATED], own[DOWN]
    if gated.dim() != 3 or down.dim() != 3 or not gated.dtype.is_floating_point:
        return False
    experts, rows, width = gated.shape
    return rows % 2 == 0 and down.shape == (experts, width, rows // 2)


@torch.no_grad()
def _computes_the_same(fused: nn.Module, split: SplitExperts) -> bool:
    """A trial on random tokens, each sent to two experts."""
    gated = _parameters(fused)[0]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(7, gated.shape[2], generator=generator).to(gated)
    index = torch.stack([torch.arange(7), torch.arange(7) + 1], 1) % len(gated)
    weights = torch.rand(7, 2, generator=generator).to(gated)
    inputs = tokens, index.to(gated.device), weights
    try:
        wanted, got = fused(*inputs), split(*inputs)
    except Exception:  # experts that are called otherwise
        return False
    if not isinstance(wanted, Tensor) or wanted.shape != got.shape:
        return False
    off = (wanted - got).abs().max()
    return bool(off <= SAME * wanted.abs().max().clamp(min=1e-30))


def _of(model: nn.Module, kind: type[nn.Module] | None) -> Iterator[tuple[nn.Module, str, Any]]:
    """Parent, name and module of every set of experts: fused ones, or those of a class.

    Those that stand in several places are met in each.
    """
    for parent in list(model.modules()):
        for name, module in list(parent._modules.items()):
            if module is None:
                continue
            if is_fused(module) if kind is None else isinstance(module, kind):
                yield parent, name, module


def has_fused_experts(model: nn.Module) -> bool:
    return any(True for _ in _of(model, None))


def alignments(model: nn.Module) -> dict[str, int]:
    """Matrices of experts that were taken apart → what their sizes must be multiples of.

    Kernels that run all experts at once read rows of whole 16 bytes.
    """
    return {
        f"{name}.{kind}.{i}": ALIGNED // weight.element_size()
        for name, module in model.named_modules()
        if isinstance(module, SplitExperts)
        for kind, parts in ((GATED, module.gate_up_proj), (DOWN, module.down_proj))
        for i, weight in enumerate(parts)
    }


def split_in_place(model: nn.Module, named: Collection[str] | None = None) -> None:
    """Take experts of a model apart, in the model itself: those that are named, or all that can be.

    Those that are named were taken apart before, with other weights, and need no trial.
    """
    fused = {id(module): module for _, _, module in _of(model, None)}
    if named is not None:
        asked = {id(model.get_submodule(name)) for name in named}
        fused = {key: module for key, module in fused.items() if key in asked}
    made = {key: SplitExperts(module).train(module.training) for key, module in fused.items()}
    for parent, name, module in _of(model, None):
        split = made.get(id(module))
        if split is not None and (named is not None or _can_be_split(module, split)):
            setattr(parent, name, split)


def _can_be_split(fused: nn.Module, split: SplitExperts) -> bool:
    return len(split.gate_up_proj) > 1 and _computes_the_same(fused, split)


def split_experts(model: nn.Module, named: Collection[str] | None = None) -> nn.Module:
    """The model with its experts apart: a copy that shares all tensors, or itself without any."""
    if not isinstance(model, nn.Module) or not has_fused_experts(model):  # tracing refuses others
        return model
    twin = deep_copy(model, {id(x): x for x in tensors(model).values()})
    split_in_place(twin, named)
    return twin


def refit_experts(fused: nn.Module, before: nn.Module) -> None:
    """The attribute that tells how many neurons an expert has, by whatever name it goes."""
    neurons, old = _parameters(fused)[1].shape[2], _parameters(before)[1].shape[2]
    for attribute, value in vars(before).items():
        if type(value) is int and value == old and "inter" in attribute:
            setattr(fused, attribute, neurons)


def join_experts(model: nn.Module) -> list[str]:
    """Put experts together again, in place; the names of those that stay apart.

    Those are experts whose widths differ, or are none that kernels can run.
    """
    apart = []
    made: dict[int, nn.Module] = {}
    for parent, name, split in _of(model, SplitExperts):
        widths = {x.shape[1] * x.element_size() for x in split.down_proj}
        if len(widths) > 1 or any(width % ALIGNED for width in widths):
            apart.append(name)
            continue
        if id(split) not in made:
            made[id(split)] = _fused(split)
        setattr(parent, name, made[id(split)])
    return apart


def _fused(split: SplitExperts) -> nn.Module:
    """One module with the experts' weights in one tensor each."""
    fused = deep_copy(split.fused[0], {})
    for key, parts in ((GATED, split.gate_up_proj), (DOWN, split.down_proj)):
        stacked = torch.stack([x.detach() for x in parts])
        fused._parameters[key] = nn.Parameter(stacked, parts[0].requires_grad)
    refit_experts(fused, split.fused[0])
    return fused.train(split.training)
