"""From a network to what runs it elsewhere: widths a target likes, int8, and a table of it all.

int8 is ONNX Runtime's static quantisation. It needs inputs to see how large activations become;
the data-free ones that statistics are collected on serve. What a step keeps is asked as always:
how many answers equal the original's, on inputs that nothing was fitted on.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lbyl.app.export import check_onnx, export_onnx, onnx_call, onnx_feed, onnx_session, silence
from lbyl.errors import LbylError
from lbyl.latency import Timing, running, take_turns
from lbyl.runtime.files import whole_file
from lbyl.runtime.format import bounded, first_line, human, percent
from lbyl.runtime.notes import note
from lbyl.runtime.run import Inputs, call_as_in_use, call_model, device_of, tensors_in
from lbyl.runtime.tensors import tensors
from lbyl.scoring.forecast import Forecast, Forecaster

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")  # with weights, their second input
CALIBRATED, AT_ONCE = 128, 16  # inputs that ranges are measured on, and how many run together


@dataclass(frozen=True)
class Target:
    """What a network is made smaller for."""

    multiple_of: int
    writes: str  # "onnx" or "executorch"
    why: str


TARGETS = {
    "onnx-cpu": Target(8, "onnx", "ONNX Runtime works on blocks of eight channels"),
    "tensorrt": Target(16, "onnx", "tensor cores take 8 channels in float16, 16 in int8"),
    "executorch": Target(8, "executorch", "XNNPACK works on blocks of eight channels"),
}


def target_of(name: str) -> Target:
    """A target by name."""
    if name not in TARGETS:
        raise LbylError(f"target {name!r}: the known ones are {', '.join(TARGETS)}")
    return TARGETS[name]


# -------------------------------------------------------------------------------------------- int8


def quantise_onnx(path: str | Path, out: str | Path, inputs: Sequence[Inputs]) -> Path:
    """Write the ONNX file `path` in int8: weights by channel, activations by their range.

    The range is the one on the first of `inputs`; scales and zero points stay in the graph beside
    the operations (QDQ), so that every runtime that knows them can fuse them.
    """
    check_onnx()
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    out, session = Path(out), onnx_session(Path(path))
    with whole_file(out) as temporary, silence(), _quiet():
        ready = temporary.with_name("prepared.onnx")
        try:
            quant_pre_process(str(path), str(ready), skip_symbolic_shape=True)
            quantization.quantize_static(
                str(ready),
                str(temporary),
                _reader(quantization.CalibrationDataReader, session, inputs),
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=quantization.QuantType.QInt8,
                weight_type=quantization.QuantType.QInt8,
                per_channel=True,
                nodes_to_exclude=_behind_all_layers(ready),
            )
        except Exception as error:  # the quantiser raises many unrelated types
            raise LbylError(f"{path} has no int8 form: {first_line(error)}") from error
        finally:
            ready.unlink(missing_ok=True)
    return out


def _behind_all_layers(path: Path) -> list[str]:
    """Nodes of a graph that no layer with weights follows, by name.

    There a detector puts pixels and chances into one tensor, which has no scale for both; and
    nearly nothing is computed there.
    """
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    read: set[str] = set()  # what layers need, directly or through others
    behind = []
    for node in reversed(graph.node):  # a graph is in the order in which it is computed
        is_layer = node.op_type in LAYERS and any(name in weights for name in node.input[1:2])
        if is_layer or any(name in read for name in node.output):
            read.update(node.input)
        else:
            behind.append(node.name)
    return behind


def _reader(base: Any, session: Any, inputs: Sequence[Inputs]) -> Any:
    """The inputs as the quantiser asks for them, one feed after the other."""
    feeds = (onnx_feed(session, batch) for batch in _slices(inputs))
    return type("Inputs", (base,), {"get_next": lambda self: next(feeds, None)})()


def _slices(inputs: Sequence[Inputs]) -> Iterator[Inputs]:
    """The first of the inputs, few at once: every activation of a batch is held."""
    given = 0
    for batch in inputs:
        size = next((len(x) for x in tensors_in(batch) if x.dim()), 0)
        for start in range(0, size, AT_ONCE):
            if given >= CALIBRATED:
                return
            stop = min(start + AT_ONCE, start + CALIBRATED - given, size)
            given += stop - start
            yield tree_map_only(Tensor, lambda x: _rows(x, start, stop, size), batch)  # noqa: B023


def _rows(x: Tensor, start: int, stop: int, size: int) -> Tensor:
    return x[start:stop].contiguous() if x.dim() and len(x) == size else x


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The quantiser gives advice by the root's logger."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(before)


class OnnxNetwork(nn.Module):
    """An ONNX file as a network, to compare it with others; its outputs are a list of tensors."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        super().__init__()
        self.session = onnx_session(path, threads)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = kwargs or args
        made = self.session.run(None, onnx_feed(self.session, given))
        device = next((x.device for x in tensors_in(given)), None)
        outputs = [torch.from_numpy(x).to(device) for x in made]
        return outputs[0] if len(outputs) == 1 else outputs


