"""Readers on small files made here; accuracy on networks whose answer is known."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lbyl import LbylError
from lbyl.app.data import ImageSet, Score, accuracy, evaluate, load
from lbyl.app.sources import zoo

ONE = ((0.0,), (1.0,))  # mean and std that leave x/255
IDX = "t10k-images-idx3-ubyte"


def pixels(count: int, side: int = 4, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    shape = (count, side, side, channels)
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


def stack(data: ImageSet, batch_size: int = 3) -> NDArray[np.uint8]:
    """The images of a set, back from normalised NCHW to bytes NHWC."""
    batches = [images for images, _ in data.batches(batch_size, *ONE)]
    return (torch.cat(batches) * 255).round().byte().permute(0, 2, 3, 1).numpy()


def labels(data: ImageSet) -> list[int]:
    assert data.labels is not None
    return list(data.labels.tolist())


def encoded(image: NDArray[np.uint8], kind: str = "png", **options: Any) -> bytes:
    buffer = io.BytesIO()
    pytest.importorskip("PIL.Image").fromarray(image).save(buffer, kind, **options)
    return buffer.getvalue()


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


def idx(array: NDArray[np.uint8], shape: tuple[int, ...] = ()) -> bytes:
    shape = shape or array.shape
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes() + array.tobytes()


def refused(path: Path, message: str, **options: Any) -> None:
    """Opening and reading give one error that says this, and take little memory."""
    tracemalloc.start()
    with pytest.raises(LbylError, match=message):
        next(load(path, **options).batches(1, *ONE))
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()


def test_npz_of_pixels_and_of_grey_ones_without_labels(tmp_path: Path) -> None:
    images = pixels(7)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(7, dtype=np.uint8) % 3)
    data = load(tmp_path / "a.npz")
    assert len(data) == 7 and labels(data) == [0, 1, 2, 0, 1, 2, 0]
    assert data.class_count == 3 and data.classes is None
    assert np.array_equal(stack(data), images)
    grey = pixels(2, side=8, channels=1)[..., 0]
    np.savez(tmp_path / "b.npz", images=grey, classes=np.array(["cat", "dog"]))
    data = load(tmp_path / "b.npz")
    assert data.labels is None and next(data.batches(2, *ONE))[1] is None
    assert data.classes == ("cat", "dog") and data.image_shape == (1, 8, 8)
    assert load(tmp_path / "b.npz", size=14).image_shape == (1, 14, 14)


@pytest.mark.parametrize("kind", ["webp", "png", "jpeg"])
def test_npz_of_encoded_pictures(tmp_path: Path, kind: str) -> None:
    images = [*pixels(4, side=16), pixels(1, side=24 if kind == "jpeg" else 16)[0]]
    blobs = [encoded(i, kind, **({"lossless": True} if kind == "webp" else {})) for i in images]
    stored = {kind: np.frombuffer(b"".join(blobs), np.uint8), "labels": np.arange(5)}
    np.savez(tmp_path / "a.npz", offsets=np.cumsum([0, *map(len, blobs)]), **stored)
    if kind == "jpeg":  # which are of different shapes
        with pytest.raises(LbylError, match="size="):
            stack(load(tmp_path / "a.npz"), 5)
        assert stack(load(tmp_path / "a.npz", size=14)).shape == (5, 14, 14, 3)
    else:
        assert np.array_equal(stack(load(tmp_path / "a.npz"), batch_size=2), images)


FLAT = np.zeros(9, np.uint8)
SQUARE = np.zeros((2, 4, 4, 3), np.uint8)
BAD_NPZ: list[tuple[str, dict[str, Any]]] = [
    ("needs 'images'", {"labels": np.arange(2)}),
    ("uint8", {"images": np.zeros((2, 4, 4, 3))}),
    ("2 images", {"images": SQUARE, "labels": np.arange(3)}),
    ("integers", {"images": SQUARE, "labels": np.ones(2)}),
    ("negative", {"images": SQUARE, "labels": np.array([0, -1])}),
    ("not a readable", {"images": np.array([{}, {}], dtype=object)}),
    ("no pixels", {"images": np.zeros((3, 0, 0, 3), np.uint8)}),
    ("rise", {"jpeg": FLAT, "offsets": np.array([0, 5, 2], np.uint64)}),
    ("flat", {"jpeg": np.zeros((3, 3), np.uint8), "offsets": np.array([0, 2])}),
    ("image 0 is not a readable picture", {"jpeg": FLAT, "offsets": np.array([0, 9])}),
    ("too many for a file of its size", {"images": np.zeros((80, 1000, 1000), np.uint8)}),
]


def test_bad_npz_is_refused(tmp_path: Path) -> None:
    for message, arrays in BAD_NPZ:
        np.savez_compressed(tmp_path / "a.npz", **arrays)
        refused(tmp_path / "a.npz", message)


def test_files_of_no_kind_bad_arguments_and_empty_folders_are_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", images=pixels(50))
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-200])
    (tmp_path / "b.npz").write_bytes(pickle.dumps([1]))
    (tmp_path / "c.txt").write_text("text")
    (tmp_path / "empty" / "class").mkdir(parents=True)
    for name in ("a.npz", "b.npz", "c.txt", "absent.npz"):
        refused(tmp_path / name, name)
    refused(tmp_path / "empty", "nothing readable")
    refused(tmp_path, "split", split="all")
    refused(tmp_path, "size", size=0)


@pytest.mark.parametrize(("layout", "suffix"), [("", ".gz"), ("raw", ""), ("FashionMNIST/raw", "")])
def test_idx_layouts(tmp_path: Path, layout: str, suffix: str) -> None:
    for seed, (split, prefix) in enumerate((("test", "t10k"), ("train", "train"))):
        images, count = pixels(5, channels=1, seed=seed), np.arange(5, dtype=np.uint8) * seed
        write(tmp_path / layout / f"{prefix}-images-idx3-ubyte{suffix}", idx(images[..., 0]))
        write(tmp_path / layout / f"{prefix}-labels-idx1-ubyte{suffix}", idx(count))
        data = load(tmp_path, split=split)
        assert np.array_equal(stack(data), images) and labels(data) == count.tolist()


def test_bad_idx_is_refused_and_unpacked_no_further_than_its_header_allows(tmp_path: Path) -> None:
    path, good = tmp_path / IDX, idx(pixels(5, channels=1)[..., 0])
    write(path, good)
    refused(tmp_path, "labels")
    write(tmp_path / "t10k-labels-idx1-ubyte", idx(np.zeros(4, np.uint8)))
    refused(path, "5 images")
    refused(tmp_path, "train", split="train")
    for content, message in (
        (good[:-1], "announces shape"),
        (b"\0\0\x09\x03" + bytes(20), "not an idx file"),
        (idx(np.zeros((4, 0, 0), np.uint8)), "no pixels"),
    ):
        write(path, content)
        refused(tmp_path, message)
    for suffix in ("", ".gz"):
        for shape in ((5, 4, 4), (1 << 20, 64, 64)):
            write(tmp_path / f"{IDX}{suffix}", idx(np.zeros(40_000_000, np.uint8), shape))
            refused(tmp_path, "announces")
        path.unlink(missing_ok=True)
    (tmp_path / f"{IDX}.gz").write_bytes(b"not gzip")
    refused(tmp_path, "cannot be read")
    for name in ("MNIST", "FashionMNIST"):
        write(tmp_path / "two" / name / "raw" / IDX, good)
    refused(tmp_path / "two", "several")


def by_channel(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2).reshape(len(images), -1))


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_cifar10_and_100(tmp_path: Path, protocol: int) -> None:
    folder, images = tmp_path / "cifar-10-batches-py", pixels(12, side=32)
    for i, name in enumerate(["test_batch", *(f"data_batch_{n}" for n in range(1, 6))]):
        part = {b"data": by_channel(images[2 * i : 2 * i + 2]), b"labels": [i, 9 - i]}
        write(folder / name, pickle.dumps(part, protocol))
    write(folder / "batches.meta", pickle.dumps({b"label_names": [b"a"] * 9 + [b"b"]}, 2))
    test, train = load(tmp_path), load(folder, split="train")
    assert np.array_equal(stack(test), images[:2]) and np.array_equal(stack(train), images[2:])
    assert labels(train) == [1, 8, 2, 7, 3, 6, 4, 5, 5, 4] and test.classes == ("a",) * 9 + ("b",)
    columns = np.asfortranarray(by_channel(images))
    hundred = {"data": columns, "fine_labels": [*range(88, 100)], "coarse_labels": [1] * 12}
    write(tmp_path / "100" / "cifar-100-python" / "test", pickle.dumps(hundred, protocol))
    data = load(tmp_path / "100")
    assert np.array_equal(stack(data), images) and data.class_count == 100


def test_cifar_of_python_2_is_read(tmp_path: Path) -> None:
    # The opcodes of the official files: byte strings as Python 2 wrote them, protocol 2.
    raw = by_channel(pixels(1, side=32)).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
    )
    array += len(raw).to_bytes(4, "little") + raw + b"tb"
    content = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x07eu."
    write(tmp_path / "cifar-10-batches-py" / "test_batch", content)
    assert stack(load(tmp_path)).tobytes() == pixels(1, side=32).tobytes()
    assert labels(load(tmp_path)) == [7]


class Runs:
    """Pickles to a call that leaves a trace if it is ever made."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("made-by-a-pickle",)


