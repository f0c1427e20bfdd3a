"""Images with channels innermost are given only to networks that compute the same of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.torchkit.layout import channels_last, prefers_channels_last


class Viewing(nn.Module):
    """Views its features as vectors, which other layouts do not allow."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.how == "view":
            return self.head(x.view(len(x), -1))
        if self.how == "by hand":
            return self.head(x.as_strided((len(x), 4 * 36), (4 * 36, 1)))
        return self.head(x.flatten(1))


@pytest.mark.parametrize(("how", "fits"), [("flatten", True), ("view", False), ("by hand", False)])
def test_networks_that_need_their_own_layout_keep_it(how: str, fits: bool) -> None:
    model, x = Viewing(how).eval(), torch.zeros(2, 3, 8, 8)
    assert prefers_channels_last(model, x) is fits
    inputs = lbyl.prepare(model, x, data=16).fresh.collection(16)
    (batch,) = inputs.batches
    assert batch.is_contiguous(memory_format=torch.channels_last) is fits


def test_networks_without_convolutions_have_nothing_to_gain() -> None:
    assert not prefers_channels_last(nn.Linear(8, 2), torch.zeros(1, 3, 8, 8))


def test_only_images_change_their_layout_and_no_value_does() -> None:
    image, mask = torch.randn(2, 3, 4, 4), torch.ones(2, 5)
    moved = channels_last({"image": image, "mask": mask})
    assert moved["mask"] is mask and torch.equal(moved["image"], image)
    assert moved["image"].stride() != image.stride()
