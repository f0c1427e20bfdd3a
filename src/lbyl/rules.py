"""What each torch function does to channels.

A rule gets the flow of labels and one recorded call, ties and pins atoms, and returns the labels of
the call's outputs. A function without a rule is opaque: everything that enters it is pinned, so an
unknown function can cost compression but never correctness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.channels import (
    FIXED,
    Contraction,
    Flow,
    Norm,
    compact,
    constant_dropped,
    select_first,
    varying,
)
from lbyl.leaves import Rule, declare_named, leaf_rule
from lbyl.record import Call, Ref, one_thread

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of the torch functions of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


@one_thread()
def propagate(flow: Flow) -> Flow:
    """Follow every call of the record; afterwards the flow holds all ties and pins."""
    for call in flow.record.calls:
        for value, labels in zip(call.outputs, _outputs(flow, call)):
            flow.labels[value] = compact(labels).expand(flow.shape(value))
        _account(flow, call)
    flow.pin_all(flow.record.outputs, "it reaches the model's output")
    flow.pin_all(flow.record.unheard, "it is used by code that cannot be followed")
    return flow


def _outputs(flow: Flow, call: Call) -> Sequence[Tensor]:
    if not call.trusted:
        return opaque(flow, call, "reads memory changed in place through another view")
    found = leaf_rule(call.leaf) if call.leaf is not None else RULES.get(call.op)
    if found is None:
        return opaque(flow, call)
    try:
        labels = found(flow, call)
    except Exception:
        # A use of the function that its rule does not foresee. Ties made so far only bind more.
        return opaque(flow, call, "is called in a way that has no channel rule")
    if len(labels) != len(call.outputs) or any(
        x.shape != flow.shape(v) for x, v in zip(labels, call.outputs)
    ):
        return opaque(flow, call)
    return labels


def _account(flow: Flow, call: Call) -> None:
    """Matrices used other than as a layer's weight stay whole; constants make constants."""
    parameters = flow.record.parameters
    for value in call.inputs:
        several = sum(size > 1 for size in flow.shape(value)) > 1
        if value in parameters and several and (id(call), value) not in flow.accounted:
            flow.pin_all([value], f"its weight is also used by {call.op} in {call.module}")
    if all(v in parameters or v in flow.constants for v in call.inputs):
        flow.constants.update(call.outputs)


def opaque(flow: Flow, call: Call, why: str = "has no channel rule") -> list[Tensor]:
    """Pin all that enters; what comes out is fixed."""
    place = f" in {call.module}" if call.module else ""
    if any(flow.marked(v) or v in flow.record.parameters for v in call.inputs):
        flow.pin_all(call.inputs, f"it enters {call.op}{place}, which {why}")
    return [torch.tensor(FIXED).expand(flow.shape(v)) for v in call.outputs]