ROW = np.zeros((2, 3072), np.uint8)
BAD_CIFAR: list[tuple[Any, str]] = [
    ([1], "dictionary"),
    ({"data": np.zeros((2, 3072)), "labels": [1, 2]}, "unsigned bytes"),
    ({"data": np.array([[1, {}]], dtype=object), "labels": [1]}, "unsigned bytes"),
    ({"data": np.zeros((2, 100), np.uint8), "labels": [1, 2]}, "3072"),
    ({"data": ROW, "labels": [1, 2**70]}, "integers"),
    ({"data": ROW, "labels": [1]}, "2 images"),
    ({"data": Runs(), "labels": []}, r"mkdir.*refused"),
    # Thirteen bytes that number an object 2**30: a table of 16 GB in the unpickler written in C.
    (b"\x80\x02Nr" + (1 << 30).to_bytes(4, "little") + b".", "dictionary"),
    (pickle.dumps({"data": ROW, "labels": [1, 2]}, 2)[:500], "not a readable CIFAR file"),
]


def test_bad_cifar_is_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    for value, message in BAD_CIFAR:
        content = value if isinstance(value, bytes) else pickle.dumps(value, 2)
        write(folder / "test_batch", content)
        refused(tmp_path, message)
    refused(tmp_path, "data_batch_1", split="train")
    assert not Path("made-by-a-pickle").exists()
    write(folder / "test_batch", pickle.dumps({"data": ROW, "labels": [1, 2]}))
    write(folder / "batches.meta", pickle.dumps({"label_names": 3}))
    refused(tmp_path, "label_names")


