"""Now `lbyl.app.sweep`."""

from lbyl.moved import moved

moved(__name__, "lbyl.app.sweep")
