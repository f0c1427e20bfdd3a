"""Networks by name, as the command line names them, and the zoo of the paper's networks."""

from lbyl.app.sources.network import Network
from lbyl.app.sources.resolve import parse_input_shape, resolve

__all__ = ["Network", "parse_input_shape", "resolve"]
