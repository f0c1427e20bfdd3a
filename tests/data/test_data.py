"""Readers on small files made here; accuracy on networks whose answer is known."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lbyl.data import ImageSet, accuracy, evaluate, load
from lbyl.errors import LbylError
from lbyl.models import zoo

SHARED = Path(os.environ.get("LBYL_SHARED", Path(__file__).resolve().parents[3] / "shared"))
DIGITS_START = [2, 1, 9, 2, 3, 1, 7, 7, 4, 5]
DIGITS_SUM = 8_953_801  # all pixels of all digits: nothing lost, nothing twice
ONE = ((0.0,), (1.0,))  # mean and std that leave x/255


def pixels(count: int, side: int = 4, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    shape = (count, side, side, channels)
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


def stack(data: ImageSet, batch_size: int = 3) -> NDArray[np.uint8]:
    """The images of a set, back from normalised NCHW to bytes NHWC."""
    batches = [images for images, _ in data.batches(batch_size, *ONE)]
    return (torch.cat(batches) * 255).round().byte().permute(0, 2, 3, 1).numpy()


def encoded(image: NDArray[np.uint8], kind: str = "png", **options: Any) -> bytes:
    pillow = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    pillow.fromarray(image).save(buffer, kind, **options)
    return buffer.getvalue()


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    data = header + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


# ---- npz -------------------------------------------------------------------------------------


def test_npz_of_pixels(tmp_path: Path) -> None:
    images, labels = pixels(7), np.arange(7, dtype=np.uint8) % 3
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    data = load(tmp_path / "a.npz")
    assert len(data) == 7
    assert data.labels is not None
    assert data.labels.tolist() == labels.tolist()
    assert data.class_count == 3
    assert data.classes is None
    assert np.array_equal(stack(data), images)


def test_npz_of_grey_pixels_names_and_no_labels(tmp_path: Path) -> None:
    images = pixels(2, channels=1)[..., 0]
    np.savez(tmp_path / "a.npz", images=images, classes=np.array(["cat", "dog"]))
    data = load(tmp_path / "a.npz")
    assert data.labels is None
    assert data.classes == ("cat", "dog")
    assert data.image_shape == (1, 4, 4)
    assert next(data.batches(2, *ONE))[1] is None


@pytest.mark.parametrize("kind", ["webp", "png"])
def test_npz_of_lossless_blobs_is_decoded_exactly(tmp_path: Path, kind: str) -> None:
    images = pixels(5, side=16)
    lossless = {"lossless": True} if kind == "webp" else {}
    blobs = [encoded(image, kind, **lossless) for image in images]
    offsets = np.cumsum([0, *map(len, blobs)])
    blob = np.frombuffer(b"".join(blobs), np.uint8)
    np.savez(tmp_path / "a.npz", offsets=offsets, labels=np.arange(5), **{kind: blob})
    assert np.array_equal(stack(load(tmp_path / "a.npz"), batch_size=2), images)


def test_jpeg_blobs_of_different_shapes_need_a_size(tmp_path: Path) -> None:
    blobs = [encoded(pixels(1, side=side)[0], "jpeg") for side in (16, 24)]
    offsets = np.cumsum([0, *map(len, blobs)])
    jpeg = np.frombuffer(b"".join(blobs), np.uint8)
    np.savez(tmp_path / "a.npz", jpeg=jpeg, offsets=offsets, labels=np.arange(2))
    with pytest.raises(LbylError, match="size="):
        next(load(tmp_path / "a.npz").batches(2, *ONE))
    images, _ = next(load(tmp_path / "a.npz", size=14).batches(2, *ONE))
    assert images.shape == (2, 3, 14, 14)


BAD_NPZ: list[tuple[dict[str, Any], str]] = [
    ({"labels": np.arange(2)}, "needs 'images'"),
    ({"images": np.zeros((2, 4, 4, 3))}, "uint8"),
    ({"images": np.zeros((2, 3, 4, 4), np.uint8)}, "uint8"),
    ({"images": np.zeros((2, 4, 4, 3), np.uint8), "labels": np.arange(3)}, "2 images"),
    ({"images": np.zeros((2, 4, 4, 3), np.uint8), "labels": np.ones(2)}, "integers"),
    ({"images": np.zeros((2, 4, 4, 3), np.uint8), "labels": np.array([0, -1])}, "negative"),
    ({"images": np.array([{}, {}], dtype=object)}, "not a readable"),
    ({"images": np.zeros((3, 0, 0, 3), np.uint8)}, "no pixels"),
    ({"jpeg": np.zeros(9, np.uint8)}, "offsets"),
    ({"jpeg": np.zeros(9, np.uint8), "offsets": np.array([0, 10])}, "rise"),
    ({"jpeg": np.zeros(9, np.uint8), "offsets": np.array([0, 5, 2], np.uint64)}, "rise"),
    ({"jpeg": np.zeros((3, 3), np.uint8), "offsets": np.array([0, 2])}, "flat"),
]


@pytest.mark.parametrize(("arrays", "message"), BAD_NPZ)
def test_bad_npz_is_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(LbylError, match=message):
        load(tmp_path / "a.npz")


def test_broken_files_are_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", images=pixels(50))
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[:-200])
    (tmp_path / "b.npz").write_bytes(pickle.dumps([1]))
    (tmp_path / "c.txt").write_text("text")
    for name in ("a.npz", "b.npz", "c.txt", "absent.npz"):
        with pytest.raises(LbylError, match=name):
            load(tmp_path / name)
    np.savez(tmp_path / "d.npz", jpeg=np.zeros(9, np.uint8), offsets=np.array([0, 9]))
    with pytest.raises(LbylError, match="image 0 is not a readable picture"):
        next(load(tmp_path / "d.npz").batches(1, *ONE))


def test_npz_that_unpacks_to_far_more_than_images_do_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", images=np.zeros((80, 1000, 1000), np.uint8))
    with pytest.raises(LbylError, match="too many for a file of its size"):
        load(tmp_path / "a.npz")


# ---- idx -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["", "raw", "FashionMNIST/raw", "MNIST/raw"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_layouts(tmp_path: Path, layout: str, suffix: str) -> None:
    for seed, (split, prefix) in enumerate((("test", "t10k"), ("train", "train"))):
        images = pixels(5, channels=1, seed=seed)
        labels = np.arange(5, dtype=np.uint8)[::-1] if split == "test" else np.zeros(5, np.uint8)
        write_idx(tmp_path / layout / f"{prefix}-images-idx3-ubyte{suffix}", images[..., 0])
        write_idx(tmp_path / layout / f"{prefix}-labels-idx1-ubyte{suffix}", labels)
        data = load(tmp_path, split=split)
        assert np.array_equal(stack(data), images)
        assert data.labels is not None
        assert data.labels.tolist() == labels.tolist()


def test_bad_idx_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t10k-images-idx3-ubyte"
    write_idx(path, pixels(5, channels=1)[..., 0])
    with pytest.raises(LbylError, match="labels"):
        load(tmp_path)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(4, np.uint8))
    with pytest.raises(LbylError, match="5 images"):
        load(path)
    with pytest.raises(LbylError, match="train"):
        load(tmp_path, split="train")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LbylError, match="announces shape"):
        load(path)
    path.write_bytes(b"\0\0\x09\x03" + bytes(20))
    with pytest.raises(LbylError, match="not an idx file"):
        load(path)
    path.unlink()
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(b"not gzip")
    with pytest.raises(LbylError, match="cannot be read"):
        load(tmp_path)


def idx_header(*shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()


def test_idx_without_pixels_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path / "t10k-images-idx3-ubyte", np.zeros((3, 0, 0), np.uint8))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(3, np.uint8))
    with pytest.raises(LbylError, match="no pixels"):
        load(tmp_path)


@pytest.mark.parametrize("shape", [(5, 4, 4), (1 << 20, 64, 64)])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_is_unpacked_no_further_than_its_header_allows(
    tmp_path: Path, shape: tuple[int, ...], suffix: str
) -> None:
    data = idx_header(*shape) + bytes(40_000_000)
    packed = gzip.compress(data, 1) if suffix else data
    (tmp_path / f"t10k-images-idx3-ubyte{suffix}").write_bytes(packed)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(5, np.uint8))
    del data, packed
    tracemalloc.start()
    with pytest.raises(LbylError, match="announces"):
        load(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


def test_several_sets_in_one_root_are_not_guessed_between(tmp_path: Path) -> None:
    for name in ("MNIST", "FashionMNIST"):
        write_idx(tmp_path / name / "raw" / "t10k-images-idx3-ubyte", pixels(1, channels=1)[..., 0])
    with pytest.raises(LbylError, match="several"):
        load(tmp_path)


# ---- CIFAR -----------------------------------------------------------------------------------


def write_pickle(path: Path, value: Any, protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol=protocol))


def by_channel(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2).reshape(len(images), -1))


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_cifar10(tmp_path: Path, protocol: int) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    images = pixels(12, side=32)
    for i, name in enumerate(["test_batch", *(f"data_batch_{n}" for n in range(1, 6))]):
        part = {b"data": by_channel(images[2 * i : 2 * i + 2]), b"labels": [i, 9 - i]}
        write_pickle(folder / name, part, protocol)
    write_pickle(folder / "batches.meta", {b"label_names": [b"c%d" % i for i in range(10)]})
    test, train = load(tmp_path), load(folder, split="train")
    assert np.array_equal(stack(test), images[:2])
    assert np.array_equal(stack(train), images[2:])
    assert train.labels is not None
    assert train.labels.tolist() == [1, 8, 2, 7, 3, 6, 4, 5, 5, 4]
    assert test.classes == tuple(f"c{i}" for i in range(10))


def test_cifar100_by_columns_and_without_names(tmp_path: Path) -> None:
    images = pixels(3, side=32)
    data = np.asfortranarray(by_channel(images))
    part = {"data": data, "fine_labels": [99, 0, 5], "coarse_labels": [1, 2, 3]}
    write_pickle(tmp_path / "cifar-100-python" / "test", part)
    read = load(tmp_path)
    assert np.array_equal(stack(read), images)
    assert read.class_count == 100


def test_cifar_written_by_python_2_is_read(tmp_path: Path) -> None:
    # The opcodes of the official files: byte strings as Python 2 wrote them, protocol 2.
    raw = by_channel(pixels(1, side=32)).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(raw).to_bytes(4, "little")
        + raw
        + b"tb"
    )
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.parent.mkdir()
    path.write_bytes(b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x07eu.")
    data = load(tmp_path)
    assert stack(data).tobytes() == pixels(1, side=32).tobytes()
    assert data.labels is not None
    assert data.labels.tolist() == [7]


class _Runs:
    """Pickles to a call that leaves a trace if it is ever made."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_cifar_pickle_cannot_run_anything(tmp_path: Path) -> None:
    file = tmp_path / "cifar-10-batches-py" / "test_batch"
    write_pickle(file, {"data": _Runs(tmp_path / "made"), "labels": []})
    with pytest.raises(LbylError, match=r"mkdir.*refused"):
        load(tmp_path)
    assert not (tmp_path / "made").exists()


