"""Means and covariances of activations from the weights alone (docs: the `moments` method).

A channel after BatchNorm is taken as Gaussian, N(β, γ²), with correlations read from the filters.
What the activation does to such a vector has a closed form for ReLU and a quickly converging
series for every other pointwise function.

What the design must satisfy: float64 throughout, all channels at once, and never a NaN, whether a
deviation is zero or a correlation is one. Leading batch dimensions are allowed everywhere but in
``filter_correlation``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lbyl.errors import LbylError

Activation = Callable[[Tensor], Tensor]
Moments = tuple[Tensor, Tensor]
#: Name → function, for the activations whose moments come from the Hermite series.
ACTIVATIONS: dict[str, Activation] = {
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "selu": F.selu,
    "elu": F.elu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
    "softplus": F.softplus,
}
# Φ(±40) is 0 or 1 to the last bit of float64, so a larger ratio of mean to deviation says no more,
# and its square cannot overflow.
FARTHEST = 40.0


def activation_moments(
    activation: str | Activation, mean: Tensor, std: Tensor, corr: Tensor
) -> Moments:
    """E[a] and Cov[a] of a = f(z), z ~ N(mean, diag(std) corr diag(std)), f by name or callable."""
    if callable(activation):
        return hermite_moments(activation, mean, std, corr)
    if activation == "identity":
        mean, std, corr = _float64(mean, std, corr)
        return mean, std[..., :, None] * std[..., None, :] * corr
    if activation == "relu":
        return relu_moments(mean, std, corr)
    if activation in ACTIVATIONS:
        return hermite_moments(ACTIVATIONS[activation], mean, std, corr)
    known = ["identity", "relu", *ACTIVATIONS]
    raise LbylError(f"no moments for the activation {activation!r}; there are {known}")


def relu_moments(mean: Tensor, std: Tensor, corr: Tensor) -> Moments:
    """Exact E (m,) and Cov (m, m) of relu(z): with h = mean/std and s = std,

    Cov_ik = s_i s_k (ρ Φ(h_i) Φ(h_k)
             + ∫₀^{asin ρ} (ρ − sin θ)/(2π) exp(−(h_i² + h_k² − 2 h_i h_k sin θ)/(2 cos² θ)) dθ).

    A channel of no deviation is the constant relu(mean).
    """
    mean, std, corr = _float64(mean, std, corr)
    varies = std > 0
    h = torch.where(varies, mean / torch.where(varies, std, 1.0), 0.0).nan_to_num()
    h = h.clamp(-FARTHEST, FARTHEST)
    below, above = torch.special.ndtr(-h), torch.special.ndtr(h)
    density = torch.exp(-h.square() / 2) / math.sqrt(math.tau)
    expected = torch.where(varies, mean * above + std * density, mean).clamp_min(0)
    rho = corr.clamp(-1, 1)
    inner = rho * above[..., :, None] * above[..., None, :] + _orthant_integral(h, rho)
    # The variance by itself, in a form in which nothing cancels when the mean is far above zero.
    variance = above + h.square() * above * below + h * density * (below - above) - density**2
    inner.diagonal(dim1=-2, dim2=-1).copy_(variance.clamp_min(0))
    return expected, std[..., :, None] * std[..., None, :] * inner


def _orthant_integral(h: Tensor, rho: Tensor) -> Tensor:
    """∫₀^{asin ρ} of ``relu_moments`` by 16 points, a block of rows at a time for the cache."""
    rows = max(1, 2**16 // max(1, rho.shape[-1]))  # no result depends on it
    blocks = zip(_blocks(h, rows, -1), _blocks(rho, rows, -2))
    return torch.cat([_orthant_rows(some, h, block) for some, block in blocks], dim=-2)


def _blocks(tensor: Tensor, rows: int, dim: int) -> list[Tensor]:
    return [
        tensor.narrow(dim, i, min(rows, tensor.shape[dim] - i))
        for i in range(0, tensor.shape[dim], rows)
    ]


def _orthant_rows(some: Tensor, h: Tensor, rho: Tensor) -> Tensor:
    end = torch.asin(rho)
    hi, hk = some[..., :, None], h[..., None, :]
    squares, product = -(hi.square() + hk.square()) / 2, hi * hk
    total = torch.zeros_like(rho)
    nodes, weights = np.polynomial.legendre.leggauss(16)
    for node, weight in zip(nodes.tolist(), weights.tolist()):
        sine = (end * ((node + 1) / 2)).sin_()
        # No node is an end of the range, so sin² θ < 1.
        bell = torch.addcmul(squares, product, sine).div_(1 - sine.square()).exp_()
        total.addcmul_(rho - sine, bell, value=weight)
    return total.mul_(end).div_(2 * math.tau)


def hermite_moments(
    activation: Activation,
    mean: Tensor,
    std: Tensor,
    corr: Tensor,
    order: int = 32,
    nodes: int = 2049,
) -> Moments:
    """E and Cov of any pointwise activation by its Hermite series.

    c_n = E[f(mean + std z) He_n(z)] / √n!,  Cov = Σ_{n=1..order} (c_n c_nᵀ) ∘ corr^{∘n}.

    Every term is positive semidefinite, so the sum is, at any order. Where the series has not
    reached a channel's own variance by then, the rest is added *on the diagonal alone*: between
    channels it would be weighted by corr^(order+1), which is small unless they nearly coincide.
    """
    mean, std, corr = _float64(mean, std, corr)
    z, weight, basis = _hermite_rule(order, nodes, mean.device)
    values = activation(mean[..., None] + std[..., None] * z)  # (..., m, nodes)
    expected = values @ weight
    # Centring first keeps rounding in a large constant out of the coefficients.
    values = values - expected[..., None]
    coefficients = values @ basis.T  # (..., m, order)
    rho, power = corr.clamp(-1, 1), torch.ones_like(corr)
    covariance = torch.zeros_like(corr)
    for c in coefficients.unbind(-1):
        power *= rho
        covariance.addcmul_(c[..., :, None] * power, c[..., None, :])
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    diagonal.copy_(torch.maximum(diagonal, values.square() @ weight))
    return expected, covariance


@lru_cache(maxsize=8)
def _hermite_rule(order: int, nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Points z, weights (their sum is 1) and weighted He_n/√n!, n = 1..order, (order, nodes).

    An even grid instead of Gauss–Hermite points: for smooth functions that fade at both ends it
    converges as fast, and at a kink its error falls with the square of the spacing.
    """
    reach = 12.0
    z = torch.linspace(-reach, reach, nodes, dtype=torch.float64, device=device)
    weight = torch.exp(-z.square() / 2)
    weight = weight / weight.sum()
    before, now, rows = torch.zeros_like(z), torch.ones_like(z), []
    for n in range(1, order + 1):
        before, now = now, (z * now - math.sqrt(n - 1) * before) / math.sqrt(n)
        rows.append(now * weight)
    return z, weight, torch.stack(rows) if rows else z.new_zeros(0, nodes)


