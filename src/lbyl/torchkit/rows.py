"""Products of long rows, by the quicker of the two libraries that torch has on a processor.

torch multiplies matrices with one library and convolves with another, and only the second uses the
widest instructions of every maker's processors. What a convolution of 1×1 calls the gradient of its
weight is a product of rows: so that is what is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

# What rows are shown as; fewer images would be convolved by the first library.
IMAGES, LINES = 16, 4
GROUP = IMAGES * LINES
FEWEST_ROWS, FEWEST_COLUMNS = 256, 64  # of smaller ones the preparations are what takes time
WIDEST = "AVX512"  # torch's name for the instructions; where there are none both are as quick


def row_products(one: Tensor, other: Tensor) -> Tensor:
    """(c, d): oneᵀ · other, of rows (n, c) and (n, d)."""
    if not (convolves(one) and convolves(other)):
        return one.T @ other
    whole = len(one) - len(one) % GROUP
    images = [
        x[:whole].contiguous().view(IMAGES, LINES, whole // GROUP, -1).permute(0, 3, 1, 2)
        for x in (one, other)
    ]
    size = one.shape[1], other.shape[1], 1, 1
    products = conv2d_weight(images[1], size, images[0]).flatten(1)
    return products if whole == len(one) else products.addmm_(one[whole:].T, other[whole:])


def convolves(rows: Tensor) -> bool:
    """Whether products of such rows are quicker as gradients of a convolution."""
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and len(rows) >= FEWEST_ROWS
        and rows.shape[1] >= FEWEST_COLUMNS
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith(WIDEST)
    )
