"""Keeps a database of the broker in the chain: its changes, and now and then all of it.

A transaction's statements are in the chain before it is committed locally (`broker/database`), so
nothing is reported that another machine would not find. Its outcome is waited for without a limit
of time: with a local file that disagrees with the chain, no later change could be made.

A snapshot is taken between two transactions, and handed over before the next one is: so it holds
the changes before it in the chain, and no others. It is in memory three times while it is written.
A database of more than `MAX_SNAPSHOT_BYTES` stays in the chain as its changes. A start is slow
then, and the log says why.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import sqlite3
import threading
from typing import TYPE_CHECKING, Any, Final

from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import CorruptionError, LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from logmirror.broker.bucket.journal import Journal
    from logmirror.broker.bucket.recovery import DatabaseEntries

_LOG: Final = logging.getLogger(__name__)
MAX_SNAPSHOT_BYTES: Final = 128 * 1024 * 1024
"""Limit for a snapshot; an object that is read at once may have 256 MiB."""

_RETRY_MS: Final = 600_000
"""Time after a snapshot that could not be made until the next one."""


class DatabaseShipping:
    """Ships the changes of one database.

    Args:
        journal: Where to.
        name: The database's name in the chain.
    """

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal, self._name = journal, name

    def ship(self, statements: list[tuple[str, list[Any]]]) -> None:
        """Make the statements of a transaction durable. Blocks until the outcome is known.

        Raises:
            FencedError: Another broker took over.
            UnavailableError: The broker is stopping.
        """
        self._journal.ship(self._name, _encoded(statements))

    def snapshot(self, whole: Callable[[], bytes], size_bytes: int) -> Callable[[], None]:
        """See `Shipping.snapshot`.

        Raises:
            UnavailableError: The database is too large.
        """
        check_size(size_bytes)
        return self._journal.begin_shipping(self._name, whole(), is_snapshot=True).result


def check_size(size_bytes: int) -> None:
    """Check that a snapshot of a database is not too large.

    Raises:
        UnavailableError: It is.
    """
    if size_bytes > MAX_SNAPSHOT_BYTES:
        raise UnavailableError(
            "the database is too large for a snapshot",
            hint="its changes stay in the bucket, and a start reads all of them; fewer groups, "
            "topics or users make it smaller",
            size_bytes=size_bytes,
            limit_bytes=MAX_SNAPSHOT_BYTES,
        )


def restore(path: Path, found: DatabaseEntries) -> None:
    """Write a database as the chain has it; only the owner may read it.

    Raises:
        CorruptionError: A change cannot be applied.
    """
    if found.snapshot is None and not found.changes:
        return
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(found.snapshot or b"")
    database = sqlite3.connect(path, isolation_level=None)
    try:
        database.execute("BEGIN")
        for change in found.changes:
            for statement, values in _decoded(change):
                database.execute(statement, values)
        database.execute("COMMIT")
    except (sqlite3.Error, ValueError) as error:
        raise CorruptionError(
            "a change of the broker's database cannot be applied", path=str(path), cause=str(error)
        ) from error
    finally:
        database.close()


def _encoded(statements: Iterable[tuple[str, list[Any]]]) -> bytes:
    return json.dumps(
        [[text, [_plain(value) for value in values]] for text, values in statements]
    ).encode()


def _plain(value: object) -> object:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"b": base64.b64encode(value).decode()}
    return value


def _decoded(change: bytes) -> list[tuple[str, list[Any]]]:
    return [
        (text, [base64.b64decode(v["b"]) if isinstance(v, dict) else v for v in values])
        for text, values in json.loads(change)
    ]


class Snapshots:
    """Makes snapshots of databases when the chain has many of their changes. Never blocks.

    Args:
        when_made: Called after each.
    """

    def __init__(self, when_made: Callable[[], object]) -> None:
        self._when_made = when_made
        self._makers: dict[str, Callable[[], None]] = {}
        self._busy: set[str] = set()
        self._not_before_ms: dict[str, int] = {}

    def add(self, name: str, make: Callable[[], None]) -> None:
        """Add a database."""
        self._makers[name] = make

    def all_due(self) -> None:
        """Make a snapshot of each database: the commits of earlier owners can be removed then."""
        for name in self._makers:
            self.due(name)

    def due(self, name: str) -> None:
        """Make a snapshot in a thread of its own, if none is being made."""
        is_early = SYSTEM_CLOCK.monotonic_ms() < self._not_before_ms.get(name, 0)
        if is_early or name in self._busy or name not in self._makers:
            return
        self._busy.add(name)
        threading.Thread(
            target=self._make, args=(name,), name="logmirror-snapshot", daemon=True
        ).start()

    def _make(self, name: str) -> None:
        try:
            self._makers[name]()
        except LogmirrorError as error:
            self._not_before_ms[name] = SYSTEM_CLOCK.monotonic_ms() + _RETRY_MS
            _LOG.warning("database %s: no snapshot was made: %s", name, error)
        else:
            self._when_made()
        finally:
            self._busy.discard(name)
