"""Driver: how old the oldest record is that a flow has not copied yet, by its own timestamp.

Only the source knows that timestamp, so it is asked, for one batch of each flow that lags: the one
at its position, once for each position, at most every `EVERY_MS`, and not before a flow has lagged
for `FIRST_MS`. A flow that keeps up costs nothing. All questions together take a small part of the
loop's time, however many flows lag, and one without an answer ends within seconds. Until its turn
comes, a flow's oldest record is taken to be as old as the last answer said, or else as the lag
itself.

The header of the batch is all that is read. Records of one batch are taken to be as old as its
first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.errors import LogmirrorError
from logmirror.wire.records import HEADER_SIZE, parse_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.mirror.observer import Observer
    from logmirror.mirror.plan import FlowState
    from logmirror.mirror.ports import FlowId
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.model import TopicPartition

FIRST_MS: Final = 1_000
"""A flow that catches up sooner is never asked about."""

EVERY_MS: Final = 10_000
"""Between two questions about one flow."""

FAILED_MS: Final = 60_000
"""A source that did not answer is left alone for so long: whoever copies will find out."""

BUDGET_MS: Final = 25
"""Of one pass of the loop, which polls four times a second when idle. A question that has begun is
finished."""

_VIEW_BYTES: Final = 16 << 10
_BATCH_BYTES_MAX: Final = 8 << 20
"""A source sends a batch whole. Larger ones are not asked for twice."""

_DELETE_HORIZON: Final = 64
"""Attribute of a batch whose base timestamp is another time; see `logmirror.wire.records`."""

_LOG_APPEND: Final = 8


@dataclass(slots=True)
class _Behind:
    """A flow that lags."""

    source: ConnectionSettings
    ask_at_ms: float
    """Monotonic."""

    position: int = -1
    """That was asked about last."""

    pending_since_ms: int | None = None
    """Monotonic; as last told."""


class RecordLag:
    """Keeps the ages of flows up to date; see `Observer.lags`.

    Args:
        client: The open client of a source, which does not wait for long.
        clock: Time.
        observer: Is told.
    """

    def __init__(
        self,
        client: Callable[[ConnectionSettings], ClusterClient],
        clock: Clock,
        observer: Observer,
    ) -> None:
        self._client, self._clock, self._observer = client, clock, observer
        self._behind: dict[FlowId, _Behind] = {}
        self._known: set[FlowId] = set()
        self._not_before_ms: dict[ConnectionSettings, float] = {}
        self._buffer = bytearray(_VIEW_BYTES)

    def look(
        self, states: Mapping[FlowId, FlowState], mirror_of: Mapping[FlowId, MirrorSpec]
    ) -> None:
        """Take in where the flows stand now, and ask what is due, longest due first."""
        began_ms = self._clock.monotonic_ms()
        for flow, state in states.items():
            if state.source_end >= 0:
                self._take_in(state, mirror_of[flow].source, began_ms)
        for flow in [flow for flow in self._behind if flow not in states]:
            del self._behind[flow]  # its mirror has stopped; its age grows on
        due = [
            (behind.ask_at_ms, flow, behind)
            for flow, behind in self._behind.items()
            if self._is_due(states[flow], behind, began_ms)
        ]
        self._ask(sorted(due, key=lambda item: item[0]), states, began_ms)

    def _take_in(self, state: FlowState, source: ConnectionSettings, now_ms: int) -> None:
        flow, wall_ms = state.flow, self._clock.now_ms()
        behind = self._behind.get(flow)
        if state.position >= state.source_end:
            if behind is not None or flow not in self._known:
                self._known.add(flow)
                self._behind.pop(flow, None)
                self._observer.lags(flow, None)
                self._observer.stalls(flow, None)
            return
        if behind is None:
            self._known.add(flow)
            behind = self._behind[flow] = _Behind(source, now_ms + FIRST_MS)
            self._observer.lags(flow, wall_ms)
        since_ms = state.pending_since_ms
        if since_ms is not None and since_ms != behind.pending_since_ms:
            behind.pending_since_ms = since_ms
            self._observer.stalls(flow, wall_ms - (now_ms - since_ms))

    def _is_due(self, state: FlowState, behind: _Behind, now_ms: int) -> bool:
        if behind.ask_at_ms > now_ms or behind.position == state.position:
            return False
        waits = state.lost or state.retry_at_ms > now_ms
        return not waits and self._not_before_ms.get(behind.source, 0) <= now_ms

    def _ask(
        self,
        due: Iterable[tuple[float, FlowId, _Behind]],
        states: Mapping[FlowId, FlowState],
        began_ms: int,
    ) -> None:
        asked: dict[tuple[ConnectionSettings, TopicPartition, int], int | None] = {}
        for _, flow, behind in due:
            state = states[flow]
            place = (behind.source, flow.source, state.position)
            if place not in asked:
                if self._clock.monotonic_ms() - began_ms >= BUDGET_MS:
                    return
                if self._not_before_ms.get(behind.source, 0) > began_ms:
                    continue
                try:
                    asked[place] = self._timestamp_ms(behind.source, state)
                except LogmirrorError:
                    self._not_before_ms[behind.source] = began_ms + FAILED_MS
                    continue
            behind.position, behind.ask_at_ms = state.position, began_ms + EVERY_MS
            found_ms = asked[place]
            if found_ms is not None:
                self._observer.lags(flow, found_ms)

    def _timestamp_ms(self, source: ConnectionSettings, state: FlowState) -> int | None:
        """The timestamp of the first batch from the position on; None: it has none."""
        client = self._client(source)
        size, needed = 0, _VIEW_BYTES
        while size == 0 and 0 < needed <= _BATCH_BYTES_MAX:
            if needed > len(self._buffer):
                self._buffer = bytearray(needed)
            response = client.fetch(
                state.flow.source,
                state.position,
                memoryview(self._buffer)[:needed],
                topic_id=state.topic_id,
                max_wait_ms=0,
            )
            size, needed = response.size, response.needed_bytes
        at = 0
        while at + HEADER_SIZE <= size:
            header = parse_header(self._buffer, at)
            if header.last_offset >= state.position:
                is_max = header.attributes & (_LOG_APPEND | _DELETE_HORIZON)
                found_ms = header.max_timestamp_ms if is_max else header.base_timestamp_ms
                return found_ms if found_ms >= 0 else None
            at += max(header.size_bytes, HEADER_SIZE)
        return None
