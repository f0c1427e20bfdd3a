"""From a template and values to one file that needs nothing else."""

from __future__ import annotations

import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from lbyl import __version__
from lbyl.app.report import numbers
from lbyl.errors import LbylError
from lbyl.runtime.files import whole_file


def write_page(
    template: str, path: str | Path, example: str = "report.html", **values: Any
) -> Path:
    """Fill a template in and write it whole; `example` is a file name to propose in an error."""
    path = Path(path)
    if path.is_dir():
        raise LbylError(f"{path} is a directory; give the report a file name such as {example}")
    made = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    text = _template(template).render(
        **values,
        version=__version__,
        made=made,
        style=_part("style.css"),
        script=_part("script.js"),
    )
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _part(name: str) -> str:
    return resources.files("lbyl.app.report").joinpath(name).read_text(encoding="utf-8")


def _template(name: str) -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise LbylError('the report needs jinja2: pip install "lbyl[report]"') from error
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(short=numbers.short, steady=numbers.steady)
    return environment.get_template(name)
