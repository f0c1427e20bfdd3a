"""The page about one compression: what each of its parts shows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lbyl import methods
from lbyl.app.deploy import HEADINGS, step_texts
from lbyl.app.report import numbers
from lbyl.app.report.charts import Chart, error_chart, kept_chart, looks, ratio_chart, series_names
from lbyl.app.report.heatmap import packed
from lbyl.app.report.html import write_page
from lbyl.app.report.loader import loader_snippet
from lbyl.result import Result
from lbyl.runtime.format import human, percent
from lbyl.scoring.forecast import Forecast

Rows = Sequence[Mapping[str, Any]]

MEASURES = (
    ("error", "Error at the consumers", "of their outputs, relative to the outputs' variance"),
)
COLUMNS = {"alone": "harm alone", "error": "error"}


FORETOLD = {"kept": "of the accuracy forecast to be kept", "agreement": "of the answers equal"}


@dataclass(frozen=True)
class Card:
    """One headline figure, before and after."""

    title: str
    before: str
    after: str
    change: str
    fraction: float | None  # of what there was, for the bar under it
    note: str = ""


def write_report(
    result: Result,
    path: str | Path,
    *,
    accuracy: Mapping[str, float] | None = None,
    comparison: Rows | Mapping[str, Any] | None = None,
    errors: Mapping[str, Rows] | None = None,
    delivery: Mapping[str, Any] | None = None,
    latency: Mapping[str, Any] | None = None,
    deployment: Rows | None = None,
    command: str | None = None,
    loader: str | None = None,
    build: str | None = None,
    afterwards: str | None = None,
    inputs: str | None = None,
    alone: Mapping[str, float] | None = None,
    further: Mapping[str, Any] | None = None,
    left_out: Sequence[str] = (),
) -> Path:
    """Write one self-contained HTML file about a compression.

    `accuracy` gives percentages by name, "original" and "slim" first of all. `comparison` has a
    row for every method, criterion and ratio with its "accuracy" or predicted "error", or is what
    `lbyl compare --json` printed, whose original was measured on the same images. `errors`
    and `delivery` are what `lbyl.app.report.gather` computes. `latency` gives milliseconds "before"
    and "after", and whatever else should be said of how they were measured; `deployment` are rows
    of `lbyl.app.deploy.measure_steps`, a runtime each. `loader` are lines
    that load the saved result with this package; a program without it is always shown, in which
    `build` are lines that name the network of the original size as `original`.
    `afterwards` says what was done to the network since, `inputs` is a picture (PNG in base64) of
    what the networks were compared on. `alone` is how far the network diverges where one unit
    alone is pruned, `further` what pruning a tenth more would bring; `gather` computes both.
    `left_out` names parts that would have taken too long.
    """
    measured, table = accuracy or {}, dict(errors or {})
    every = _every_row(result, alone)
    own = _pruned(every)
    table = table or {str(result.method["name"]): own}
    compared = _comparison(*_compared_with(comparison, measured.get("original")))
    return write_page(
        "template.html",
        path,
        **_story(result),
        **_overview(result, every, measured, latency or {}, deployment or ()),
        **_layers(every),
        afterwards=afterwards,
        left_out=list(left_out),
        inputs=_base64(inputs),
        further=_further(result, further),
        error_charts=_error_charts(own, table),
        methods=looks(list(table)),
        comparison=compared,
        matrices=packed(delivery or {}),
        largest=_largest(delivery or {}),
        tabs=_tabs(bool(delivery), compared is not None),
        command=command,
        loader=loader,
        program=loader_snippet(result, build=build),
    )


def _every_row(result: Result, alone: Mapping[str, float] | None) -> list[dict[str, Any]]:
    """Rows of the result, each with how much its unit hurts alone where that is known."""
    told = alone if isinstance(alone, Mapping) else {}
    harms = {k: v for k, v in told.items() if numbers.finite(v) is not None}
    return [{**asdict(row), "alone": harms.get(row.unit)} for row in result.rows]


def _pruned(rows: Rows) -> list[Mapping[str, Any]]:
    """Rows of units that lose channels."""
    return [row for row in rows if row["kept"] < row["channels"]]


def _overview(
    result: Result,
    every: Rows,
    accuracy: Mapping[str, float],
    latency: Mapping[str, Any],
    deployment: Rows,
) -> dict[str, Any]:
    """What the first part shows: headlines, bars by unit, and what every step gives."""
    own = _pruned(every)
    return {
        "cards": _cards(result, accuracy, latency, own),
        "accuracies": _accuracies(accuracy),
        "fallbacks": list(result.fallbacks),
        "headings": HEADINGS,
        "deployment": step_texts(deployment),
        "kept": kept_chart(every),
        "hurting": _hurting(own),
    }


def _layers(every: Rows) -> dict[str, Any]:
    """What the second part shows: units that lose channels, and those kept whole."""
    own = _pruned(every)
    return {
        "rows": own,
        "columns": {k: v for k, v in COLUMNS.items() if any(row[k] is not None for row in own)},
        "whole": [row["unit"] for row in every if row["kept"] == row["channels"]],
    }


def _hurting(rows: Rows) -> list[dict[str, Any]]:
    """The layers that hurt most when they alone are pruned, the worst first."""
    known = [row for row in rows if row["alone"] is not None]
    worst = sorted(known, key=lambda row: -row["alone"])
    most = max((row["alone"] for row in worst), default=0.0) or 1.0
    return [{**row, "percent": 100 * row["alone"] / most} for row in worst]


def _further(result: Result, further: Mapping[str, Any] | None) -> str | None:
    """What the next step would bring, as a sentence."""
    if not isinstance(further, Mapping):
        return None
    parts = []
    for key, noun in (("parameters", "parameters"), ("macs", "MACs")):
        size = numbers.finite(further.get(key))
        if size is not None:
            parts.append(
                f"{human(int(size))} {noun} instead of {human(getattr(result.after, key))}"
            )
    told = {} if result.forecast is None else asdict(result.forecast)
    for key, what in FORETOLD.items():
        now, then = numbers.finite(told.get(key)), numbers.finite(further.get(key))
        if now is not None and then is not None:
            parts.append(f"{percent(then)} {what} instead of {percent(now)}")
            break
    return "; ".join(parts) or None


def _base64(text: str | None) -> str | None:
    """Nothing but base64 gets into the address of a picture."""
    whole = text is not None and re.fullmatch(r"[A-Za-z0-9+/]+=*", text)
    return text if whole else None


def _tabs(delivery: bool, comparison: bool) -> list[tuple[str, str]]:
    """Only parts that there is something to show in."""
    shown = [("overview", "Overview"), ("layers", "Layers"), ("errors", "Errors")]
    shown += [("delivery", "Delivery")] if delivery else []
    shown += [("compare", "Methods")] if comparison else []
    return [*shown, ("repeat", "Repeat and load")]


def _largest(delivery: Mapping[str, Any]) -> int:
    """The matrix shown first: the largest has most to see."""
    sizes = [m["channels"] if isinstance(m, Mapping) else len(m) for m in delivery.values()]
    return sizes.index(max(sizes)) if sizes else 0


def _story(result: Result) -> dict[str, Any]:
    """What was done, in words."""
    pruned = [row for row in result.rows if row.kept < row.channels]
    return {
        "network": type(result.model).__name__,
        "method": str(result.method["name"]),
        "by_channel": not methods.resolve(dict(result.method)).by_unit,
        "story": result.story,
        "refinement": result.refinement,
        "pruned": sum(row.channels - row.kept for row in pruned),
        "channels": sum(row.channels for row in result.rows),
        "unprunable": _by_reason(result.graph.unprunable),
        "stages": _stages(result.seconds),
        "total_seconds": sum(result.seconds.values()),
    }


def _when(stage: str) -> int:
    """Stages in the order they run, others behind them."""
    order = ("trace", "images", "collect", "plan", "restore", "refine", "forecast")
    return order.index(stage) if stage in order else len(order)


def _by_reason(unprunable: Mapping[str, str]) -> dict[str, list[str]]:
    """Many layers share a reason, which then need be read only once."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in unprunable.items():
        by_reason.setdefault(reason, []).append(name)
    return by_reason


