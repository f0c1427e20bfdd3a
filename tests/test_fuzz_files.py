"""Files that are damaged or hostile; `make fuzz-files` tries more, with limits on memory."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from support.fuzz.files import attempt, kinds

NAMES = sorted(kinds())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_whole_is_accepted(name: str) -> None:
    assert attempt(kinds()[name], kinds()[name].valid)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_damaged_is_one_clear_error(name: str) -> None:
    kind = kinds()[name]

    @settings(max_examples=12, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(kind.contents)
    def run(content: bytes) -> None:
        attempt(kind, content)  # any other error fails

    run()
