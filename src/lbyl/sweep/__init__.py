"""Many compressions of several networks: each a row in one SQLite file, resumable row by row."""

from lbyl.sweep.engine import Engine, sweep
from lbyl.sweep.grid import Point, Setting, Subject, points
from lbyl.sweep.store import Store

__all__ = ["Engine", "Point", "Setting", "Store", "Subject", "points", "sweep"]
