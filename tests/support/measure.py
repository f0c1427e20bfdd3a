"""Moments and errors computed from samples, straight from their definitions."""

from __future__ import annotations

from torch import Tensor, nn

from support.networks import consumer_samples


def moments_of(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (features,) and covariance (features, features) of samples (n, features)."""
    centred = samples - samples.mean(0)
    return samples.mean(0), centred.T @ centred / len(samples)


def relative_error(model: nn.Module, slim: nn.Module, layer: str, x: Tensor) -> float:
    """Variance of the difference of a layer's outputs over that of the original's output."""
    _, before = consumer_samples(model, layer, x)
    _, after = consumer_samples(slim, layer, x)
    return float((after - before).var(0, correction=0).sum() / before.var(0, correction=0).sum())
