"""Which of several networks to pick: the cheapest that keeps nearly all of the accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

KEEP = 0.95  # of the accuracy, measured or as forecast


def recommend(points: Sequence[tuple[float, float | None]], keep: float = KEEP) -> int | None:
    """Of points (cost, accuracy kept) the cheapest that keeps so much; None where none does.

    Of equally cheap ones the one that keeps most.
    """
    enough = [(cost, -kept, i) for i, (cost, kept) in enumerate(points) if kept and kept >= keep]
    return min(enough)[2] if enough else None


def kept_of(row: Mapping[str, Any]) -> float | None:
    """What a row of a sweep keeps: measured where there were labels, else as forecast."""
    now, before = row.get("accuracy"), row.get("accuracy_before")
    return now / before if now is not None and before else row.get("kept")


def recommended_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row to pick of one network, by its MACs."""
    done = [row for row in rows if not row.get("failed") and row.get("macs")]
    index = recommend([(float(row["macs"]), kept_of(row)) for row in done])
    return None if index is None else done[index]
