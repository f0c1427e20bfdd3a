"""SpectrumGains: the spectrum and the colours that images need for this network.

The running variance of the first BatchNorm is the variance that each filter in front of it had on
the training data. Some filters look for fine edges, some for broad light, some for one colour or
another: together they determine how strong each of these was. So procedural images are split into
bands of frequency and axes of colour, and each part gets the gain with which the running
variances come out best. No data and hardly any time: nothing runs but the first layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.graph.watch import NormCall, Watch
from lbyl.inputs.procedural import procedural_images
from lbyl.torchkit.run import Inputs, call_model, device_of, evaluation_mode

BLURS = (0.7, 1.5, 3.0)  # deviations in pixels of the Gaussians that part the bands
PRIOR = 0.01  # how much a gain that is far from one costs, in squared logarithms
LOOKS, FEWEST, PIXELS = 64, 16, 1 << 22  # images to look at; large ones are fewer
WINDOW = 64  # pixels a side: the central ones are used
POSITIONS = 32  # a side of what a filter gives: more are nearly alike
ROUNDS, LARGEST_STEP = 30, 0.5  # of Gauss and Newton, in logarithms
LINEAR = 1e-2  # the largest part of a response that parts may fail to add up to
SEEN = 1e-4  # filters whose running variance is less, of the mean one, are switched off


@dataclass(frozen=True)
class SpectrumGains:
    """Gains of the parts of an image."""

    gains: Tensor  # (bands from fine to broad, axes of colour)

    def __call__(self, images: Tensor) -> Tensor:
        """Images (n, channels, height, width) with these gains applied."""
        axes = colour_axes(images.shape[1]).to(images)
        bands = band_filters(images.shape[2:]).to(images)
        transfer = torch.einsum("bhw,ba->ahw", bands, self.gains.to(images))

        def shape(some: Tensor) -> Tensor:
            parts = torch.einsum("ac,nchw->nahw", axes, some)
            shaped = torch.fft.irfft2(torch.fft.rfft2(parts) * transfer, s=some.shape[2:])
            return torch.einsum("ac,nahw->nchw", axes, shaped)

        # Transforms take several times the memory of what they transform.
        return torch.cat([shape(some) for some in images.split(_at_once(images.shape))])


def _at_once(shape: Sequence[int]) -> int:
    """How many images of a shape (…, height, width) to work on at a time."""
    return max(1, PIXELS // (shape[-2] * shape[-1]))


def colour_axes(channels: int) -> Tensor:
    """Rows: grey, then one end of the channels against the other, then ever finer contrasts."""
    phase = (torch.arange(channels, dtype=torch.float64) + 0.5) * math.pi / channels
    rows = torch.cos(torch.arange(channels, dtype=torch.float64)[:, None] * phase)
    return rows / rows.norm(dim=1, keepdim=True)


def band_filters(size: tuple[int, ...] | torch.Size) -> Tensor:
    """What each band lets through of the frequencies of a real Fourier transform; sums to one."""
    down = torch.fft.fftfreq(size[0], dtype=torch.float64)
    across = torch.fft.rfftfreq(size[1], dtype=torch.float64)
    squares = down[:, None].square() + across.square()
    passed = [torch.ones_like(squares)]
    passed += [torch.exp(-2 * (math.pi * blur) ** 2 * squares) for blur in BLURS]
    passed.append(torch.zeros_like(squares))
    return torch.stack([a - b for a, b in itertools.pairwise(passed)])


class _FirstNormReached(Exception):
    """Carries the first BatchNorm's input and running variance; the rest need not run."""


class FirstNorm(Watch):
    """Stops a network at its first BatchNorm."""

    def before_norm(self, call: NormCall) -> None:
        raise _FirstNormReached(call.x, call.var)


