"""Attributes of modules (`out_channels`, `num_features`, `groups`…) made true after a cut."""

from __future__ import annotations

from torch import Tensor, nn

from lbyl.graph.declare import sizes_of
from lbyl.surgery.modules.experts import is_fused, refit_experts


def refit_attributes(model: nn.Module, original: nn.Module) -> None:
    """Make `out_channels`, `num_features`, `groups`… say what the tensors are."""
    before = dict(original.named_modules())
    for name, module in model.named_modules():
        _refit(module, before.get(name, module))


def _refit(module: nn.Module, before: nn.Module) -> None:
    weight = weight_of(module)
    if isinstance(module, nn.modules.conv._ConvNd) and isinstance(weight, Tensor):
        _refit_conv(module, before, weight)
    elif isinstance(module, nn.Linear) and isinstance(weight, Tensor):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        like = weight if weight is not None else module.running_mean
        if isinstance(like, Tensor):
            module.num_features = like.shape[0]
    elif isinstance(module, nn.GroupNorm) and isinstance(weight, Tensor):
        assert isinstance(before, nn.GroupNorm)
        size = before.num_channels // before.num_groups
        module.num_channels, module.num_groups = weight.shape[0], weight.shape[0] // size
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and isinstance(weight, Tensor):
        module.normalized_shape = tuple(weight.shape)
    elif isinstance(module, nn.Embedding) and isinstance(weight, Tensor):
        module.num_embeddings, module.embedding_dim = weight.shape
    elif is_fused(module):
        refit_experts(module, before)
    elif isinstance(module, nn.PReLU):
        assert isinstance(weight, Tensor)
        module.num_parameters = weight.shape[0]
    elif hasattr(module, "nf") and "Conv1D" in {k.__name__ for k in type(module).__mro__}:
        # Hugging Face's GPT-2
        assert isinstance(weight, Tensor)
        module.__dict__.update(nx=weight.shape[0], nf=weight.shape[1])
    for attribute, follows in sizes_of(type(module)).items():
        setattr(module, attribute, len(getattr(module, follows)))


def weight_of(module: nn.Module) -> object:
    """What a module multiplies with; one that is computed may advance where training asks for it.

    So that is asked for in evaluation.
    """
    # The report's program has this source and torch alone: no helper of this package is called.
    if "weight" in module._parameters or not nn.utils.parametrize.is_parametrized(module, "weight"):
        return getattr(module, "weight", None)
    modes = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        return module.weight
    finally:
        for part, was in modes:
            part.training = was


def _refit_conv(module: nn.modules.conv._ConvNd, before: nn.Module, weight: Tensor) -> None:
    assert isinstance(before, nn.modules.conv._ConvNd)
    rows, columns = weight.shape[:2]
    if before.groups > 1:  # whole groups went, so the size of one is unchanged
        old = weight_of(before)
        assert isinstance(old, Tensor)
        module.groups = rows * before.groups // old.shape[0]
    outputs, inputs = (columns, rows) if module.transposed else (rows, columns)
    module.out_channels = outputs * (module.groups if module.transposed else 1)
    module.in_channels = inputs * (1 if module.transposed else module.groups)