def picture(path: Path, width: int, height: int, value: int) -> None:
    write(path, encoded(np.full((height, width, 3), value, np.uint8)))


def test_folders_of_classes_in_alphabetical_order_and_flat_ones(tmp_path: Path) -> None:
    picture(tmp_path / "val" / "dog" / "1.png", 40, 30, 10)
    picture(tmp_path / "val" / "cat" / "deep" / "2.PNG", 30, 40, 20)
    picture(tmp_path / "val" / "cat" / "1.png", 32, 32, 30)
    picture(tmp_path / "val" / "cat" / "._1.png", 8, 8, 1)  # hidden, as the next
    picture(tmp_path / "val" / ".thumbnails" / "1.png", 8, 8, 1)
    picture(tmp_path / "train" / "cat" / "1.png", 32, 32, 40)
    (tmp_path / "val" / "cat" / "notes.txt").write_text("no picture")
    data = load(tmp_path, size=28)
    assert data.classes == ("cat", "dog") and labels(data) == [0, 0, 1]
    assert stack(data)[:, 0, 0, 0].tolist() == [30, 20, 10] and data.image_shape == (3, 28, 28)
    assert len(load(tmp_path, split="train")) == 1
    picture(tmp_path / "flat" / "b.png", 300, 260, 1)
    picture(tmp_path / "flat" / "a.png", 20, 20, 2)
    flat = load(tmp_path / "flat")
    assert flat.labels is None and flat.image_shape == (3, 224, 224)
    assert stack(flat)[:, 0, 0, 0].tolist() == [2, 1]


def test_pictures_are_resized_as_torchvision_does_it_and_never_blown_up(tmp_path: Path) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    image = np.random.RandomState(0).randint(0, 256, (61, 83, 3)).astype(np.uint8)
    write(tmp_path / "usual" / "a.png", encoded(image))
    write(tmp_path / "usual" / "b.png", encoded(image[:28, :28]))  # stays as it is
    usual = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(28)])
    expected = np.array(usual(pytest.importorskip("PIL.Image").fromarray(image)))
    assert np.array_equal(stack(load(tmp_path / "usual", size=28)), [expected, image[:28, :28]])
    for shape in ((60_000, 1, 3), (1, 60_000, 3)):
        write(tmp_path / "thin" / "a.png", encoded(np.zeros(shape, np.uint8)))
        refused(tmp_path / "thin", "more than 64,000,000 pixels", size=224)


def test_digits_split_is_fixed_and_disjoint() -> None:
    pytest.importorskip("sklearn")
    test, train = load("digits"), load("digits", split="train")
    assert (len(test), len(train)) == (797, 1000) and test.image_shape == (1, 8, 8)
    # The shipped weights know the other thousand, so the division may never move.
    assert labels(test)[:10] == [2, 1, 9, 2, 3, 1, 7, 7, 4, 5]
    assert int(stack(test, 797).sum() + stack(train, 1000).sum()) == 8_953_801  # nothing twice


