"""What a cut must equal: the original with pruned channels silenced where they are read."""

from __future__ import annotations

import platform
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import lbyl
from lbyl import Graph, Result

# private: what a cut must equal is said by the axes of a graph and run as the library runs it
from lbyl.runtime.run import call_model
from lbyl.runtime.tensors import is_finite, tensors  # private: as above
from lbyl.surgery.indices import kept_mask  # private: as above


class Silence(TorchFunctionMode):
    """Multiplies the inputs of consumers by a mask of the channels that stay."""

    def __init__(self, masks: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.masks = masks  # by the id of the consumer's weight
        self.silenced: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        call: dict[int | str, Any] = {**dict(enumerate(args)), **(kwargs or {})}
        for key, weight in list(call.items()):
            mask = self.masks.get(id(weight)) if key != 0 else None
            if mask is None:
                continue
            self.silenced.add(id(weight))
            source = _multiplied_by(key, call)
            x = call[source]
            dim = x.dim() - weight.dim() + 1 if "conv" in func.__name__ else x.dim() - 1
            shape = [-1 if d == dim else 1 for d in range(x.dim())]
            call[source] = x * mask.reshape(shape).to(x)
        named = {key: value for key, value in call.items() if isinstance(key, str)}
        return func(*(call[i] for i in range(len(args))), **named)


def _multiplied_by(key: int | str, call: Mapping[int | str, Any]) -> int | str:
    """Where a call has what it multiplies by the weight that it has at `key`."""
    if isinstance(key, int):
        return key - 1  # what a weight multiplies stands right before it
    if key == "mat2":  # of addmm(bias, mat1, mat2) or mm(input, mat2)
        return next(k for k in ("mat1", 1, 0, "input") if k in call)
    return 0 if 0 in call else "input"


class Still(TorchFunctionMode):
    """Nothing is drawn at random: dropout does nothing, random numbers are all the same.

    A network that draws in evaluation gives other numbers once it is cut, whatever the seed, as
    fewer are drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if "dropout" in name and kwargs.get("training", args[2] if len(args) > 2 else True):
            self.drew = True
            return args[0] if args else kwargs["input"]
        out = func(*args, **kwargs)
        if re.match(r"(rand|normal|bernoulli|multinomial|uniform)", name) and flat(out):
            self.drew = True
            return torch.full_like(out, 0.5)
        return out


def masks(model: nn.Module, graph: Graph, kept: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """For every consumer, by the id of its weight, which input columns stay."""
    alive, state = kept_mask(graph, kept), tensors(model)
    return {
        id(state[c.weight]): (c.channel < 0) | alive[c.channel.clamp(min=0)]
        for c in graph.consumers.values()
    }


def flat(output: Any) -> list[Tensor]:
    """Every floating tensor of an output."""
    if isinstance(output, Tensor):
        return [output] if output.dtype.is_floating_point else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [x for part in output for x in flat(part)]
    return []


NOTHING = 1e-8  # of an output that is smaller most is rounding: a mean over what was normalised


def distance(a: Any, b: Any) -> float:
    """The largest relative difference of two outputs; infinite where only one of them has NaN."""
    first, second = flat(a), flat(b)
    if [x.shape for x in first] != [x.shape for x in second] or not first:
        return float("inf")
    worst = 0.0
    for x, y in zip(first, second):
        x, y = x.detach(), y.detach()
        if x.numel():
            same = (x == y) | (x.isnan() & y.isnan())
            scale = max(float(v.nan_to_num(0, 0, 0).abs().max()) for v in (x, y))
            off = float((x - y).abs().masked_fill(same, 0).max()) / max(scale, NOTHING)
            worst = max(worst, off if off == off else float("inf"))
    return worst


PROBES = "head rpn.head roi_heads.box_predictor roi_heads.mask_predictor".split()
PROBES += ["roi_heads.keypoint_predictor"]


class Probe:
    """A network's output; of a detector what its parts gave before boxes are sorted and dropped.

    The order of boxes with nearly equal scores is not a property of the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.still = Still()
        modules = dict(model.named_modules())
        detects = any("GeneralizedRCNNTransform" in type(m).__name__ for m in modules.values())
        self.parts = [modules[name] for name in PROBES if name in modules] if detects else []

    def __call__(
        self, inputs: Any, mode: TorchFunctionMode | None = None, seed: int | None = None
    ) -> list[Tensor]:
        """All floating outputs, with nothing drawn at random where no `seed` is given."""
        seen: list[Any] = []
        handles = [m.register_forward_hook(lambda m, a, out: seen.append(out)) for m in self.parts]
        torch.manual_seed(seed or 0)
        try:
            with self.still if seed is None else nullcontext(), mode or nullcontext():
                output = call_model(self.model, inputs)
        finally:
            for handle in handles:
                handle.remove()
        return flat(seen if self.parts else output)


@dataclass
class Cut:
    """What was found when a network was cut, for a test to judge or a table to show."""

    result: Result
    same: float  # distance at ratio 0
    exact: float  # distance to the silenced original
    moved: float  # distance to the original
    read: int  # consumers that the silencing met
    random: float = 0.0  # distance of the original from itself with another seed


def prove_cut(
    model: nn.Module, inputs: Any, graph: Graph, ratio: float = 0.3, unchanged: bool = True
) -> Cut:
    """Cut at `ratio` without restoring, and compare with the silenced original."""
    prepared = lbyl.Prepared(model, inputs, graph)
    with torch.no_grad():
        probe = Probe(model)
        original = probe(inputs)
        random, same = 0.0, 0.0
        if probe.still.drew:
            random = distance(*(probe(inputs, seed=seed) for seed in (1, 2)))
        if unchanged:
            whole = prepared.compress(0.0, method="none")
            same = distance(original, Probe(whole.model)(inputs))
            del whole
        result = prepared.compress(ratio, method="none")
        slim = Probe(result.model)(inputs)
        mode = Silence(masks(model, graph, result.plan.kept))
        reference = Probe(model)(inputs, mode)
    moved = distance(original, slim)
    return Cut(result, same, distance(reference, slim), moved, len(mode.silenced), random)


def assert_exact(cut: Cut, graph: Graph) -> None:
    """The promises of a cut: equal where nothing goes, exact where something does, and smaller."""
    result = cut.result
    assert cut.same == 0, "ratio 0 changed the output"
    assert cut.exact < 1e-4, f"the cut is off by {cut.exact:.2e}"
    assert cut.moved > 0, "the cut changed nothing: the comparison proves nothing"
    assert cut.read == len(graph.consumers), "some consumer was never met"
    assert result.after.parameters < result.before.parameters
    assert result.after.macs < result.before.macs


GENERAL = (
    (r"its channels are added to others' \(.*", "residual"),
    (r"it meets a tensor of fixed size at.*", "residual, fixed elsewhere"),
    (r"it enters scaled_dot_product_attention.*|it enters \S*attention\S*.*", "attention"),
    (r"it enters (?:layer|rms)_norm.*", "normalised together (LayerNorm)"),
    (r"it enters (\w+).*, which (.*)", r"\1 \2"),
    (r"it is read by .*, which runs in training only", "read by a layer of training only"),
    (r" (?:in|at|at the input of) [\w.]+$", ""),
)


def short(reason: str) -> str:
    """A reason without the names of layers, so that equal reasons are counted together."""
    for pattern, instead in GENERAL:
        reason = re.sub(pattern, instead, reason)
    return reason


def machine() -> str:
    """The processor and the torch that times were measured with."""
    about = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", about.read_text()) if about.exists() else None
    processor = named.group(1) if named else platform.processor() or platform.machine()
    return f"one core of {processor} with torch {torch.__version__.partition('+')[0]}"


def traced(model: nn.Module, inputs: Any, ratio: float = 0.3) -> tuple[Graph, float]:
    """A network's graph, and the processor seconds of finding it and planning a cut.

    What other processes do on the machine counts in neither.
    """
    start = time.process_time()
    graph = lbyl.trace(model, inputs)
    if graph.units:
        lbyl.Prepared(model, inputs, graph).plan(ratio, method="none")
    return graph, time.process_time() - start


def summary(
    model: nn.Module, graph: Graph, seconds: float, cut: Cut | None = None
) -> dict[str, Any]:
    """What the page of published networks shows of one."""
    reasons = Counter(short(reason) for reason in graph.unprunable.values())
    found: dict[str, Any] = {"units": len(graph), "channels": graph.channels}
    found |= {"machine": machine(), "seconds": seconds, "alone": dict(reasons.most_common())}
    if cut is None:
        size = sum(p.numel() for p in model.parameters())
        return found | {"before": size, "after": size, "macs": 1.0, "exact": None}
    before, after = cut.result.before, cut.result.after
    found |= {"before": before.parameters, "after": after.parameters}
    return found | {"macs": after.macs / before.macs, "exact": cut.exact}


def in_double(model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """Both in float64, where a wrong index cannot hide behind rounding."""

    def widen(x: Tensor) -> Tensor:
        return x.double() if x.dtype.is_floating_point else x

    return model.double(), tree_map_only(Tensor, widen, inputs)


def assert_survives(
    original: nn.Module,
    result: Result,
    inputs: Any,
    fresh: nn.Module,
    directory: Path,
    untried: Collection[str] = (),
) -> list[str]:
    """A slim model is a model: saved and loaded, exported, compiled, trained a step.

    Returns the last three's names where the original does not survive them either.
    """
    slim = result.model
    assert_reloads(result, inputs, fresh, directory)
    steps = {"export": assert_exports, "compile": assert_compiles, "training": assert_trains}
    return [
        name
        for name, step in steps.items()
        if name not in untried and not _as_original(step, slim, original, inputs)
    ]


def _as_original(
    step: Callable[[nn.Module, Any], None], slim: nn.Module, original: nn.Module, inputs: Any
) -> bool:
    """Whether the slim model survives a step; it must where the original does."""
    try:
        step(slim, inputs)
    except Exception:
        try:
            step(original, inputs)
        except Exception:
            return False
        raise
    return True


def assert_reloads(result: Result, inputs: Any, fresh: nn.Module, directory: Path) -> None:
    """What was saved, read into a fresh network, computes the same to the last bit."""
    with torch.no_grad():
        before = Probe(result.model)(inputs)
        lbyl.save(result, directory)
        after = Probe(lbyl.load(directory, model=fresh).eval())(inputs)
    shutil.rmtree(directory)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def assert_exports(model: nn.Module, inputs: Any) -> None:
    """`torch.export` takes it, and what comes out computes the same."""
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (args, {})
    with torch.no_grad():
        exported = torch.export.export(model, args, kwargs).module()
        assert distance(call_model(model, inputs), exported(*args, **kwargs)) < 1e-4


def assert_compiles(model: nn.Module, inputs: Any) -> None:
    """`torch.compile` captures it, and what it captured computes the same.

    Its code generators take minutes a network and never see how a model came to its shapes.
    """
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            compiled = torch.compile(model, backend="eager")
            assert distance(call_model(model, inputs), call_model(compiled, inputs)) < 1e-4
    finally:
        torch._dynamo.reset()


def assert_trains(model: nn.Module, inputs: Any) -> None:
    """One step of training: a finite loss, its gradient, and weights that move and stay finite."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    try:
        losses = flat(call_model(model, _for_training(model, inputs)))
        loss = sum(x.square().mean() if x.dim() else x for x in losses if x.requires_grad)
        assert isinstance(loss, Tensor) and bool(torch.isfinite(loss))
        torch.autograd.backward(loss)
        slopes = {p: float(p.grad.norm()) for p in parameters if p.grad is not None}
        watched = max(slopes, key=lambda p: slopes[p])  # a small step may drown in rounding
        before = watched.detach().clone()
        torch.optim.SGD(parameters, lr=1e-3).step()
        assert not torch.equal(before, watched)
        assert all(map(is_finite, parameters))
    finally:
        model.zero_grad(set_to_none=True)
        model.eval()


def _for_training(model: nn.Module, inputs: Any) -> Any:
    """Two examples that differ, as BatchNorm needs where maps are 1 × 1; detectors get boxes."""
    if Probe(model).parts:
        image = inputs[0][0]
        pair = [image, image.flip(-1)]
        return pair, [_boxes(x) for x in pair]
    if isinstance(inputs, Tensor) and len(inputs) == 1:
        return torch.cat([inputs, inputs.flip(-1)])
    return inputs


def _boxes(image: Tensor) -> dict[str, Tensor]:
    """Two objects of the first class, with all that any detector asks to know of them."""
    boxes = torch.tensor([[8.0, 8.0, 72.0, 96.0], [40.0, 24.0, 120.0, 88.0]]).to(image)
    masks = torch.zeros(2, *image.shape[1:], dtype=torch.uint8)
    masks[:, 30:80, 45:70] = 1
    points = torch.cat([torch.full((2, 17, 2), 60.0), torch.ones(2, 17, 1)], dim=2)
    return {"boxes": boxes, "labels": torch.ones(2).long(), "masks": masks, "keypoints": points}