def _enters(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """What enters the first BatchNorm (n, filters, height, width), and its running variance."""
    try:
        with FirstNorm():
            call_model(model, inputs)
    except _FirstNormReached as end:
        entering, variance = end.args
    except Exception:  # a network that does not take a part of an image is not asked
        return None
    else:
        return None
    if variance is None or entering.dim() != 4:
        return None
    steps = [math.ceil(side / POSITIONS) for side in entering.shape[2:]]
    return entering[..., :: steps[0], :: steps[1]].float(), variance


@torch.no_grad()
def match_first_batchnorm(model: nn.Module, example_inputs: Inputs) -> SpectrumGains | None:
    """Gains under which images match a network's first BatchNorm; None where it has none."""
    examples = [x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor)]
    if len(examples) != 1 or examples[0].dim() != 4 or not examples[0].is_floating_point():
        return None
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        return None  # without this check the whole network would run
    shape, dtype = tuple(examples[0].shape[1:]), examples[0].dtype
    count = max(FEWEST, min(LOOKS, _at_once(shape)))
    images = procedural_images(count, shape, device=device_of(model))
    top, left = ((side - min(side, WINDOW)) // 2 for side in shape[1:])
    images = images[:, :, top : top + WINDOW, left : left + WINDOW]

    def ask(images: Tensor) -> tuple[Tensor, Tensor] | None:
        given = tree_map_only(Tensor, lambda _: images.to(dtype), example_inputs)
        return _enters(model, given)

    with evaluation_mode(model):
        seen = _products(ask, images)
    if seen is None:
        return None
    products, target = seen
    active = target > SEEN * target.mean()
    if not bool(active.any()):
        return None
    gains = fit_gains(products[active], target[active]).reshape(-1, shape[0])
    # A common factor of all gains is not determined: images keep their strength.
    return SpectrumGains(
        gains * float(images.std() / SpectrumGains(gains)(images).std().clamp(min=1e-12))
    )


def _products(
    ask: Callable[[Tensor], tuple[Tensor, Tensor] | None], images: Tensor
) -> tuple[Tensor, Tensor] | None:
    """(filters, parts, parts): covariances of what filters make of the parts of images.

    And the running variances (filters,).
    """
    whole, nothing = ask(images), ask(torch.zeros_like(images))
    if whole is None or nothing is None:
        return None
    responses = []
    for gains in torch.eye((len(BLURS) + 1) * images.shape[1]):
        part = ask(SpectrumGains(gains.reshape(-1, images.shape[1]))(images))
        assert part is not None  # what took the whole takes a part
        responses.append(part[0] - nothing[0])
    rows = torch.stack(responses)
    off = rows.sum(0) + nothing[0] - whole[0]
    if float(off.std()) > LINEAR * float(whole[0].std()):
        return None  # parts do not add up, so gains of parts would not describe the whole
    rows = rows.movedim(2, 0).flatten(2)  # (filters, parts, everything)
    rows = rows - rows.mean(2, keepdim=True)
    return (rows @ rows.mT / rows.shape[2]).double().cpu(), whole[1].double().cpu()


def fit_gains(products: Tensor, target: Tensor) -> Tensor:
    """Gains g, near one, with which the variances g'Pg are in proportion to `target`."""
    logs = torch.zeros(products.shape[1], dtype=products.dtype)
    eye = torch.eye(len(logs), dtype=products.dtype)
    for _ in range(ROUNDS):
        gains = logs.exp()
        sides = (products @ gains) * gains  # (filters, parts)
        variance = sides.sum(1).clamp(min=1e-30)
        error = variance.log() - target.log()
        slopes = 2 * sides / variance[:, None]
        error, slopes = error - error.mean(), slopes - slopes.mean(0)
        curvature = slopes.T @ slopes / len(error) + PRIOR * eye
        slope = slopes.T @ error / len(error) + PRIOR * logs
        step, failed = torch.linalg.solve_ex(curvature, slope)
        if int(failed) or not bool(step.isfinite().all()):
            break
        logs = logs - step.clamp(-LARGEST_STEP, LARGEST_STEP)
    return logs.exp()
