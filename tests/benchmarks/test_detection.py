"""Detection: the drawn set is COCO, the figures are COCO's, whole batches are torchvision's."""

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
    detect_packed,
    draw_detection_set,
    evaluate,
    find_coco,
    pack_images,
    train_detector,
)
from benchmarks.detection import table as benchmark
from benchmarks.detection.batched import default_boxes, ssd_losses, suppress
from benchmarks.detection.coco import open_coco
from lbyl import LbylError

pytest.importorskip("pycocotools")
ops = pytest.importorskip("torchvision.ops")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    draw_detection_set(folder, DrawConfig(images=60, size=96, seed=4), "val")
    return folder


@pytest.fixture(scope="module")
def data(drawn: Path) -> CocoImages:
    return CocoImages(drawn, split="val", limit=24, cache=True)


def test_the_drawn_set_is_coco_and_the_same_seed_draws_the_same_bytes(
    drawn: Path, tmp_path: Path
) -> None:
    coco = open_coco(find_coco(drawn)[0])
    assert len(coco.imgs) == 60
    assert [c["name"] for c in coco.loadCats(coco.getCatIds())] == list(CLASSES)
    assert {item["category_id"] for item in coco.anns.values()} == set(coco.getCatIds())
    for item in coco.anns.values():
        left, top, width, height = item["bbox"]
        assert min(left, top) >= 0 and min(width, height) >= 1
        assert max(left + width, top + height) <= 96
        assert 0 < item["area"] <= width * height and item["iscrowd"] == 0
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        draw_detection_set(tmp_path / name, DrawConfig(images=3, size=64, seed=seed), "val")
    for file in (p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*")):
        one, same, other = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert one == same != other


def test_average_precision_of_right_and_wrong_boxes(drawn: Path) -> None:
    coco = open_coco(find_coco(drawn)[0])

    def found(shift: float = 0.0, turn: int = 0) -> list[dict[str, Any]]:
        return [
            {"image_id": item["image_id"], "score": 1.0,
             "category_id": (item["category_id"] - 1 + turn) % 8 + 1,
             "bbox": [item["bbox"][0] + shift * item["bbox"][2], *item["bbox"][1:]]}
            for item in coco.anns.values()
        ]  # fmt: skip

    right = average_precision(coco, found())
    assert all(math.isnan(v) or v == pytest.approx(1.0) for v in right.values())
    shifted = average_precision(coco, found(0.2))  # overlap 0.8 / 1.2 = 0.67
    assert shifted["AP50"] > 0.97 and shifted["AP75"] < 0.05 and shifted["AP"] < 0.5
    assert average_precision(coco, found(turn=1))["AP50"] < 0.1
    assert average_precision(coco, [])["AP"] == 0


class Oracle(nn.Module):
    """A detector that looks the answer up, in the order it is asked."""

    def __init__(self, data: CocoImages, labels: list[int]) -> None:
        super().__init__()
        self.data, self.labels, self.next = data, torch.tensor(labels), 0

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        targets = [self.data[self.next + i][1] for i in range(len(images))]
        self.next += len(images)
        return [
            {"boxes": t["boxes"], "labels": self.labels[t["labels"] - 1],
             "scores": torch.ones(len(t["labels"]))} for t in targets
        ]  # fmt: skip


def test_a_real_coco_folder_is_read_as_it_is(tmp_path: Path) -> None:
    """Ids with gaps, a crowd, images of several sizes, one without objects."""
    images, folder = [], tmp_path / "val2017"
    folder.mkdir()
    for number, (width, height) in {139: (60, 40), 285: (50, 70), 632: (40, 40)}.items():
        name = f"{number:012d}.jpg"
        Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(folder / name)
        images.append({"id": number, "file_name": name, "width": width, "height": height})
    rows = [(1, 139, 1, [5, 5, 20, 30], 0), (2, 139, 90, [30, 2, 10, 10], 0)]
    rows += [(3, 285, 13, [1, 1, 45, 60], 0), (4, 285, 1, [0, 0, 40, 40], 1)]
    annotations = [
        {"id": i, "image_id": im, "category_id": c, "bbox": b, "area": b[2] * b[3], "iscrowd": w}
        for i, im, c, b, w in rows
    ]
    categories = [{"id": i, "name": str(i)} for i in (90, 1, 13)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    data = CocoImages(tmp_path, split="val")
    assert data.categories == [1, 13, 90]
    assert [data[i][1]["labels"].tolist() for i in range(3)] == [[1, 3], [2], []]
    assert data[0][1]["boxes"][0].tolist() == [5, 5, 25, 35]
    for labels, names in (("contiguous", [1, 2, 3]), ("category", [1, 13, 90])):
        found = evaluate(Oracle(data, names), tmp_path, batch_size=2, labels=labels)
        assert [found["AP"], found["APs"]] == pytest.approx([1, 1]) and math.isnan(found["APl"])
    with pytest.raises(LbylError, match="labels='category'"):
        evaluate(Oracle(data, [1, 13, 90]), tmp_path)
    with pytest.raises(LbylError, match=r"instances_train\*"):
        CocoImages(tmp_path, split="train")


def test_packing_keeps_pixels_scales_boxes_and_mirrors_both(data: CocoImages) -> None:
    packed, larger = pack_images(data, 96), pack_images(data, 144, threads=1)
    for index in range(len(data)):
        image, target = data[index]
        count = len(target["labels"])
        assert torch.equal(packed.images[index], image) and not packed.labels[index, count:].any()
        assert torch.equal(packed.boxes[index, :count], target["boxes"])
        assert packed.labels[index].tolist()[:count] == target["labels"].tolist()
    torch.testing.assert_close(larger.boxes, 1.5 * packed.boxes)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(packed), generator=generator)
    mirrored = torch.rand(len(packed), generator=generator) < 0.5
    batches = list(packed.shuffled(16, torch.Generator().manual_seed(0), flip=True))
    images, boxes, labels = (torch.cat(parts) for parts in zip(*batches))
    assert 0 < int(mirrored.sum()) < len(packed) and torch.equal(labels, packed.labels[order])
    for row, index in enumerate(order.tolist()):
        image, box = packed.images[index].float() / 255, packed.boxes[index].clone()
        if mirrored[row]:
            image, box[:, 0::2] = image.flip(-1), 96 - box[:, 0::2].flip(-1)
        assert torch.equal(images[row], image) and torch.equal(boxes[row], box)


def test_losses_gradients_and_detections_are_torchvisions(data: CocoImages) -> None:
    model, packed = build_ssd(8, 96, depth=10, width=8).train(), pack_images(data, 96)
    packed.labels[3] = 0  # an image without objects
    images = packed.images.float() / 255
    targets = [
        {"boxes": boxes[labels > 0], "labels": labels[labels > 0]}
        for boxes, labels in zip(packed.boxes[:12], packed.labels[:12])
    ]
    expected = model(list(images[:12]), targets)
    sum(expected.values()).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    anchors = default_boxes(model, 96)
    losses = ssd_losses(model, images[:12], packed.boxes[:12], packed.labels[:12], anchors)
    sum(losses.values()).backward()
    torch.testing.assert_close(dict(losses), dict(expected))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-5)
    model = build_ssd(8, 96, depth=10, width=8).eval()
    with torch.inference_mode():
        for parameter in model.get_submodule("head.classification_head").parameters():
            parameter.mul_(8)  # so that some boxes pass the threshold
        outputs = model(list(images))
    rows = torch.from_numpy(detect_packed(model, packed, batch_size=16))
    assert len(rows) == sum(len(output["scores"]) for output in outputs) > 500
    for image_id, output in zip(data.ids, outputs):
        mine = rows[rows[:, 0] == image_id]
        torch.testing.assert_close(mine[:, 5].float(), output["scores"])
        assert mine[:, 6].tolist() == output["labels"].tolist()
        corners = torch.cat([mine[:, 1:3], mine[:, 1:3] + mine[:, 3:5]], 1).float()
        torch.testing.assert_close(corners, output["boxes"], rtol=1e-4, atol=1e-3)


