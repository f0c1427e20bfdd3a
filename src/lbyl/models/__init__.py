"""Networks by name, as the command line names them, and the zoo of the paper's networks."""

from lbyl.models.network import Network
from lbyl.models.resolve import parse_input_shape, resolve

__all__ = ["Network", "parse_input_shape", "resolve"]
