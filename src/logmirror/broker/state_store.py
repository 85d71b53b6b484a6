"""The coordinators' durable state: groups, committed offsets, transactions.

A table of keys and values, by kind, in SQLite (WAL mode, synchronous=FULL). One thread writes.
Changes that arrive while it writes are committed together, so that many requests share a flush of
the disk, and they are committed in the order in which they were handed over.

    state(kind, key, value)     WITHOUT ROWID

After a failed commit nothing more is written until the broker restarts: it is not known what
reached the disk, and later changes could depend on it. A broker whose state is in a bucket ends
then; another one is not ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.database import Database
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from logmirror.broker.database import Shipping

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS state ("
    "kind TEXT NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (kind, key)"
    ") WITHOUT ROWID"
)
_PUT: Final = "INSERT OR REPLACE INTO state VALUES (?, ?, ?)"
_DELETE: Final = "DELETE FROM state WHERE kind = ? AND key = ?"

_CHANGES_MAX: Final = 10_000
"""Changes in one commit, from the second handed-over list on: bounds how long the first waits."""


class Change(NamedTuple):
    """A new value of a key."""

    kind: str
    key: bytes
    value: bytes | None
    """None: the key is removed."""


class _Handed(NamedTuple):
    changes: list[Change]
    done: asyncio.Future[None]


class StateStore:
    """The state of the coordinators. `write` belongs to the event loop.

    Args:
        path: The database, created if it does not exist.
        shipping: Where changes are durable, if that is elsewhere too.

    Attributes:
        failure: Why nothing more is written until the next start; None: changes are written.

    Raises:
        UnavailableError: The database cannot be opened.
    """

    def __init__(self, path: Path, shipping: Shipping | None = None) -> None:
        self.failure: LogmirrorError | None = None
        self._handed: list[_Handed] = []
        self._has_work = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._database = Database(path, _SCHEMA, shipping=shipping)

    def load(self, kind: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys and values of a kind, by key. Blocks; called before the broker listens.

        Raises:
            UnavailableError: The database cannot be read.
        """
        select = "SELECT key, value FROM state WHERE kind = ? ORDER BY key"
        with self._database.reading() as database:
            yield from database.execute(select, (kind,))

    def write(self, changes: Iterable[Change]) -> asyncio.Future[None]:
        """Make changes durable, all of them or none.

        Returns:
            A future that ends when they are durable, or with the `UnavailableError` of the failure.
            Changes of later calls are never durable without these.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if self.failure is not None:
            done.set_exception(self.failure)
            return done
        with self._has_work:
            self._handed.append(_Handed(list(changes), done))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(loop,), name="logmirror-state", daemon=True
                )
                self._thread.start()
            self._has_work.notify()
        return done

    def watch(self, when_failed: Callable[[Exception, Path], None]) -> None:
        """Report errors of the disk to a function; see `Database.when_failed`."""
        self._database.when_failed = when_failed

    def close(self) -> None:
        """Write what was handed over, then close the database."""
        with self._has_work:
            self._is_closing = True
            self._has_work.notify()
        if self._thread is not None:
            self._thread.join()
        self._database.close()

    # The thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while batch := self._next_batch():
            failure = self.failure or self._commit(batch)
            if failure is not None and self.failure is None:
                self._database.report_end(failure)
            self.failure = failure
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its waiters with it
                loop.call_soon_threadsafe(_end, batch, failure)

    def _next_batch(self) -> list[_Handed]:
        """Wait for changes; empty when the store closes."""
        with self._has_work:
            while not self._handed and not self._is_closing:
                self._has_work.wait()
            batch, count = self._handed[:1], 0
            for handed in self._handed[1:]:
                count += len(handed.changes)
                if count > _CHANGES_MAX:
                    break
                batch.append(handed)
            del self._handed[: len(batch)]
            return batch

    def _commit(self, batch: list[_Handed]) -> LogmirrorError | None:
        try:
            with self._database.transaction() as database:
                for handed in batch:
                    for kind, key, value in handed.changes:
                        if value is None:
                            database.execute(_DELETE, (kind, key))
                        else:
                            database.execute(_PUT, (kind, key, value))
        except LogmirrorError as error:
            return error
        return None

    def snapshot(self) -> None:
        """Ship the whole database. Blocks; in any thread."""
        self._database.snapshot()


def _end(batch: list[_Handed], failure: LogmirrorError | None) -> None:
    for _, done in batch:
        if done.done():
            continue  # cancelled: the client has disconnected
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)
