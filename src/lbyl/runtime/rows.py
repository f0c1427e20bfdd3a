"""Products of long rows, by the quicker of the two libraries that torch has on a processor.

torch multiplies matrices with one library and convolves with another, and on AMD's processors only
the second uses their widest instructions. What a convolution of 1×1 calls the gradient of its
weight is a product of rows: so that is what is asked for there.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

# What rows are shown as; fewer images would be convolved by the first library.
IMAGES, LINES = 16, 4
GROUP = IMAGES * LINES
FEWEST_PRODUCTS = 1 << 23  # of numbers: of fewer the preparations are what takes time
TOLD = 1 << 12  # characters of what Linux tells of the first processor


def row_products(one: Tensor, other: Tensor) -> Tensor:
    """(c, d): oneᵀ · other, of rows (n, c) and (n, d)."""
    if not convolves(one, other):
        return one.T @ other
    whole = len(one) - len(one) % GROUP
    images = [
        x[:whole].contiguous().view(IMAGES, LINES, whole // GROUP, -1).permute(0, 3, 1, 2)
        for x in (one, other)
    ]
    size = one.shape[1], other.shape[1], 1, 1
    products = conv2d_weight(images[1], size, images[0]).flatten(1)
    return products if whole == len(one) else products.addmm_(one[whole:].T, other[whole:])


def convolves(one: Tensor, other: Tensor) -> bool:
    """Whether products of such rows are quicker as gradients of a convolution."""
    return (
        one.device.type == "cpu"
        and one.dtype == other.dtype == torch.float32
        and len(one) >= GROUP
        and one.numel() * other.shape[1] >= FEWEST_PRODUCTS
        and _convolutions_are_quicker()
    )


@cache
def _convolutions_are_quicker() -> bool:
    """Whether this is a processor of AMD's with AVX-512, of which MKL uses half the width."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as told:
            maker = told.read(TOLD)
    except OSError:  # not Linux
        maker = platform.processor()
    return "AuthenticAMD" in maker and "AVX512" in torch.backends.cpu.get_cpu_capability()
