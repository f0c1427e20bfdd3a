"""scikit-learn's 1,797 handwritten digits of 8×8 pixels, always divided in the same way."""

from __future__ import annotations

import numpy as np

from lbyl.data.imageset import ImageSet
from lbyl.data.pictures import sized
from lbyl.exceptions import LbylError

TRAINING = 1000  # the other 797 are held out


def read_digits(split: str, size: int | None = None) -> ImageSet:
    """The held-out digits (``test``) or those that trained the demonstration (``train``)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LbylError("the digits need scikit-learn: pip install lbyl[demo]") from error
    bunch = load_digits()
    order = np.random.RandomState(0).permutation(len(bunch.target))
    chosen = order[:TRAINING] if split == "train" else order[TRAINING:]
    # Stored as 0..16; every set here is 0..255.
    pixels = np.rint(bunch.images[chosen] * (255 / 16)).astype(np.uint8)[..., None]
    names = [str(digit) for digit in range(10)]
    return ImageSet(sized(pixels, size), bunch.target[chosen], names, name=f"digits {split}")