def test_cifar_pickle_cannot_reserve_memory(tmp_path: Path) -> None:
    # Thirteen bytes that number an object 2**30: a table of 16 GB in the unpickler written in C.
    file = tmp_path / "cifar-10-batches-py" / "test_batch"
    file.parent.mkdir()
    file.write_bytes(b"\x80\x02Nr" + (1 << 30).to_bytes(4, "little") + b".")
    tracemalloc.start()
    with pytest.raises(LbylError, match="dictionary"):
        load(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_cifar_class_names_must_be_a_list(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_pickle(folder / "test_batch", {"data": np.zeros((1, 3072), np.uint8), "labels": [1]})
    write_pickle(folder / "batches.meta", {"label_names": 3})
    with pytest.raises(LbylError, match="label_names"):
        load(tmp_path)


BAD_CIFAR: list[tuple[Any, str]] = [
    ([1], "dictionary"),
    ({"labels": [1]}, "no array"),
    ({"data": np.zeros((2, 3072)), "labels": [1, 2]}, "unsigned bytes"),
    ({"data": np.array([[1, {}]], dtype=object), "labels": [1]}, "unsigned bytes"),
    ({"data": np.zeros((2, 100), np.uint8), "labels": [1, 2]}, "3072"),
    ({"data": np.zeros((2, 3072), np.uint8), "labels": ["a", "b"]}, "integers"),
    ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2**70]}, "integers"),
    ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "2 images"),
]


