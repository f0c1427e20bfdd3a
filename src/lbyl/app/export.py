"""Models for other runtimes, each run there once and compared with PyTorch before it is written."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.errors import LbylError
from lbyl.latency import RUNTIMES
from lbyl.runtime.files import whole_directory, whole_file
from lbyl.runtime.run import Inputs, call_model, evaluation_mode

CHECKED_BATCHES = (1, 3)
EMBEDDED_LIMIT = 1_800_000_000  # bytes of weights one ONNX file can hold (protobuf ends at 2 GB)


def export_onnx(
    model: nn.Module, example_inputs: Inputs, path: str | Path, tolerance: float = 1e-3
) -> float:
    """Write `model` as ONNX with a variable batch size and return how far ONNX Runtime is from it.

    That is the largest difference of any output, relative to the output's largest value, at two
    batch sizes. Nothing is written when it exceeds `tolerance`.
    """
    check_onnx()
    path = Path(path)
    embedded = sum(p.numel() * p.element_size() for p in model.parameters()) < EMBEDDED_LIMIT
    # Weights beside the graph, where there are any, must be there before it.
    with whole_directory(path.parent, last=path.name) as folder:
        written = folder / path.name
        with evaluation_mode(model), silence():
            program = _to_onnx(model, example_inputs)
            program.save(str(written), external_data=not embedded)
        error = onnx_error(model, example_inputs, written)
        _check_error(error, tolerance)
    return error


def export_program(model: nn.Module, example_inputs: Inputs, path: str | Path) -> Path:
    """Write `model` as a `torch.export` program (.pt2) with a variable batch size."""
    path = Path(path)
    with evaluation_mode(model), silence():
        program = _to_program(model, example_inputs)
        with whole_file(path) as temporary:
            buffer = io.BytesIO()
            torch.export.save(program, buffer)
            temporary.write_bytes(buffer.getvalue())
    return path


def export_executorch(
    model: nn.Module, example_inputs: Inputs, path: str | Path, tolerance: float = 1e-3
) -> float:
    """Write `model` for ExecuTorch (.pte), for XNNPACK's kernels, at the example's batch size.

    Returns how far it is from `model` when ExecuTorch runs it; nothing is written beyond
    `tolerance`.
    """
    check_executorch()
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    args, kwargs = _arguments(example_inputs)
    with evaluation_mode(model), silence():
        try:
            program = torch.export.export(model, args, kwargs or None)
            edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
            content = edge.to_executorch().buffer
        except Exception as error:
            raise LbylError(f"this model has no ExecuTorch form: {_short(error)}") from error
        count = next((len(x) for x in _tensors(example_inputs) if x.dim()), 1)
        found = difference(model, _random_batch(example_inputs, count), _executorch_runner(content))
    _check_error(found, tolerance)
    with whole_file(Path(path)) as temporary:
        temporary.write_bytes(content)
    return found


def export_openvino(
    model: nn.Module, example_inputs: Inputs, path: str | Path, tolerance: float = 1e-3
) -> float:
    """Write `model` for OpenVINO (.xml and .bin) by way of ONNX; returns how far that is from it.

    Both are checked, and nothing is written beyond `tolerance`.
    """
    check_openvino()
    import openvino

    path = Path(path)
    with whole_directory(path.parent, last=path.name) as folder:
        step = folder / f"{path.stem}.onnx"
        export_onnx(model, example_inputs, step, tolerance)
        made = openvino.convert_model(str(step))
        error = _error_at_batches(model, example_inputs, _openvino_runner(made))
        _check_error(error, tolerance)
        openvino.save_model(made, str(folder / path.name), compress_to_fp16=False)
        for file in folder.glob(f"{step.name}*"):
            file.unlink()
    return error


# ---------------------------------------------------------------------------- compared with PyTorch

Runner = Callable[[Inputs], Sequence[Tensor]]  # another runtime: inputs to outputs, in order


def difference(model: nn.Module, inputs: Inputs, runner: Runner) -> float:
    """Largest difference between another runtime and PyTorch, relative to each output's scale."""
    with torch.no_grad(), evaluation_mode(model):
        expected = _tensors(call_model(model, inputs))
    worst = 0.0
    for ours, theirs in zip(expected, runner(inputs), strict=True):
        ours = ours.detach().cpu().float()
        gap = (ours - theirs.detach().float()).abs().max()
        worst = max(worst, float(gap / ours.abs().max().clamp(min=1e-12)))
    return worst


def onnx_error(model: nn.Module, example_inputs: Inputs, path: Path) -> float:
    """The same between ONNX Runtime and PyTorch, at two batch sizes."""
    session = onnx_session(path)

    def run(inputs: Inputs) -> list[Tensor]:
        return [torch.from_numpy(x) for x in session.run(None, onnx_feed(session, inputs))]

    return _error_at_batches(model, example_inputs, run)


