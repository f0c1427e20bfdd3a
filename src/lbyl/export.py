"""Now `lbyl.app.export`."""

from lbyl.moved import moved

moved(__name__, "lbyl.app.export")
