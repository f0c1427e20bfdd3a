"""Tables in narrow windows, and messages in the words of the command line."""

from __future__ import annotations

import pytest
from rich.console import Console, RenderableType

from lbyl.cli.errors import as_options
from lbyl.cli.screen import Screen, table

NAMES = ["features.denseblock3.denselayer17.conv1", "features.transition1.conv"]


def printed(drawn: RenderableType, width: int) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(drawn)
    return capture.get()


@pytest.mark.parametrize("width", [60, 80, 160])
def test_names_are_the_last_thing_a_narrow_window_takes(width: int) -> None:
    columns = ["method", *(f"column {i}" for i in range(9))]
    text = printed(table(columns, [[name, *range(9)] for name in NAMES]), width)
    assert all(name in text for name in NAMES)
    assert max(map(len, text.splitlines())) <= width
    shown = sum(f"column {i}" in text.split("not shown")[0] for i in range(9))
    assert shown == 9 if width == 160 else 0 < shown < 9
    # what is not shown is named
    assert all(f"column {i}" in text for i in range(9))


@pytest.mark.parametrize("width", [80, 120])
def test_lists_fold_before_columns_are_left_out(width: int) -> None:
    columns = ["unit", "channels", "tied with", "sliced along", "consumed by"]
    rows = [[name, 32, "", f"{name}.norm1, {name}.norm2", f"{name}.conv2"] for name in NAMES]
    text = printed(table(columns, rows, lists=columns[2:]), width)
    assert all(name in text for name in [*NAMES, "channels", "32"])
    assert max(map(len, text.splitlines())) <= width


def test_a_name_wider_than_the_window_is_folded_not_lost() -> None:
    name = "a" * 60 + "z" * 30
    text = printed(table(["layer", "channels"], [[name, 7]]), 50)
    assert text.count("a") - "layer channels".count("a") == 60 and text.count("z") == 30
    assert "7" in text


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("criterion= has no say", "--criterion has no say"),
        ("leave it out with exclude=", "leave it out with --exclude"),
        ("multiple_of= and data=: both", "--multiple-of and --data: both"),
        ("sequential=True needs data= of tensors", "sequential=True needs --data of tensors"),
        ("exclude='x' fits no layer", "exclude='x' fits no layer"),
    ],
)
def test_messages_of_the_library_name_options(said: str, shown: str) -> None:
    assert as_options(said) == shown


def test_what_others_print_while_a_stage_runs_is_no_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for screen, out, err in (
        (Screen(json=True), "{}\n", ""),
        (Screen(quiet=True), "", ""),
        (Screen(), "", "loading weights\n✓ loading"),
    ):
        with screen.stage("loading"):
            print("loading weights")
        screen.data({})
        told = capsys.readouterr()
        assert told.out == out and told.err.startswith(err) and (err or not told.err)
