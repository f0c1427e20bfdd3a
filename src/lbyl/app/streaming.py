"""A checkpoint compressed block by block, in the memory of one block and its activations.

The network is built without memory. What comes before its blocks runs once on the tokens; then each
block is read from its shards, traced and measured on the activations that reach it in the original
network, restored, run (the original on the original's activations, the slim one on its own, which
tells how far they drift apart), written to a shard of its own, and freed. Weights stay in the
checkpoint's precision; statistics are added up from float32, systems solved in float64.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.app.sources.hf import class_names, directory_and_task
from lbyl.errors import LbylError
from lbyl.inputs.batches import InputBatches
from lbyl.inputs.text.tokens import ZIPF_OFFSET
from lbyl.methods.echo import Echo
from lbyl.planning.plan import Plan
from lbyl.planning.ratio import Ratio, counts
from lbyl.planning.task import Task, make_plan
from lbyl.restoring.rewrite import restore
from lbyl.runtime.files import read_json, whole_directory, write_json, write_tensors
from lbyl.runtime.format import human
from lbyl.runtime.run import Progress
from lbyl.statistics.collect import collect
from lbyl.storage.configs import CONFIG, Entry, carry, described_shapes
from lbyl.tracing.trace import Patterns, trace

INDEX = "model.safetensors.index.json"
SEQUENCES, LENGTH, AT_ONCE = 32, 128, 8  # of text that blocks are measured on


@dataclass
class BlockReport:
    """What was done, block by block."""

    directory: Path
    blocks: int
    parameters: tuple[int, int]  # before and after
    drift: list[float] = field(default_factory=list)  # error of each block's output, relative
    seconds: float = 0.0
    forward: float = 0.0  # of these, the original's blocks run once over the same text
    peak: int | None = None  # bytes of the process

    def __str__(self) -> str:
        was, now = self.parameters
        lines = [
            f"{self.blocks} blocks, {human(was)} → {human(now)} parameters in {self.directory}",
            f"{self.seconds:.1f} s, {self.seconds / max(self.forward, 1e-9):.1f} times one pass of "
            f"the original ({self.forward:.1f} s)",
            f"outputs of the last block differ by {self.drift[-1]:.3g} of their variance",
        ]
        lines += [f"at most {human(self.peak)} bytes of memory"] if self.peak else []
        return "\n".join(lines)


def compress_blocks(
    directory: str | Path,
    out: str | Path,
    ratio: Ratio = 0.3,
    *,
    data: Tensor | None = None,
    include: Patterns = "*",
    criterion: str = "l2",
    method: Echo | None = None,
    multiple_of: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> BlockReport:
    """Compress a directory of Transformers into another without ever holding all of it.

    `data` are token numbers (sequences, length); without them frequent tokens are drawn, since
    writing text would run all blocks for every token. Ratios are taken literally, so that widths
    are the same in every block and `config.json` can say them; no biases are added.
    """
    start = time.perf_counter()
    task = Task.of(
        ratio if isinstance(ratio, Mapping) else {"*": ratio},
        criterion,
        method or Echo(new_bias=False),
        multiple_of,
    )
    checkpoint = Checkpoint(Path(directory))
    skeleton = checkpoint.skeleton()
    name, blocks = find_blocks(skeleton)
    prefixes = [f"{name}.{i}." for i in range(len(blocks))]
    rest = [n for n in checkpoint.names if not n.startswith(f"{name}.")]
    checkpoint.fill(skeleton, rest)
    tokens = _tokens(skeleton, data, seed)
    stream = Stream(*entering(skeleton, name, blocks, tokens))
    report = BlockReport(Path(out), len(blocks), (0, 0))
    shards = Shards(len(blocks) + 1)
    plan = Plan({}, {})
    with whole_directory(Path(out), last=INDEX) as folder:
        shards.write(folder, checkpoint.stored(skeleton, rest))
        _free(skeleton, name)
        for i, prefix in enumerate(prefixes):
            block = stream.bound(i, checkpoint.block(blocks[i], prefix))
            slim, here = _compress_block(block, stream.inputs(), task, include, seed)
            values = {prefix + n: x for n, x in slim.block.state_dict().items()}
            shards.write(folder, values)
            report.drift.append(stream.advance(block, slim))
            blocks[i].to("meta")
            plan = _joined(plan, here, prefix)
            del block, slim, values
            gc.collect()
            if progress:
                progress("blocks", i + 1, len(blocks))
        shards.finish(folder)
        config = described_shapes(checkpoint.model_class, checkpoint.config, plan, shards.shapes)
        _write_config(checkpoint, config, plan, folder)
    report.parameters = (checkpoint.parameters, shards.parameters)
    report.seconds, report.forward = time.perf_counter() - start, stream.seconds
    report.peak = _peak()
    return report


def _compress_block(
    block: Bound, inputs: InputBatches, task: Task, include: Patterns, seed: int
) -> tuple[Bound, Plan]:
    """A block with fewer channels, and which ones stay."""
    example = next(iter(inputs.batches))
    graph = trace(block, example, include=include)
    if not graph.units:
        reasons = "; ".join(f"{n}: {r}" for n, r in list(graph.unprunable.items())[:3])
        raise LbylError(f"nothing in a block can be pruned ({reasons})")
    statistics = collect(block, graph, inputs, seed=seed)
    assert isinstance(task.amount, (Mapping, float, int))
    left = counts(graph, task.amount, task.multiple_of)
    plan = make_plan(block, graph, left, task.method, task.criteria[0], statistics)
    slim = restore(block, graph, plan, task.method, statistics).model
    assert isinstance(slim, Bound)
    return slim, plan


def _joined(plan: Plan, other: Plan, prefix: str) -> Plan:
    """Both plans, the second with its units named as in the whole network."""
    kept = {**plan.kept, **{prefix + _inner(n): k for n, k in other.kept.items()}}
    channels = {**plan.channels, **{prefix + _inner(n): c for n, c in other.channels.items()}}
    return Plan(kept, channels, other.criterion, other.method)


def _inner(name: str) -> str:
    """A unit's name without the wrapper around its block."""
    return name.removeprefix("block.")


