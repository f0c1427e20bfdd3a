"""The directory that `lbyl compress` writes, all at once."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from lbyl import LbylError, Plan, Prepared, Result
from lbyl.app.cli.limit import in_time
from lbyl.app.cli.loading import construction, loading
from lbyl.app.cli.screen import Screen
from lbyl.app.deploy import quantise_onnx, table_of_steps
from lbyl.app.export import check_executorch, check_onnx, export_executorch, export_onnx
from lbyl.app.report import write_report
from lbyl.app.report.fill import parts, together
from lbyl.app.sources import Network, resolve
from lbyl.app.sources.hf import directory_and_task
from lbyl.app.sources.kinds import source_of
from lbyl.app.sources.yolo import WORKFLOW, is_ultralytics, write_yolo
from lbyl.latency import Timing
from lbyl.runtime.files import read_json, whole_directory, write_json
from lbyl.runtime.format import first_line
from lbyl.runtime.notes import noting
from lbyl.runtime.session import own_randomness
from lbyl.storage.configs import CONFIG, TIMM, beside, carry, timm_text
from lbyl.storage.files import (
    ABOUT,
    EXECUTORCH,
    INT8,
    MODEL,
    ONNX,
    PLAN,
    REPORT,
    SHOWN,
    outdated,
    plan_document,
    write_network,
)

LEFT_OUT = "left_out"  # under which report.json names what would have taken too long
SHARE, LEAST = 0.1, 10.0  # of the compression's seconds, and seconds that a report may take anyway
PAGE = 0.8  # of these for what the page shows; the rest is for the page


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
    settings: Mapping[str, Any] = field(default_factory=dict)  # that it was prepared with

    def write(
        self, screen: Screen, out: Path, runtimes: Runtimes = PYTORCH, report: bool = True
    ) -> dict[str, Any]:
        """Write it; what an earlier run wrote is replaced, or removed where it is out of date.

        Weights and plan are in place before anything else begins: files for other runtimes and the
        report take long, and may fail.
        """
        with (
            screen.stage("writing weights and plan"),
            noting() as notes,
            whole_directory(out, last=PLAN, stale=(*ABOUT, *outdated(out))) as folder,
        ):
            files = [*self._network(folder), PLAN]
            document = self.document(folder) | ({"notes": notes} if notes else {})
            write_json(folder / PLAN, document)
        written: dict[str, Any] = {"out": str(out), "notes": list(notes), "files": files}
        if runtimes != PYTORCH:
            with whole_directory(out, last=PLAN) as folder:
                written |= self._exports(screen, folder, runtimes, written)
                document |= {k: v for k, v in written.items() if k == DEPLOYMENT}
                write_json(folder / PLAN, document)
                files += sorted(file.name for file in folder.iterdir() if file.name != PLAN)
        if report:
            written["notes"] += self._report(screen, out, document)
            files += [name for name in (REPORT, SHOWN) if (out / name).is_file()]
        return written

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

    def _network(self, folder: Path) -> list[str]:
        """The weights, with what other libraries need to load them where they can."""
        kind, _, name = self.network.name.partition(":")
        source = Path(directory_and_task(name)[0]) if kind == "hf" else None
        files = write_network(self.result, folder, source)
        if kind == "timm":
            with beside(TIMM):
                text = timm_text(self.network.model, self.result.model, self.network.example)
                if text is not None:
                    (folder / TIMM).write_text(text, encoding="utf-8")
                    files.append(TIMM)
        if is_ultralytics(self.result.model):
            with beside(WORKFLOW):
                write_yolo(self.result.model, folder / WORKFLOW)
                files.append(WORKFLOW)
        if kind == "hf" and CONFIG not in files:
            carry(source, folder)
        return files

    def document(self, folder: Path) -> dict[str, Any]:
        """What plan.json holds, with the way to the original network so that commands find it."""
        document = plan_document(self.told, folder / MODEL)
        extra: dict[str, Any] = {"network": self.named.describe(), "command": command()}
        extra["settings"] = dict(self.settings)
        if self.origin is not None:  # whose units are those of every compression so far
            extra["settings"] |= {"include": None, "exclude": None}
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

    @own_randomness()
    def _steps(self, folder: Path) -> list[dict[str, Any]]:
        """What every step gives, from the original network in PyTorch to int8."""
        models = {"original": self.network.model, "slim": self.result.model}
        files = {"slim": folder / ONNX, "int8": folder / INT8}
        judge = self.prepared.judges.forecaster
        return table_of_steps(models, files, self.network.example, judge)

    def _report(self, screen: Screen, out: Path, document: dict[str, Any]) -> list[str]:
        """The report, in a tenth of the compression's time; what there is to say about it."""
        if not importlib.util.find_spec("jinja2"):
            return ["no report.html: it needs jinja2 (pip install 'lbyl[report]')"]
        seconds = max(LEAST, SHARE * sum(self.result.seconds.values()))
        again = f"\n    {report_command(self.named, out)}"
        try:
            with screen.stage("writing the report"):
                found, left_out = in_time(parts(self.prepared, self.result), PAGE * seconds)
                shown = together(found) | {LEFT_OUT: left_out}
                write_json(out / SHOWN, shown)
                page(document, self.told, out / REPORT, shown, self.named, out)
        except Exception as error:  # the network is written, whatever the report does
            return [f"no report.html: {first_line(error)}. To try again:{again}"]
        if not left_out:
            return []
        return [f"left out of report.html for time: {', '.join(left_out)}. To add them:{again}"]


def page(
    document: dict[str, Any],
    result: Result,
    path: Path,
    shown: dict[str, Any],
    network: Network,
    directory: Path,
    comparison: Any = None,
) -> None:
    """The report of what plan.json and report.json of a directory hold."""
    commands = [*document.get("earlier", []), document.get("command")]
    write_report(
        result,
        path,
        accuracy=document.get("accuracy"),
        latency=milliseconds(document.get("latency")),
        deployment=document.get(DEPLOYMENT),
        comparison=comparison,
        command="\n".join(filter(None, commands)) or None,
        loader="\n".join(loading(network, directory)),
        build=construction(network),
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


def before(known: Mapping[str, Any], model: str | None = None) -> Network | None:
    """The network that was compressed, with its weights, from what plan.json says of it.

    `model` names it where the plan does not or may not. None where it cannot be built again: no
    weights are known, or they are no longer there.
    """
    name, weights = model or str(known.get("name", "")), known.get("weights")
    source, inner = source_of(name)
    from_plan = source is not None and source.from_plan
    if (model is None and not from_plan) or (from_plan and weights is None):
        return None
    # Of a file that is the network and its weights there is nothing else to read.
    own = None if weights == inner or (source and source.own_weights) else weights
    try:
        network = resolve(name, own, known.get("input_shape"), known.get("classes"))
    except LbylError:
        return None
    return network.scaled(known.get("mean"), known.get("std"))


def report_command(network: Network, out: Path) -> str:
    """The command that writes the report of a directory again, with all that it can show."""
    source, _ = source_of(network.name)
    named = [] if source is not None and source.from_plan else ["--model", network.name]
    return shlex.join(["lbyl", "report", str(out), *named])


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
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LbylError(f"the result in {PLAN} is incomplete: {error}") from error


def milliseconds(seconds: dict[str, float] | None) -> dict[str, float]:
    """Times as the report shows them."""
    return {name: 1e3 * value for name, value in (seconds or {}).items()}


def command() -> str:
    """The command line that is running, to repeat it."""
    return shlex.join(["lbyl", *sys.argv[1:]])
