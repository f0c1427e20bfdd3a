"""Small networks of other packages, built from configurations: nothing is downloaded.

One entry is a package, a name and what builds a network and inputs for it.
"""

from __future__ import annotations

from functools import cache

from support.foreign import diffusion, hugging, medical, pictures, segmenters, yolo
from support.published import Build

PACKAGES = {
    "transformers": hugging.builds,
    "timm": pictures.timm_builds,
    "ultralytics": yolo.builds,
    "segmentation_models_pytorch": segmenters.builds,
    "diffusers": diffusion.builds,
    "monai": medical.builds,
    "torchvision": pictures.torchvision_builds,
}
"""Package, as it is imported, and what gives its networks; none of them is imported before."""


@cache
def every() -> dict[str, Build]:
    """All networks by "package/name"."""
    return {
        f"{package}/{name}": build
        for package, builds in PACKAGES.items()
        for name, build in builds().items()
    }
