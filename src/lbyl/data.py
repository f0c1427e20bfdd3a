"""Now `lbyl.app.data`."""

from lbyl.moved import moved

moved(__name__, "lbyl.app.data")
