"""Many compressions of several networks: each a row in one SQLite file, resumable row by row."""

from lbyl.app.sweep.engine import Engine, sweep
from lbyl.app.sweep.grid import Point, Setting, Subject, points
from lbyl.app.sweep.store import Store

__all__ = ["Engine", "Point", "Setting", "Store", "Subject", "points", "sweep"]
