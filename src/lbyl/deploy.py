"""Now `lbyl.app.deploy`."""

from lbyl.moved import moved

moved(__name__, "lbyl.app.deploy")