def test_suppression_is_the_greedy_one() -> None:
    corner = torch.rand(6, 50, 2) * 40
    boxes = torch.cat([corner, corner + 5 + 30 * torch.rand(6, 50, 2)], -1)
    scores, valid = torch.linspace(1, 0.1, 50), torch.rand(6, 50) < 0.9
    kept = suppress(boxes, valid, 0.45)
    for group in range(6):
        inside = valid[group].nonzero().flatten()
        expected = inside[ops.nms(boxes[group][inside], scores[inside], 0.45)]
        assert kept[group].nonzero().flatten().tolist() == expected.tolist()


def test_a_detector_learns_two_images_by_heart(drawn: Path) -> None:
    packed = pack_images(CocoImages(drawn, split="val", limit=2), 96)
    model = build_ssd(8, 96, depth=10, width=16)
    rows = train_detector(model, packed, 40, 0.002, "cpu", False, optimizer="adamw", batch_size=2)
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"] and not model.training


def test_the_papers_table_is_complete_and_the_best_row_of_each_cell_is_kept() -> None:
    for criterion in benchmark.CRITERIA:
        for ratio in benchmark.RATIOS:
            for method in benchmark.COLUMNS:
                cell = {"criterion": criterion, "ratio": ratio, "method": method}
                told = benchmark.published(cell)
                assert (told is None) == (method == "echo")
                assert told is None or tuple(told) == benchmark.METRICS
    cell = {"criterion": "l2", "ratio": 0.1, "method": "lbyl, best λ"}
    rows = [{**cell, "AP": ap} for ap in (1.0, 3.0, 2.0)] + [{**cell, "ratio": 0.2, "AP": 0.5}]
    assert [row["AP"] for row in benchmark.best_of(iter(rows))] == [3.0, 0.5]
