"""A small SQLite database of the broker: WAL mode, synchronous=FULL, one transaction a call.

Where its changes are durable elsewhere (`Shipping`), the file is a copy that no start reads:

- D1 A transaction's statements are shipped before COMMIT, and only if they changed something.
  What other calls read is therefore in both places. They are deterministic: the same statements in
  the same order make the same content.
- D2 If they cannot be shipped, they are rolled back. If COMMIT fails behind them, the file lacks a
  change that the other place has. Then every later transaction and snapshot fails until a start,
  and the broker ends.
- D3 The file is not flushed (synchronous=OFF): a crash loses it anyway.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import sqlite3
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from logmirror.errors import CorruptionError, InternalError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.errors import LogmirrorError

_CHANGES: Final = frozenset({"INSERT", "REPLACE", "UPDATE", "DELETE", "CREATE", "DROP", "ALTER"})
_PRIMARY: Final = 0xFF
"""The part of SQLite's error codes that is the kind of the error."""

_DISK_ERRORS: Final = frozenset(
    {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
)
_MOST_GROUPED: Final = 500
"""Changes in a transaction of `GroupedChanges`."""

_Value = TypeVar("_Value", str, bytes)


class Shipping(Protocol):
    """Makes the changes of a database durable elsewhere."""

    def ship(self, statements: list[tuple[str, list[Any]]]) -> None:
        """Make the statements of a transaction durable, before it is committed here."""
        ...

    def snapshot(self, whole: Callable[[], bytes], size_bytes: int) -> Callable[[], None]:
        """Hand over the whole database; the next call of `ship` is behind it.

        Args:
            whole: Returns its bytes.
            size_bytes: How many these are.

        Returns:
            A function that waits until it is durable.
        """
        ...


class Recording(sqlite3.Connection):
    """A connection that remembers the statements of the transaction in progress."""

    def __init__(self, *arguments: Any, **more: Any) -> None:  # noqa: ANN401  # those of SQLite
        super().__init__(*arguments, **more)
        self._statements: list[tuple[str, list[Any]]] = []

    def execute(self, statement: str, values: Iterable[Any] = (), /) -> sqlite3.Cursor:  # type: ignore[override]  # values by position only
        """See `sqlite3.Connection.execute`."""
        kept = list(values)
        cursor = super().execute(statement, kept)
        self._remember(statement, [kept])
        return cursor

    def executemany(self, statement: str, rows: Iterable[Iterable[Any]], /) -> sqlite3.Cursor:  # type: ignore[override]  # the same
        """See `sqlite3.Connection.executemany`."""
        kept = [list(values) for values in rows]
        cursor = super().executemany(statement, kept)
        self._remember(statement, kept)
        return cursor

    def _remember(self, statement: str, rows: list[list[Any]]) -> None:
        first = statement.split(None, 1)[:1]
        if first and first[0].upper() in _CHANGES:
            self._statements += ((statement, values) for values in rows)

    def begin(self) -> None:
        """Forget the statements of a transaction that was rolled back."""
        self._statements = []

    def taken(self) -> list[tuple[str, list[Any]]]:
        """Return the statements since `begin`."""
        return self._statements


class Database:
    """A database with a table `settings(name, value)`. Safe to call from several threads.

    Args:
        path: The file, created if it does not exist.
        schema: `CREATE TABLE IF NOT EXISTS` statements, separated by semicolons.
        pragmas: Further settings of SQLite, such as `secure_delete=ON`.
        shipping: Where changes are durable, if that is elsewhere too.

    Attributes:
        when_failed: Called in any thread with an error of the disk and the path. A `LogmirrorError`
            says that a database that is durable elsewhere is not written until the next start.

    Raises:
        CorruptionError: The file is damaged, or not a database.
        UnavailableError: The file cannot be opened or written.
    """

    def __init__(
        self, path: Path, schema: str, *pragmas: str, shipping: Shipping | None = None
    ) -> None:
        self.path = path
        self.when_failed: Callable[[Exception, Path], None] = lambda _error, _path: None
        self._shipping = shipping
        self._is_behind = False
        self._lock, self._read_lock = threading.Lock(), threading.Lock()
        kind = sqlite3.Connection if shipping is None else Recording
        synchronous = "FULL" if shipping is None else "OFF"
        with self._translating():
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, factory=kind
            )
        with self._lent() as connection:
            for pragma in ("journal_mode=WAL", f"synchronous={synchronous}", *pragmas):
                connection.execute(f"PRAGMA {pragma}")
        with self.transaction() as connection:
            for statement in schema.split(";"):
                connection.execute(statement)
        with self._translating():
            self._reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._reader.execute("PRAGMA query_only=ON")

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & _PRIMARY in _DISK_ERRORS:
                self.when_failed(OSError(errno.EIO, str(error), str(self.path)), self.path)
            raise _translated(error, self.path) from error

    @contextmanager
    def _lent(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._translating():
            yield self._connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection for reading what is durable. Never waits for a transaction."""
        with self._read_lock, self._translating():
            yield self._reader

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection. The changes are durable at the end, or none was made.

        Within `together`, at the end of that.

        Raises:
            UnavailableError: The database is not usable, or behind its copy elsewhere (D2).
            LogmirrorError: The changes could not be shipped.
        """
        if _GROUP.stack is None:
            with self._transaction() as connection:
                yield connection
        else:
            if self not in _GROUP.lent:
                _GROUP.lent[self] = _GROUP.stack.enter_context(self._transaction())
            yield _GROUP.lent[self]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lent() as connection:
            self._check_not_behind()
            try:
                connection.execute("BEGIN IMMEDIATE")
                if isinstance(connection, Recording):
                    connection.begin()
                before = self._version()
                yield connection
                if self._version() != before:
                    self._ship()
                self._commit(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _commit(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._is_behind:
                self.report_end(_translated(error, self.path))
            raise
        self._is_behind = False

    def report_end(self, error: LogmirrorError) -> None:
        """Report that the database is not written until a start, if it is durable elsewhere too."""
        if self._shipping is not None:
            self.when_failed(error, self.path)

    def _version(self) -> tuple[int, int]:
        """Return two numbers of which one changes with every change of the content."""
        if self._shipping is None:
            return 0, 0
        schema = self._connection.execute("PRAGMA schema_version").fetchone()[0]
        return schema, self._connection.total_changes

    def _ship(self) -> None:
        if not isinstance(self._connection, Recording) or self._shipping is None:
            return
        statements = self._connection.taken()
        if not statements:
            raise InternalError("a change of the broker's database was not recorded")
        self._shipping.ship(statements)
        self._is_behind = True

    def _check_not_behind(self) -> None:
        if self._is_behind:
            raise UnavailableError(
                "the broker's database is behind its copy in the bucket",
                hint="a change could not be written here; restart the broker",
                path=str(self.path),
            )

    def setting(self, name: str, default: _Value) -> _Value:
        """Return a setting; stores `default` first if it is not set."""
        insert = "INSERT INTO settings VALUES (?, ?) ON CONFLICT DO NOTHING"
        select = "SELECT value FROM settings WHERE name = ?"
        with self.transaction() as connection:
            connection.execute(insert, (name, default))
            found: _Value = connection.execute(select, (name,)).fetchone()[0]
        return found

    def snapshot(self) -> None:
        """Ship the whole database, and wait for it. Later changes need not."""
        if self._shipping is None:
            return
        with self._lent() as connection:
            self._check_not_behind()
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
            wait = self._shipping.snapshot(connection.serialize, pages * page_bytes)
        wait()

    def close(self) -> None:
        """Close the connections."""
        with self._lock, self._read_lock:
            self._reader.close()
            self._connection.close()


class _Group(threading.local):
    """The transactions of a thread within `together`."""

    stack: ExitStack | None = None

    def __init__(self) -> None:
        self.lent: dict[Database, sqlite3.Connection] = {}


_GROUP: Final = _Group()


@contextmanager
def together() -> Iterator[None]:
    """Let the transactions of this thread be one of each database, until the end.

    All of their changes are durable then, or none was made: an error must leave the block.
    """
    with ExitStack() as stack:
        _GROUP.stack = stack
        try:
            yield
        finally:
            _GROUP.stack = None
            _GROUP.lent.clear()


class GroupedChanges:
    """Changes of a database: one transaction for those that wait together. On the event loop.

    Args:
        executor: Where they are made.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._waiting: list[tuple[Callable[[], None], asyncio.Future[None]]] = []
        self._running: asyncio.Future[list[Exception | None]] | None = None

    async def make(self, change: Callable[[], None]) -> None:
        """Make a change, which is a call of methods that make transactions. It may be repeated.

        Raises:
            LogmirrorError: The change could not be made.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        self._begin()
        await done

    def _begin(self) -> None:
        if self._running is None and self._waiting:
            taken = self._waiting[:_MOST_GROUPED]
            del self._waiting[:_MOST_GROUPED]
            changes = [change for change, _ in taken]
            loop = asyncio.get_running_loop()
            self._running = loop.run_in_executor(self._executor, _outcomes, changes)
            waiters = [done for _, done in taken]
            self._running.add_done_callback(functools.partial(self._ended, waiters))

    def _ended(
        self,
        waiters: list[asyncio.Future[None]],
        running: asyncio.Future[list[Exception | None]],
    ) -> None:
        self._running = None
        if running.cancelled():
            for done in (*waiters, *(done for _, done in self._waiting)):
                done.cancel()
            self._waiting.clear()
            return
        for done, error in zip(waiters, running.result(), strict=True):
            if done.done():
                continue  # cancelled
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
        self._begin()


def _outcomes(changes: list[Callable[[], None]]) -> list[Exception | None]:
    """Make changes in one transaction; if that fails, each in its own. Blocks."""
    try:
        with together():
            for change in changes:
                change()
    except Exception as error:  # noqa: BLE001  # any error is that of the caller
        if len(changes) == 1:
            return [error]
        return [outcome for change in changes for outcome in _outcomes([change])]
    return [None] * len(changes)


def _translated(error: sqlite3.Error, path: Path) -> UnavailableError | CorruptionError:
    text = str(error)
    if "not a database" in text or "malformed" in text:
        return CorruptionError("the broker's database is damaged", path=str(path), cause=text)
    return UnavailableError(
        "the broker's database is not usable",
        hint="check free space and the health of the disk, then restart the broker",
        path=str(path),
        cause=text,
    )
