"""One HTML file that tells the story of a compression; nothing in it is fetched from a network."""

from lbyl.report.fill import gather
from lbyl.report.loader import loader_snippet
from lbyl.report.page import write_report

__all__ = ["gather", "loader_snippet", "write_report"]