@pytest.mark.parametrize(("value", "message"), BAD_CIFAR)
def test_bad_cifar_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    write_pickle(tmp_path / "cifar-10-batches-py" / "test_batch", value)
    with pytest.raises(LbylError, match=message):
        load(tmp_path)


def test_damaged_or_absent_cifar_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cifar-10-batches-py" / "test_batch"
    write_pickle(file, {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]})
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(LbylError, match="not a readable CIFAR file"):
        load(tmp_path)
    with pytest.raises(LbylError, match="data_batch_1"):
        load(tmp_path, split="train")


# ---- folders of pictures ---------------------------------------------------------------------


def write_picture(path: Path, width: int, height: int, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(np.full((height, width, 3), value, np.uint8)))


def test_folder_of_classes_in_alphabetical_order(tmp_path: Path) -> None:
    write_picture(tmp_path / "val" / "dog" / "1.png", 40, 30, 10)
    write_picture(tmp_path / "val" / "cat" / "deep" / "2.PNG", 30, 40, 20)
    write_picture(tmp_path / "val" / "cat" / "1.png", 32, 32, 30)
    write_picture(tmp_path / "train" / "cat" / "1.png", 32, 32, 40)
    (tmp_path / "val" / "cat" / "notes.txt").write_text("no picture")
    data = load(tmp_path, size=28)
    assert data.classes == ("cat", "dog")
    assert data.labels is not None
    assert data.labels.tolist() == [0, 0, 1]
    assert stack(data)[:, 0, 0, 0].tolist() == [30, 20, 10]
    assert data.image_shape == (3, 28, 28)
    assert len(load(tmp_path, split="train")) == 1


