"""Where bars, lines and ticks lie: geometry only, the template draws it as SVG.

What the design must satisfy: colours and markers go by the method's name, so that a method looks
the same in every chart; nothing but plain numbers and strings reaches the template.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lbyl.app.report.numbers import finite, short

WIDTH = 1044.0  # that of the page, so that letters have their size
NARROW = 760.0  # for charts with few positions, which also fit a phone
LEFT, RIGHT, TOP = 48.0, 12.0, 12.0
# Methods of the papers have a look of their own; others take what is left, in order.
LOOKS = {"none": 0, "neuron-merging": 1, "lbyl": 2, "echo": 3, "fold": 4, "moments": 5}
LOOK_COUNT = 8
FRONT_LOOK = 0  # of the line that leads through the best points: grey, as a reference
LOGARITHMIC_FROM = 20.0  # largest over median


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    tip: str


@dataclass(frozen=True)
class Series:
    name: str
    look: int
    path: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Bar:
    x: float
    width: float
    full: tuple[float, float]  # top and height of the whole
    part: tuple[float, float]  # of what is kept
    tip: str


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """A drawing in its own coordinates."""

    title: str
    note: str
    width: float
    height: float
    bottom: float  # y of the horizontal axis
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    slanted: bool
    series: tuple[Series, ...] = ()
    bars: tuple[Bar, ...] = ()
    line: Tick | None = None  # a horizontal line to compare with
    x_title: str = ""

    @property
    def left(self) -> float:
        return LEFT

    @property
    def right(self) -> float:
        return self.width - RIGHT

    @property
    def drawn(self) -> bool:
        return bool(self.bars) or any(s.points for s in self.series)


def looks(names: Sequence[str]) -> dict[str, int]:
    """Name → number of its colour and marker."""
    look = {name: LOOKS[name] for name in names if name in LOOKS}
    unused = [i for i in reversed(range(LOOK_COUNT)) if i not in look.values()]
    for index, name in enumerate(n for n in names if n not in LOOKS):
        look[name] = unused[index % len(unused)] if unused else index % LOOK_COUNT
    return look


def nice_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers that span low … high."""
    span = high - low
    if span <= 0:
        span = abs(high) or 1.0
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


@dataclass(frozen=True)
class Scale:
    """From values to 0 … 1 along the vertical axis."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def fraction(self, value: float) -> float:
        if self.logarithmic:
            value = max(value, self.low)  # zero has no logarithm: it lies on the axis
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def fitting_scale(values: Sequence[float], wanted: int = 4) -> Scale:
    """Linear from zero, unless a few values would press all others flat."""
    positive = sorted(v for v in values if v > 0)
    if (
        positive
        and min(values) >= 0
        and positive[-1] > LOGARITHMIC_FROM * positive[len(positive) // 2]
    ):
        low = math.floor(math.log10(positive[0]))
        high = max(math.ceil(math.log10(positive[-1])), low + 1)
        step = math.ceil((high - low) / 6)
        powers = tuple(10.0**power for power in range(low, high + 1, step))
        return Scale(10.0**low, 10.0**high, powers, True)
    ticks = nice_ticks(min([0.0, *values]), max(values, default=1.0), wanted)
    return Scale(ticks[0], ticks[-1], tuple(ticks))


def kept_chart(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Bars by unit: channels there were, and those kept."""
    names = [str(row["unit"]) for row in rows]
    frame = _frame(names)
    ticks = nice_ticks(0, max([row["channels"] for row in rows] + [1]))
    scale = Scale(ticks[0], ticks[-1], tuple(ticks))
    bars = []
    for row, x in zip(rows, frame.positions):
        full, part = (frame.y(row[key], scale) for key in ("channels", "kept"))
        percent = 100 * row["kept"] / max(1, row["channels"])
        tip = f"{row['unit']}: {row['kept']} of {row['channels']} channels kept ({percent:.0f} %)"
        wide = min(frame.step * 0.72, 72.0)
        bars.append(
            Bar(
                x - wide / 2,
                wide,
                (full, frame.bottom - full),
                (part, frame.bottom - part),
                tip,
            )
        )
    return frame.chart("Channels kept", "", scale, bars=tuple(bars))


def error_chart(
    title: str, note: str, key: str, units: Sequence[str], errors: Mapping[str, Any]
) -> Chart:
    """A line for every method over the units."""
    frame = _frame(units)
    table = {m: {str(row["unit"]): finite(row.get(key)) for row in errors[m]} for m in errors}
    values = [v for rows in table.values() for v in rows.values() if v is not None]
    scale = fitting_scale(values)
    note += ", on a logarithmic scale" if scale.logarithmic else ""
    style = looks(list(errors))
    series = []
    for method, rows in table.items():
        points = [
            (x, rows.get(unit), f"{method}, {unit}: {short(rows.get(unit))}")
            for unit, x in zip(units, frame.positions)
        ]
        if any(value is not None for _, value, _ in points):
            series.append(_line(method, style[method], points, frame, scale))
    return frame.chart(title, note, scale, series=tuple(series))


