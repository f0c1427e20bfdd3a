"""One HTML file about a compression or a sweep; nothing in it is fetched from a network."""

from lbyl.app.report.fill import gather
from lbyl.app.report.loader import loader_snippet
from lbyl.app.report.page import write_report
from lbyl.app.report.several import Run, write_several
from lbyl.app.report.tradeoff import write_tradeoff

__all__ = [
    "Run",
    "gather",
    "loader_snippet",
    "write_report",
    "write_several",
    "write_tradeoff",
]
