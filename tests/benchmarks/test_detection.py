"""Detection: the drawn set is COCO, the figures are COCO's, the detector learns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.detection import (
    CLASSES,
    CocoImages,
    DrawConfig,
    average_precision,
    build_ssd,
    draw_detection_set,
    evaluate,
    find_coco,
    train_detector,
)
from benchmarks.detection.coco import open_coco
from benchmarks.detection.draw import draw_image
from benchmarks.detection.ssd import feature_sizes
from benchmarks.detection.train import _mirror
from lbyl.errors import LbylError

pytest.importorskip("pycocotools")
pytest.importorskip("torchvision")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    draw_detection_set(folder, DrawConfig(images=120, seed=4), "val2017")
    return folder


def test_the_drawn_set_is_coco(drawn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coco = open_coco(drawn / "annotations" / "instances_val2017.json")
    assert capsys.readouterr().out == ""
    assert len(coco.imgs) == 120
    assert [c["name"] for c in coco.loadCats(coco.getCatIds())] == list(CLASSES)
    assert len(CLASSES) >= 6
    areas = []
    for item in coco.anns.values():
        left, top, width, height = item["bbox"]
        image = coco.imgs[item["image_id"]]
        assert min(left, top) >= 0
        assert min(width, height) >= 1
        assert left + width <= image["width"] == 128
        assert top + height <= image["height"] == 128
        assert 40 <= item["area"] <= width * height
        assert item["iscrowd"] == 0
        areas.append(item["area"])
    assert {c["category_id"] for c in coco.anns.values()} == set(coco.getCatIds())
    bins = np.histogram(areas, [0, 32**2, 96**2, 1e9])[0]
    assert (bins >= [60, 60, 5]).all(), bins
    name = coco.imgs[1]["file_name"]
    with Image.open(drawn / "val2017" / name) as picture:
        assert picture.size == (128, 128)


def test_areas_and_boxes_are_those_of_the_visible_pixels() -> None:
    """Seen by drawing with a brush of its own: each object's pixels in a colour of its number."""
    from benchmarks.detection import draw

    owners: list[np.ndarray[Any, Any]] = []
    original = draw._visible

    def spy(owner: Any, drawn: Any) -> Any:
        owners.append(owner.copy())
        return original(owner, drawn)

    draw._visible = spy
    try:
        results = [draw_image(DrawConfig(size=160, seed=9), "train", n)[1] for n in range(1, 30)]
    finally:
        draw._visible = original
    overlapping = 0
    for owner, objects in zip(owners, results):
        assert len(objects) == owner.max()
        for number, item in enumerate(objects, start=1):
            ys, xs = np.nonzero(owner == number)
            left, top, width, height = item["bbox"]
            assert item["area"] == len(ys)
            assert (left, top) == (xs.min(), ys.min())
            assert (left + width, top + height) == (xs.max() + 1, ys.max() + 1)
            box = owner[int(top) : int(top + height), int(left) : int(left + width)]
            overlapping += bool(((box > number) & (box != number)).any())
    assert overlapping > 5  # there is occlusion


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    def contents(folder: str, seed: int, split: str = "train") -> dict[str, bytes]:
        config = DrawConfig(images=4, size=96, seed=seed, format=kind)
        draw_detection_set(tmp_path / folder, config, split)
        files = sorted((tmp_path / folder).rglob("*.*"))
        return {p.name: p.read_bytes() for p in files if p.is_file()}

    first, again, other = contents("a", 1), contents("b", 1), contents("c", 2)
    assert len(first) == 5
    assert first == again
    assert all(first[name] != other[name] for name in first)
    held_out = contents("d", 1, "val")
    images = [name for name in first if not name.endswith("json")]
    assert all(first[name] != held_out[name] for name in images)


def perfect(coco: Any, shift: float = 0.0) -> list[dict[str, Any]]:
    return [
        {
            "image_id": item["image_id"],
            "category_id": item["category_id"],
            "bbox": [item["bbox"][0] + shift * item["bbox"][2], *item["bbox"][1:]],
            "score": 1.0,
        }
        for item in coco.anns.values()
    ]