# -------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Step:
    """One network in one runtime: how large, how quick, how much like the original."""

    network: str  # "original", "slim" or "int8"
    runtime: str
    bytes: int
    timing: Timing
    forecast: Forecast | None  # None where answers could not be compared

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, times in seconds."""
        low, high = self.timing.quartiles
        times = {"median": self.timing.median, "low": low, "high": high}
        named = {"network": self.network, "runtime": self.runtime, "bytes": self.bytes}
        told = self.forecast
        agreement = None if told is None else told.agreement
        kept = None if told is None or told.kept is None else [told.kept, told.low, told.high]
        return {**named, **times, "agreement": agreement, "kept": kept}


HEADINGS = ("one input on this CPU", "size", "keeps about", "median", "quartiles")


def step_texts(steps: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of `Step.to_dict` as they are shown, under `HEADINGS`."""
    try:
        return [
            [
                f"{step['network']}, {step['runtime']}",
                f"{human(step['bytes'])}B",
                _kept_text(step),
                f"{1e3 * step['median']:.2f} ms",
                f"{1e3 * step['low']:.2f}–{1e3 * step['high']:.2f}",
            ]
            for step in steps
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise LbylError(f"the table of steps is damaged: {first_line(error)}") from error


def _kept_text(step: Mapping[str, Any]) -> str:
    """The accuracy kept with its bounds, or else how many answers are equal."""
    if step.get("kept") is not None:
        kept, low, high = step["kept"]
        return percent(kept) if low == high else bounded(kept, low, high)
    agreement = step["agreement"]
    return percent(agreement) if agreement is None else f"{percent(agreement)} agree"


def measure_steps(
    models: Mapping[str, nn.Module],
    files: Mapping[str, Path],
    example_inputs: Inputs,
    forecaster: Forecaster,
    *,
    compiled: bool = False,
    repeats: int = 20,
    threads: int | None = None,
) -> list[Step]:
    """A row for every network in every runtime, timed on the CPU, all of them in turns.

    `models` are networks of PyTorch and `files` ONNX files, by the same names. Those named alike
    compute the same, so their answers are compared with the original's once; a file of another
    name was made from the last of the models.
    """
    home = {name: device_of(model) for name, model in models.items()}
    inputs = tree_map_only(Tensor, lambda x: x.cpu(), example_inputs)
    told = _forecasts(models, files, forecaster, threads)
    with ExitStack() as stack:
        for name, model in models.items():
            stack.callback(model.to, home[name])
            model.to("cpu")
        runners: dict[tuple[str, str], Callable[[], object]] = {}
        stack.enter_context(running(models.values(), threads))
        for name, model in models.items():
            runners[name, "PyTorch"] = _call(model, inputs)
            quick = _compiled(model, inputs, name) if compiled else None
            if quick is not None:
                runners[name, "compiled"] = _call(quick, inputs)
        for name, path in files.items():
            runners[name, "ONNX Runtime"] = onnx_call(path, inputs, threads)
        timed = take_turns(runners, torch.device("cpu"), repeats)
    return [
        Step(name, runtime, _size(models, files, name, runtime), timing, told[name])
        for (name, runtime), timing in timed.items()
    ]


def table_of_steps(
    models: Mapping[str, nn.Module],
    files: Mapping[str, Path],
    example_inputs: Inputs,
    forecaster: Forecaster,
    **options: Any,
) -> list[dict[str, Any]]:
    """Rows of `measure_steps` as plain data; a network without a file gets one meanwhile."""
    with TemporaryDirectory() as place:
        lacking = {n: Path(place) / f"{n}.onnx" for n in models if n not in files}
        for name, path in lacking.items():
            export_onnx(models[name], example_inputs, path)
        steps = measure_steps(models, lacking | dict(files), example_inputs, forecaster, **options)
    return [step.to_dict() for step in steps]


def _forecasts(
    models: Mapping[str, nn.Module],
    files: Mapping[str, Path],
    forecaster: Forecaster,
    threads: int | None,
) -> dict[str, Forecast | None]:
    """What each keeps of the original's accuracy, by name."""
    found: dict[str, Forecast | None] = {}
    for name in [*models, *(name for name in files if name not in models)]:
        try:
            if name in models:
                found[name] = forecaster(models[name])
            else:
                found[name] = forecaster(OnnxNetwork(files[name], threads))
        except Exception as error:  # a runtime may refuse a batch that PyTorch takes
            note(f"{name}: answers were not compared: {first_line(error)}")
            found[name] = None
        told = found[name]
        if told is not None and told.kept is not None and _is_of(models.get(name), forecaster):
            found[name] = replace(told, kept=1.0, low=1.0, high=1.0)  # nothing was done to it
    return found


def _is_of(model: nn.Module | None, forecaster: Forecaster) -> bool:
    """Whether a network is the one that others are compared with: it shares all weights."""
    own, others = ([] if m is None else list(m.parameters()) for m in (model, forecaster.model))
    same = (a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in zip(own, others))
    return len(own) == len(others) and bool(own) and all(same)


def _size(
    models: Mapping[str, nn.Module], files: Mapping[str, Path], name: str, runtime: str
) -> int:
    if runtime != "ONNX Runtime":
        return sum(x.numel() * x.element_size() for x in tensors(models[name]).values())
    beside = files[name].with_name(files[name].name + ".data")
    return sum(path.stat().st_size for path in (files[name], beside) if path.is_file())


def _call(model: nn.Module, inputs: Inputs) -> Callable[[], object]:
    return lambda: call_as_in_use(model, inputs)


def _compiled(model: nn.Module, inputs: Inputs, name: str) -> nn.Module | None:
    """The network as `torch.compile` makes it; None, and a note, where it cannot."""
    try:
        quick: Any = torch.compile(copy.deepcopy(model))
        with silence():
            call_model(quick, inputs)
    except Exception as error:  # no compiler, no support, …
        note(f"{name}: torch.compile failed: {first_line(error)}")
        return None
    made: nn.Module = quick
    return made