def test_flat_folder_has_no_labels_and_default_size(tmp_path: Path) -> None:
    write_picture(tmp_path / "b.png", 300, 260, 1)
    write_picture(tmp_path / "a.png", 20, 20, 2)
    data = load(tmp_path)
    assert data.labels is None
    assert data.image_shape == (3, 224, 224)
    assert stack(data)[:, 0, 0, 0].tolist() == [2, 1]


def test_resize_and_crop_agree_with_torchvision(tmp_path: Path) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    pillow = pytest.importorskip("PIL.Image")
    image = np.random.RandomState(0).randint(0, 256, (61, 83, 3)).astype(np.uint8)
    (tmp_path / "a.png").write_bytes(encoded(image))
    usual = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(28)])
    expected = np.array(usual(pillow.fromarray(image)))
    assert np.array_equal(stack(load(tmp_path, size=28))[0], expected)


def test_picture_of_the_wanted_size_stays_as_it_is(tmp_path: Path) -> None:
    image = pixels(1, side=28)[0]
    (tmp_path / "a.png").write_bytes(encoded(image))
    assert np.array_equal(stack(load(tmp_path, size=28))[0], image)


def test_arrays_are_resized_on_request(tmp_path: Path) -> None:
    for channels in (1, 3):
        np.savez(tmp_path / "a.npz", images=pixels(2, side=8, channels=channels))
        assert load(tmp_path / "a.npz", size=14).image_shape == (channels, 14, 14)


@pytest.mark.parametrize("shape", [(60_000, 1, 3), (1, 60_000, 3)])
def test_thin_picture_is_not_blown_up(tmp_path: Path, shape: tuple[int, ...]) -> None:
    thin = np.zeros(shape, np.uint8)
    (tmp_path / "a.png").write_bytes(encoded(thin))
    np.savez(tmp_path / "b.npz", images=thin[None])
    for path in (tmp_path, tmp_path / "b.npz"):
        with pytest.raises(LbylError, match="more than 64,000,000 pixels"):
            next(load(path, size=224).batches(1, *ONE))


def test_hidden_files_and_folders_are_no_pictures(tmp_path: Path) -> None:
    write_picture(tmp_path / "cat" / "1.png", 8, 8, 1)
    write_picture(tmp_path / "cat" / "._1.png", 8, 8, 1)
    write_picture(tmp_path / ".thumbnails" / "1.png", 8, 8, 1)
    data = load(tmp_path)
    assert (len(data), data.classes) == (1, ("cat",))


def test_only_pictures_and_cifar_need_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    np.savez(tmp_path / "a.npz", images=pixels(2))
    assert len(stack(load(tmp_path / "a.npz"))) == 2
    (tmp_path / "cifar-10-batches-py").mkdir()
    for path in (tmp_path, Path(__file__).parent):
        with pytest.raises(LbylError, match=r"torchvision: pip install lbyl\[vision\]"):
            load(path)
    with pytest.raises(LbylError, match=r"torchvision: pip install lbyl\[vision\]"):
        next(load(tmp_path / "a.npz", size=3).batches(1, *ONE))


