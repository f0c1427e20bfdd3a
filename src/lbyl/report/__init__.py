"""One HTML file about a compression or a sweep; nothing in it is fetched from a network."""

from lbyl.report.fill import gather
from lbyl.report.loader import loader_snippet
from lbyl.report.page import write_report
from lbyl.report.several import Run, write_several
from lbyl.report.tradeoff import write_tradeoff

__all__ = [
    "Run",
    "gather",
    "loader_snippet",
    "write_report",
    "write_several",
    "write_tradeoff",
]
