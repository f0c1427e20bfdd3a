"""Settings of the whole suite."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import benchmarks.networks

# private: how many inputs are drawn is no argument of the calls whose tests must be quick
from lbyl.inputs import batches
from lbyl.tracing.rules import base as rules  # private: a switch for tests alone

settings.register_profile("lbyl", deadline=None, max_examples=8, derandomize=True)
settings.load_profile("lbyl")

rules.STRICT = True  # a rule that raises costs users compression; here it is an error

# Every compression ends with a forecast, which few tests are about: 32 inputs of CIFAR's size are
# enough for those that are not. `whole_forecast` is for those that are, and slow tests, which are
# on real networks, get it anyway. The second pass, which it asks as well, runs the fewest that it
# ever does.
WHOLE = batches.FORECAST, batches.SECOND_PASS
batches.FORECAST, batches.SECOND_PASS = 32, 16

# Tiny tensors gain nothing from threads, and parallel test processes would fight over cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def whole_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast and the second pass run as many inputs as they do for users."""
    monkeypatch.setattr(batches, "FORECAST", WHOLE[0])
    monkeypatch.setattr(batches, "SECOND_PASS", WHOLE[1])


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collections of 32 procedural inputs that nothing is fitted to, for tests of other things."""
    monkeypatch.setattr(batches, "image_count", lambda shape: 32)
    monkeypatch.setattr(batches, "FEWEST", 16)
    monkeypatch.setattr(batches, "match_first_batchnorm", lambda *_: None)


@pytest.fixture(autouse=True)
def as_for_users(request: pytest.FixtureRequest) -> None:
    """Slow tests run what users run."""
    if request.node.get_closest_marker("slow") is not None:
        request.getfixturevalue("whole_forecast")


@pytest.fixture
def shared() -> Path:
    """The directory of real models and data; tests that need it are skipped without it."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    path = Path(os.environ.get("LBYL_SHARED", beside))
    if not (path / "models").is_dir():
        pytest.skip(f"no models and data at {path} (set LBYL_SHARED)")
    return path


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts of benchmarks/ can be imported as they import each other."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    sys.modules.pop("harness", None)  # it reads its folders when imported