# -------------------------------------------------------------------------------- the checkpoint


class Checkpoint:
    """A directory of Transformers whose tensors are read when they are needed."""

    def __init__(self, directory: Path) -> None:
        try:
            import transformers
        except ImportError as error:
            raise LbylError("this needs transformers: pip install transformers") from error
        place, task = directory_and_task(str(directory))
        directory = self.directory = Path(place)
        if not (directory / CONFIG).is_file():
            raise LbylError(f"{directory} is no directory of transformers: it has no {CONFIG}")
        config: Any = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        listed = (getattr(config, "architectures", None) or [""])[0]
        listed = next(iter(class_names(config, task)), "") if task else listed
        self.config, self.model_class = config, getattr(transformers, listed, None)
        if self.model_class is None:
            raise LbylError(
                f"{directory}: config.json names no architecture that transformers has: say with "
                "--task what its head is for"
            )
        self.files = self._files()
        self.parameters = 0

    def _files(self) -> dict[str, Path]:
        """Tensor → the file that holds it."""
        from safetensors import safe_open

        if (self.directory / INDEX).is_file():
            listed = read_json(self.directory / INDEX).get("weight_map", {})
            return {name: self.directory / str(file) for name, file in listed.items()}
        single = self.directory / "model.safetensors"
        if not single.is_file():
            raise LbylError(f"{self.directory} has no safetensors: convert its weights first")
        with safe_open(str(single), "pt") as file:
            return dict.fromkeys(file.keys(), single)

    @property
    def names(self) -> list[str]:
        return list(self.files)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        from safetensors import SafetensorError, safe_open

        values: dict[str, Tensor] = {}
        for path in dict.fromkeys(self.files[name] for name in names):
            try:
                with safe_open(str(path), "pt") as file:
                    values |= {n: file.get_tensor(n) for n in names if self.files[n] == path}
            except (SafetensorError, OSError) as error:
                raise LbylError(f"{path} is damaged: {error}") from error
        return values

    def skeleton(self) -> nn.Module:
        """The whole network without memory."""
        assert self.model_class is not None
        with torch.device("meta"):
            made: nn.Module = self.model_class(self.config)
        return made.eval()

    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Give a part of the network its weights; what is computed when it is built is computed."""
        values = self.read(names)
        self.parameters += sum(x.numel() for x in values.values())
        model.load_state_dict(values, strict=False, assign=True)
        tie: Any = getattr(model, "tie_weights", None)
        if tie is not None:
            tie()
        _compute_buffers(model)

    def stored(self, model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
        state = model.state_dict()
        return {name: state[name] for name in names if name in state}

    def block(self, block: nn.Module, prefix: str) -> nn.Module:
        """One block with its weights."""
        values = self.read([n for n in self.names if n.startswith(prefix)])
        self.parameters += sum(x.numel() for x in values.values())
        block.load_state_dict(
            {n[len(prefix) :]: x for n, x in values.items()}, strict=True, assign=True
        )
        _compute_buffers(block)
        return block.requires_grad_(False)


def _compute_buffers(model: nn.Module) -> None:
    """Buffers that are not stored, as modules of their own with a configuration compute them."""
    for module in model.modules():
        missing = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        config = getattr(module, "config", None)
        if missing and config is not None:
            fresh = type(module)(config)  # type: ignore[call-arg]
            for name in missing:
                module._buffers[name] = fresh._buffers[name]


def find_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The list of equal modules that holds most of a network, by name."""
    lists = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
    }

    def size(name: str) -> int:
        return sum(p.numel() for block in lists[name] for p in block.parameters())

    if not lists:
        raise LbylError("this network has no list of blocks: compress it as a whole")
    name = max(lists, key=size)
    return name, lists[name]


def _free(model: nn.Module, blocks: str) -> None:
    """Give back the weights outside of the blocks: they are written already."""
    for name, module in model.named_modules():
        if not name.startswith(blocks):
            for key, p in list(module._parameters.items()):
                if p is not None:
                    module._parameters[key] = nn.Parameter(p.detach().to("meta"), False)
    gc.collect()