def test_importing_the_package_imports_no_torch() -> None:
    # `lbyl` itself stands as an empty package here: what its own import costs is not asked.
    root = Path(sys.modules["lbyl"].__file__ or "").parent
    code = (
        "import sys, types; package = types.ModuleType('lbyl'); "
        f"package.__path__ = [{str(root)!r}]; sys.modules['lbyl'] = package; "
        "import lbyl.data; assert not {'torch', 'torchvision'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_empty_folder_and_bad_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty" / "class").mkdir(parents=True)
    with pytest.raises(LbylError, match="nothing readable"):
        load(tmp_path / "empty")
    with pytest.raises(LbylError, match="split"):
        load(tmp_path, split="all")
    with pytest.raises(LbylError, match="size"):
        load(tmp_path, size=0)


# ---- ImageSet --------------------------------------------------------------------------------


def test_digits_split_is_fixed_and_disjoint() -> None:
    pytest.importorskip("sklearn")
    test, train = load("digits"), load("digits", split="train")
    assert (len(test), len(train)) == (797, 1000)
    assert test.image_shape == (1, 8, 8)
    assert test.labels is not None
    # The shipped weights know the other thousand, so the division may never move.
    assert test.labels[:10].tolist() == DIGITS_START
    assert int(stack(test, 797).sum() + stack(train, 1000).sum()) == DIGITS_SUM


def test_normalisation() -> None:
    images = pixels(3)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    batch, labels = next(ImageSet(images, [0, 1, 2]).batches(3, mean, std))
    expected = (images / 255.0 - np.array(mean)) / np.array(std)
    assert batch.dtype == torch.float32
    assert np.allclose(batch.numpy(), expected.transpose(0, 3, 1, 2), atol=1e-6)
    assert labels is not None
    assert labels.dtype == torch.int64


def test_batches_cover_everything_once_and_respect_the_limit() -> None:
    data = ImageSet(pixels(10), np.arange(10))
    sizes = [len(images) for images, _ in data.batches(4, *ONE)]
    assert sizes == [4, 4, 2]
    seen = torch.cat([labels for _, labels in data.batches(4, *ONE, limit=6) if labels is not None])
    assert seen.tolist() == [0, 1, 2, 3, 4, 5]


class _Counted:
    """A source that remembers what was asked of it."""

    def __init__(self, images: NDArray[np.uint8]) -> None:
        self.images, self.asked = images, set[int]()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> NDArray[np.uint8]:
        self.asked.add(index)
        return self.images[index]


def test_decoding_streams_and_stops_with_the_reader() -> None:
    source = _Counted(pixels(100))
    batches = ImageSet(source, None).batches(5, *ONE)
    first, _ = next(batches)
    assert np.array_equal((first * 255).round().byte().permute(0, 2, 3, 1), source.images[:5])
    batches.close()  # type: ignore[attr-defined]
    assert source.asked <= set(range(10))


def test_subset_is_seeded_and_keeps_labels_with_images() -> None:
    images = pixels(20)
    data = ImageSet(images, np.arange(20))
    one, same, other = data.subset(8, 1), data.subset(8, 1), data.subset(8, 2)
    assert one.labels is not None
    assert same.labels is not None
    assert other.labels is not None
    assert len(set(one.labels.tolist())) == 8
    assert one.labels.tolist() == same.labels.tolist()
    assert one.labels.tolist() != other.labels.tolist()
    assert np.array_equal(stack(one), images[one.labels])
    nested = one.subset(3, 0)
    assert nested.labels is not None
    assert np.array_equal(stack(nested), images[nested.labels])
    assert nested.class_count == 20
    for n in (0, 21):
        with pytest.raises(LbylError, match="cannot take"):
            data.subset(n, 0)


def test_bad_batch_arguments_are_refused_at_once() -> None:
    data = ImageSet(pixels(2), [0, 1])
    with pytest.raises(LbylError, match="batch_size"):
        data.batches(0, *ONE)
    with pytest.raises(LbylError, match="limit"):
        data.batches(1, *ONE, limit=0)
    with pytest.raises(LbylError, match="std"):
        data.batches(1, (0.0,), (0.0,))
    with pytest.raises(LbylError, match="3 channel"):
        next(data.batches(1, (0.0, 0.0), (1.0, 1.0)))


# ---- accuracy --------------------------------------------------------------------------------


