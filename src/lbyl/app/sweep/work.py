"""What a worker does: prepare a network, or compress it at one point and measure what came of it.

Everything a call takes and gives is plain data, so that it can go to another machine.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lbyl.api import Prepared, prepare
from lbyl.app import data as images
from lbyl.app.sources import Network, resolve
from lbyl.app.sweep.grid import Point, Setting, Subject
from lbyl.errors import LbylError
from lbyl.latency import compare, threads_of
from lbyl.methods import registry as methods
from lbyl.result import Size
from lbyl.runtime.run import device_of
from lbyl.statistics.moments import Statistics

# A worker may have several threads; a prepared network is used by one at a time.
_TURN = threading.Lock()


def network_of(subject: Subject, setting: Setting) -> Network:
    """The network on its device."""
    made = resolve(subject.model, subject.weights, setting.input_shape, setting.classes)
    return made.scaled(setting.mean, setting.std).to(setting.device)


@functools.lru_cache(maxsize=2)
def _prepared(
    subject: Subject, seed: int, setting: Setting, statistics: str | None
) -> tuple[Network, Prepared]:
    """A network traced, with the statistics that were collected for all workers.

    Kept from row to row: orders of elimination and what the original makes of its inputs too.
    """
    network = network_of(subject, setting)
    prepared = prepare(
        network.model,
        network.example,
        include=setting.include or "*",
        exclude=setting.exclude,
        residual=setting.residual,
        data=setting.data,
        seed=seed,
        progress=False,
    )
    if statistics is not None and Path(statistics).is_file():
        prepared.adopt(Statistics.load(statistics).to(device_of(network.model)))
    return network, prepared


@functools.lru_cache(maxsize=1)
def _test_images(path: str, size: int | None, limit: int | None) -> images.ImageSet:
    loaded = images.load(path, "test", size=size)
    return loaded if limit is None or limit >= len(loaded) else loaded.subset(limit)


def _accuracy(network: Network, model: torch.nn.Module, setting: Setting) -> float | None:
    if setting.test is None:
        return None
    test = _test_images(setting.test, network.image_size, setting.limit)
    shown = network.as_classifier(model)
    return images.accuracy(shown, test, network.mean, network.std, 100, flatten=network.flatten)


@contextmanager
def _at_work(setting: Setting) -> Iterator[None]:
    """One at a time in a process, which is as it was before afterwards."""
    keep_workers()
    with _TURN, threads_of(setting.threads):
        yield


def keep_workers() -> None:
    """joblib ends a process that holds 300 MB more than after its first task, as leaking.

    What is held here is meant to be: the network, its statistics and all that is known of it. A new
    process would load torch, trace and work out the same again, for nearly every row.
    """
    executor: Any = sys.modules.get("joblib.externals.loky.process_executor")
    if hasattr(executor, "_MAX_MEMORY_LEAK_SIZE"):
        executor._MAX_MEMORY_LEAK_SIZE = sys.maxsize


def prepare_subject(
    subject: Subject, seed: int, setting: Setting, statistics: str | None
) -> dict[str, Any]:
    """Collect the statistics of a network into a file, once; figures of the original.

    `statistics` is None where no point needs any.
    """
    with _at_work(setting):
        network, prepared = _prepared(subject, seed, setting, None)
        if statistics is not None and not Path(statistics).is_file():
            prepared.statistics().save(statistics)
        size = Size.of(network.model, prepared.graph)
        _prepared.cache_clear()  # the next row reads them from the file, as others do
        return {
            "parameters": size.parameters,
            "macs": size.macs,
            "accuracy": _accuracy(network, network.model, setting),
        }


def compress_point(point: Point, setting: Setting, statistics: str | None) -> dict[str, Any]:
    """The figures of one row; what cannot be done is a row that says why."""
    with _at_work(setting):
        start = time.perf_counter()
        try:
            figures = _figures(point, setting, statistics)
        except LbylError as error:
            figures = {"failed": str(error)}
        where = f"{socket.gethostname()}:{os.getpid()}"
        return {**figures, "seconds": time.perf_counter() - start, "worker": where}


def _figures(point: Point, setting: Setting, statistics: str | None) -> dict[str, Any]:
    network, prepared = _prepared(point.subject, point.seed, setting, statistics)
    result = prepared.compress(
        point.pruned,
        criterion=point.chosen,
        method=methods.resolve(point.method),
        multiple_of=setting.multiple_of,
        refine=setting.refine,
    )
    with prepared.at_work():
        divergence = prepared.judges.whole(result.model)
    figures: dict[str, Any] = {
        "chosen": None if result.criterion is None else result.criterion["name"],
        "story": result.story,
        "parameters": result.after.parameters,
        "macs": result.after.macs,
        "accuracy": _accuracy(network, result.model, setting),
        "divergence": divergence,
    }
    told = result.forecast
    if told is not None:
        figures |= {"agreement": told.agreement, "kept": told.kept}
        figures |= {"kept_low": told.low, "kept_high": told.high}
    if setting.time:  # in turns, so that a busy machine slows both
        models = {"original": network.model, "slim": result.model}
        timed = compare(models, network.example, device_of(network.model))
        figures["latency"] = timed["slim"].median
        figures["latency_before"] = timed["original"].median
    return figures