def filter_correlation(weight: Tensor, running_var: Tensor, groups: int = 1) -> Tensor:
    """Correlation (o, o) of the channels that filters (o, i, *k) give, from the filters alone.

    The inputs are taken as independent between channels and, within one, correlated between kernel
    taps as exp(−distance/ℓ); ℓ is the one under which the variances of the outputs follow
    ``running_var`` best. The scale of the input is unknown, so the fit is of the logarithms, up to
    a constant. Linear layers and 1×1 kernels have no ℓ: the cosine matrix is all there is.
    Filters in different groups read different channels and count as uncorrelated.
    """
    weight, running_var = _float64(weight, running_var)
    filters = weight.flatten(2) if weight.ndim > 2 else weight[:, :, None]  # (o, i, taps)
    taps = _tap_correlations(tuple(weight.shape[2:]), weight.device)  # (lengths, taps, taps)
    best = taps[_best_length(filters, running_var, taps)]
    covariance = (filters @ best).flatten(1) @ filters.flatten(1).T
    covariance = (covariance + covariance.T) / 2
    variance = covariance.diagonal()
    # A filter of zeros gives a constant, which correlates with nothing.
    scale = torch.where(variance > 0, variance, math.inf).rsqrt()
    correlation = (covariance * scale[:, None] * scale[None, :]).clamp(-1, 1)
    if groups > 1:
        group = torch.arange(len(weight), device=weight.device) // (len(weight) // groups)
        correlation = correlation * (group[:, None] == group[None, :])
    return correlation.fill_diagonal_(1.0)


def _tap_correlations(kernel: tuple[int, ...], device: torch.device) -> Tensor:
    """exp(−distance/ℓ) between the taps of a kernel, for a grid of ℓ from none to nearly flat."""
    if math.prod(kernel) == 1:
        return torch.ones((1, 1, 1), dtype=torch.float64, device=device)
    axes = [torch.arange(side, dtype=torch.float64, device=device) for side in kernel]
    offsets = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1).T  # (taps, dims)
    distance = (offsets[:, None] - offsets[None, :]).norm(dim=-1)
    lengths = torch.logspace(-1.5, 2.0, 64, dtype=torch.float64, device=device)
    return torch.exp(-distance / lengths[:, None, None])


def _best_length(filters: Tensor, running_var: Tensor, taps: Tensor) -> int:
    """Index of the ℓ whose log variances differ from log running_var most nearly by a constant."""
    if len(taps) == 1:
        return 0
    within = filters.transpose(1, 2) @ filters  # (o, taps, taps): Σ over input channels
    variance = within.flatten(1) @ taps.flatten(1).T  # (o, lengths)
    usable = (running_var > 0) & (variance > 0).all(1) & running_var.isfinite()
    if int(usable.sum()) < 2:  # nothing to fit: an ℓ near one tap, as in natural images
        return len(taps) // 2
    gap = variance[usable].log() - running_var[usable].log()[:, None]
    return int(gap.var(dim=0, correction=0).argmin())


def _float64(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.detach().to(torch.float64) for t in tensors)
