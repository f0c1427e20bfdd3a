"""`lbyl sweep`: several networks, many ways, one row each."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from lbyl.app.cli import options as o
from lbyl.app.cli.errors import UsageError, guarded, usage
from lbyl.app.cli.parse import OwnImages, check_limit, check_source_used, parse_data, parse_numbers
from lbyl.app.cli.screen import Screen, bold, plain, table
from lbyl.app.cli.setup import pick_device
from lbyl.app.sources import parse_input_shape
from lbyl.app.sweep import Engine, Point, Setting, Store, Subject, points
from lbyl.app.sweep import sweep as run
from lbyl.app.sweep.grid import RATIO
from lbyl.app.sweep.recommend import KEEP, recommended_row
from lbyl.planning.budget import Budget
from lbyl.planning.task import DEFAULT_RATIO
from lbyl.runtime.format import bounded, counted, human, percent

Rows = Sequence[dict[str, Any]]

WEIGHTS = "Weights of each network, in the same order (may be repeated); none for none."
CLUSTER = (
    "Where the work is done instead: tcp://HOST:8786 of a Dask scheduler, ray, or ray://HOST:10001."
)
FILE = "SQLite file of the rows; what is in it already is not computed again."

Models = Annotated[
    list[str],
    typer.Argument(
        help="Networks, named as for `lbyl compress`.",
        autocompletion=o.complete_model,
        metavar="MODEL...",
        show_default=False,
    ),
]
Weights = Annotated[
    list[str] | None, o.option("Network", "--weights", metavar="FILE", help=WEIGHTS)
]
Out = Annotated[Path, o.output_option("--out", metavar="FILE", help=FILE)]
Seeds = Annotated[
    list[int], o.option("Machine", "--seed", metavar="N", help="A seed (may be repeated).")
]
Jobs = Annotated[
    int | None,
    o.option("Machine", metavar="N", min=1, help="Rows at once: processes here; on a cluster all."),
]
Cluster = Annotated[str | None, o.option("Machine", metavar="ADDRESS", help=CLUSTER)]
Time = Annotated[bool, o.output_option("--time", help="Also time a pass of one image.")]


def _amounts(name: str) -> Any:
    text = f"Budget: {name} that may stay (may be repeated)."
    return o.option("What is pruned", metavar="FRACTION", help=text)


Macs = Annotated[list[float] | None, _amounts("MACs")]
Params = Annotated[list[float] | None, _amounts("parameters")]
Criteria = Annotated[
    list[str] | None,
    o.option(
        "What is pruned",
        "--criterion",
        metavar="NAME",
        help="Which channels are pruned (may be repeated); else as suits the method.",
        autocompletion=o.complete_criterion,
    ),
]
Ratios = Annotated[
    list[float] | None,
    o.option(
        "What is pruned",
        "--ratio",
        metavar="FRACTION",
        min=0.0,
        max=0.99,
        help="Fraction of channels pruned (may be repeated); 0.3 where no amount is given.",
    ),
]


@guarded
def sweep(
    models: Models,
    weights: Weights = None,
    ratio: Ratios = None,
    macs: Macs = None,
    params: Params = None,
    method: o.Methods = ["echo"],  # noqa: B006 (typer shows and copies it)
    criterion: Criteria = None,
    seed: Seeds = [0],  # noqa: B006
    refine: o.Refine = 0,
    include: o.Include = None,
    exclude: o.Exclude = None,
    residual: o.Residual = False,
    multiple_of: o.MultipleOf = None,
    data: o.Data = None,
    test: o.Test = None,
    limit: o.Limit = None,
    time: Time = False,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    mean: o.Mean = None,
    std: o.Std = None,
    out: Out = Path("sweep.db"),
    jobs: Jobs = None,
    cluster: Cluster = None,
    device: o.Device = "auto",
    threads: o.Threads = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Compress several networks in many ways, on all cores or a cluster; resumable."""
    screen = Screen(json, quiet)
    source = parse_data(data)
    if isinstance(source, OwnImages):
        raise UsageError("--data of a sweep: write procedural, inversion, analytic or a number")
    check_limit(test, limit)
    amounts = all_amounts(ratio, macs, params)
    with usage():
        given = subjects(models, weights)
        grid = points(given, amounts, criterion or [None], method, seed, multiple_of)
    check_source_used(source, [point.task(multiple_of) for point in grid], refine)
    setting = Setting(
        input_shape=parse_input_shape(input_size) if input_size else None,
        classes=classes,
        mean=parse_numbers(mean, "mean"),
        std=parse_numbers(std, "std"),
        data=source,
        test=_everywhere(test),
        limit=limit,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        residual=residual,
        multiple_of=multiple_of,
        refine=refine,
        time=time,
        device=pick_device(device),
        threads=threads,
    )
    rows = compute(screen, grid, setting, out, Engine(jobs, cluster))
    screen.data({"out": str(out), "rows": rows})
    show(screen, out, grid, rows)


