"""A small SQLite database of the broker: WAL mode, synchronous=FULL, one transaction a call."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from logmirror.errors import CorruptionError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_CHANGES: Final = frozenset({"INSERT", "REPLACE", "UPDATE", "DELETE", "CREATE", "DROP", "ALTER"})
_Value = TypeVar("_Value", str, bytes)


class Shipping(Protocol):
    """Makes the changes of a database durable elsewhere."""

    def ship(self, statements: list[tuple[str, list[Any]]]) -> None:
        """Make the statements of a transaction durable, before it is committed here."""
        ...

    def snapshot(self, database: Recording) -> None:
        """Make the whole database durable."""
        ...


class Recording(sqlite3.Connection):
    """A connection that remembers the statements of the transaction in progress."""

    statements: list[tuple[str, list[Any]]]

    def execute(self, statement: str, values: Iterable[Any] = (), /) -> sqlite3.Cursor:  # type: ignore[override]  # values by position only
        """See `sqlite3.Connection.execute`."""
        kept = list(values)
        self._remember(statement, kept)
        return super().execute(statement, kept)

    def executemany(self, statement: str, rows: Iterable[Iterable[Any]], /) -> sqlite3.Cursor:  # type: ignore[override]  # the same
        """See `sqlite3.Connection.executemany`."""
        kept = [list(values) for values in rows]
        for values in kept:
            self._remember(statement, values)
        return super().executemany(statement, kept)

    def _remember(self, statement: str, values: list[Any]) -> None:
        first = statement.split(None, 1)[:1]
        if first and first[0].upper() in _CHANGES:
            self.statements.append((statement, values))

    def take(self) -> list[tuple[str, list[Any]]]:
        """Return the statements since the last call."""
        taken, self.statements = self.statements, []
        return taken


def connected(path: Path) -> Recording:
    """Open a connection outside transactions, for all threads."""
    found = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Recording)
    found.statements = []
    return found


class Database:
    """A database with a table `settings(name, value)`. Safe to call from several threads.

    Args:
        path: The file, created if it does not exist.
        schema: `CREATE TABLE IF NOT EXISTS` statements, separated by semicolons.
        pragmas: Further settings of SQLite, such as `secure_delete=ON`.
        shipping: Where changes are durable, if that is elsewhere too.

    Raises:
        CorruptionError: The file is damaged, or not a database.
        UnavailableError: The file cannot be opened or written.
    """

    def __init__(
        self, path: Path, schema: str, *pragmas: str, shipping: Shipping | None = None
    ) -> None:
        self.path = path
        self._shipping = shipping
        self._is_behind = False
        self._lock = threading.Lock()
        try:
            self._connection = connected(path)
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
            if self._is_behind:
                raise UnavailableError(
                    "the broker's database is behind its copy in the bucket",
                    hint="a change could not be written here; restart the broker",
                    path=str(self.path),
                )
            try:
                connection.execute("BEGIN IMMEDIATE")
                self._connection.take()
                yield connection
                statements = self._connection.take()
                if statements and self._shipping is not None:
                    self._shipping.ship(statements)
                    self._is_behind = True
                connection.execute("COMMIT")
                self._is_behind = False
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

    def snapshot(self) -> None:
        """Ship the whole database."""
        with self.lock():
            if self._shipping is not None:
                self._shipping.snapshot(self._connection)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()


def _translated(error: sqlite3.Error, path: Path) -> UnavailableError | CorruptionError:
    text = str(error)
    if "not a database" in text or "malformed" in text:
        return CorruptionError("the broker's database is damaged", path=str(path), cause=text)
    return UnavailableError("the broker's database is not usable", path=str(path), cause=text)
