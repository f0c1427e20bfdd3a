"""SpectrumGains: the spectrum and the colours that images need for this network.

The running variance of the first BatchNorm is the variance that each filter in front of it had on
the training data. Some filters look for fine edges, some for broad light, some for one colour or
another: together they determine how strong each of these was. So procedural images are split into
bands of frequency and axes of colour, and each part gets the gain with which the running
variances come out best. The running means determine the mean colour likewise. So images get the
strength and the colour that inputs of this network have, whether it takes them between 0 and 1 or
normalised. No data and hardly any time: nothing runs but the first layer.

Where BatchNorm was folded into the weights, as in most ONNX files, biases still tell whether inputs
are far stronger, as those from 0 to 255 are. A filter's bias was the mean of its output, or its
distance from zero, which is of the size of its deviation: on images of unit deviation biases come
out at 0.7 to 2.2 deviations where a network takes normalised images (median over filters, five
networks), and at 50 to 60 where it takes those from 0 to 255.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.graph.watch import NormCall, Watch, layer_call
from lbyl.inputs.images.noise import at_once, squared_frequencies
from lbyl.inputs.images.procedural import (
    as_given,
    channels_come_last,
    channels_first,
    procedural_images,
)
from lbyl.runtime.intercept import Function
from lbyl.runtime.run import Inputs, call_model, device_of, evaluation_mode

BLURS = (0.7, 1.5, 3.0)  # deviations in pixels of the Gaussians that part the bands
PRIOR = 0.01  # how much a gain that is far from one costs, in squared logarithms
LOOKS, FEWEST = 64, 16  # images to look at;
LOOKED_PIXELS = 1 << 22  # large ones are fewer
SEEN_AT_ONCE = 8  # of them on a processor at most,
NUMBERS_AT_ONCE = 1 << 22  # where filters make no more of all their parts
WINDOW = 64  # pixels a side: the central ones are used
POSITIONS = 32  # a side of what a filter gives: more are nearly alike
ROUNDS, LARGEST_STEP = 30, 0.5  # of Gauss and Newton, in logarithms
LINEAR = 1e-2  # the largest part of a response that parts may fail to add up to
STRONGEST = 1e3  # how far the strength of images may be from one, either way
LEAST_LEFT = 0.05  # of a running variance, that borders leave to images
MEAN_PRIOR = 1e-3  # how much a mean colour costs, in squared deviations of images
FAR_OFF = 8.0  # biases of so many deviations ask for stronger images
TYPICAL = 0.9  # of networks whose inputs are as strong as images
COLOUR_PRIOR = 0.25  # a mean colour may well be twice as strong as images are
SEEN = 1e-4  # filters whose running variance is less, of the mean one, are switched off


@dataclass(frozen=True)
class SpectrumGains:
    """Gains of the parts of an image, and the mean colour of all."""

    gains: Tensor  # (bands from fine to broad, axes of colour)
    mean: Tensor | None = None  # (channels,), added at the end

    def __call__(self, images: Tensor) -> Tensor:
        """Images (n, channels, height, width) with these gains applied."""
        axes = colour_axes(images.shape[1]).to(images)
        bands = band_filters(images.shape[2:]).to(images)
        transfer = torch.einsum("bhw,ba->ahw", bands, self.gains.to(images))

        def shape(some: Tensor) -> Tensor:
            parts = torch.einsum("ac,nchw->nahw", axes, some)
            shaped = torch.fft.irfft2(torch.fft.rfft2(parts) * transfer, s=some.shape[2:])
            made = torch.einsum("ac,nahw->nchw", axes, shaped)
            return made if self.mean is None else made + self.mean.to(made)[:, None, None]

        # Transforms take several times the memory of what they transform.
        made = torch.empty_like(images)
        size = at_once(images)
        for part, some in zip(made.split(size), images.split(size)):
            part.copy_(shape(some))
        return made


def colour_axes(channels: int) -> Tensor:
    """Rows: grey, then one end of the channels against the other, then ever finer contrasts."""
    phase = (torch.arange(channels, dtype=torch.float64) + 0.5) * math.pi / channels
    rows = torch.cos(torch.arange(channels, dtype=torch.float64)[:, None] * phase)
    return rows / rows.norm(dim=1, keepdim=True)


def band_filters(size: tuple[int, ...] | torch.Size) -> Tensor:
    """What each band lets through of the frequencies of a real Fourier transform; sums to one."""
    squares = squared_frequencies(size, dtype=torch.float64)
    passed = [torch.ones_like(squares)]
    passed += [torch.exp(-2 * (math.pi * blur) ** 2 * squares) for blur in BLURS]
    passed.append(torch.zeros_like(squares))
    return torch.stack([a - b for a, b in itertools.pairwise(passed)])


@dataclass(frozen=True)
class Entering:
    """What enters the first BatchNorm, and its running statistics."""

    x: Tensor  # (n, filters, height, width)
    mean: Tensor  # (filters,)
    variance: Tensor


class _FirstNormReached(Exception):
    """Carries the first BatchNorm's input and running statistics; the rest need not run."""


