"""The thread that writes commit objects: one at a time, what arrives meanwhile goes into the next.

    entries submitted ... -> [one object] -> ... durable -> callbacks, in the order of submission

- J1 At most one object is begun in each interval, however many partitions there are.
- J2 While it is not known whether an object exists, only its own bytes are sent, again and again.
  So a former owner's and a lost request's bytes are never mixed up, and nothing is lost by an
  outage: what was submitted becomes durable when the bucket is back.
- J3 After a fence nothing is durable any more: all callbacks get `FencedError`.
- J4 Behind an object that a stop has given up, nothing is written: it may exist, or not, and what
  was submitted later may need it. All callbacks get the error.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror import failpoints
from logmirror.broker.bucket.chain import CHECK_MS
from logmirror.broker.bucket.commit_format import Entry, Kind, of_database
from logmirror.clock import SYSTEM_CLOCK, jittered_ms
from logmirror.errors import FencedError, LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.broker.bucket.chain import Coverage
    from logmirror.broker.bucket.chain_writer import ChainWriter

_LOG: Final = logging.getLogger(__name__)
MAX_OBJECT_BYTES: Final = 8 * 1024 * 1024
"""Limit for an object that holds more than one submission."""

_FIRST_PAUSE_MS: Final = 100
_LONGEST_PAUSE_MS: Final = 2_000


class Submission(NamedTuple):
    """Entries that become durable together."""

    size_bytes: int
    read: Callable[[], Sequence[Entry]]
    """Returns the entries; may read files, and raise `OSError`."""

    done: Callable[[int, BaseException | None], None]
    """Called in the journal's thread, with the sequence number or an error."""


