"""Now `lbyl.app.report`."""

from lbyl.moved import moved

moved(__name__, "lbyl.app.report")
