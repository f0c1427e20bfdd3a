"""Damaged and hostile files of every kind that the library reads, and what reads them.

A kind is a strategy of file contents near a valid file, and a reader. Whatever lies there, a reader
gives a value or raises `LbylError`: no other exception, little memory, little time.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors.torch import load as read_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

import lbyl
from benchmarks.training import TrainConfig, train
from lbyl.app import data
from lbyl.app.sources import resolve, zoo
from support import quick
from support.networks import build, example, fingerprint

MODEL, PLAN = "model.safetensors", "plan.json"
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class Kind:
    """Contents of a file near a valid one, and what reads them from a folder of its own."""

    valid: bytes
    contents: st.SearchStrategy[bytes]
    read: Callable[[bytes, Path], None]


def attempt(kind: Kind, content: bytes) -> bool:
    """Whether a content is accepted; an error other than `LbylError` goes on to the caller."""
    with tempfile.TemporaryDirectory(prefix="lbyl-files-") as folder:
        try:
            kind.read(content, Path(folder))
        except lbyl.LbylError as error:
            assert str(error).strip(), "an error that says nothing"
            return False
    return True


# Contents ---------------------------------------------------------------------------------------

ODD_NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 10**30]
)
SCALARS = st.one_of(
    *(st.none(), st.booleans(), ODD_NUMBERS, st.integers(-9, 99), st.text(max_size=8)), st.floats()
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@st.composite
def damaged(draw: Draw, valid: bytes) -> bytes:
    """A valid content with some bytes changed, put in, left out, or cut off."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 6))):
        if not content:
            break
        at = draw(st.integers(0, len(content) - 1))
        what = draw(st.sampled_from(["set", "set", "number", "insert", "delete", "cut", "copy"]))
        if what == "set":
            content[at] = draw(st.integers(0, 255))
        elif what == "number":
            order = draw(st.sampled_from(["<I", ">I", "<Q", ">H"]))
            value = draw(ODD_NUMBERS) % 2 ** (8 * struct.calcsize(order))
            content[at : at + struct.calcsize(order)] = struct.pack(order, max(0, value))
        elif what == "insert":
            content[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif what == "delete":
            del content[at : at + draw(st.integers(1, 64))]
        elif what == "cut":
            del content[at:]
        else:
            content[at:at] = content[: draw(st.integers(1, 64))]
    return bytes(content)


@st.composite
def changed(draw: Draw, document: Any) -> Any:
    """A JSON document with one to three places replaced, renamed or left out."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        document = _change(draw, document)
    return document


def _change(draw: Draw, document: Any) -> Any:
    if not isinstance(document, (dict, list)) or not document or draw(st.integers(0, 4)) == 0:
        return draw(JSON)
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    key = draw(st.sampled_from(keys))
    what = draw(st.sampled_from(["inside", "inside", "inside", "delete", "rename"]))
    if what == "inside":
        document[key] = _change(draw, document[key])
    elif what == "delete":
        del document[key]
    elif isinstance(document, dict):
        document[draw(st.text(max_size=6))] = document.pop(key)
    else:
        document.insert(0, document[key])
    return document


def as_json(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def json_near(valid: bytes) -> st.SearchStrategy[bytes]:
    nested = st.integers(1, 60_000).map(lambda depth: b"[" * depth)  # deeper than any stack
    return st.one_of(changed(json.loads(valid)).map(as_json), damaged(valid), nested)


@st.composite
def safetensors_near(draw: Draw, valid: bytes) -> bytes:
    """A header that is changed in its fields, with a length that is true or not."""
    if draw(st.booleans()):
        return draw(damaged(valid))
    (length,) = struct.unpack("<Q", valid[:8])
    header = as_json(draw(changed(json.loads(valid[8 : 8 + length]))))
    announced = draw(st.sampled_from([len(header), len(header), len(header) + 1, 2**40, 2**63]))
    return struct.pack("<Q", announced) + header + valid[8 + length :]


@st.composite
def png_near(draw: Draw) -> bytes:
    """Chunks with right sums: sizes, depths and contents that need not agree."""
    sides = st.sampled_from([0, 1, 2, 8, 60_000, 20_000, 2**31 - 1])
    width, height = draw(sides), draw(sides)
    depth, colour = draw(st.sampled_from([1, 8, 16, 7])), draw(st.sampled_from([0, 2, 3, 4, 6, 9]))
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, draw(st.integers(0, 1)))
    pixels = zlib.compress(bytes(draw(st.sampled_from([0, 10, 1000, 1 << 22]))))
    extra = draw(st.sampled_from([b"", b"zTXt", b"iCCP", b"PLTE", b"tRNS", b"acTL"]))
    bomb = b"a\0\0" + zlib.compress(bytes(1 << draw(st.sampled_from([4, 22, 26]))))
    chunks = [(b"IHDR", header), *([(extra, bomb)] if extra else []), (b"IDAT", pixels)]
    chunks += [(b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(c)) + name + c + struct.pack(">I", zlib.crc32(name + c))
        for name, c in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def valid_pictures() -> list[bytes]:
    from PIL import Image

    image = Image.fromarray((np.arange(12 * 10 * 3) % 255).reshape(12, 10, 3).astype(np.uint8))
    valid = []
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        file = io.BytesIO()
        image.save(file, form)
        valid.append(file.getvalue())
    return valid


def pictures() -> st.SearchStrategy[bytes]:
    from PIL import Image

    thin = io.BytesIO()
    Image.new("1", (60_000, 1)).save(thin, "PNG")
    near = [damaged(valid) for valid in valid_pictures()]
    return st.one_of(st.just(thin.getvalue()), png_near(), *near)


def valid_npz() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, images=np.zeros((3, 4, 4, 3), np.uint8), labels=np.arange(3))
    return file.getvalue()


def valid_idx() -> bytes:
    return bytes([0, 0, 8, 3]) + struct.pack(">3I", 3, 4, 4) + bytes(48)


@st.composite
def npz_near(draw: Draw) -> bytes:
    """Members with headers of NumPy's that say what they like, in a sound or damaged archive."""
    if draw(st.booleans()):
        return draw(damaged(valid_npz()))
    file = io.BytesIO()
    names = ["images", "labels", "classes", "jpeg", "offsets", "png"]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in draw(st.lists(st.sampled_from(names), unique=True, max_size=4)):
            archive.writestr(f"{name}.npy", draw(npy_near()))
    return file.getvalue()


@st.composite
def npy_near(draw: Draw) -> bytes:
    dtype = draw(st.sampled_from(["|u1", "<i8", "<f4", "|O", "<U3", "|V8", "<M8[s]", "?"]))
    sizes = st.sampled_from([0, 1, 2, 3, 4, 1000, 2**31, 2**40, -1])
    shape = tuple(draw(st.lists(sizes, max_size=5)))
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    header = draw(st.sampled_from([header, header, header, "{", "__import__('os')", "1" * 9000]))
    data = bytes(draw(st.sampled_from([0, 1, 48, 144, 1 << 20])))
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


@st.composite
def idx_near(draw: Draw) -> bytes:
    sizes = [draw(st.sampled_from([0, 1, 3, 4, 2**16, 2**31])) for _ in range(3)]
    dimensions = draw(st.sampled_from([3, 3, 3, 1, 9]))
    announced = bytes([0, 0, 8, dimensions]) + struct.pack(">3I", *sizes)
    content = announced + bytes(draw(st.sampled_from([0, 9, 48, 1 << 20, 80 << 20])))
    return gzip.compress(content, 1) if draw(st.booleans()) else content[: 1 << 20]


# Readers ----------------------------------------------------------------------------------------


@functools.cache
def saved() -> dict[str, bytes]:
    """The files of a small result, of its statistics and of a checkpoint of training."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        model, x = build("chain"), example("chain")
        prepared = lbyl.prepare(model, x, data=16)
        lbyl.save(prepared.compress(0.5, criterion="l2"), out)
        prepared.statistics().save(out / "statistics")
        torch.save(build("chain").state_dict(), out / "weights.pth")
        _train(out / "run", epochs=1, resume=False)
        checkpoint = out / "run" / "checkpoint-000001"
        found = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
        return found | {f"checkpoint {p.name}": p.read_bytes() for p in checkpoint.iterdir()}


def _small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3))


def _train(folder: Path, epochs: int, resume: bool) -> None:
    images = torch.arange(8 * 12.0).reshape(8, 3, 2, 2) / 96
    config = TrainConfig(epochs=epochs, batch_size=4, augment=False)
    pair = (images, torch.arange(8) % 3)
    train(_small(), pair, config=config, out=folder, resume=resume, progress=False, cpu=True)


def _read_result(name: str, content: bytes, folder: Path) -> None:
    for other in (PLAN, MODEL):
        (folder / other).write_bytes(content if other == name else saved()[other])
    model = build("chain", 3)
    before = fingerprint(model)
    try:
        lbyl.load(folder, model)
    except lbyl.LbylError:
        assert fingerprint(model) == before, "a network that could not be loaded was changed"
        raise
    with torch.no_grad():
        got = model.eval()(example("chain"))
    assert got.shape == (2, 5)
    assert name == MODEL or torch.equal(got, _chain()), "what is loaded computes something else"


@functools.cache
def _chain() -> Tensor:
    """What the saved network computes."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (PLAN, MODEL):
            (Path(folder) / name).write_bytes(saved()[name])
        with torch.no_grad():
            return lbyl.load(folder, build("chain", 3)).eval()(example("chain"))


def _read_statistics(content: bytes, folder: Path) -> None:
    (folder / "statistics").write_bytes(content)
    read = lbyl.Statistics.load(folder / "statistics")
    graph = lbyl.trace(build("chain"), example("chain"))
    quick_plan = quick.plan_for(graph, {"0": [0, 1, 2], "3": [0, 3]})
    lbyl.compress(build("chain"), example("chain"), quick_plan, data=read)


def _read_weights(suffix: str, content: bytes, folder: Path) -> None:
    path = folder / f"weights{suffix}"
    path.write_bytes(content)
    zoo.load_weights(build("chain"), path)


def _read_checkpoint(name: str, content: bytes, folder: Path) -> None:
    checkpoint = folder / "checkpoint-000001"
    checkpoint.mkdir()
    for other in ("state.json", MODEL, "optimizer.safetensors"):
        valid = saved()[f"checkpoint {other}"]
        (checkpoint / other).write_bytes(content if other == name else valid)
    _train(folder, epochs=1, resume=True)


def _read_picture(content: bytes, folder: Path) -> None:
    (folder / "picture.png").write_bytes(content)
    assert data.load(folder, size=8).image_shape == (3, 8, 8)


def _read_images(name: str, content: bytes, folder: Path) -> None:
    path = folder / (name + ".gz" if content[:2] == b"\x1f\x8b" else name)
    path.write_bytes(content)
    if "-images" in name:
        labels = bytes([0, 0, 8, 1]) + struct.pack(">I", 3) + bytes(3)
        (folder / name.replace("images-idx3", "labels-idx1")).write_bytes(labels)
    found = data.load(path, size=8)
    assert found.image_shape[1:] == (8, 8)


@functools.cache
def kept_heads() -> tuple[dict[str, bytes], Tensor, Tensor]:
    """The files of a network that lost heads and rows of a stream, an input and its output."""
    with tempfile.TemporaryDirectory() as folder:
        out, x = Path(folder), torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
        lbyl.save(lbyl.compress(heads(), x, {"*:heads": 0.5, "mlp": 0.5}, progress=False), out)
        files = {p.name: p.read_bytes() for p in out.iterdir()}
        with torch.no_grad():
            return files, x, lbyl.load(out, heads())(x)


@functools.cache
def named() -> tuple[dict[str, bytes], Tensor, Tensor]:
    """The files of a network whose plan says which it is, an input and its output."""
    with tempfile.TemporaryDirectory() as folder:
        out, x = Path(folder), torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        network = resolve("lbyl:digits", "shipped")
        result = lbyl.compress(network.model, x, 0.5, method="none", progress=False)
        lbyl.save(result, out)
        plan = json.loads((out / PLAN).read_text())
        plan = {key: plan[key] for key in ("version", "units", "tensors", "shapes")}
        (out / PLAN).write_text(json.dumps({"network": network.describe(), **plan}))
        files = {p.name: p.read_bytes() for p in out.iterdir()}
        with torch.no_grad():
            return files, x, lbyl.load(out)(x)


class Heads(nn.Module):
    """Attention whose forward reads its number of heads from an attribute, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.mlp, self.last = nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.last(self.mlp(x + self.o(y)).relu())


def heads() -> nn.Module:
    torch.manual_seed(0)
    return Heads().eval()


@st.composite
def tensors_near(draw: Draw, valid: bytes) -> bytes:
    """Sound files whose tensors have lost, gained or changed something."""
    values = read_tensors(valid)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(values)))
        x = values[name]
        axis = draw(st.integers(0, max(x.dim() - 1, 0)))
        kind = draw(
            st.sampled_from(["cut", "grow", "turn", "flat", "type", "drop", "move", "ones"])
        )
        if kind == "drop" and len(values) > 1:
            del values[name]
        elif kind == "move":
            values[draw(st.sampled_from(["x", f"{name}.bias", *sorted(values)]))] = x.clone()
        elif kind == "type":
            kinds = [torch.int64, torch.bool, torch.complex64, torch.float16, torch.float64]
            values[name] = x.to(draw(st.sampled_from(kinds)))
        elif kind == "flat":
            values[name] = x.flatten()
        elif x.dim() and kind == "cut":
            values[name] = x.narrow(axis, 0, draw(st.integers(0, x.shape[axis]))).contiguous()
        elif x.dim() and kind == "grow":
            values[name] = torch.cat([x, x], axis)
        elif kind == "turn":
            values[name] = x.transpose(0, -1).contiguous() if x.dim() else x[None]
        else:
            values[name] = torch.ones_like(x)
    (length,) = struct.unpack("<Q", valid[:8])
    notes = json.loads(valid[8 : 8 + length])["__metadata__"]
    return save_tensors(values, draw(st.sampled_from([None, {"format": "pt"}, notes])))


def _read_saved(name: str, make: Callable[[], Any], content: bytes, folder: Path) -> None:
    """Loads to a network that computes what was saved; with other weights, one that runs."""
    files, x, wanted = make()
    for other in (PLAN, MODEL):
        (folder / other).write_bytes(content if other == name else files[other])
    with torch.no_grad():
        got = (lbyl.load(folder) if make is named else lbyl.load(folder, heads()))(x)
    assert got.shape == wanted.shape, "what is loaded runs otherwise"
    assert name == MODEL or torch.equal(got, wanted), "what is loaded computes something else"


@functools.cache
def kinds() -> dict[str, Kind]:
    """Every kind of file, by name."""
    files, near = saved(), safetensors_near
    plan, model, state = files[PLAN], files[MODEL], files["checkpoint state.json"]
    statistics, weights = files["statistics"], files["weights.pth"]
    momenta, trained = files["checkpoint optimizer.safetensors"], files[f"checkpoint {MODEL}"]
    whole = save_tensors(build("chain").state_dict())
    partial = functools.partial
    return {
        "plan.json": Kind(plan, json_near(plan), partial(_read_result, PLAN)),
        "model.safetensors": Kind(model, near(model), partial(_read_result, MODEL)),
        **{
            f"{name} of {word}": Kind(
                make()[0][name],
                json_near(make()[0][name]) if name == PLAN else tensors_near(make()[0][name]),
                partial(_read_saved, name, make),
            )
            for word, make in (("heads", kept_heads), ("a named network", named))
            for name in (PLAN, MODEL)
        },
        "statistics": Kind(statistics, near(statistics), _read_statistics),
        "weights.pth": Kind(weights, damaged(weights), partial(_read_weights, ".pth")),
        "weights.safetensors": Kind(whole, near(whole), partial(_read_weights, ".safetensors")),
        "state.json": Kind(state, json_near(state), partial(_read_checkpoint, "state.json")),
        "checkpoint": Kind(trained, near(trained), partial(_read_checkpoint, MODEL)),
        "optimizer.safetensors": Kind(
            momenta, near(momenta), partial(_read_checkpoint, "optimizer.safetensors")
        ),
        "pictures": Kind(valid_pictures()[0], pictures(), _read_picture),
        "npz": Kind(valid_npz(), npz_near(), partial(_read_images, "images.npz")),
        "idx": Kind(valid_idx(), idx_near(), partial(_read_images, "t10k-images-idx3-ubyte")),
    }