def test_average_precision_of_right_and_wrong_boxes(
    drawn: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coco = open_coco(find_coco(drawn)[0])
    right = average_precision(coco, perfect(coco))
    assert list(right) == ["AP", "AP50", "AP75", "APs", "APm", "APl"]
    assert all(value == pytest.approx(1.0) for value in right.values()), right
    shifted = average_precision(coco, perfect(coco, 0.2))  # overlap 0.8 / 1.2 = 0.67
    assert shifted["AP50"] > 0.97
    assert shifted["AP75"] < 0.05
    assert shifted["AP"] < 0.5
    swapped = [{**item, "category_id": item["category_id"] % 8 + 1} for item in perfect(coco)]
    assert average_precision(coco, swapped)["AP50"] < 0.1
    assert average_precision(coco, [])["AP"] == 0
    assert capsys.readouterr().out == ""


class Oracle(nn.Module):
    """A detector that looks the answer up, in the order it is asked."""

    def __init__(self, data: CocoImages, labels: list[int] | None = None) -> None:
        super().__init__()
        self.data, self.labels, self.next = data, labels, 0

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        outputs = []
        for image in images:
            expected, target = self.data[self.next]
            assert torch.equal((image * 255).round().byte(), expected)
            labels = target["labels"]
            if self.labels is not None:
                labels = torch.tensor(self.labels)[labels - 1]
            scores = torch.ones(len(labels))
            outputs.append({"boxes": target["boxes"], "labels": labels, "scores": scores})
            self.next += 1
        return outputs


def coco_like(folder: Path) -> Path:
    """As the real one: ids with gaps, a crowd, images of several sizes, one without objects."""
    (folder / "annotations").mkdir(parents=True)
    (folder / "val2017").mkdir()
    rng = np.random.default_rng(0)
    sizes = {139: (60, 40), 285: (50, 70), 632: (40, 40)}
    images = []
    for number, (width, height) in sizes.items():
        name = f"{number:012d}.jpg"
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels if number != 632 else pixels[..., 0]).save(folder / "val2017" / name)
        images.append({"id": number, "file_name": name, "width": width, "height": height})
    rows = [(1, 139, 1, [5, 5, 20, 30], 0), (2, 139, 90, [30, 2, 10, 10], 0)]
    rows += [(3, 285, 13, [1, 1, 45, 60], 0), (4, 285, 1, [0, 0, 40, 40], 1)]
    annotations = [
        {"id": i, "image_id": im, "category_id": c, "bbox": b, "area": b[2] * b[3], "iscrowd": w}
        for i, im, c, b, w in rows
    ]
    categories = [{"id": i, "name": str(i)} for i in (90, 1, 13)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("labels", ["contiguous", "category"])
def test_a_real_coco_folder_is_read_as_it_is(tmp_path: Path, labels: str) -> None:
    folder = coco_like(tmp_path / "coco")
    data = CocoImages(folder, split="val")
    assert data.categories == [1, 13, 90]
    assert [len(data[i][1]["labels"]) for i in range(3)] == [2, 1, 0]
    assert data[0][1]["labels"].tolist() == [1, 3]
    assert data[0][1]["boxes"][0].tolist() == [5, 5, 25, 35]
    names = [1, 13, 90] if labels == "category" else None
    oracle = Oracle(data, names).train()
    result = evaluate(oracle, folder, batch_size=2, labels=labels)
    assert oracle.training
    assert result["AP"] == pytest.approx(1.0)
    assert result["APs"] == pytest.approx(1.0)
    assert math.isnan(result["APl"])
    explicit = folder / "annotations" / "instances_val2017.json"
    again = evaluate(Oracle(data), explicit, folder / "val2017", "cpu", 3)
    assert again["AP"] == pytest.approx(1.0)


def test_mistakes_are_named(tmp_path: Path) -> None:
    folder = coco_like(tmp_path / "coco")
    with pytest.raises(LbylError, match=r"instances_train\*"):
        CocoImages(folder, split="train")
    with pytest.raises(LbylError, match="no folder of images"):
        find_coco(folder, tmp_path / "nowhere")
    with pytest.raises(LbylError, match="labels='category'"):
        evaluate(Oracle(CocoImages(folder, split="val"), [1, 13, 90]), folder)
    (folder / "val2017" / "000000000285.jpg").write_bytes(b"no picture")
    with pytest.raises(LbylError, match="cannot read image"):
        CocoImages(folder, split="val")[1]
    (folder / "annotations" / "instances_val2017.json").write_text("[]")
    with pytest.raises(LbylError, match="not a COCO annotations file"):
        CocoImages(folder, split="val")
    with pytest.raises(LbylError, match="depth 51"):
        build_ssd(3, depth=51)
    with pytest.raises(LbylError, match="size"):
        DrawConfig(size=10)


@pytest.mark.parametrize(("size", "first"), [(128, 32), (300, 38)])
def test_ssd_forward_and_backward(size: int, first: int) -> None:
    torch.manual_seed(0)
    model = build_ssd(8, size, depth=10, width=8)
    sizes = feature_sizes(model, size)
    assert sizes[0] == (first, first)
    assert len(sizes) == 5
    images = [torch.rand(3, 90, 120), torch.rand(3, 128, 128)]
    boxes = torch.tensor([[10.0, 10, 60, 70], [5, 5, 20, 20]])
    targets = [
        {"boxes": boxes, "labels": torch.tensor([1, 8])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
    ]
    losses = model.train()(images, targets)
    sum(losses.values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    output = model.eval()(images)
    assert output[0]["boxes"].shape[1] == 4
    assert output[0]["boxes"][:, 2].max() <= 120
    assert output[0]["boxes"][:, 3].max() <= 90
    assert len(output[1]["scores"]) <= 100


def test_the_backbone_can_be_traced_and_takes_torchvision_weights() -> None:
    from torchvision.models import resnet18

    backbone = build_ssd(8).get_submodule("backbone").eval()
    image = torch.rand(1, 3, 128, 128)
    traced = torch.fx.symbolic_trace(backbone)
    exported = torch.export.export(backbone, (image,)).module()
    for name, value in backbone(image).items():
        assert torch.allclose(traced(image)[name], value)
        assert torch.allclose(exported(image)[name], value, atol=1e-5)
    missing = backbone.load_state_dict(resnet18(weights=None).state_dict(), strict=False)
    assert all(key.startswith("extra") for key in missing.missing_keys)
    assert missing.unexpected_keys == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize("bf16", [False, True])
def test_a_detector_learns_two_images_by_heart(drawn: Path, bf16: bool) -> None:
    torch.manual_seed(0)
    data = CocoImages(drawn, split="val2017", limit=2, cache=True)
    model = build_ssd(len(data.categories), 128, depth=10, width=16)
    steps = 6 if bf16 else 60
    rows = train_detector(model, data, steps, 0.01, "cpu", bf16, batch_size=2, flip=not bf16)
    assert len(rows) == steps
    assert rows[-1]["loss"] < (0.95 if bf16 else 0.3) * rows[0]["loss"]
    assert not model.training
    if not bf16:
        assert evaluate(model, drawn, split="val2017", limit=2)["AP50"] > 0.5


def test_mirroring_moves_the_boxes_with_the_picture() -> None:
    image = torch.zeros(3, 10, 20, dtype=torch.uint8)
    image[:, 2:5, 3:9] = 1
    target = {"boxes": torch.tensor([[3.0, 2, 9, 5]]), "labels": torch.tensor([1])}
    mirrored, moved = _mirror(image, target)
    left, top, right, bottom = (int(v) for v in moved["boxes"][0])
    assert mirrored[:, top:bottom, left:right].eq(1).all()
    assert mirrored.sum() == 3 * (right - left) * (bottom - top)
