"""Write docs/cli.md, the reference of the command line, from the program itself.

python scripts/cli_reference.py          writes it
python scripts/cli_reference.py --check  exits with 1 where it is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lbyl.app.cli.app import COMMANDS, load_command

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD = """\
# The command line

Every command has `--help`, `--json` (results as JSON and nothing else), `--quiet` and `--debug`.
Results go to stdout, progress and errors to stderr. The exit code is 0 on success, 2 where what
was given does not fit (options that contradict each other, patterns that match nothing, a file or
a network that cannot be used), 1 where the work itself failed (a full disk, memory), 3 where the
smaller network is lost and was not written, and 130 where it was interrupted.

*This page is made from the program by `python scripts/cli_reference.py`.*
"""


def main() -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing")
    text = reference()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/cli.md is out of date: run python scripts/cli_reference.py", file=sys.stderr)
    return 1


def reference() -> str:
    """The whole page."""
    parts = [HEAD, "| command | |\n|---|---|"]
    parts[-1] += "".join(f"\n| [`{n}`](#lbyl-{n}) | {e.help} |" for n, e in COMMANDS.items())
    parts += [section(name) for name in COMMANDS]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def section(name: str) -> str:
    """One command: how it is written, what it does, and its options under their headings."""
    command = load_command(name)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    words = [f"[{_metavar(p)}]" if not p.required else _metavar(p) for p in arguments]
    must = [f"{p.opts[0]} {_metavar(p)}" for p in options if p.required]
    usage = " ".join(["lbyl", name, *words, *must, "[OPTIONS]"])
    lines = [f"## lbyl {name}", "", COMMANDS[name].help, "", "```text", usage, "```", ""]
    lines += [f"- `{_metavar(p)}`: {p.help}{_default(p)}" for p in arguments]
    for panel in dict.fromkeys(_panel(p) for p in options):
        lines += ["", f"**{panel}**", "", "| option | |", "|---|---|"]
        lines += [f"| `{_written(p)}` | {_cell(p)} |" for p in options if _panel(p) == panel]
    return "\n".join(lines)


def _panel(parameter: Any) -> str:
    panel = getattr(parameter, "rich_help_panel", None)
    return panel if isinstance(panel, str) else "Options"


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _written(parameter: Any) -> str:
    """`--ratio FRACTION`, `--report / --no-report`, `--quiet, -q`."""
    if parameter.is_flag:
        both = [", ".join(parameter.opts), ", ".join(parameter.secondary_opts)]
        return " / ".join(part for part in both if part)
    return f"{', '.join(parameter.opts)} {_metavar(parameter)}"


def _cell(parameter: Any) -> str:
    return (str(parameter.help or "") + _default(parameter)).replace("|", "\\|")


def _default(parameter: Any) -> str:
    """What holds where nothing is given, if that is something."""
    default = parameter.default
    if default is None or default is False or parameter.required or callable(default):
        return ""
    shown = ", ".join(_values(default))
    return f" Default: `{shown}`." if shown else ""


def _values(default: Any) -> Iterator[str]:
    if isinstance(default, (list, tuple)):
        yield from map(str, default)
    elif default is True:
        yield "on"
    else:
        yield str(default)


if __name__ == "__main__":
    sys.exit(main())
