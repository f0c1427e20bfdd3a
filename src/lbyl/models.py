"""Now `lbyl.app.sources`."""

from lbyl.moved import moved

SOURCES = "lbyl.app.sources"
moved(
    __name__,
    SOURCES,
    **{name: f"{SOURCES}.{name}" for name in ("resolve", "saved", "yolo", "zoo")},
    blocks="lbyl.app.streaming",
)
