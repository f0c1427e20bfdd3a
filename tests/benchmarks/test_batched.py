"""Whole batches give what torchvision gives image by image."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.detection import (
    CocoImages,
    DrawConfig,
    build_ssd,
    detect_packed,
    draw_detection_set,
    evaluate,
    pack_images,
    train_detector,
)
from benchmarks.detection.batched import _suppress_together, default_boxes, ssd_losses, suppress
from benchmarks.detection.evaluate import average_precision

pytest.importorskip("pycocotools")
ops = pytest.importorskip("torchvision.ops")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> CocoImages:
    folder = tmp_path_factory.mktemp("packed")
    draw_detection_set(folder, DrawConfig(images=24, size=96, seed=3), "val")
    return CocoImages(folder, split="val", cache=True)


def confident(model: torch.nn.Module) -> torch.nn.Module:
    """Logits of an untrained head spread out, so that some boxes pass the threshold."""
    head = model.get_submodule("head.classification_head")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(20)
    return model


def test_parts_drawn_side_by_side_are_the_same_files(tmp_path: Path) -> None:
    config = DrawConfig(images=130, size=64, seed=1)
    draw_detection_set(tmp_path / "one", config, "val")
    with ThreadPoolExecutor(3) as pool:
        draw_detection_set(tmp_path / "many", config, "val", pool)
    names = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*"))
    assert len(names) == 131
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()


def test_packing_keeps_pixels_and_scales_boxes(data: CocoImages) -> None:
    same, larger = pack_images(data, 96), pack_images(data, 144, threads=1)
    for index in range(len(data)):
        image, target = data[index]
        count = len(target["labels"])
        assert torch.equal(same.images[index], image)
        assert torch.equal(same.boxes[index, :count], target["boxes"])
        assert same.labels[index].tolist()[:count] == target["labels"].tolist()
        assert not same.labels[index, count:].any()
    torch.testing.assert_close(larger.boxes, 1.5 * same.boxes)
    torch.testing.assert_close(larger.boxes * larger.scale[:, None], same.boxes)


def test_mirrored_batches_move_boxes_with_pixels(data: CocoImages) -> None:
    packed = pack_images(data, 96)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(packed), generator=generator)
    mirrored = torch.rand(len(packed), generator=generator) < 0.5
    batches = list(packed.shuffled(16, torch.Generator().manual_seed(0), flip=True))
    images, boxes, labels = (torch.cat(parts) for parts in zip(*batches))
    assert mirrored.any()
    assert not mirrored.all()
    assert torch.equal(labels, packed.labels[order])
    for row, index in enumerate(order.tolist()):
        image, box = packed.images[index].float() / 255, packed.boxes[index].clone()
        if mirrored[row]:
            image, box[:, 0::2] = image.flip(-1), 96 - box[:, 0::2].flip(-1)
        assert torch.equal(images[row], image)
        assert torch.equal(boxes[row], box)


@pytest.mark.parametrize("depth", [10, 50])
def test_losses_and_gradients_are_torchvisions(data: CocoImages, depth: int) -> None:
    model = build_ssd(8, 96, depth=depth, width=8).train()
    packed = pack_images(data, 96)
    packed.labels[3] = 0  # an image without objects
    chosen = slice(0, 12)
    images = packed.images[chosen].float() / 255
    targets = [
        {"boxes": boxes[labels > 0], "labels": labels[labels > 0]}
        for boxes, labels in zip(packed.boxes[chosen], packed.labels[chosen])
    ]
    expected = model(list(images), targets)
    sum(expected.values()).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    anchors = default_boxes(model, 96)
    losses = ssd_losses(model, images, packed.boxes[chosen], packed.labels[chosen], anchors)
    sum(losses.values()).backward()
    assert losses.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(losses[name], value)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-5)


def test_detections_are_torchvisions(data: CocoImages) -> None:
    model = confident(build_ssd(8, 96, depth=10, width=8)).eval()
    packed = pack_images(data, 96)
    rows = torch.from_numpy(detect_packed(model, packed, batch_size=16))
    with torch.inference_mode():
        outputs = model([image.float() / 255 for image in packed.images])
    assert len(rows) == sum(len(output["scores"]) for output in outputs) > 500
    for image_id, output in zip(data.ids, outputs):
        mine = rows[rows[:, 0] == image_id]
        torch.testing.assert_close(mine[:, 5].float(), output["scores"])
        assert mine[:, 6].tolist() == output["labels"].tolist()
        corners = torch.cat([mine[:, 1:3], mine[:, 1:3] + mine[:, 3:5]], 1).float()
        torch.testing.assert_close(corners, output["boxes"], rtol=1e-4, atol=1e-3)
    figures = average_precision(data.coco, rows.numpy(), data.ids)
    again = evaluate(model, data.folder.parent, split="val")
    assert figures == pytest.approx(again, abs=1e-6, nan_ok=True)


def test_suppression_is_the_greedy_one() -> None:
    corner = torch.rand(6, 50, 2) * 40
    boxes = torch.cat([corner, corner + 5 + 30 * torch.rand(6, 50, 2)], -1)
    scores = torch.linspace(1, 0.1, 50)
    valid = torch.rand(6, 50) < 0.9
    kept = suppress(boxes, valid, 0.45)
    assert torch.equal(_suppress_together(boxes, valid, 0.45), kept)
    for group in range(6):
        inside = valid[group].nonzero().flatten()
        expected = inside[ops.nms(boxes[group][inside], scores[inside], 0.45)]
        assert kept[group].nonzero().flatten().tolist() == expected.tolist()
    for function in (suppress, _suppress_together):
        assert not function(boxes, torch.zeros_like(valid), 0.45).any()


@pytest.mark.parametrize("bf16", [False, True])
def test_a_detector_learns_from_packed_images(data: CocoImages, bf16: bool) -> None:
    packed = pack_images(CocoImages(data.folder.parent, split="val", limit=4), 96)
    model = build_ssd(8, 96, depth=10, width=16)
    steps = 5 if bf16 else 60
    rows = train_detector(model, packed, steps, 0.002, "cpu", bf16, optimizer="adamw", batch_size=2)
    assert len(rows) == steps
    assert rows[-1]["loss"] < (0.95 if bf16 else 0.5) * rows[0]["loss"]
    assert not model.training
