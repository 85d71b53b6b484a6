"""Waits until the owner of a log dir is gone.

The owner counts as gone when it said so and the chain has not moved since, or when neither its
heartbeats nor the chain have moved for the timeout. Time is this machine's own, from the end of one
check to the beginning of another one.

- W1 In a slow or absent bucket no owner is suspected: time counts only while checks succeed,
  and only if this machine could write for half of the timeout in which the owner did not.
- W2 A wrong suspicion is safe. The fence decides, and the former owner stops (`chain`).
- W3 A standby takes over only what it has checked. If the chain has moved since, it waits again. So
  of two standbys, one takes over.
"""

from __future__ import annotations

import enum
import logging
import os
import select
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.bucket.chain import COMMITS, HEARTBEAT_MS, commit_name, sequence_of
from logmirror.broker.bucket.heartbeats import HEARTBEATS, Heartbeat, newest
from logmirror.clock import SYSTEM_CLOCK, new_nonce
from logmirror.errors import (
    FencedError,
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
)
from logmirror.stopping import StoppedError, StopRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.broker.bucket.logs import BucketLogs
    from logmirror.stores.base import BlobStore

_LOG: Final = logging.getLogger(__name__)
_PROBES: Final = HEARTBEATS.replace("heartbeats", "standbys")
_STEP_S: Final = 0.05
_STDIN: Final = 0


class Step(enum.Enum):
    """What a standby does next."""

    WAIT = enum.auto()
    PROBE = enum.auto()
    """Check that this machine can write."""

    TAKE_OVER = enum.auto()


class Observation(NamedTuple):
    """What a standby has seen."""

    heartbeat: Heartbeat | None
    end: int | None
    """The newest number of the chain, -1 without one; None: not checked, the owner is there."""

    began_ms: int
    ended_ms: int


class Watch:
    """Decides when an owner counts as gone. Takes values, does no I/O.

    Args:
        timeout_ms: How long there must be no sign of life.
    """

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._heartbeat: Heartbeat | None = None
        self._end: int | None = None
        self._since_ms: int | None = None
        self._wrote_ms: int | None = None
        self.quiet_ms = 0
        """Without a sign of life."""

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The newest one."""
        return self._heartbeat

    def saw(self, seen: Observation) -> Step:
        """Add what was seen; returns what to do next."""
        has_moved = seen.heartbeat != self._heartbeat
        if seen.end is not None:
            has_moved |= self._end not in {None, seen.end}
            self._end = seen.end
        self._heartbeat = seen.heartbeat
        if has_moved or self._since_ms is None:
            self._since_ms, self._wrote_ms = seen.ended_ms, None
        self.quiet_ms = max(0, seen.began_ms - self._since_ms)
        if seen.end is None:
            return Step.WAIT
        if seen.heartbeat is not None and seen.heartbeat.stopped_at == seen.end:
            return Step.TAKE_OVER
        if self._wrote_ms is None:  # early enough to delay nothing
            return Step.PROBE if self.quiet_ms >= self._timeout_ms // 3 else Step.WAIT
        could_write_ms = seen.began_ms - self._wrote_ms
        is_due = self.quiet_ms >= self._timeout_ms and could_write_ms >= self._timeout_ms // 2
        return Step.TAKE_OVER if is_due else Step.WAIT

    def wrote(self, at_ms: int) -> None:
        """Record that this machine could write."""
        self._wrote_ms = at_ms

    def failed(self) -> None:
        """Record that the bucket did not respond: time counts from the next check on."""
        self._since_ms = self._wrote_ms = None
        self.quiet_ms = 0


class Standby:
    """A process that waits for the log dir.

    Args:
        store: The log dir.
        timeout_ms: See `Watch`.
        stop: Ends the waiting.
        with_stdin: Whether the end of stdin ends it too.
    """

    def __init__(
        self, store: BlobStore, timeout_ms: int, stop: StopRequest, *, with_stdin: bool = False
    ) -> None:
        self._store, self._stop, self._with_stdin = store, stop, with_stdin
        self.watch = Watch(timeout_ms)
        self._end = -1
        self._is_failing = False
        self._next_ms = 0

    def take_over(self, open_logs: Callable[[int], BucketLogs]) -> BucketLogs | None:
        """Wait until the owner is gone, then open the log dir; None: a stop was requested.

        Args:
            open_logs: Takes the log dir over if its chain ends with this number.

        Raises:
            CorruptionError: As `open_logs`.
            UsageError: The bucket refuses the access.
        """
        while True:
            try:
                self._wait()
                return open_logs(self._end)
            except StoppedError:
                return None
            except FencedError:
                _LOG.info("another broker took over first; waiting for that one")
            except (UnavailableError, OutcomeUnknownError) as error:
                _LOG.warning("the log dir could not be taken over; waiting again: %s", error)
            self.watch.failed()

    def _wait(self) -> None:
        epoch = None
        while True:
            self._pause()
            try:
                step = self._stop.unless_stopped(self._observe)
            except (UnavailableError, OutcomeUnknownError) as error:
                self._failed(error)
                step = Step.WAIT
            else:
                self._succeeded()
            if step is Step.TAKE_OVER:
                break
            beat = self.watch.heartbeat
            if beat is not None and beat.epoch != epoch:
                epoch = beat.epoch
                _LOG.info("the owner has epoch %d", epoch)
        beat, quiet_s = self.watch.heartbeat, self.watch.quiet_ms / 1000
        if beat is not None and beat.stopped_at == self._end:
            _LOG.info("the owner of epoch %d has stopped; taking over", beat.epoch)
        else:
            _LOG.warning("no sign of an owner for %.1f s; taking over", quiet_s)

    def _observe(self) -> Step:
        began_ms, end = SYSTEM_CLOCK.monotonic_ms(), None
        beat = newest(self._store)
        if beat is None or beat.stopped_at >= 0 or beat == self.watch.heartbeat:
            end = self._end = self._chain_end()
        step = self.watch.saw(Observation(beat, end, began_ms, SYSTEM_CLOCK.monotonic_ms()))
        if step is Step.PROBE:
            self._probe()
        return step

    def _chain_end(self) -> int:
        # The newest one is never removed, so it is listed again.
        after = commit_name(self._end - 1).rpartition("/")[2] if self._end > 0 else ""
        names = self._store.tail(COMMITS, after=after).names
        return max((s for name in names if (s := sequence_of(name)) is not None), default=-1)

    def _probe(self) -> None:
        name = f"{_PROBES}/{new_nonce()}"
        self._store.create(name, b"")
        self._store.delete(name)
        self.watch.wrote(SYSTEM_CLOCK.monotonic_ms())

    def _failed(self, error: LogmirrorError) -> None:
        if not self._is_failing:
            _LOG.warning("the bucket does not respond; the owner is not suspected: %s", error)
        self._is_failing = True
        self.watch.failed()

    def _succeeded(self) -> None:
        if self._is_failing:
            _LOG.info("the bucket responds again")
        self._is_failing = False

    def _pause(self) -> None:
        """Wait until the next check is due; the first one is at once."""
        watched = [_STDIN] if self._with_stdin else []
        while not self._stop.requested and SYSTEM_CLOCK.monotonic_ms() < self._next_ms:
            readable, _, _ = select.select(watched, [], [], _STEP_S)
            if readable and not os.read(_STDIN, 4096):
                self._stop.request()
        if self._stop.requested:
            raise StoppedError
        self._next_ms = SYSTEM_CLOCK.monotonic_ms() + HEARTBEAT_MS
