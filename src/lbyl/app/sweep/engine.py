"""Running a sweep: which rows are missing, who computes them, and writing them as they come.

joblib gives out the work: to processes here, to a Dask cluster by its address, or to Ray.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lbyl.app.sweep.grid import Point, Setting, Subject, fingerprint
from lbyl.app.sweep.store import Store
from lbyl.app.sweep.work import compress_point, prepare_subject
from lbyl.errors import LbylError
from lbyl.runtime.format import counted

Tick = Callable[[str, int, int], None]
"""Called with the stage's name, rows done and rows in all."""

ATTEMPTS = 3  # how often in a row processes may die without a single row finished
DASK_SECONDS = 10  # to wait for a scheduler


@dataclass(frozen=True)
class Engine:
    """Who does the work: `jobs` processes here, or a cluster.

    `cluster` is the address of a Dask scheduler ("tcp://host:8786"), "ray" for the machine's own
    Ray, or "ray://host:10001".
    """

    jobs: int | None = None
    cluster: str | None = None

    @property
    def is_local(self) -> bool:
        return self.cluster is None

    def threads(self) -> int:
        """Cores for each process here."""
        return max(1, _cores() // self._jobs())

    def _jobs(self) -> int:
        return self.jobs or _cores()

    @contextmanager
    def active(self) -> Iterator[None]:
        """joblib's backend inside."""
        joblib = _imported("joblib", "joblib")
        if self.cluster is None:
            with joblib.parallel_config("loky", n_jobs=self._jobs()):
                yield
        elif self.cluster.startswith("ray"):
            ray = _imported("ray", "ray[default]")
            ray.init(address=None if self.cluster == "ray" else self.cluster)
            _imported("ray.util.joblib", "ray[default]").register_ray()
            with joblib.parallel_config("ray", n_jobs=self.jobs or -1):
                yield
        else:
            jobs = self.jobs or -1
            with self._dask() as client, joblib.parallel_config("dask", n_jobs=jobs, client=client):
                yield

    @contextmanager
    def _dask(self) -> Iterator[Any]:
        distributed = _imported("distributed", "dask[distributed]")
        try:
            client = distributed.Client(self.cluster, timeout=DASK_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:
            raise LbylError(
                f"no Dask scheduler answers at {self.cluster}: start one with `dask scheduler` and "
                "give the address it prints"
            ) from error
        try:
            yield client
        finally:
            client.close()

    def unordered(self, calls: Sequence[Any]) -> Iterator[Any]:
        """What the calls give, as it comes; processes that die are replaced by others."""
        joblib = _imported("joblib", "joblib")
        # One call a task: what a worker that dies had in hand is a single row.
        parallel = joblib.Parallel(
            return_as="generator_unordered", batch_size=1, pre_dispatch="all"
        )
        yield from parallel(calls)


def _cores() -> int:
    """Cores that this process may use."""
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return known or 1


def _imported(name: str, package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LbylError(
            f"a sweep on this engine needs {package}: pip install 'lbyl[sweep]' {package}"
        ) from error


def sweep(
    points: Sequence[Point],
    setting: Setting,
    store: Store,
    engine: Engine | None = None,
    tick: Tick | None = None,
) -> list[dict[str, Any]]:
    """Compute every row that is not in the store yet; all rows of these points afterwards.

    Rows are written one by one as they come. What was killed goes on where it stood.
    """
    engine = engine or Engine()
    if engine.is_local and setting.threads is None:
        setting = replace(setting, threads=engine.threads())
    wanted = {point.key(setting): point for point in points}
    folder = store.path.with_name(f"{store.path.name}.statistics").resolve()
    with engine.active():
        left = _left(wanted, store)
        if left:
            files = _prepare(list(left.values()), setting, store, folder, engine, tick)
            _compress(wanted, setting, store, files, engine, tick)
    if not _left(wanted, store):
        _forget(folder)
    return [row for row in store.rows() if row["key"] in wanted]


def _left(wanted: dict[str, Point], store: Store) -> dict[str, Point]:
    done = store.done(wanted)
    return {key: point for key, point in wanted.items() if key not in done}


def _forget(folder: Path) -> None:
    """Statistics have served once all rows are there; nothing but our own files is removed."""
    if folder.is_dir():
        for file in folder.glob("*.safetensors"):
            file.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


Source = tuple[Subject, int]
"""A network and the seed its inputs are drawn by: what has statistics of its own."""


def _original_key(source: Source, setting: Setting) -> str:
    same = {**asdict(setting), "device": None, "threads": None, "time": None}
    return fingerprint({"subject": asdict(source[0]), "seed": source[1], "setting": same})


def _prepare(
    points: Sequence[Point],
    setting: Setting,
    store: Store,
    folder: Path,
    engine: Engine,
    tick: Tick | None,
) -> dict[Source, str | None]:
    """Statistics of every network, collected once into a file that all workers read."""
    needed: dict[Source, bool] = {}
    for point in points:
        source = (point.subject, point.seed)
        needs = point.task(setting.multiple_of).needs_statistics
        needed[source] = needed.get(source, False) or needs
    files: dict[Source, str | None] = {}
    for source, needs in needed.items():
        path = folder / f"{_original_key(source, setting)}.safetensors"
        files[source] = str(path) if needs and setting.data != "analytic" else None
    missing = [s for s in needed if not _is_prepared(s, setting, store, files[s])]
    calls = [_call(prepare_named, *source, setting, files[source]) for source in missing]
    for step, (source, figures) in enumerate(engine.unordered(calls)):
        store.add_original(_original_key(source, setting), figures)
        _tell(tick, "collecting statistics", step + 1, len(calls))
    return files


def _is_prepared(source: Source, setting: Setting, store: Store, path: str | None) -> bool:
    known = store.original(_original_key(source, setting)) is not None
    return known and (path is None or Path(path).is_file())


def prepare_named(
    subject: Subject, seed: int, setting: Setting, statistics: str | None
) -> tuple[Source, dict[str, Any]]:
    """`prepare_subject`, with what it was asked for."""
    return (subject, seed), prepare_subject(subject, seed, setting, statistics)


def compress_named(
    key: str, point: Point, setting: Setting, statistics: str | None
) -> tuple[str, dict[str, Any]]:
    """`compress_point`, with the row it is for."""
    return key, compress_point(point, setting, statistics)


def _compress(
    wanted: dict[str, Point],
    setting: Setting,
    store: Store,
    files: dict[Source, str | None],
    engine: Engine,
    tick: Tick | None,
) -> None:
    attempts = 0
    while left := _left(wanted, store):
        before = len(left)
        calls = [
            _call(compress_named, key, point, setting, files[point.subject, point.seed])
            for key, point in left.items()
        ]
        done = len(wanted) - before
        _tell(tick, "sweeping", done, len(wanted))
        try:
            for key, figures in engine.unordered(calls):
                store.add(key, _row(wanted[key], setting, store) | figures)
                done += 1
                _tell(tick, "sweeping", done, len(wanted))
            return  # rows that failed are not tried again by themselves
        except Exception as error:
            if not _is_death(error):
                raise
            attempts = attempts + 1 if len(_left(wanted, store)) == before else 0
            if attempts >= ATTEMPTS:
                raise LbylError(
                    f"worker processes die ({counted(before, 'row')} left): there may be too "
                    "little memory for so many at once, use fewer --jobs"
                ) from error


def _is_death(error: Exception) -> bool:
    """Whether a worker died, rather than what it ran failed."""
    return type(error).__name__ in ("TerminatedWorkerError", "BrokenProcessPool", "KilledWorker")


def _row(point: Point, setting: Setting, store: Store) -> dict[str, Any]:
    """What a row says of itself, before its figures."""
    original = store.original(_original_key((point.subject, point.seed), setting)) or {}
    return {
        "model": point.subject.model,
        "weights": point.subject.weights,
        "kind": point.kind,
        "amount": point.amount,
        "criterion": point.criterion,
        "method": point.method,
        "seed": point.seed,
        "setting": json.dumps(asdict(setting)),
        "command": point.command(setting),
        "failed": None,
        **{f"{name}_before": original.get(name) for name in ("parameters", "macs", "accuracy")},
    }


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    joblib = _imported("joblib", "joblib")
    return joblib.delayed(function)(*arguments)


def _tell(tick: Tick | None, stage: str, done: int, total: int) -> None:
    if tick is not None:
        tick(stage, done, total)