def argument(call: Call, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    if len(call.args) > position:
        return call.args[position]
    return call.kwargs.get(name, default)


def value_of(x: Any) -> int | None:
    """The value number of a tensor argument, None for anything else."""
    return x.value if isinstance(x, Ref) else None


# --- entry by entry -----------------------------------------------------------------------------

ADDITIVE = ["add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__"]
ADDITIVE += ["__isub__", "rsub", "lerp", "addcmul", "maximum", "minimum", "where", "copy_"]

POINTWISE = """
relu relu_ relu6 leaky_relu leaky_relu_ rrelu elu elu_ selu selu_ celu celu_ gelu silu silu_ mish
softplus softsign tanhshrink hardshrink softshrink threshold threshold_ hardtanh hardtanh_
hardswish hardswish_ hardsigmoid hardsigmoid_ sigmoid sigmoid_ logsigmoid tanh tanh_ erf exp log
sqrt rsqrt square pow pow_ __pow__ __rpow__ abs neg __neg__ sign clamp clamp_ clip clamp_min
clamp_max mul mul_ __mul__ __rmul__ __imul__ div div_ __div__ true_divide __truediv__ __rdiv__
__rtruediv__ __itruediv__ reciprocal sin cos floor ceil round trunc nan_to_num logaddexp
dropout dropout1d dropout2d dropout3d dropout_ alpha_dropout feature_dropout feature_alpha_dropout
contiguous clone detach detach_ to float half bfloat16 double type type_as cpu cuda requires_grad
identity masked_fill masked_fill_ zeros_like ones_like full_like empty_like data fill_ zero_
__eq__ eq ne __ne__ __lt__ __le__ __gt__ __ge__ lt le gt ge logical_and logical_or logical_not
isnan isinf isfinite __and__ __or__ __invert__ __getattr__ alias
""".split()

_CONSTANT_RESULT = {"zeros_like", "ones_like", "full_like", "empty_like"}


@rule(*POINTWISE, *ADDITIVE)
def pointwise(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Operands that meet entry by entry are the same channels."""
    shape = flow.shape(call.outputs[0])
    # Only sums of activations make a stream; a bias or a learned offset belongs to its channel.
    fixed = flow.constants | flow.record.parameters.keys()
    added = call.op in ADDITIVE and sum(v not in fixed for v in set(call.inputs)) > 1
    labels = unify(flow, list(dict.fromkeys(call.inputs)), shape, call, added)
    return [labels] * len(call.outputs)


def unify(
    flow: Flow, values: list[int], shape: torch.Size, call: Call, added: bool = False
) -> Tensor:
    """Tie the channels of operands that broadcast to `shape`; the labels of the outcome."""
    place = f"{call.op} in {call.module}" if call.module else call.op
    labels = {v: lead(flow.of(v), len(shape)) for v in values}
    moving = sorted({d for x in labels.values() for d in varying(x)})
    if not moving:
        return torch.tensor(FIXED).expand(shape)
    met: list[Tensor] = []
    for value, label in labels.items():
        label = _of_parameter(flow, call, value, label, moving)
        if any(label.shape[d] == 1 and shape[d] > 1 for d in moving):
            # One entry serves many channels (a mask, a scalar): it may not go, they may.
            flow.atoms.pin(label, f"it is spread over all channels by {place}")
        else:
            met.append(label)
    for other in met[1:]:
        reason = f"it meets a tensor of fixed size at {place}"
        flow.atoms.tie(met[0], other, reason, added)
    first = next((x for x in met if bool((x != FIXED).any())), met[0] if met else None)
    return torch.tensor(FIXED).expand(shape) if first is None else first.expand(shape)


def lead(labels: Tensor, dims: int) -> Tensor:
    """Labels with leading dimensions of one added, as broadcasting does."""
    return labels.reshape((1,) * (dims - labels.dim()) + tuple(labels.shape))


def _of_parameter(flow: Flow, call: Call, value: int, label: Tensor, moving: list[int]) -> Tensor:
    """A parameter with several long axes is labelled along the one where channels lie."""
    name = flow.record.parameters.get(value)
    shape = flow.shape(value)
    axis = moving[0] - (label.dim() - len(shape))
    if name is None or len(moving) > 1 or axis < 0 or shape[axis] == 1:
        return label
    if sum(size > 1 for size in shape) < 2:
        return label
    flow.accounted.add((id(call), value))
    return lead(flow.along(flow.atoms.axis(name, axis, shape[axis]), value, axis), label.dim())


@rule("prelu")
def prelu(flow: Flow, call: Call) -> Sequence[Tensor]:
    x, weight = (value_of(argument(call, i, n)) for i, n in enumerate(("input", "weight")))
    assert x is not None and weight is not None
    labels = flow.of(x)
    if math.prod(flow.shape(weight)) > 1:
        slopes = flow.of(weight).reshape([-1 if d == 1 else 1 for d in range(labels.dim())])
        flow.atoms.tie(labels, slopes, f"it meets a fixed slope in {call.module}")
    return [labels]


@rule("glu")
def gated(flow: Flow, call: Call) -> Sequence[Tensor]:
    dim = argument(call, 1, "dim", -1)
    a, b = flow.of(call.inputs[0]).chunk(2, dim)
    flow.atoms.tie(a, b, f"it is gated by a fixed entry in {call.module}")
    return [a]


# --- moving data --------------------------------------------------------------------------------

MOVEMENT = """
flatten reshape view view_as reshape_as permute transpose transpose_ swapaxes swapdims movedim
moveaxis t T mT squeeze unsqueeze squeeze_ unsqueeze_ unflatten ravel
cat concat concatenate stack hstack vstack chunk split tensor_split split_with_sizes unbind
narrow select flip roll expand expand_as repeat tile repeat_interleave
broadcast_to pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
meshgrid atleast_2d rot90 unfold_copy
""".split()


@rule(*MOVEMENT)
def movement(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Labels are moved by the same call that moved the data."""
    if not any(flow.marked(v) for v in call.inputs):
        return [torch.tensor(FIXED).expand(flow.shape(v)) for v in call.outputs]
    args, kwargs = tree_map_only(Ref, lambda r: flow.of(r.value), (call.args, call.kwargs))
    if call.op == "view":
        moved: Any = args[0].reshape(flow.shape(call.outputs[0]))
    else:
        moved = call.function(*args, **kwargs)
    outputs = [x for x in tree_flatten(moved)[0] if isinstance(x, Tensor)]
    if call.op in ("chunk", "split", "tensor_split", "split_with_sizes", "unbind"):
        _tie_pieces(flow, outputs, call)
    elif call.op in ("narrow", "select"):
        _pin_cut(flow, outputs, call)
    elif call.op == "pixel_shuffle":
        return [_tie_along(flow, x, [x.dim() - 2, x.dim() - 1], call) for x in outputs]
    else:
        return [_tie_blocks(flow, x, call) for x in outputs]
    return outputs


@rule("__getitem__", "index_select")
def indexing(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Indices that are tensors hold no values here: they may only range over equal labels."""
    labels = flow.of(call.inputs[0])
    shape = flow.shape(call.outputs[0])
    if call.op == "index_select":
        index: Any = (slice(None),) * (argument(call, 1, "dim") % labels.dim())
        index = (*index, argument(call, 2, "index"))
    else:
        index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if any(isinstance(i, list) for i in index):
        index = tuple(torch.tensor(i) if isinstance(i, list) else i for i in index)
    if not any(isinstance(i, Ref) for i in index):
        out = labels[index]
        _pin_cut(flow, [out], call)
        return [out]
    if any(flow.marked(v) for v in call.inputs[1:]):
        return opaque(flow, call, "is steered by its values")
    found, looked_up = _anywhere(flow, index, labels.dim())
    if set(varying(labels)) & looked_up:
        return opaque(flow, call, "picks channels by number")
    out = labels[found].expand(shape)
    _pin_cut(flow, [out], call)
    return [out]


def _anywhere(flow: Flow, index: tuple[Any, ...], rank: int) -> tuple[tuple[Any, ...], set[int]]:
    """The index with place 0 wherever a tensor stood, and the dimensions tensors range over."""

    def consumed(i: Any) -> int:
        if i is None or i is Ellipsis:
            return 0
        masked = isinstance(i, Ref) and not flow.record.whole[i.value]
        return len(flow.shape(i.value)) if masked else 1

    gap = rank - sum(map(consumed, index))
    found: list[Any] = []
    looked_up: set[int] = set()
    dim = 0
    for i in index:
        if isinstance(i, Ref):
            looked_up |= set(range(dim, dim + consumed(i)))
            if flow.record.whole[i.value]:
                found.append(torch.zeros(flow.shape(i.value), dtype=torch.long))
            else:  # a mask: as many entries as the outcome shows
                found += [torch.zeros(1, dtype=torch.long)] * consumed(i)
        else:
            found.append(i)
        dim += gap if i is Ellipsis else consumed(i)
    return tuple(found), looked_up


def _tie_pieces(flow: Flow, pieces: list[Tensor], call: Call) -> None:
    """Equal pieces must stay equal in size, so their channels go together, place by place."""
    source = flow.of(call.inputs[0])
    changed = [d for d in varying(source) if any(x.dim() <= d for x in pieces)]
    changed += [
        d
        for d in varying(source)
        if d not in changed and any(x.shape[d] != source.shape[d] for x in pieces)
    ]
    if not changed:
        return
    if any(x.shape != pieces[0].shape for x in pieces):
        flow.atoms.pin(source, f"it is cut into unequal pieces in {call.module or call.op}")
        return
    for other in pieces[1:]:
        flow.atoms.tie(pieces[0], other, f"it is cut beside fixed entries in {call.module}")


def _pin_cut(flow: Flow, outputs: list[Tensor], call: Call) -> None:
    """Indices written in the code do not move with the channels: what they cut is pinned."""
    source = flow.of(call.inputs[0])
    kept = torch.unique(torch.cat([constant_dropped(out).reshape(-1) for out in outputs]))
    if not bool(torch.isin(torch.unique(constant_dropped(source)), kept).all()):
        flow.atoms.pin(source, f"it is indexed by fixed positions in {call.module or call.op}")


def _tie_blocks(flow: Flow, out: Tensor, call: Call) -> Tensor:
    """Channels split over two dimensions stay equal per block: blocks go place by place."""
    dims = varying(out)
    sources = [flow.of(v) for v in dict.fromkeys(call.inputs)]
    if len(dims) > 1 and all(len(varying(x)) < len(dims) for x in sources):
        return _tie_along(flow, out, dims[:1], call)
    return out


def _tie_along(flow: Flow, labels: Tensor, dims: Sequence[int], call: Call) -> Tensor:
    """Channels that differ only in their place along `dims` go together, under one label."""
    first = labels
    for d in dims:
        first = first.narrow(d, 0, 1)
    flow.atoms.tie(first, labels, f"it is regrouped beside fixed entries in {call.module}")
    return first.expand(labels.shape)


# Tensors that hold the same number everywhere fit any channels; the trial cut sees whether their
# size follows the channels.
BLANK = "zeros ones full empty new_zeros new_ones new_full new_empty".split()


@rule(*BLANK)
def blank(flow: Flow, call: Call) -> Sequence[Tensor]:
    flow.blank.update(call.outputs)
    return [torch.tensor(FIXED).expand(flow.shape(v)) for v in call.outputs]


@rule("__setitem__")
def write(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Writing along dimensions without channels: target and source have the same channels."""
    target, written = call.args[0].value, value_of(call.args[2])
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    plain = all(isinstance(i, (Ref, slice, int)) for i in index)
    if (
        written is None
        or not plain
        or any(flow.marked(i.value) for i in index if isinstance(i, Ref))
    ):
        return opaque(flow, call, "writes in a way that has no channel rule")
    masks = [
        len(flow.shape(i.value))
        for i in index
        if isinstance(i, Ref) and not flow.record.whole[i.value]
    ]
    touched = len(index) + sum(masks) - len(masks)
    shape = flow.shape(target)
    source = constant_dropped(flow.of(written))
    inner = len(shape) - touched  # dimensions behind the index are written whole
    if source.dim() < inner or any(d < source.dim() - inner for d in varying(source)):
        return opaque(flow, call, "writes channels at positions given by number")
    for _ in range(source.dim() - inner):
        source = source.select(0, 0)
    if set(varying(flow.of(target))) & set(range(touched)):
        return opaque(flow, call, "writes channels at positions given by number")
    if target not in flow.blank:
        flow.atoms.tie(
            flow.of(target), source, f"it is written beside fixed entries in {call.module}"
        )
    return [source.expand(shape)]


@rule("roi_align", "roi_pool")
def regions(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Pictures of regions keep their channels; where the regions lie has none."""
    for value in call.inputs[1:]:
        flow.atoms.pin(flow.of(value), f"it places regions in {call.op}")
    labels = flow.of(call.inputs[0])
    channels = flow.vector(call.inputs[0], 1, f"its channels vary by position in {call.op}")
    return [flow.along(channels, call.outputs[0], 1)] if labels.dim() == 4 else opaque(flow, call)


@rule("pad")
def pad(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Padding around channels is fixed; padding around pixels leaves them as they were."""
    labels, widths = flow.of(call.inputs[0]), argument(call, 1, "pad")
    dims = varying(labels)
    padded = {labels.dim() - 1 - i // 2 for i, width in enumerate(widths) if width}
    if not padded & set(dims):
        return [_same_channels(labels, flow.shape(call.outputs[0]), dims)]
    return [F.pad(labels.contiguous(), list(widths), value=FIXED)]


# --- mixing along dimensions --------------------------------------------------------------------

POOLING = {
    f"{kind}{n}d": n
    for n in (1, 2, 3)
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
}
POOLING |= {f"max_pool{n}d_with_indices": n for n in (1, 2, 3)}
REDUCTIONS = ["mean", "sum", "amax", "amin", "max", "min", "var", "std", "logsumexp", "nansum"]
REDUCTIONS += ["prod", "median", "any", "all", "argmax", "argmin", "norm", "var_mean", "std_mean"]


def _same_channels(labels: Tensor, shape: torch.Size, dims: list[int]) -> Tensor:
    """The channels along `dims` laid over another shape of the same rank."""
    for d in range(labels.dim()):
        if d not in dims:
            labels = labels.narrow(d, 0, 1)
    return labels.expand(shape)


def mixing(flow: Flow, call: Call, dims: Sequence[int]) -> list[Tensor]:
    """Values along `dims` are mixed: channels that lie there cannot go one by one."""
    labels = flow.of(call.inputs[0])
    mixed = {d % labels.dim() for d in dims}
    if mixed & set(varying(labels)):
        return opaque(flow, call, "mixes its channels")
    outputs = []
    for value in call.outputs:
        shape, moved = flow.shape(value), labels
        if len(shape) < labels.dim():  # a reduction that drops its dimensions
            for d in sorted(mixed, reverse=True):
                moved = moved.select(d, 0)
            mixed = set()
        if moved.dim() != len(shape):
            return opaque(flow, call)
        outputs.append(_same_channels(moved, shape, varying(moved)))
    return outputs


@rule(*POOLING, "interpolate", "upsample", "grid_sample")
def pooling(flow: Flow, call: Call) -> Sequence[Tensor]:
    rank = len(flow.shape(call.inputs[0]))
    if call.op == "grid_sample":
        flow.atoms.pin(flow.of(call.inputs[1]), "it places samples in grid_sample")
    return mixing(flow, call, range(rank - POOLING.get(call.op, rank - 2), rank))


@rule(*REDUCTIONS)
def reduction(flow: Flow, call: Call) -> Sequence[Tensor]:
    dim = argument(call, 1, "dim")
    if isinstance(dim, Ref):
        return pointwise(flow, call)
    rank = len(flow.shape(call.inputs[0]))
    if dim is None:
        return mixing(flow, call, range(rank))
    return mixing(flow, call, [dim] if isinstance(dim, int) else dim)


@rule("softmax", "log_softmax", "cumsum", "cumprod", "sort", "topk", "normalize", "argsort")
def along_dim(flow: Flow, call: Call) -> Sequence[Tensor]:
    position = {"topk": 2, "normalize": 2}.get(call.op, 1)
    default = {"normalize": 1}.get(call.op, -1)
    dim = argument(call, position, "dim", default)
    return mixing(flow, call, [default if dim is None else dim])


# --- normalisation ------------------------------------------------------------------------------


@rule("batch_norm", "instance_norm")
def batch_norm(flow: Flow, call: Call) -> Sequence[Tensor]:
    names = ("input", "running_mean", "running_var", "weight", "bias")
    x, *others = (value_of(argument(call, i, n)) for i, n in enumerate(names))
    assert x is not None
    place = call.module or call.op
    channels = flow.vector(x, 1, f"its channels vary by position in {place}")
    if flow.record.parameters.get(x) is not None:
        return opaque(flow, call, "normalises a parameter")
    for other in others:
        if other is not None:
            flow.atoms.tie(channels, flow.of(other), f"it is normalised with fixed ones in {place}")
    parameters = [None if v is None else flow.record.parameters.get(v) for v in others]
    mean, var, weight, bias = parameters
    if call.op == "batch_norm" and mean is not None and var is not None:
        eps = argument(call, 7, "eps", 1e-5)
        name = mean.rpartition(".")[0]
        flow.norms.append(Norm(name, mean, var, weight, bias, eps, x, call.outputs[0]))
    return [flow.of(x)]


@rule("group_norm")
def group_norm(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Channels of one group are normalised together: whole groups go."""
    x, groups = call.inputs[0], argument(call, 1, "num_groups")
    channels = flow.vector(x, 1, f"its channels vary by position in {call.module}")
    blocks = channels.reshape(groups, -1)
    reason = f"it is normalised with fixed ones in {call.module}"
    flow.atoms.tie(blocks[:, :1], blocks, reason)
    for position, name in ((2, "weight"), (3, "bias")):
        other = value_of(argument(call, position, name))
        if other is not None:
            flow.atoms.tie(channels, flow.of(other), reason)
    flow.grouped_norms[call.module] = blocks.shape[1]
    return [flow.of(x)]


@rule("layer_norm", "rms_norm")
def layer_norm(flow: Flow, call: Call) -> Sequence[Tensor]:
    shape = argument(call, 1, "normalized_shape")
    labels = flow.of(call.inputs[0])
    dims = range(labels.dim() - len(shape), labels.dim())
    if set(dims) & set(varying(labels)):
        return opaque(flow, call, "normalises its channels together")
    return [labels]


# --- declared modules ---------------------------------------------------------------------------


@declare_named("channelwise")
def channelwise(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Channels pass one by one; the module's own tensors of their number go along."""
    x = next(r for r in tree_flatten((call.args, call.kwargs))[0] if isinstance(r, Ref)).value
    labels = flow.of(x)
    dims = varying(labels)
    if len(dims) > 1:
        return opaque(flow, call, "is declared for channels along one dimension")
    if dims:
        channels = select_first(labels, dims[0])
        for value in dict.fromkeys(call.inputs):
            name, shape = flow.record.parameters.get(value), flow.shape(value)
            if name is not None and len(channels) in shape:
                axis = list(shape).index(len(channels))
                reason = f"it meets fixed entries in {call.module}"
                flow.atoms.tie(channels, flow.atoms.axis(name, axis, shape[axis]), reason)
                flow.accounted.add((id(call), value))
    return [_same_channels(labels, flow.shape(v), dims) for v in call.outputs]


@declare_named("FrozenBatchNorm2d", "FrozenBatchNormAct2d")
def frozen_batch_norm(flow: Flow, call: Call) -> Sequence[Tensor]:
    """A BatchNorm written out in arithmetic: known as one, so that repairs can use it."""
    names = {flow.record.parameters.get(v, "").rpartition(".")[2]: v for v in call.inputs}
    wanted = ("running_mean", "running_var", "weight", "bias")
    if not set(wanted) <= names.keys():
        return channelwise(flow, call)
    x = call.args[0].value
    mean, var, weight, bias = (flow.record.parameters[names[n]] for n in wanted)
    eps = getattr(flow.record.leaves.get(call.module), "eps", 1e-5)
    flow.norms.append(
        Norm(mean.rpartition(".")[0], mean, var, weight, bias, eps, x, call.outputs[0])
    )
    return channelwise(flow, call)


# --- contractions -------------------------------------------------------------------------------


def _parameter_name(flow: Flow, x: Any) -> str | None:
    value = value_of(x)
    return None if value is None else flow.record.parameters.get(value)


def _contract(
    flow: Flow, call: Call, kind: str, x: int, weight: Any, bias: Any, groups: int = 1, dim: int = 1
) -> Sequence[Tensor]:
    """Tie inputs to the weight's columns; its rows are the channels that come out."""
    name, bias_name = _parameter_name(flow, weight), _parameter_name(flow, bias)
    if name is None or (bias is not None and bias_name is None):
        if call.module:
            flow.refused[call.module] = "its weight is computed in the forward pass"
        return opaque(flow, call, "computes its weight in the forward pass")
    flow.accounted.add((id(call), weight.value))
    size = flow.shape(weight.value)
    input_axis, output_axis = (0, 1) if kind in ("transposed", "matmul") else (1, 0)
    place = call.module or name
    columns = flow.vector(x, dim, f"its channels vary by position at {place}")
    if groups > 1:
        flow.grouped.add(name)
    if name not in flow.grouped:
        reason = f"it meets fixed entries at the input of {place}"
        inputs = flow.atoms.axis(name, input_axis, size[input_axis])
        flow.atoms.tie(inputs, columns, reason)
        rows = flow.atoms.axis(name, output_axis, size[output_axis])
    else:
        rows = _whole_groups(flow, name, size, columns, groups, kind, place)
    if bias_name is not None:
        flow.atoms.tie(rows, flow.of(bias.value), f"it has a fixed bias in {place}")
    out = call.outputs[0]
    reach = x if kind == "transposed" else out
    positions = math.prod(flow.shape(reach)) // flow.shape(reach)[dim]
    owner = name.removesuffix(".weight")
    flow.contractions.append(
        Contraction(
            owner,
            name,
            bias_name,
            input_axis,
            output_axis,
            groups,
            "linear" if kind == "matmul" else kind,
            x,
            out,
            positions,
            call,
        )
    )
    return [flow.along(rows, out, dim % len(flow.shape(out)))]


def _whole_groups(
    flow: Flow, name: str, size: torch.Size, columns: Tensor, groups: int, kind: str, place: str
) -> Tensor:
    """Inputs and outputs of a group of a grouped convolution form one channel."""
    rows = flow.atoms.axis(name, 0, size[0])
    reason = f"it shares a group with fixed entries in {place}"
    flow.atoms.tie(columns.reshape(groups, -1)[:, :1], columns.reshape(groups, -1), reason)
    flow.atoms.tie(columns.reshape(groups, -1)[:, :1], rows.reshape(groups, -1), reason)
    if kind == "transposed":
        return rows.reshape(groups, -1)[:, :1].expand(-1, size[1]).reshape(-1)
    return rows


@rule("conv1d", "conv2d", "conv3d")
def conv(flow: Flow, call: Call) -> Sequence[Tensor]:
    weight, bias = argument(call, 1, "weight"), argument(call, 2, "bias")
    groups = argument(call, 6, "groups", 1)
    dim = -(len(flow.shape(weight.value)) - 1)
    return _contract(flow, call, "conv", call.args[0].value, weight, bias, groups, dim)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(flow: Flow, call: Call) -> Sequence[Tensor]:
    weight, bias = argument(call, 1, "weight"), argument(call, 2, "bias")
    groups = argument(call, 6, "groups", 1)
    dim = -(len(flow.shape(weight.value)) - 1)
    return _contract(flow, call, "transposed", call.args[0].value, weight, bias, groups, dim)


@rule("linear")
def linear(flow: Flow, call: Call) -> Sequence[Tensor]:
    weight, bias = argument(call, 1, "weight"), argument(call, 2, "bias")
    return _contract(flow, call, "linear", argument(call, 0, "input").value, weight, bias, 1, -1)


@rule("addmm")
def addmm(flow: Flow, call: Call) -> Sequence[Tensor]:
    bias, x, weight = (argument(call, i, n) for i, n in enumerate(("input", "mat1", "mat2")))
    return _contract(flow, call, "matmul", x.value, weight, bias, 1, -1)


@rule("matmul", "__matmul__", "mm", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention")
def product(flow: Flow, call: Call) -> Sequence[Tensor]:
    """A product with a parameter is a linear layer; one of activations is opaque, but costs."""
    refs = [x for x in call.args if isinstance(x, Ref)]
    if call.op in ("matmul", "__matmul__", "mm") and len(refs) == 2:
        weight = refs[1].value
        if flow.record.parameters.get(weight) is not None and len(flow.shape(weight)) == 2:
            return _contract(flow, call, "matmul", refs[0].value, refs[1], None, 1, -1)
    flow.fixed_macs += _product_macs(flow, call)
    return opaque(flow, call, "mixes its channels")


def _product_macs(flow: Flow, call: Call) -> int:
    shapes = [flow.shape(v) for v in call.inputs]
    if call.op == "scaled_dot_product_attention":
        q, k, v = shapes[:3]
        return math.prod(q) * k[-2] + math.prod(q[:-1]) * math.prod(v[-2:])
    if call.op == "einsum":
        return 0
    return math.prod(flow.shape(call.outputs[0])) * shapes[-2][-1]


@rule("multi_head_attention_forward")
def attention(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Attention mixes channels of all heads: left alone, its cost counted."""
    length, batch, width = flow.shape(call.inputs[0])
    keys = flow.shape(call.inputs[1])[0]
    projections = 2 * (length + keys) * batch * width * width
    flow.fixed_macs += projections + 2 * batch * length * keys * width
    return opaque(flow, call, "mixes its channels")


@rule("embedding")
def embedding(flow: Flow, call: Call) -> Sequence[Tensor]:
    return opaque(flow, call, "looks its channels up in a table")


__all__ = ["RULES", "opaque", "propagate", "rule", "select_first"]
