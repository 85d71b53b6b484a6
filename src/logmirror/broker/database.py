"""A small SQLite database of the broker: WAL mode, synchronous=FULL, one transaction a call."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from logmirror.errors import CorruptionError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_Value = TypeVar("_Value", str, bytes)


class Database:
    """A database with a table `settings(name, value)`. Safe to call from several threads.

    Args:
        path: The file, created if it does not exist.
        schema: `CREATE TABLE IF NOT EXISTS` statements, separated by semicolons.
        pragmas: Further settings of SQLite, such as `secure_delete=ON`.

    Raises:
        CorruptionError: The file is damaged, or not a database.
        UnavailableError: The file cannot be opened or written.
    """

    def __init__(self, path: Path, schema: str, *pragmas: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise _translated(error, path) from error
        with self.lock() as connection:
            for pragma in ("journal_mode=WAL", "synchronous=FULL", *pragmas):
                connection.execute(f"PRAGMA {pragma}")
        with self.transaction() as connection:
            for statement in schema.split(";"):
                connection.execute(statement)

    @contextmanager
    def lock(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection, outside a transaction. Each statement is its own."""
        with self._lock:
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise _translated(error, self.path) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection. The changes are durable at the end, or none was made."""
        with self.lock() as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def setting(self, name: str, default: _Value) -> _Value:
        """Return a setting; stores `default` first if it is not set."""
        insert = "INSERT INTO settings VALUES (?, ?) ON CONFLICT DO NOTHING"
        select = "SELECT value FROM settings WHERE name = ?"
        with self.transaction() as connection:
            connection.execute(insert, (name, default))
            found: _Value = connection.execute(select, (name,)).fetchone()[0]
        return found

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()


def _translated(error: sqlite3.Error, path: Path) -> UnavailableError | CorruptionError:
    text = str(error)
    if "not a database" in text or "malformed" in text:
        return CorruptionError("the broker's database is damaged", path=str(path), cause=text)
    return UnavailableError("the broker's database is not usable", path=str(path), cause=text)