# ------------------------------------------------------------------------------- the activations


class _Stub(nn.Module):
    """Stands for a block: notes what it is called with and hands its input on."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log = log
        self.hidden = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None  # what a network asks of its blocks, a kind of attention, say

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.log.append((args, kwargs))
        self.hidden = hidden
        return hidden


class Bound(nn.Module):
    """A block with all arguments but the activations."""

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.block, self.args, self.kwargs = block, args, kwargs

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.block(hidden, *self.args, **self.kwargs)
        return out if isinstance(out, Tensor) else out[0]


@torch.no_grad()
def entering(
    model: nn.Module, name: str, blocks: list[nn.Module], tokens: Tensor
) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """Batches of activations that enter the first block, and what else each block is given."""
    log: list[Any] = []
    stubs = [_Stub(log) for _ in blocks]
    hidden: list[Tensor] = []
    with _in_place(model, name, nn.ModuleList(stubs)):
        inner = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
        for batch in tokens.split(AT_ONCE):
            if len(batch) < min(AT_ONCE, len(tokens)):
                break
            log.clear()
            inner(batch, use_cache=False)
            hidden.append(stubs[0].hidden)
    return hidden, [(args, _without_cache(kwargs)) for args, kwargs in log]


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    cache = ("past_key_values", "past_key_value", "use_cache", "layer_past")
    return {name: value for name, value in kwargs.items() if name not in cache}


@contextmanager
def _in_place(model: nn.Module, name: str, stubs: nn.ModuleList) -> Iterator[None]:
    parent = model.get_submodule(name.rpartition(".")[0])
    last = name.rpartition(".")[2]
    real = getattr(parent, last)
    setattr(parent, last, stubs)
    try:
        yield
    finally:
        setattr(parent, last, real)


class Stream:
    """Activations of the original and of the slim network, from block to block."""

    def __init__(self, hidden: list[Tensor], arguments: list[tuple[Any, ...]]) -> None:
        self.original, self.slim = hidden, [x.clone() for x in hidden]
        self.arguments = arguments
        self.seconds = 0.0

    def bound(self, i: int, block: nn.Module) -> Bound:
        args, kwargs = self.arguments[i]
        return Bound(block, args, kwargs)

    def inputs(self) -> InputBatches:
        return InputBatches(self.original, len(self.original), False, "own")

    @torch.no_grad()
    def advance(self, block: nn.Module, slim: nn.Module) -> float:
        """Run both blocks; how far the two networks have drifted apart, relative to variance."""
        start = time.perf_counter()
        self.original = [block(x) for x in self.original]
        self.seconds += time.perf_counter() - start
        self.slim = [slim(x) for x in self.slim]
        error = sum(float((a - b).float().square().sum()) for a, b in zip(self.original, self.slim))
        size = sum(float((a.float() - a.float().mean()).square().sum()) for a in self.original)
        return error / max(size, 1e-30)


def _tokens(model: nn.Module, data: Tensor | None, seed: int) -> Tensor:
    if data is not None:
        if data.dim() != 2 or data.dtype.is_floating_point:
            raise LbylError("data must be token numbers (sequences, length)")
        return data
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if embedding is None:
        raise LbylError("this network has no table of tokens: give data=")
    # By Zipf's law alone: neighbours in the table would take several times its memory.
    likely = 1 / (torch.arange(len(embedding.weight)) + float(ZIPF_OFFSET))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(likely, SEQUENCES * LENGTH, replacement=True, generator=generator)
    return drawn.reshape(SEQUENCES, LENGTH)


# ----------------------------------------------------------------------------------------- on disk


class Shards:
    """Safetensors files in the manner of Transformers, with an index."""

    def __init__(self, count: int) -> None:
        self.count, self.written = count, 0
        self.places: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.bytes = 0

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def write(self, folder: Path, values: Mapping[str, Tensor]) -> None:
        self.written += 1
        name = f"model-{self.written:05d}-of-{self.count:05d}.safetensors"
        write_tensors(folder / name, values, {"format": "pt"})
        self.places |= dict.fromkeys(values, name)
        self.shapes |= {n: tuple(x.shape) for n, x in values.items()}
        self.bytes += sum(x.numel() * x.element_size() for x in values.values())

    def finish(self, folder: Path) -> None:
        index = {"metadata": {"total_size": self.bytes}, "weight_map": self.places}
        write_json(folder / INDEX, index)


def _write_config(
    checkpoint: Checkpoint, changes: dict[Entry, Any] | None, plan: Plan, folder: Path
) -> None:
    carry(checkpoint.directory, folder)
    if changes is None:
        raise LbylError("no config.json can say the new sizes: widths differ between blocks")
    config = read_json(checkpoint.directory / CONFIG)
    for path, value in changes.items():
        inner = config
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    write_json(folder / CONFIG, config)
    write_json(folder / "blocks.json", plan.to_dict())


def _peak() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