class _OtherPath(Exception):
    """Images do not all come to one BatchNorm: values decide what runs, or none is reached."""


class FirstNorm(Watch):
    """Stops a network at its first BatchNorm."""

    def before_norm(self, call: NormCall) -> None:
        raise _FirstNormReached(call.x, call.mean, call.var)


def _enters(model: nn.Module, inputs: Inputs) -> Entering | None:
    """What enters the first BatchNorm; None where that cannot be told."""
    try:
        with FirstNorm():
            call_model(model, inputs)
    except _FirstNormReached as end:
        entering, mean, variance = end.args
    except Exception:  # a network that does not take a part of an image is not asked
        return None
    else:
        return None
    if mean is None or variance is None or entering.dim() != 4:
        return None
    steps = [math.ceil(side / POSITIONS) for side in entering.shape[2:]]
    return Entering(entering[..., :: steps[0], :: steps[1]].float(), mean, variance)


@torch.no_grad()
def match_first_batchnorm(model: nn.Module, example_inputs: Inputs) -> SpectrumGains | None:
    """Gains under which images match a network's first BatchNorm; None where it has none."""
    example = _image_example(example_inputs)
    if example is None:
        return None
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        return None  # without this check the whole network would run
    shape = channels_first(example.shape[1:])
    count = max(FEWEST, min(LOOKS, LOOKED_PIXELS // (shape[1] * shape[2])))
    images = procedural_images(count, shape, device=device_of(model))
    top, left = ((side - min(side, WINDOW)) // 2 for side in shape[1:])
    images = images[:, :, top : top + WINDOW, left : left + WINDOW]

    made: dict[torch.Size, torch.Size] = {}  # sizes of images → shapes of what enters

    def ask(images: Tensor) -> Entering:
        seen = _enters(model, _in_place_of(example_inputs, example, images))
        if seen is None:
            raise _OtherPath
        entering = seen.x.shape[1:]
        known = made.setdefault(images.shape[2:], entering)
        if known != entering or any(x[0] != entering[0] for x in made.values()):
            raise _OtherPath
        return seen

    with evaluation_mode(model):
        try:
            seen = _products(ask, images)
            if seen is None:
                return None
            products, target = seen
            active = target > SEEN * target.mean()
            if not bool(active.any()):
                return None
            even = _even_pictures(ask, shape, images)
        except _OtherPath:
            return None
    mean = torch.zeros(shape[0], dtype=torch.float64)
    for _ in range(2):  # what the borders of an even picture give is no variance of the images
        own = (target - even.border_variance(mean)).clamp(min=LEAST_LEFT * target)[active]
        gains = fit_gains(products[active], own)
        factor = strength(products[active], own, gains)
        mean = even.fit(active, factor)
    return SpectrumGains(gains.reshape(-1, shape[0]) * factor, mean)


def _image_example(example_inputs: Inputs) -> Tensor | None:
    """The one image that is given for an example; None where inputs are anything else."""
    examples = [x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor)]
    if len(examples) != 1 or examples[0].dim() != 4 or not examples[0].is_floating_point():
        return None
    return examples[0]


def _in_place_of(example_inputs: Inputs, example: Tensor, images: Tensor) -> Inputs:
    """Inputs with images (n, c, h, w) in place of the example, in its order of axes."""
    given = as_given(images, channels_come_last(example.shape[1:])).to(example.dtype)
    return tree_map_only(Tensor, lambda _: given, example_inputs)


class _FirstLayerReached(Exception):
    """Carries what the first convolution gives; the rest need not run."""


class FirstConvolution(Watch):
    """Stops a network behind its first convolution."""

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = layer_call(func, args, kwargs)
        out = super().on_call(func, args, kwargs)
        if call is not None:
            raise _FirstLayerReached(out if call.kind == "conv" else None)
        return out


@torch.no_grad()
def match_first_biases(model: nn.Module, example_inputs: Inputs) -> SpectrumGains | None:
    """How strong images are, and of what colour, where the first biases are far off otherwise.

    None where the network has no such biases, or images of unit deviation suit them, and where it
    normalises: biases in front of a norm may be anything.
    """
    example = _image_example(example_inputs)
    if example is None or any("norm" in type(m).__name__.lower() for m in model.modules()):
        return None
    shape = channels_first(example.shape[1:])
    images = procedural_images(FEWEST, shape, device=device_of(model))

    def ask(images: Tensor) -> Tensor | None:
        try:
            with FirstConvolution():
                call_model(model, _in_place_of(example_inputs, example, images))
        except _FirstLayerReached as end:
            out = end.args[0]
            return None if out is None or out.dim() != 4 else out.double().cpu()
        except Exception:  # a network that does not take them is not asked
            return None
        return None

    with evaluation_mode(model):
        made, even = ask(images), ask(_one_colour_each(shape, images))
    if made is None or even is None or made.shape[1] != even.shape[1]:
        return None
    level = even.flatten(2).median(2).values  # (1 + channels, filters): borders do not count
    deviation = (made - level[0][:, None, None]).transpose(0, 1).flatten(1).std(1)
    active = deviation > SEEN**0.5 * deviation.max()
    bias = (level[0] / deviation)[active]
    if not bool(active.any()) or not float(bias.abs().median()) > FAR_OFF:
        return None
    seen = ((level[1:] - level[0]) / deviation).T[active]
    mean, factor = strength_and_mean(bias, seen)
    gains = torch.full((len(BLURS) + 1, shape[0]), factor, dtype=torch.float64)
    return SpectrumGains(gains, mean)


def strength_and_mean(bias: Tensor, seen: Tensor) -> tuple[Tensor, float]:
    """The mean colour (channels,) and the strength of images that biases (filters,) ask for.

    Both are in deviations that filters have on images of unit strength, as `seen` (filters,
    channels) is, what they make of an even colour. Outputs should be near zero, as far as a colour
    brings them there; how far most of them are from it is the strength. Least absolute values, by
    weighted squares: a few filters are far off in any network.
    """
    eye = COLOUR_PRIOR * torch.eye(seen.shape[1], dtype=seen.dtype)
    left = bias
    mean = torch.zeros(seen.shape[1], dtype=seen.dtype)
    for _ in range(ROUNDS):
        weights = left.abs().median() / left.abs().clamp(min=left.abs().median())
        rows = seen * weights[:, None]
        mean = torch.linalg.solve(rows.T @ seen + eye, -rows.T @ bias)
        left = bias + seen @ mean
    return mean, min(float(left.abs().median()) / TYPICAL, STRONGEST)


Ask = Callable[[Tensor], Entering]
"""What images make enter the first BatchNorm; raises `_OtherPath` where it is not the same."""


def _products(ask: Ask, images: Tensor) -> tuple[Tensor, Tensor] | None:
    """(filters, parts, parts): covariances of what filters make of the parts of images.

    And the running variances (filters,).
    """
    seen, variance = Responses(), torch.zeros(0)
    parts = (len(BLURS) + 1) * images.shape[1]
    first = ask(images[:1])
    at_a_time = len(images)
    if images.device.type == "cpu":
        at_a_time = max(1, min(SEEN_AT_ONCE, NUMBERS_AT_ONCE // (parts * first.x.numel())))
    for some in images.split(at_a_time):
        whole, nothing = ask(some), ask(torch.zeros_like(some))
        variance = whole.variance.double().cpu()
        made = []
        for gains in torch.eye(parts):
            part = ask(SpectrumGains(gains.reshape(-1, images.shape[1]))(some))
            made.append(part.x - nothing.x)
        seen.add(torch.stack(made), whole.x - nothing.x)
    if not seen.add_up:
        return None  # gains of parts would not describe the whole
    return seen.covariance, variance


@dataclass
class Responses:
    """Sums over what filters make of the parts of images."""

    count: int = 0
    total: Tensor | float = 0.0  # (filters, parts)
    products: Tensor | float = 0.0  # (filters, parts, parts)
    off: float = 0.0  # squares by which parts fail to add up to the whole
    size: float = 0.0  # squares of the whole

    def add(self, parts: Tensor, whole: Tensor) -> None:
        """Take responses (parts, n, filters, …) in, and those to the whole images."""
        self.off += float((parts.sum(0) - whole).double().square().sum())
        self.size += float(whole.double().square().sum())
        rows = parts.movedim(2, 0).flatten(2).double()
        self.count += rows.shape[2]
        self.total = self.total + rows.sum(2)
        self.products = self.products + rows @ rows.mT

    @property
    def add_up(self) -> bool:
        return math.sqrt(self.off) <= LINEAR * math.sqrt(self.size)

    @property
    def covariance(self) -> Tensor:
        assert isinstance(self.total, Tensor) and isinstance(self.products, Tensor)
        mean = self.total / self.count
        return (self.products / self.count - mean[:, :, None] * mean[:, None]).cpu()


def strength(products: Tensor, target: Tensor, gains: Tensor) -> float:
    """The factor of all gains with which the variances g'Pg are the target, not only alike."""
    variance = ((products @ gains) * gains).sum(1).clamp(min=1e-30)
    factor = float(((target.log() - variance.log()).mean() / 2).exp())
    return min(max(factor, 1 / STRONGEST), STRONGEST)


@dataclass(frozen=True)
class EvenPictures:
    """What filters make of pictures of one colour each, beyond what they make of black ones."""

    responses: Tensor  # (channels, filters, positions)
    mean: Tensor  # (filters,): the running one, less what black pictures give
    variance: Tensor  # the running one

    def border_variance(self, colour: Tensor) -> Tensor:
        """(filters,): borders, where images end, differ from the rest of an even picture."""
        return torch.einsum("c,cfp->fp", colour, self.responses).var(1, correction=0)

    def fit(self, active: Tensor, deviation: float) -> Tensor:
        """The colour (channels,) whose even picture gives every filter its running mean.

        Filters count by their running deviation. Those that see no even colour say nothing about
        it: the prior keeps what nobody sees at zero.
        """
        weights = self.variance[active].rsqrt()
        seen = self.responses.mean(2).T[active] * weights[:, None]
        prior = MEAN_PRIOR * len(seen) / deviation**2
        curvature = seen.T @ seen + prior * torch.eye(seen.shape[1], dtype=seen.dtype)
        return torch.linalg.solve(curvature, seen.T @ (self.mean[active] * weights))


def _one_colour_each(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """(1 + channels, *shape): a black picture, then one of each channel alone."""
    colours = torch.cat([torch.zeros(1, shape[0]), torch.eye(shape[0])]).to(like)
    return colours[:, :, None, None].expand(-1, *shape).contiguous()


def _even_pictures(ask: Ask, shape: tuple[int, ...], like: Tensor) -> EvenPictures:
    """Pictures of the whole size, for their borders."""
    seen = ask(_one_colour_each(shape, like))
    x = seen.x.flatten(2).double().cpu()
    mean = seen.mean.double().cpu() - x[0].mean(1)
    return EvenPictures(x[1:] - x[:1], mean, seen.variance.double().cpu())


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