class Journal:
    """Writes the chain of a log dir.

    Args:
        writer: The owner of the chain.
        coverage: Learns of each commit.
        interval_ms: Least time between the beginnings of two objects.
        check_ms: How often an idle owner looks whether it still is the owner.

    Attributes:
        when_fenced: Called in the journal's thread, once, when another owner took over.
        when_created: Called in the journal's thread with the number and bytes of each object.
        failing_since_ms: Since when the bucket cannot be written, monotonic; None: it can.
    """

    def __init__(
        self, writer: ChainWriter, coverage: Coverage, *, interval_ms: int, check_ms: int = CHECK_MS
    ) -> None:
        self._writer = writer
        self.coverage = coverage
        self.interval_ms, self._check_ms = 0, check_ms
        self._least_ms = interval_ms
        self._waiting: deque[Submission] = deque()
        self._asked: list[Future[None]] = []
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._failure: LogmirrorError | None = None
        self.lock = threading.Lock()
        """Guards the coverage."""

        self.when_fenced: Callable[[FencedError], None] = lambda _: None
        self.when_created: Callable[[int, bytes], None] = lambda *_: None
        self.failing_since_ms: int | None = None
        self.pause: Callable[[float], object] = lambda ms: self._closing.wait(ms / 1000)
        """Waits before a repetition."""

        self.objects = self.object_bytes = 0
        self._thread = threading.Thread(target=self._run, name="logmirror-commits", daemon=True)

    @property
    def end(self) -> int:
        """The last number of the chain that is known to exist."""
        return self._writer.next_sequence - 1

    @property
    def is_fenced(self) -> bool:
        """Whether another owner took the log dir over."""
        return isinstance(self._failure, FencedError)

    def start(self) -> None:
        """Start the thread. What was submitted before is written then."""
        self._thread.start()

    def opened(self) -> None:
        """Keep the interval from now on; the steps of a start depend on each other."""
        self.interval_ms = self._least_ms

    def submit(self, submission: Submission) -> None:
        """Make entries durable, in the order of the calls. Never blocks."""
        with self._changed:
            failure = self._failure or self._closed()
            if failure is None:
                self._waiting.append(submission)
                self._changed.notify_all()
        if failure is not None:
            submission.done(-1, failure)

    def _closed(self) -> LogmirrorError | None:
        return UnavailableError("the broker is stopping") if self._closing.is_set() else None

    def ship(self, name: str, payload: bytes) -> None:
        """Make a change of a database durable. Blocks until that is known.

        Raises:
            UnavailableError: The broker is stopping, and the bucket cannot be written.
            FencedError: Another broker took the log dir over.
        """
        self.begin_shipping(name, payload).result()

    def begin_shipping(
        self, name: str, payload: bytes, *, is_snapshot: bool = False
    ) -> Future[None]:
        """Hand over a change of a database or a snapshot of it; durable in the order of the calls.

        A snapshot must hold every change that was handed over before it, and none that was not.

        Returns:
            Ends when it is durable, or with an error as in `ship`.
        """
        entry = of_database(Kind.SNAPSHOT if is_snapshot else Kind.CHANGE, name, payload)
        outcome: Future[None] = Future()

        def done(_: int, error: BaseException | None) -> None:
            if error is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(error)

        self.submit(Submission(len(payload), lambda: [entry], done))
        return outcome

    def confirm(self) -> Future[None]:
        """Find out whether this broker still was the owner at this call. Never blocks.

        Returns:
            Ends when that is known; with `FencedError` if another one had taken over, with another
            `LogmirrorError` if the bucket could not be read. While the bucket cannot be written it
            does not end, so the caller needs a deadline. It may be cancelled.
        """
        asked: Future[None] = Future()
        with self._changed:
            failure = self._failure or self._closed()
            if failure is None:
                self._asked.append(asked)
                self._changed.notify_all()
        if failure is not None:
            asked.set_exception(failure)
        return asked

    def close(self, timeout_s: float) -> None:
        """End the thread when what was submitted is written, or the bucket does not respond.

        Args:
            timeout_s: How long to wait for that.
        """
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # The thread

    def _run(self) -> None:
        began_ms = SYSTEM_CLOCK.monotonic_ms()
        while True:
            with self._changed:
                if not self._waiting and not self._asked and not self._closing.is_set():
                    self._changed.wait(self._check_ms / 1000)
                is_idle, asked, self._asked = not self._waiting, self._asked, []
            if asked or (is_idle and not self._closing.is_set()):
                self._check(asked)
            if is_idle and self._closing.is_set():
                return
            if is_idle:
                continue
            if not self._closing.is_set():
                SYSTEM_CLOCK.sleep_ms(began_ms + self.interval_ms - SYSTEM_CLOCK.monotonic_ms())
            began_ms = SYSTEM_CLOCK.monotonic_ms()
            self.commit()

    def commit(self) -> None:
        """Write what was submitted first, as one object. Only the thread calls it, if it runs."""
        self._commit(self._take())

    def _take(self) -> list[Submission]:
        with self._changed:
            taken = [self._waiting.popleft()]
            size = taken[0].size_bytes
            while self._waiting and size + self._waiting[0].size_bytes <= MAX_OBJECT_BYTES:
                size += self._waiting[0].size_bytes
                taken.append(self._waiting.popleft())
            return taken

    def _commit(self, taken: list[Submission]) -> None:
        whole: list[Submission] = []
        entries: list[Entry] = []
        for one in taken:
            try:
                entries += one.read()
                whole.append(one)
            except Exception as error:  # noqa: BLE001  # of the local disk: that one only
                one.done(-1, error)
        if not entries:
            for one in whole:
                one.done(self._writer.next_sequence - 1, None)
            return
        with self.lock:
            oldest = self.coverage.oldest
        try:
            sequence = self._create(self._writer.packed(entries, oldest))
        except FencedError as error:
            self._fenced(error, whole)
            return
        except UnavailableError as error:  # the broker is stopping, and the bucket is away
            self._end(error, whole)  # J4
            return
        with self.lock:
            self.coverage.add(sequence, entries, SYSTEM_CLOCK.monotonic_ms())
        failpoints.reach("bucket.committed")
        for one in whole:
            one.done(sequence, None)

    def _create(self, data: bytes) -> int:
        """Create an object, however long it takes (J2)."""
        began_ms, pause_ms = SYSTEM_CLOCK.monotonic_ms(), _FIRST_PAUSE_MS
        while True:
            try:
                sequence = self._writer.create(data)
            except FencedError:
                raise
            except LogmirrorError as error:
                if self.failing_since_ms is None:
                    self.failing_since_ms = began_ms  # the store itself tries for seconds
                    _LOG.warning("the bucket cannot be written; it is tried again: %s", error)
                if self._closing.is_set():
                    raise UnavailableError("the bucket cannot be written") from error
            else:
                if self.failing_since_ms is not None:
                    _LOG.info("the bucket can be written again")
                self.failing_since_ms = None
                self.objects += 1
                self.object_bytes += len(data)
                self.when_created(sequence, data)
                return sequence
            self.pause(jittered_ms(pause_ms))
            pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)

    def _check(self, asked: Sequence[Future[None]]) -> None:
        failure: LogmirrorError | None = None
        try:
            self._writer.check()
        except FencedError as error:
            failure = error
            self._fenced(error, [])
        except LogmirrorError as error:
            failure = error
            _LOG.debug("ownership could not be checked: %s", error)
        for one in asked:
            if not one.set_running_or_notify_cancel():
                continue  # its caller has gone
            if failure is None:
                one.set_result(None)
            else:
                one.set_exception(failure)

    def _fenced(self, error: FencedError, taken: list[Submission]) -> None:
        if not self.is_fenced:
            self.when_fenced(error)
        self._end(error, taken)

    def _end(self, error: LogmirrorError, taken: list[Submission]) -> None:
        """Write nothing any more."""
        with self._changed:
            self._failure = error
            self._closing.set()
            taken = [*taken, *self._waiting]
            self._waiting.clear()
        for one in taken:
            one.done(-1, error)
