"""A simulated transaction coordinator: transactional IDs, their producers, and markers in logs.

Its state is durable and never expires. As on real brokers, the markers of a transaction are written
after the response to EndTxn, in each log at another moment. Leader changes before that are not
simulated; tests with real brokers cover them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror.wire.batch_header import MarkerType
from logmirror.wire.messages import (
    CONCURRENT_TRANSACTIONS,
    INVALID_TXN_STATE,
    NONE,
)
from logmirror.wire.records import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logmirror.clock import Chooser
    from logmirror.simulation.log import Log
    from logmirror.simulation.schedule import Schedule

PRODUCER_FENCED: Final = 90

_FIRST_PRODUCER: Final = 1000
_NO_PRODUCER: Final = -1
MARKER_MS: Final = (0, 0, 2, 30)
"""Delays of a marker after the end of its transaction."""


@dataclass(kw_only=True, eq=False)
class _Id:
    """The state of a transactional ID."""

    producer_id: int
    epoch: int = -1
    timeout_ms: int = 0
    joined: set[str] = field(default_factory=set)
    """Topics in the open transaction."""

    count: int = 0
    """Number of transactions so far."""

    outcome: MarkerType | None = None
    """Outcome of the last transaction."""

    awaited: int = 0
    """Number of its markers that are not written yet."""


class Transactions:
    """The state of the transaction coordinators.

    Args:
        schedule: The scheduler.
        chooser: Draws the delays of markers.
        log: Returns the log of a topic.
    """

    def __init__(self, schedule: Schedule, chooser: Chooser, log: Callable[[str], Log]) -> None:
        self._schedule, self._chooser, self._log = schedule, chooser, log
        self._ids: dict[str, _Id] = {}
        self._unwritten: list[tuple[_Id, str]] = []

    def decided(self, topic: str) -> list[bytes]:
        """Return the markers of decided transactions that are not written to a topic's log yet."""
        now_ms = self._schedule.now_ms()
        return [
            encode_marker(
                known.outcome, offset=0, producer_id=known.producer_id, timestamp_ms=now_ms
            )
            for known, where in self._unwritten
            if where == topic and known.outcome is not None
        ]

    def describe(self, name: str) -> _Id | None:
        """DescribeTransactions; None for an unknown transactional ID."""
        return self._ids.get(name)

    def is_joined(self, own: tuple[int, int], topic: str) -> bool:
        """Return whether a topic is in the open transaction of a producer (ID and epoch)."""
        ids = self._ids.values()
        return any(own == (k.producer_id, k.epoch) and topic in k.joined for k in ids)

    def init(self, name: str, timeout_ms: int, expected: tuple[int, int]) -> tuple[int, int, int]:
        """InitProducerId.

        Returns:
            Error code, producer ID, epoch.
        """
        known = self._ids.setdefault(name, _Id(producer_id=_FIRST_PRODUCER + len(self._ids)))
        repeated = (known.producer_id, known.epoch - 1)
        if expected[0] != _NO_PRODUCER and expected not in (
            repeated,
            (known.producer_id, known.epoch),
        ):
            return PRODUCER_FENCED, -1, -1
        if known.joined:
            self._abort(known)
        if known.awaited:
            return CONCURRENT_TRANSACTIONS, -1, -1
        if expected != repeated:
            known.epoch += 1
        known.timeout_ms = timeout_ms
        return NONE, known.producer_id, known.epoch

    def add(self, name: str, own: tuple[int, int], topics: Iterable[str]) -> int:
        """AddPartitionsToTxn; returns an error code."""
        known = self._ids[name]
        if own != (known.producer_id, known.epoch):
            return PRODUCER_FENCED
        if known.awaited:
            return CONCURRENT_TRANSACTIONS
        if not known.joined:
            known.count += 1
            count = known.count

            def time_out() -> None:
                if known.joined and known.count == count:
                    self._abort(known)

            self._schedule.after(known.timeout_ms, time_out)
        known.joined.update(topics)
        return NONE

    def end(self, name: str, own: tuple[int, int], marker: MarkerType) -> int:
        """EndTxn, which can be retried; returns an error code."""
        known = self._ids[name]
        if own != (known.producer_id, known.epoch):
            return PRODUCER_FENCED
        if not known.joined:
            return NONE if known.outcome is marker else INVALID_TXN_STATE
        self._decide(known, marker)
        return NONE

    def _abort(self, known: _Id) -> None:
        """Abort the open transaction and fence its producer."""
        known.epoch += 1
        self._decide(known, MarkerType.ABORT)

    def _decide(self, known: _Id, marker: MarkerType) -> None:
        known.outcome = marker
        topics, known.joined = sorted(known.joined), set()
        known.awaited = len(topics)
        for topic in topics:
            self._unwritten.append((known, topic))
            delay_ms = self._chooser.choice(MARKER_MS)
            if delay_ms:
                self._schedule.after(delay_ms, lambda topic=topic: self._mark(known, topic))  # type: ignore[misc]  # bound in the loop
            else:
                self._mark(known, topic)

    def _mark(self, known: _Id, topic: str) -> None:
        assert known.outcome is not None  # noqa: S101  # for mypy
        known.awaited -= 1
        self._unwritten.remove((known, topic))
        self._log(topic).append_marker(
            known.producer_id, known.epoch, 0, self._schedule.now_ms(), known.outcome
        )