def _error_at_batches(model: nn.Module, example_inputs: Inputs, runner: Runner) -> float:
    batches = [_random_batch(example_inputs, count) for count in CHECKED_BATCHES]
    return max(difference(model, batch, runner) for batch in batches)


def _check_error(error: float, tolerance: float) -> None:
    if not error <= tolerance:
        raise LbylError(
            f"the exported model differs from PyTorch by {error:.2g} of its output's scale, "
            f"more than {tolerance:g}; nothing was written"
        )


def _openvino_runner(model: Any) -> Runner:
    import openvino

    # Some processors would compute in bfloat16 unless told otherwise.
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(model, "CPU", settings)

    def run(inputs: Inputs) -> list[Tensor]:
        made = compiled([_array(x) for x in _tensors(inputs)])
        return [torch.from_numpy(made[i].copy()) for i in range(len(compiled.outputs))]

    return run


def _executorch_runner(content: bytes) -> Runner:
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(bytes(content))

    def run(inputs: Inputs) -> Sequence[Tensor]:
        method: Any = program.load_method("forward")
        made: Sequence[Tensor] = method.execute([x.detach().cpu() for x in _tensors(inputs)])
        return made

    return run


def onnx_session(path: Path, threads: int | None = None) -> Any:
    """ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads:
        options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def onnx_feed(session: Any, inputs: Inputs) -> dict[str, Any]:
    """Inputs by the names the session has for them, in order."""
    values = [_array(x) for x in _tensors(inputs)]
    return dict(zip((entry.name for entry in session.get_inputs()), values, strict=True))


def _onnx_runner(
    stack: contextlib.ExitStack, model: nn.Module, inputs: Inputs, threads: int | None
) -> Callable[[], object]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    export_onnx(model, inputs, folder / "model.onnx")
    return onnx_call(folder / "model.onnx", inputs, threads)


def onnx_call(path: Path, inputs: Inputs, threads: int | None) -> Callable[[], object]:
    """A function that runs a file once on inputs, in ONNX Runtime."""
    session = onnx_session(path, threads)
    feed = onnx_feed(session, inputs)
    return lambda: session.run(None, feed)


RUNTIMES["onnx"] = _onnx_runner


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, Tensor)]


def _array(x: Tensor) -> Any:
    return x.detach().cpu().contiguous().numpy()


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _free_batch(inputs: Inputs) -> Any:
    """Every tensor's first dimension is variable, all the same one."""
    batch = torch.export.Dim.DYNAMIC
    return tree_map_only(Tensor, lambda x: {0: batch} if x.dim() else None, inputs)


def _to_program(model: nn.Module, example_inputs: Inputs) -> Any:
    inputs = _random_batch(example_inputs, 2)  # a batch of one would be taken as fixed
    args, kwargs = _arguments(inputs)
    shapes = _free_batch(kwargs or args)
    try:
        return torch.export.export(model, args, kwargs or None, dynamic_shapes=shapes)
    except Exception as error:  # the exporter raises many unrelated types
        raise LbylError(f"torch.export cannot follow this model: {_short(error)}") from error


def _to_onnx(model: nn.Module, example_inputs: Inputs) -> Any:
    program = _to_program(model, example_inputs)
    try:
        return torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:
        raise LbylError(f"this model has no ONNX form: {_short(error)}") from error


def _short(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


def _random_batch(inputs: Inputs, batch: int) -> Inputs:
    """Inputs like the example in another batch size; numbers of tokens and flags are repeated."""
    generator = torch.Generator().manual_seed(batch)

    def like(x: Tensor) -> Tensor:
        if not x.dim():
            return x
        shape = (batch, *x.shape[1:])
        if x.dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(x)
        return x[:1].expand(shape).clone()

    return tree_map_only(Tensor, like, inputs)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Exporters are talkative about things no user can change."""
    names = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def check_onnx() -> None:
    """One clear error where a library for ONNX is missing."""
    _check("ONNX", ("onnx", "onnxscript", "onnxruntime"), "lbyl[onnx]")


def check_executorch() -> None:
    """The same for ExecuTorch."""
    _check("ExecuTorch", ("executorch",), "executorch")


def check_openvino() -> None:
    """The same for OpenVINO."""
    _check("OpenVINO", ("openvino",), "openvino")


def _check(what: str, modules: tuple[str, ...], install: str) -> None:
    missing = [name for name in modules if not importlib.util.find_spec(name)]
    if missing:
        raise LbylError(f"{what} needs {', '.join(missing)}: pip install {install}")