def _stages(seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    total = sum(seconds.values()) or 1.0
    return [
        {"name": name, "seconds": seconds[name], "percent": 100 * seconds[name] / total}
        for name in sorted(seconds, key=_when)
    ]


def _cards(
    result: Result, accuracy: Mapping[str, float], latency: Mapping[str, Any], rows: Rows
) -> list[Card]:
    before, after = result.before, result.after
    measured, told = _accuracy_card(accuracy), _forecast_card(result.forecast)
    cards = [card for card in (told, measured) if card] or [_error_card(rows, result.data)]
    sizes = (
        ("Parameters", before.parameters, after.parameters, human),
        ("Multiply–adds", before.macs, after.macs, human),
        ("Size of weights", before.bytes, after.bytes, numbers.size),
    )
    for title, was, now, show in sizes:
        fraction = now / was if was else None
        cards.append(Card(title, show(was), show(now), numbers.change(was, now), fraction))
    timed = _latency_card(latency)
    return [*cards, timed] if timed else cards


def _forecast_card(forecast: Forecast | None) -> Card | None:
    """The first figure: how much accuracy is kept, as far as that is known without labels."""
    if forecast is None:
        return None
    where = f"on {forecast.inputs} {forecast.source} inputs"
    if forecast.boxes is not None:
        agree = forecast.agreement
        note = f"of one class, overlapping by half; {forecast.boxes} boxes of the original {where}"
        return Card("Boxes that agree", "", percent(agree), "", agree, note)
    if forecast.agreement is None:
        apart = f"squared error of the outputs {where}, relative to their variance"
        return Card("Difference", "", numbers.short(forecast.divergence), "", None, apart)
    equal = percent(forecast.agreement)
    if forecast.one_answer:
        alike = f"the original answers all inputs alike; {equal} equal answers {where}"
        return Card("Accuracy kept", "", "cannot be told", "", None, alike)
    if forecast.kept is None:
        return Card("Equal answers", "", equal, "", forecast.agreement, where)
    interval = f"at least {percent(forecast.low)}"
    behind = f"; {forecast.standing}" if forecast.standing else ""
    note = f"forecast without labels: {equal} equal answers {where}{behind}"
    kept = percent(forecast.kept)
    return Card("Accuracy kept", "", f"about {kept}", interval, forecast.kept, note)


def _accuracy_card(accuracy: Mapping[str, float]) -> Card | None:
    was, now = (numbers.finite(accuracy.get(key)) for key in ("original", "slim"))
    if now is None:
        return None
    if was is None:
        return Card("Accuracy", "", f"{now:.2f} %", "", now / 100)
    return Card("Accuracy", f"{was:.2f} %", f"{now:.2f} %", numbers.points(was, now), now / 100)


def _error_card(rows: Rows, data: str | None) -> Card:
    """Without labelled images the error of what was written is all that can be told."""
    values = [value for row in rows if (value := numbers.finite(row["error"])) is not None]
    if values:
        mean = numbers.short(sum(values) / len(values))
        note = f"mean error at the consumers' outputs on {data} statistics; no labelled images"
        return Card("Predicted error", "", mean, "", None, f"{note} were given")
    return Card("Predicted error", "", numbers.DASH, "", None, "nothing was measured")


def _latency_card(latency: Mapping[str, Any]) -> Card | None:
    was = numbers.finite(latency.get("before", latency.get("original")))
    now = numbers.finite(latency.get("after", latency.get("slim")))
    if was is None or now is None or was <= 0:
        return None
    rest = {k: v for k, v in latency.items() if k not in ("before", "after", "original", "slim")}
    note = ", ".join(f"{k} {v}" for k, v in rest.items())
    change = numbers.change(was, now)
    return Card(
        "Latency", f"{numbers.short(was)} ms", f"{numbers.short(now)} ms", change, now / was, note
    )


def _accuracies(accuracy: Mapping[str, float]) -> list[dict[str, Any]]:
    """A bar for each, where there is more to tell than before and after."""
    known = {k: numbers.finite(v) for k, v in accuracy.items()}
    bars = [{"name": k, "value": v} for k, v in known.items() if v is not None]
    return bars if len(bars) > 2 else []


def _error_charts(own: Rows, table: Mapping[str, Rows]) -> list[Chart]:
    units = list(dict.fromkeys(str(row["unit"]) for rows in table.values() for row in rows))
    order = [row["unit"] for row in own if row["unit"] in units]
    units = order + [unit for unit in units if unit not in order]
    charts = [error_chart(title, note, key, units, table) for key, title, note in MEASURES]
    return [chart for chart in charts if chart.drawn]


def _compared_with(
    given: Rows | Mapping[str, Any] | None, original: float | None
) -> tuple[Rows, float | None]:
    """Rows of a comparison, and the accuracy of the original on the images of these rows."""
    if not isinstance(given, Mapping):
        return given or (), original
    own = given.get("original")
    measured = own.get("accuracy") if isinstance(own, Mapping) else None
    return given.get("rows") or (), numbers.finite(measured)


def _comparison(rows: Rows, original: float | None) -> dict[str, Any] | None:
    """Rows for the table, and a chart where there are numbers to draw."""
    if not rows:
        return None
    accurate = any(numbers.finite(row.get("accuracy")) is not None for row in rows)
    key, title = ("accuracy", "Accuracy, %") if accurate else ("error", "Predicted error")
    numbered = [row for row in rows if numbers.finite(row.get(key)) is not None]
    ratios = {row.get("ratio") for row in numbered}
    names = series_names(rows)
    return {
        "rows": [_compared(row) for row in rows],
        "accurate": accurate,
        "erring": any(row.get("error") is not None for row in rows),
        "methods": looks(list(dict.fromkeys(names))),
        "chart": ratio_chart(rows, key, title, numbers.finite(original) if accurate else None)
        if len(ratios) > 1
        else None,
        "bars": _bars(numbered, key) if len(ratios) == 1 else [],
        "title": title,
    }


def _compared(row: Mapping[str, Any]) -> dict[str, str]:
    error, ratio = row.get("error"), numbers.finite(row.get("ratio"))
    value = numbers.finite(row.get("accuracy"))
    return {
        "method": str(row.get("method", "")),
        "criterion": str(row.get("criterion") or "its own"),
        "ratio": numbers.DASH if ratio is None else f"{ratio:g}",
        "accuracy": numbers.DASH if value is None else f"{value:.2f}",
        # What failed has a message instead of a number.
        "error": error if isinstance(error, str) else numbers.short(error),
    }


def _bars(rows: Rows, key: str) -> list[dict[str, Any]]:
    """With a single ratio there is no line to draw."""
    names = series_names(rows)
    style = looks(list(dict.fromkeys(names)))
    values = [float(row[key]) for row in rows]
    top = 100.0 if key == "accuracy" else max([v for v in values if math.isfinite(v)] + [1e-12])
    return [
        {"name": name, "look": style[name], "value": value, "percent": 100 * value / top}
        for name, value in zip(names, values)
    ]
