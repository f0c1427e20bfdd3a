"""The directory that `lbyl compress` writes, all at once."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from lbyl import LbylError, Plan, Prepared, Result
from lbyl.cli.screen import Screen
from lbyl.configs import CONFIG, TIMM, carry, timm_text, why_not
from lbyl.deploy import quantise_onnx, table_of_steps
from lbyl.export import check_executorch, check_onnx, export_executorch, export_onnx
from lbyl.latency import Timing
from lbyl.models import Network
from lbyl.models.sources import source_of
from lbyl.models.yolo import WORKFLOW, is_ultralytics, write_yolo
from lbyl.report import gather, write_report
from lbyl.storage import PLAN, plan_document, write_network
from lbyl.torchkit.fallbacks import noting
from lbyl.torchkit.files import read_json, whole_directory, write_json

REPORT, SHOWN = "report.html", "report.json"
ONNX, INT8, EXECUTORCH = "model.onnx", "model.int8.onnx", "model.pte"
OPTIONAL = (REPORT, SHOWN, ONNX, f"{ONNX}.data", INT8, EXECUTORCH)


@dataclass(frozen=True)
class Runtimes:
    """What a network is written for besides PyTorch."""

    onnx: bool = False
    int8: bool = False
    executorch: bool = False

    def check(self) -> None:
        """That what is needed for it is installed."""
        if self.onnx:
            check_onnx()
        if self.executorch:
            check_executorch()


PYTORCH = Runtimes()
DEPLOYMENT = "deployment"  # under which plan.json has the table of steps


@dataclass(frozen=True)
class Package:
    """A compressed network with what is known about it."""

    network: Network
    prepared: Prepared
    result: Result
    accuracy: dict[str, float] | None = None
    times: dict[str, Timing] | None = None  # of the original and the slim network

    def write(
        self, screen: Screen, out: Path, runtimes: Runtimes = PYTORCH, report: bool = True
    ) -> dict[str, Any]:
        """Write it; what an earlier run wrote is replaced, or removed where it is out of date."""
        written: dict[str, Any] = {"out": str(out), "notes": []}
        with whole_directory(out, last=PLAN) as folder:
            with screen.stage("writing weights and plan"):
                weights = self._network(folder, written)
            written |= self._exports(screen, folder, runtimes, written)
            document = self.document() | {k: v for k, v in written.items() if k == DEPLOYMENT}
            write_json(folder / PLAN, document)
            if report:
                written["notes"] += self._report(screen, folder / REPORT, out, document)
            files = [n for n in (*weights, PLAN, *OPTIONAL) if (folder / n).is_file()]
        for name in set(OPTIONAL) - set(files):  # of an earlier run: out of date
            (out / name).unlink(missing_ok=True)
        return written | {"files": files}

    @cached_property
    def origin(self) -> dict[str, Any] | None:
        """What plan.json says of the network given, where that was compressed before."""
        return origin(self.network)

    @cached_property
    def told(self) -> Result:
        """The result as one of the original network, however often that was compressed."""
        if self.origin is None:
            return self.result
        earlier = stored(self.origin, self.result.model)
        return self.result.behind(earlier.plan, earlier.before)

    @cached_property
    def named(self) -> Network:
        """The network under the name of the original."""
        return self.network if self.origin is None else renamed(self.network, self.origin)

    def _network(self, folder: Path, written: dict[str, Any]) -> list[str]:
        """The weights, with a config.json where Transformers can say the new sizes."""
        kind, _, name = self.network.name.partition(":")
        source = Path(name) if kind == "hf" else None
        files = write_network(self.result, folder, source, self.network.example)
        if kind == "timm":
            text = timm_text(self.network.model, self.result.model, self.network.example)
            if text is not None:
                (folder / TIMM).write_text(text, encoding="utf-8")
                files.append(TIMM)
        if is_ultralytics(self.result.model):
            write_yolo(self.result.model, folder / WORKFLOW)
            files.append(WORKFLOW)
        if kind == "hf" and CONFIG not in files:
            written["notes"].append(why_not(self.result.plan, written["out"]))
            carry(source, folder)
        return files

    def document(self) -> dict[str, Any]:
        """What plan.json holds, with the way to the original network so that commands find it."""
        document = plan_document(self.told)
        extra: dict[str, Any] = {"network": self.named.describe(), "command": command()}
        if self.origin is not None:
            document["shapes"] = self.origin.get("shapes", {})
            extra["network"] = self.origin.get("network")
            extra["earlier"] = [*self.origin.get("earlier", []), self.origin.get("command")]
        if self.accuracy:
            extra["accuracy"] = self.accuracy
        if self.times:
            extra["latency"] = {name: timing.median for name, timing in self.times.items()}
        return document | extra

    def _exports(
        self, screen: Screen, folder: Path, runtimes: Runtimes, written: dict[str, Any]
    ) -> dict[str, Any]:
        """The network for other runtimes, and with int8 what every step gives."""
        made: dict[str, Any] = {}
        slim, example = self.result.model, self.network.example
        if runtimes.onnx:
            with screen.stage("exporting to ONNX and checking it"):
                made["onnx_error"] = export_onnx(slim, example, folder / ONNX)
        if runtimes.executorch:
            with screen.stage("exporting to ExecuTorch and checking it"):
                made["executorch_error"] = export_executorch(slim, example, folder / EXECUTORCH)
        if runtimes.int8:
            with screen.stage("quantising"):
                seen = self.prepared.own or self.prepared.fresh.collection()
                quantise_onnx(folder / ONNX, folder / INT8, list(seen.batches))
            with screen.stage("timing every step"), noting() as notes:
                made[DEPLOYMENT] = self._steps(folder)
            made["notes"] = [*written["notes"], *notes]
        return made

    def _steps(self, folder: Path) -> list[dict[str, Any]]:
        """What every step gives, from the original network in PyTorch to int8."""
        models = {"original": self.network.model, "slim": self.result.model}
        files = {"slim": folder / ONNX, "int8": folder / INT8}
        judge = self.prepared.judges.forecaster
        return table_of_steps(models, files, self.network.example, judge)

    def _report(self, screen: Screen, path: Path, out: Path, document: dict[str, Any]) -> list[str]:
        if not importlib.util.find_spec("jinja2"):
            return ["no report.html: it needs jinja2 (pip install 'lbyl[report]')"]
        with screen.stage("writing the report"):
            shown = gather(self.prepared, self.result)
            write_json(path.with_name(SHOWN), shown)
            page(document, self.told, path, shown, loading(self.named, str(out)))
        return []


def page(
    document: dict[str, Any],
    result: Result,
    path: Path,
    shown: dict[str, Any],
    lines: list[str],
    comparison: Any = None,
) -> None:
    """The report of what plan.json and report.json hold."""
    commands = [*document.get("earlier", []), document.get("command")]
    write_report(
        result,
        path,
        accuracy=document.get("accuracy"),
        latency=milliseconds(document.get("latency")),
        deployment=document.get(DEPLOYMENT),
        comparison=comparison,
        command="\n".join(filter(None, commands)) or None,
        loader="\n".join(lines),
        afterwards=document.get("afterwards"),
        **shown,
    )


def origin(network: Network) -> dict[str, Any] | None:
    """plan.json of the directory that a network was read from, None where it was another file."""
    for place in (network.name, network.weights):
        if place and (Path(place) / PLAN).is_file():
            document: dict[str, Any] = read_json(Path(place) / PLAN)
            return document
    return None


def renamed(network: Network, document: dict[str, Any]) -> Network:
    """The network under the name it was compressed by."""
    known = document.get("network") or {}
    return replace(network, name=str(known.get("name", network.name)))


def stored(document: dict[str, Any], model: nn.Module) -> Result:
    """The result that plan.json holds, with one clear error where it holds none."""
    if not isinstance(document.get("result"), dict):
        raise LbylError(f"this {PLAN} holds no result: compress the network again")
    plan = Plan.from_dict(document)
    try:
        return Result.from_dict(document["result"], model, plan)
    except (KeyError, TypeError) as error:
        raise LbylError(f"the result in {PLAN} is incomplete: {error}") from error


def milliseconds(seconds: dict[str, float] | None) -> dict[str, float]:
    """Times as the report shows them."""
    return {name: 1e3 * value for name, value in (seconds or {}).items()}


def command() -> str:
    """The command line that is running, to repeat it."""
    return shlex.join(["lbyl", *sys.argv[1:]])


def loading(network: Network, out: str) -> list[str]:
    """Python that loads what was written, ready to use."""
    source, place = source_of(network.name)
    if source is not None and source.from_plan:  # plan.json says which network it was
        return ["import lbyl", f'model = lbyl.load("{out}")']
    if source is not None and source.prefix == "hf":
        kind = type(network.model).__name__
        if (Path(out) / CONFIG).is_file():
            return [f"from transformers import {kind}", f'model = {kind}.from_pretrained("{out}")']
        first = f"import lbyl; from transformers import {kind}"
        made = f'{kind}.from_pretrained("{place}")'
    elif ":" in network.name:
        module, _, function = network.name.rpartition(":")
        module = Path(module).stem if module.endswith(".py") else module
        first, made = f"import lbyl; from {module} import {function}", f"{function}()"
    else:
        first, made = "import lbyl", "the_original_network"
    return [first, f'model = lbyl.load("{out}", model={made}).eval()']