def ratio_chart(
    rows: Sequence[Mapping[str, Any]], key: str, title: str, original: float | None
) -> Chart:
    """A line for every method (and criterion, where several) over the ratios."""
    names = series_names(rows)
    style = looks(list(dict.fromkeys(names)))
    ratios = sorted({r for r in (finite(row.get("ratio")) for row in rows) if r is not None})
    values = [v for v in (finite(row.get(key)) for row in rows) if v is not None]
    reference = [original] if original is not None and values else []
    ticks = nice_ticks(min([0.0, *values]), max([*values, *reference], default=1.0), 5)
    scale = Scale(ticks[0], ticks[-1], tuple(ticks))
    frame = _Frame([str(r) for r in ratios], NARROW, 340.0, 52.0, _along(ratios, NARROW), False)
    position_of = dict(zip(ratios, frame.positions))
    series = []
    for name in style:
        points = []
        for row, own in zip(rows, names):
            ratio, value = finite(row.get("ratio")), finite(row.get(key))
            if own == name and ratio is not None:
                tip = f"{name} at ratio {ratio:g}: {short(value)}"
                points.append((position_of[ratio], value, tip))
        series.append(_line(name, style[name], sorted(points, key=lambda p: p[0]), frame, scale))
    line = None
    if reference:
        line = Tick(frame.y(reference[0], scale), f"original {short(reference[0])}")
    return frame.chart(title, "", scale, series=tuple(series), line=line, x_title="ratio pruned")


def scatter_chart(
    title: str,
    x_title: str,
    points: Sequence[tuple[str, float, float, str]],
    front: Sequence[tuple[float, float]],
    original: float | None,
) -> Chart:
    """Markers by name at (x, value, tip), x in per cent of the original, and a line that leads."""
    style = looks(list(dict.fromkeys(name for name, *_ in points)))
    values = [value for _, _, value, _ in points]
    reference = [original] if original is not None else []
    scale = fitting_scale([*values, *reference], 5)
    ends = [x for _, x, _, _ in points]
    across = nice_ticks(min(ends, default=0.0), max([*ends, 100.0]), 5)
    frame = _Frame([short(x) for x in across], NARROW, 340.0, 52.0, _along(across, NARROW), False)

    def position(x: float) -> float:
        first, last = frame.positions[0], frame.positions[-1]
        return first + (x - across[0]) / (across[-1] - across[0]) * (last - first)

    best = [(position(x), value, "") for x, value in front]
    series = [Series("front", FRONT_LOOK, _line("", 0, best, frame, scale).path, ())]
    for name, look in style.items():
        own = [(position(x), value, tip) for n, x, value, tip in points if n == name]
        series.append(Series(name, look, "", _line(name, look, own, frame, scale).points))
    line = Tick(frame.y(reference[0], scale), f"original {short(original)}") if reference else None
    return frame.chart(title, "", scale, series=tuple(series), line=line, x_title=x_title)


def series_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each row of a comparison is called: its criterion is said only where there are more."""
    criteria = {row["criterion"] for row in rows if row.get("criterion")}
    many = len(criteria) > 1
    return [
        f"{row.get('method', '?')} ({row['criterion']})"
        if many and row.get("criterion")
        else str(row.get("method"))
        for row in rows
    ]


@dataclass(frozen=True)
class _Frame:
    """The space in which a chart is drawn."""

    names: Sequence[str]
    width: float
    height: float
    foot: float
    positions: list[float]
    slanted: bool

    @property
    def bottom(self) -> float:
        return self.height - self.foot

    @property
    def step(self) -> float:
        return (self.width - LEFT - RIGHT) / max(1, len(self.names))

    def y(self, value: float, scale: Scale) -> float:
        return round(self.bottom - scale.fraction(value) * (self.bottom - TOP), 2)

    def chart(self, title: str, note: str, scale: Scale, **parts: Any) -> Chart:
        every = math.ceil(len(self.names) / 64)
        x_ticks = tuple(
            Tick(round(x, 2), shortened(name))
            for i, (name, x) in enumerate(zip(self.names, self.positions))
            if i % every == 0
        )
        y_ticks = tuple(Tick(self.y(v, scale), short(v)) for v in scale.ticks)
        return Chart(
            title, note, self.width, self.height, self.bottom, x_ticks, y_ticks, self.slanted,
            **parts,
        )  # fmt: skip


def _frame(names: Sequence[str]) -> _Frame:
    """Units side by side, wide enough for their names."""
    width = max(WIDTH, LEFT + RIGHT + 24.0 * min(len(names), 128))
    step = (width - LEFT - RIGHT) / max(1, len(names))
    longest = max([len(shortened(name)) for name in names] + [1])
    slanted = longest * 7.0 > step - 6
    foot = 18 + (longest * 4.8 if slanted else 8)
    positions = [LEFT + (i + 0.5) * step for i in range(len(names))]
    return _Frame(names, width, 224.0 + foot, foot, positions, slanted)


def _along(values: Sequence[float], width: float) -> list[float]:
    """Positions of values along the horizontal axis."""
    inner = width - LEFT - RIGHT
    if len(values) < 2:
        return [LEFT + inner / 2 for _ in values]
    span = values[-1] - values[0]
    return [LEFT + 24 + (v - values[0]) / span * (inner - 48) for v in values]


def _line(
    name: str,
    look: int,
    points: Sequence[tuple[float, float | None, str]],
    frame: _Frame,
    scale: Scale,
) -> Series:
    """A path that breaks where a value is missing, and a marker for each value."""
    path, marks, pen = [], [], "M"
    for x, value, tip in points:
        if value is None:
            pen = "M"
            continue
        y = frame.y(value, scale)
        path.append(f"{pen}{x:.1f} {y:.1f}")
        marks.append(Point(round(x, 1), round(y, 1), tip))
        pen = "L"
    return Series(name, look, "".join(path), tuple(marks))


def shortened(name: str, limit: int = 22) -> str:
    """Names end in what tells them apart, so the beginning is left out."""
    return name if len(name) <= limit else "…" + name[-(limit - 1) :]