def test_batches_are_normalised_cover_everything_once_and_respect_the_limit() -> None:
    images, mean, std = pixels(10), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    data = ImageSet(images, np.arange(10))
    parts = list(data.batches(4, mean, std))
    assert [len(batch) for batch, _ in parts] == [4, 4, 2]
    expected = ((images / 255.0 - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2)
    assert np.allclose(torch.cat([batch for batch, _ in parts]).numpy(), expected, atol=1e-6)
    limited = torch.cat([part for _, part in data.batches(4, *ONE, limit=6) if part is not None])
    assert limited.tolist() == [0, 1, 2, 3, 4, 5] and limited.dtype == torch.int64
    with pytest.raises(LbylError, match="3 channel"):
        next(data.batches(1, (0.0, 0.0), (1.0, 1.0)))


def test_subset_is_seeded_and_keeps_labels_with_images() -> None:
    images = pixels(20)
    data = ImageSet(images, np.arange(20))
    one, other = data.subset(8, 1), data.subset(8, 2)
    assert labels(one) == labels(data.subset(8, 1)) != labels(other)
    assert len(set(labels(one))) == 8 and np.array_equal(stack(one), images[labels(one)])
    nested = one.subset(3, 0)
    assert np.array_equal(stack(nested), images[labels(nested)]) and nested.class_count == 20
    for n in (0, 21):
        with pytest.raises(LbylError, match="cannot take"):
            data.subset(n, 0)


class Brightness(nn.Module):
    """Answers with the class whose number is the value of the first pixel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.dropout = nn.Dropout(1.0)  # gives wrong answers unless in evaluation mode

    def forward(self, x: Tensor) -> Tensor:
        value = (self.dropout(x).flatten(1)[:, 0] * 255).round().long()
        return nn.functional.one_hot(value, self.classes).float()


def numbered(count: int, classes: int, wrong: int = 0) -> ImageSet:
    told = np.arange(count) % classes
    images = np.broadcast_to(told[:, None, None, None], (count, 2, 2, 1)).astype(np.uint8)
    return ImageSet(images, np.where(np.arange(count) < wrong, classes - 1 - told, told))


def test_accuracy_counts_and_leaves_every_mode_alone_even_where_it_fails() -> None:
    model = Brightness(4).train()
    model.dropout.eval()
    calls: list[tuple[int, int]] = []
    wrong = numbered(40, 4, wrong=10)
    got = accuracy(model, wrong, *ONE, batch_size=16, progress=lambda *c: calls.append(c))
    assert got == pytest.approx(75.0) and calls == [(16, 40), (32, 40), (40, 40)]
    assert (model.training, model.dropout.training) == (True, False)
    model.dropout.train()
    assert accuracy(model, numbered(40, 4), *ONE) == 100.0 and model.dropout.training
    assert accuracy(model, wrong, *ONE, limit=10) == 0.0
    with pytest.raises(LbylError):
        accuracy(model, numbered(40, 5), (0.0, 0.0), (1.0, 1.0))
    assert model.training
    assert 0 <= accuracy(nn.Linear(4, 10), numbered(10, 10), *ONE, flatten=True) <= 100
    assert accuracy(Brightness(100), numbered(90, 99), *ONE) == 100.0  # few lack the last classes
    half = Score(100, 50, 80)
    assert half.interval == (pytest.approx(40.4, abs=0.1), pytest.approx(59.6, abs=0.1))
    assert half.top_5 == 80


def test_images_or_labels_that_do_not_fit_the_network_are_refused() -> None:
    three = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    for model, data, message in (
        (three, numbered(10, 5), "5 classes but the model tells 3"),
        (three, ImageSet(pixels(2, 2, 1), [0, 1], ["cat", "dog"]), "2 classes"),
        (Brightness(100), numbered(100, 10), "10 classes but the model tells 100"),
        (nn.Identity(), numbered(4, 2), "shape"),
        (Brightness(2), ImageSet(pixels(2), None), "no labels"),
        (Brightness(2), ImageSet(pixels(0), []), "no images"),
    ):
        with pytest.raises(LbylError, match=message):
            accuracy(model, data, *ONE)
    lenet, data = zoo.create("lenet300_100_fashionmnist"), ImageSet(pixels(9, 28, 1), np.arange(9))
    assert 0 <= evaluate("lenet300_100_fashionmnist", lenet, data, limit=3) <= 100
    with pytest.raises(LbylError, match="size=32"):
        evaluate("vgg16_cifar10", lenet, data)
