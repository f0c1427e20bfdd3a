"""The directory that `lbyl compress` writes, all at once."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lbyl import Prepared, Result
from lbyl.cli.screen import Screen
from lbyl.export import export_onnx
from lbyl.latency import Timing
from lbyl.models import Network
from lbyl.report import gather, write_report
from lbyl.storage import MODEL, PLAN, plan_document
from lbyl.torchkit.files import whole_directory, write_json, write_tensors
from lbyl.torchkit.tensors import tensors

REPORT, ONNX = "report.html", "model.onnx"
OPTIONAL = (REPORT, ONNX, f"{ONNX}.data")


@dataclass(frozen=True)
class Package:
    """A compressed network with what is known about it."""

    network: Network
    prepared: Prepared
    result: Result
    accuracy: dict[str, float] | None = None
    times: dict[str, Timing] | None = None  # of the original and the slim network

    def write(
        self, screen: Screen, out: Path, onnx: bool = False, report: bool = True
    ) -> dict[str, Any]:
        """Write it; what an earlier run wrote is replaced, or removed where it is out of date."""
        written: dict[str, Any] = {"out": str(out), "notes": []}
        with whole_directory(out, last=PLAN) as folder:
            with screen.stage("writing weights and plan"):
                write_tensors(folder / MODEL, tensors(self.result.model), {"format": "pt"})
                write_json(folder / PLAN, self.document())
            if onnx:
                written["onnx_error"] = self._onnx(screen, folder / ONNX)
            if report:
                written["notes"] += self._report(screen, folder / REPORT, out)
            files = [n for n in (MODEL, PLAN, *OPTIONAL) if (folder / n).is_file()]
        for name in set(OPTIONAL) - set(files):  # of an earlier run: out of date
            (out / name).unlink(missing_ok=True)
        return written | {"files": files}

    def document(self) -> dict[str, Any]:
        """plan.json, with the network's name so that other commands find it."""
        extra: dict[str, Any] = {"network": self.network.describe(), "command": command()}
        if self.accuracy:
            extra["accuracy"] = self.accuracy
        if self.times:
            extra["latency"] = {name: timing.median for name, timing in self.times.items()}
        return plan_document(self.result) | extra

    def _onnx(self, screen: Screen, path: Path) -> float:
        with screen.stage("exporting to ONNX and checking it"):
            return export_onnx(self.result.model, self.network.example, path)

    def _report(self, screen: Screen, path: Path, out: Path) -> list[str]:
        if not importlib.util.find_spec("jinja2"):
            return ["no report.html: it needs jinja2 (pip install 'lbyl[report]')"]
        with screen.stage("writing the report"):
            write_report(
                self.result,
                path,
                accuracy=self.accuracy,
                latency=milliseconds(self.document().get("latency")),
                command=command(),
                loader="\n".join(loading(self.network, str(out))),
                **gather(self.prepared, self.result),
            )
        return []


def milliseconds(seconds: dict[str, float] | None) -> dict[str, float]:
    """Times as the report shows them."""
    return {name: 1e3 * value for name, value in (seconds or {}).items()}


def command() -> str:
    """The command line that is running, to repeat it."""
    return shlex.join(["lbyl", *sys.argv[1:]])


def loading(network: Network, out: str) -> list[str]:
    """Python that loads what was written."""
    source, _, name = network.name.partition(":")
    options = "" if network.classes is None else f", num_classes={network.classes}"
    if source == "torchvision":
        first = "import lbyl, torchvision"
        made = f'torchvision.models.get_model("{name}"{options})'
    elif source == "timm":
        first, made = "import lbyl, timm", f'timm.create_model("{name}"{options})'
    elif source == "lbyl":
        first = "import lbyl; from lbyl.models import zoo"
        made = f'zoo.create("{name}")'
    elif source == "hf":
        kind = type(network.model).__name__
        first = f"import lbyl; from transformers import {kind}"
        made = f'{kind}.from_pretrained("{name}")'
    elif ".py:" in network.name:
        path, _, function = network.name.rpartition(":")
        first, made = f"import lbyl; from {Path(path).stem} import {function}", f"{function}()"
    else:
        first, made = "import lbyl", "the_original_network"
    return [first, f'model = lbyl.load("{out}", model={made})']
