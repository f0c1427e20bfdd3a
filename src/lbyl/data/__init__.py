"""Real images for measuring: readers of the usual layouts, and top-1 accuracy."""

from lbyl.data.imageset import ImageSet
from lbyl.data.measure import accuracy, evaluate
from lbyl.data.reader import load

__all__ = ["ImageSet", "accuracy", "evaluate", "load"]