class Brightness(nn.Module):
    """Answers with the class whose number is the value of the first pixel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.dropout = nn.Dropout(1.0)  # gives wrong answers unless in evaluation mode

    def forward(self, x: Tensor) -> Tensor:
        value = (self.dropout(x).flatten(1)[:, 0] * 255).round().long()
        return nn.functional.one_hot(value, self.classes).float()


def numbered(count: int, classes: int) -> ImageSet:
    labels = np.arange(count) % classes
    images = np.broadcast_to(labels[:, None, None, None], (count, 2, 2, 1)).astype(np.uint8)
    return ImageSet(images, labels)


def test_accuracy_counts_and_leaves_every_mode_alone() -> None:
    data = numbered(40, 4)
    wrong = ImageSet(data._source, np.where(np.arange(40) < 10, 3 - np.arange(40) % 4, data.labels))
    model = Brightness(4)
    model.train()
    model.dropout.eval()
    calls: list[tuple[int, int]] = []
    got = accuracy(model, wrong, *ONE, batch_size=16, progress=lambda *c: calls.append(c))
    assert got == pytest.approx(75.0)
    assert calls == [(16, 40), (32, 40), (40, 40)]
    assert (model.training, model.dropout.training) == (True, False)
    model.dropout.train()
    assert accuracy(model, data, *ONE) == 100.0
    assert model.dropout.training
    assert accuracy(model, wrong, *ONE, limit=10) == 0.0


def test_mode_is_restored_after_a_failure() -> None:
    model = Brightness(4).train()
    with pytest.raises(LbylError):
        accuracy(model, numbered(40, 5), (0.0, 0.0), (1.0, 1.0))
    assert model.training


def test_flatten_feeds_vectors() -> None:
    model = nn.Linear(4, 10)
    assert 0 <= accuracy(model, numbered(10, 10), *ONE, flatten=True) <= 100


def test_labels_of_another_data_set_are_refused() -> None:
    with pytest.raises(LbylError, match="5 classes but the model tells 3"):
        accuracy(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), numbered(10, 5), *ONE)
    with pytest.raises(LbylError, match="10 classes but the model tells 100"):
        accuracy(Brightness(100), numbered(100, 10), *ONE)
    named = ImageSet(pixels(2, 2, 1), [0, 1], ["cat", "dog"])
    with pytest.raises(LbylError, match="2 classes"):
        accuracy(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), named, *ONE)
    with pytest.raises(LbylError, match="shape"):
        accuracy(nn.Identity(), numbered(4, 2), *ONE)


def test_few_images_may_lack_the_last_classes() -> None:
    assert accuracy(Brightness(100), numbered(90, 99), *ONE) == 100.0


def test_no_labels_or_no_images_is_an_error() -> None:
    with pytest.raises(LbylError, match="no labels"):
        accuracy(Brightness(2), ImageSet(pixels(2), None), *ONE)
    with pytest.raises(LbylError, match="no images"):
        accuracy(Brightness(2), ImageSet(pixels(0), []), *ONE)


def test_evaluate_checks_the_shape_of_the_images() -> None:
    lenet = zoo.create("lenet300_100_fashionmnist")
    data = ImageSet(pixels(10, side=28, channels=1), np.arange(10))
    assert 0 <= evaluate("lenet300_100_fashionmnist", lenet, data) <= 100
    assert 0 <= evaluate(zoo.info("lenet300_100_fashionmnist"), lenet, data, limit=3) <= 100
    with pytest.raises(LbylError, match="reads"):
        evaluate("lenet300_100_fashionmnist", lenet, numbered(10, 10))
    with pytest.raises(LbylError, match="size=32"):
        evaluate("vgg16_cifar10", lenet, data)


# ---- the real files --------------------------------------------------------------------------

REAL = [
    ("cifar10_test.npz", 10_000, (3, 32, 32), 10),
    ("cifar100_train.npz", 50_000, (3, 32, 32), 100),
    ("imagenet_val1000.npz", 1_000, (3, 224, 224), 1000),
    ("t10k-images-idx3-ubyte.gz", 10_000, (1, 28, 28), 10),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "count", "shape", "classes"), REAL)
def test_real_files(file: str, count: int, shape: tuple[int, int, int], classes: int) -> None:
    path = SHARED / "data" / file
    if not path.is_file():
        pytest.skip(f"{path} is not here (LBYL_SHARED says where to look)")
    data = load(path)
    assert (len(data), data.image_shape, data.class_count) == (count, shape, classes)
    images, labels = next(data.batches(20, *ONE))
    assert images.shape == (20, *shape)
    assert labels is not None
    assert 0.1 < float(images.mean()) < 0.9
