"""The rows of a sweep in SQLite: each written once, readable while the sweep runs.

One process writes, so that workers on other machines need no common database. The journal is a
write-ahead log: whoever reads sees whole rows and holds up nobody.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lbyl.errors import LbylError

FORMAT = 0x6C62796C  # "lbyl", as SQLite's application id
VERSION = 1
COLUMNS = {
    "model": "TEXT NOT NULL",
    "weights": "TEXT",
    "kind": "TEXT NOT NULL",
    "amount": "REAL NOT NULL",
    "criterion": "TEXT",
    "method": "TEXT NOT NULL",
    "seed": "INTEGER NOT NULL",
    "setting": "TEXT NOT NULL",
    "command": "TEXT NOT NULL",
    "chosen": "TEXT",  # the criterion that was used in the end
    "story": "TEXT",
    "parameters": "INTEGER",
    "macs": "INTEGER",
    "accuracy": "REAL",
    "divergence": "REAL",
    "agreement": "REAL",
    "kept": "REAL",  # of the accuracy, as forecast
    "kept_low": "REAL",
    "kept_high": "REAL",
    "latency": "REAL",
    "parameters_before": "INTEGER",
    "macs_before": "INTEGER",
    "accuracy_before": "REAL",
    "latency_before": "REAL",
    "seconds": "REAL",
    "worker": "TEXT",
    "failed": "TEXT",  # why there are no figures
    "finished": "TEXT DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))",
}


class Store:
    """One file of rows; a row that is there is never computed again, unless it failed."""

    def __init__(self, path: str | Path, writable: bool = True) -> None:
        self.path = Path(path)
        if not writable and not self.path.is_file():
            raise LbylError(f"there is no sweep at {self.path}")
        try:
            if writable:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._connection = sqlite3.connect(self.path)
            else:
                address = f"{self.path.resolve().as_uri()}?mode=ro"
                self._connection = sqlite3.connect(address, uri=True)
            self._check()
            if writable:
                self._create()
        except (sqlite3.Error, OSError) as error:
            raise LbylError(f"{self.path} is no sweep of lbyl: {error}") from error

    def _check(self) -> None:
        """One clear error for another program's database."""
        known = self._connection.execute("PRAGMA application_id").fetchone()[0]
        tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if known != FORMAT and tables:
            raise LbylError(f"{self.path} is a database of another program: name another file")
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if known == FORMAT and version != VERSION:
            raise LbylError(f"{self.path} was written by another version of lbyl: name a new file")

    def _create(self) -> None:
        with self._connection as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA application_id={FORMAT}")
            connection.execute(f"PRAGMA user_version={VERSION}")
            columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
            connection.execute(f"CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, {columns})")
            there = self._columns()
            for name, kind in COLUMNS.items():
                if name not in there:  # an older sweep, which goes on
                    connection.execute(f"ALTER TABLE rows ADD COLUMN {name} {kind}")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS originals (key TEXT PRIMARY KEY, figures TEXT NOT NULL)"
            )

    def done(self, keys: Iterable[str]) -> set[str]:
        """Which of the keys have their figures."""
        found = self._connection.execute("SELECT key FROM rows WHERE failed IS NULL").fetchall()
        return {key for (key,) in found} & set(keys)

    def add(self, key: str, row: Mapping[str, Any]) -> bool:
        """Write a row; False where it is there already. What failed before gives way."""
        names = ["key", *row]
        update = ", ".join(f"{name} = excluded.{name}" for name in row)
        statement = (
            f"INSERT INTO rows ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT(key) DO UPDATE SET {update}, "
            "finished = strftime('%Y-%m-%dT%H:%M:%fZ', 'now') WHERE rows.failed IS NOT NULL"
        )
        with self._connection as connection:
            changed = connection.execute(statement, [key, *row.values()]).rowcount
        return changed > 0

    def original(self, key: str) -> dict[str, Any] | None:
        """What is known of an original network, None where nothing is."""
        statement = "SELECT figures FROM originals WHERE key = ?"
        found = self._connection.execute(statement, [key]).fetchone()
        return None if found is None else json.loads(found[0])

    def add_original(self, key: str, figures: Mapping[str, Any]) -> None:
        with self._connection as connection:
            connection.execute(
                "INSERT OR IGNORE INTO originals (key, figures) VALUES (?, ?)",
                [key, json.dumps(figures)],
            )

    def rows(self) -> list[dict[str, Any]]:
        """All rows as plain data, in the order they were finished."""
        names = ["key", *(name for name in COLUMNS if name in self._columns())]
        statement = f"SELECT {', '.join(names)} FROM rows ORDER BY finished, key"
        absent: dict[str, Any] = dict.fromkeys(["key", *COLUMNS])
        return [absent | dict(zip(names, row)) for row in self._connection.execute(statement)]

    def _columns(self) -> set[str]:
        """Those that the file has: fewer where an older version wrote it."""
        return {row[1] for row in self._connection.execute("PRAGMA table_info(rows)")}

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