def compute(
    screen: Screen, grid: list[Point], setting: Setting, out: Path, engine: Engine
) -> list[dict[str, Any]]:
    """A row for every point; what the file has already is not computed again."""
    with Store(out) as store:
        known = len(store.done(point.key(setting) for point in grid))
        if known:
            screen.note(f"{counted(known, 'row')} of {len(grid)} there already")
        with screen.stage(f"sweep of {counted(len(grid), 'row')}"):
            return run(grid, setting, store, engine, screen.progress)


def _everywhere(path: str | None) -> str | None:
    """A path that workers find from where they were started; a word stays one."""
    return str(Path(path).resolve()) if path and Path(path).expanduser().exists() else path


def subjects(models: list[str], weights: list[str] | None) -> list[Subject]:
    """Each network with its weights."""
    if weights and len(weights) != len(models):
        raise UsageError(
            f"--weights is given {len(weights)} times for {counted(len(models), 'network')}: give "
            "one for each, in the same order, or none at all"
        )
    own = [None if w == "none" else w for w in weights] if weights else [None] * len(models)
    return [Subject(model, file) for model, file in zip(models, own)]


def all_amounts(
    ratio: list[float] | None, macs: list[float] | None, params: list[float] | None
) -> list[tuple[str, float]]:
    """How much is pruned in each point: three tenths where nothing is said."""
    budgets = [("macs", value) for value in macs or ()] + [("params", v) for v in params or ()]
    with usage():
        for kind, value in budgets:
            amount: dict[str, Any] = {kind: value}
            Budget(**amount)
    return [*((RATIO, value) for value in ratio or ()), *budgets] or [(RATIO, DEFAULT_RATIO)]


def show(screen: Screen, out: Path, grid: list[Point], rows: list[dict[str, Any]]) -> None:
    """A table of all rows, which to pick, and what failed."""
    order = {str(point): i for i, point in enumerate(grid)}
    done = sorted((r for r in rows if not r["failed"]), key=lambda r: _place(r, order))
    columns = [column for column in COLUMNS if column.shown(done)]
    lines = [[column.text(row) for column in columns] for row in done]
    screen.say("", table([column.title for column in columns], lines))
    for model in dict.fromkeys(row["model"] for row in rows):
        best = recommended_row([row for row in rows if row["model"] == model])
        if best is not None:
            screen.say(
                f"recommended for {bold(_short(model))}: {best['method']}, {_amount(best)}, "
                f"the smallest that keeps {percent(KEEP)} of the accuracy"
            )
    for row in rows:
        if row["failed"]:
            screen.warn(f"{row['command']}: {row['failed']}")
    command = shlex.join(["lbyl", "report", str(out)])
    screen.say(f"wrote {bold(out)}; the trade-off: [cyan]{plain(command)}[/]")


def _short(model: str) -> str:
    return model.rsplit("/", 1)[-1]  # of a file: folders would push the rest off


def _amount(row: Mapping[str, Any]) -> str:
    return f"{row['kind']} {row['amount']:g}"


def _always(rows: Rows) -> bool:
    return True


def _known(key: str) -> Callable[[Rows], bool]:
    return lambda rows: any(row.get(key) is not None for row in rows)


def _unknown(key: str) -> Callable[[Rows], bool]:
    return lambda rows: not _known(key)(rows)


class Column(NamedTuple):
    """A column of the table, shown where there is something to tell apart."""

    title: str
    text: Callable[[dict[str, Any]], str]
    shown: Callable[[Rows], bool] = _always


KEPT = ("kept", "kept_low", "kept_high")
COLUMNS = (
    Column("network", lambda row: _short(row["model"])),
    Column("method", lambda row: row["method"]),
    Column("criterion", lambda row: row["chosen"] or "its own"),
    Column("amount", _amount),
    Column("seed", lambda row: str(row["seed"]), lambda rows: len({r["seed"] for r in rows}) > 1),
    Column("accuracy", lambda row: f"{row['accuracy']:.2f} %", _known("accuracy")),
    Column("keeps about", lambda row: bounded(*map(row.get, KEPT)), _known("kept")),
    Column("agrees", lambda row: percent(row.get("agreement")), _unknown("kept")),
    Column("MACs", lambda row: human(row["macs"])),
    Column("parameters", lambda row: human(row["parameters"])),
    Column("time", lambda row: f"{1e3 * row['latency']:.2f} ms", _known("latency")),
    Column("divergence", lambda row: f"{row['divergence']:.3g}"),
)


def _place(row: dict[str, Any], order: dict[str, int]) -> tuple[int, int]:
    """Rows in the order of the grid, whoever finished first."""
    point = Point(
        Subject(row["model"], row["weights"]),
        row["kind"],
        row["amount"],
        row["criterion"],
        row["method"],
        row["seed"],
    )
    return order.get(str(point), len(order)), row["seed"]
