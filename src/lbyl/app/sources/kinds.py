"""Where networks come from, a file each; every one puts itself into `SOURCES`."""

from lbyl.app.sources import hubs  # noqa: F401 (listed first)

# isort: split
from lbyl.app.sources import hf, onnx, smp, ultralytics  # noqa: F401 (they register)
from lbyl.app.sources.base import SOURCES, Source, source_of
from lbyl.app.sources.python import from_file, from_module

__all__ = ["SOURCES", "Source", "from_file", "from_module", "source_of"]
