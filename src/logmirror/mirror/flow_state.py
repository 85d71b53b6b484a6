"""Driver: the state of one flow between ticks, and the events that change it.

A flow is in one of four phases. Each event has a row in one table, which says what phase follows.
Only this module writes a flow's phase and the fields that belong to it; all others report events.
An event that its row does not allow is a bug: it raises InternalError, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from logmirror.errors import InternalError
from logmirror.mirror.backoff import backoff_ms
from logmirror.mirror.ports import ArchiveSpec, DestinationSpec, FlowId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.mirror.ports import Begun, Hold, SliceResult, Start

SLICE_BYTES: Final = 256 << 20
"""A slice stops at the first object boundary after this many bytes: about one second of work. A
shutdown is prompt, and Spark's 20-40 ms per tick are a few per cent at most."""

ASSUMED_BYTES: Final = 1024
"""Assumed size of a record before any was read, where a read would cost a whole snapshot."""

MARGIN_MS: Final = 60_000
"""Safety margin within `delete.retention.ms`: for clock skew, and for the time between polling the
source and reading it."""

DAY_MS: Final = 86_400_000


class Phase(Enum):
    """What a flow may do."""

    READY = "ready"
    """The position is known: slices are planned when they are due."""

    WAITING = "waiting"
    """The flow backs off until `retry_at_ms`, and is then planned from its position."""

    STALE = "stale"
    """The position must be read from the destination before the next slice."""

    STALE_WAITING = "stale-waiting"
    """The flow backs off until `retry_at_ms`, and then reads its position."""


class Event(Enum):
    """What happens to a flow; each is one method of `FlowState`, or one outcome of it."""

    OPENED = "opened"
    """The position was read, and the destination is ready for the first write."""

    HELD = "held"
    """The position was read, but an earlier writer may still write: read it again later."""

    OBSERVED = "observed"
    """The end of the source was polled."""

    COMPARED = "compared"
    """Leader epochs were compared after an election at the source."""

    ADVANCED = "advanced"
    """The result of a slice was committed, or the part of it before an error."""

    COMMITTED = "committed"
    """All results of a tick were committed without an error."""

    FAILED = "failed"
    """A request or a slice failed with a retriable error."""

    OUTDATED = "outdated"
    """The destination may not end at the position any more."""


_ANY: Final = {phase: phase for phase in Phase}
_KNOWN: Final = {phase: phase for phase in (Phase.READY, Phase.WAITING)}

TRANSITIONS: Final[Mapping[Event, Mapping[Phase, Phase]]] = {
    Event.OPENED: {Phase.STALE: Phase.READY, Phase.STALE_WAITING: Phase.READY},
    Event.HELD: {Phase.STALE: Phase.STALE_WAITING, Phase.STALE_WAITING: Phase.STALE_WAITING},
    Event.OBSERVED: _KNOWN,
    Event.COMPARED: _KNOWN,
    Event.ADVANCED: _ANY,  # a job that was started before the flow failed may end after that
    Event.COMMITTED: _ANY | {Phase.WAITING: Phase.READY, Phase.STALE_WAITING: Phase.STALE},
    Event.FAILED: _ANY | {Phase.READY: Phase.WAITING, Phase.STALE: Phase.STALE_WAITING},
    Event.OUTDATED: _ANY | {Phase.READY: Phase.STALE, Phase.WAITING: Phase.STALE_WAITING},
}
"""For each event the phases in which it may happen, each with the phase that follows."""


@dataclass(slots=True, kw_only=True)
class FlowState:
    """The driver's state of one flow between ticks. A restart derives all of it again."""

    flow: FlowId
    destination: DestinationSpec
    topic_id: bytes | None
    """The topic ID at the source, 16 bytes. None: the source has no topic IDs."""

    compacted: bool
    """Whether the source's `cleanup.policy` contains `compact`."""

    position: int
    """The next offset to copy."""

    source_end: int = -1
    """The last stable offset of the source, as last polled. -1: not polled yet."""

    pending_since_ms: int | None = None
    """Monotonic time since when offsets are pending. None: no offset is pending."""

    bytes_per_offset: float | None = None
    """Payload bytes per offset in the last slice, at least 1. None: not known yet."""

    probed_bytes: int = 0
    """Payload bytes between `position` and `probed_end`, from a slice that filled no object."""

    probed_end: int = 0
    """One past the last offset that `probed_bytes` counts."""

    next_daily_ms: int | None = None
    """Time of the next daily flush, in milliseconds since 1970. None: no daily flush."""

    target: int | None = None
    """Offset at which the flow ends (`--until-now`, or a shutdown). None: it does not end."""

    phase: Phase = Phase.READY
    """What the flow may do now."""

    retry_at_ms: int = 0
    """Monotonic time before which the flow backs off. 0: it is not in a phase that waits."""

    failures: int = 0
    """Consecutive failures."""

    log_start: int = 0
    """The source's log start offset when the position was read."""

    delete_retention_ms: int = 0
    """The source's `delete.retention.ms`."""

    current_ms: int = 0
    """`compaction: log`: when the newest snapshot was last complete, in milliseconds since 1970."""

    rebuild: bool = False
    """`compaction: log`: the next snapshot is built from the source's whole log."""

    newest: str = ""
    """File name of the chain's last known object. Empty: none."""

    tail_checked: bool = True
    """See `Work.tail_checked`."""

    leader_epoch: int = -1
    """The source's leader epoch of the batch before `position`. -1: unknown."""

    source_epoch: int = -1
    """The source's current leader epoch, as last compared. -1: it has none."""

    fenced: bool = False
    """See `Work.fenced`."""

    in_flight_max: int = 1
    """See `Work.in_flight_max`."""

    hold: Hold | None = None
    """What the flow has waited for at `hold_position`. None: nothing."""

    hold_position: int = -1

    @property
    def end(self) -> int:
        """One past the last offset to copy now: the lower of source end and target."""
        return self.source_end if self.target is None else min(self.target, self.source_end)

    @property
    def pending(self) -> int:
        """Number of offsets that are not copied yet, never negative."""
        return max(self.end - self.position, 0)

    @property
    def reached(self) -> bool:
        """Whether the flow has reached its target. False without a target."""
        return self.target is not None and self.position >= self.target

    def end_before(self, offset: int) -> bool:
        """End the flow before an offset; False if it ends there, or before, as it is."""
        if offset >= self.end:
            return False
        self.target = offset
        return True

    @property
    def position_stale(self) -> bool:
        """Whether the position must be read from the destination before the flow resumes."""
        return self.phase in {Phase.STALE, Phase.STALE_WAITING}

    def backs_off(self, now_ms: int) -> bool:
        """Whether the flow waits at this monotonic time."""
        return self.retry_at_ms > now_ms

    def is_free(self, now_ms: int) -> bool:
        """Whether a slice may begin at the position at this monotonic time."""
        return not self.position_stale and not self.backs_off(now_ms)

    def daily_is_due(self, wall_ms: int) -> bool:
        """Whether it is time for the daily flush."""
        return self.next_daily_ms is not None and wall_ms >= self.next_daily_ms

    def expected_bytes(self) -> int:
        """Estimate the payload bytes that are not copied yet."""
        if self.bytes_per_offset is None:
            archive = self.destination
            if not isinstance(archive, ArchiveSpec):
                return SLICE_BYTES
            return self.pending * ASSUMED_BYTES if archive.compaction else archive.max_bytes
        known = max(min(self.probed_end, self.end) - self.position, 0)
        return self.probed_bytes + int((self.pending - known) * self.bytes_per_offset)

    def _enter(self, event: Event) -> None:
        """Enter the phase that follows an event.

        Raises:
            InternalError: The event is not possible in this phase.
        """
        following = TRANSITIONS[event].get(self.phase)
        if following is None:
            raise InternalError(
                "an event of a flow in the wrong phase",
                flow=str(self.flow),
                event=event.value,
                phase=self.phase.value,
            )
        self.phase = following

    def opened(self, start: Start, begun: Begun, now_ms: int) -> None:
        """The position was read and compared with the source.

        Args:
            start: Where the flow starts.
            begun: What the destination did. The flow may have to wait, and read again.
            now_ms: Monotonic time.
        """
        self._enter(Event.HELD if begun.wait_ms else Event.OPENED)
        self.retry_at_ms = now_ms + begun.wait_ms if begun.wait_ms else 0
        self.topic_id, self.log_start = start.view.topic_id, start.view.log_start
        self.position, self.leader_epoch = start.position, start.leader_epoch
        self.source_epoch = start.view.leader_epoch
        self.probed_bytes, self.probed_end = 0, start.position
        self.tail_checked, self.fenced, self.in_flight_max = start.tail_checked, False, 1
        self.newest = begun.newest
        self.current_ms, self.rebuild = begun.snapshot_ms, begun.rebuild

    def outdated(self) -> None:
        """The destination may not end at the position any more."""
        self._enter(Event.OUTDATED)

    def recreated(self, topic_id: bytes | None) -> None:
        """The topic has another topic ID at the source. Reading the position reports it."""
        self._enter(Event.OUTDATED)
        self.topic_id, self.leader_epoch = topic_id, -1

    def held_at(self, position: int) -> Hold | None:
        """Return what the flow has waited for, if its next slice begins where that one ended."""
        return self.hold if position == self.hold_position else None

    def failed(self, now_ms: int, hold: Hold | None = None) -> int:
        """A request or a slice failed with a retriable error.

        Args:
            now_ms: Monotonic time.
            hold: What the flow must wait for at least.

        Returns:
            How long the flow backs off, in milliseconds.
        """
        self._enter(Event.FAILED)
        self.failures += 1
        wait_ms = max(backoff_ms(self.failures), hold.wait_ms if hold else 0)
        if hold is not None:
            self.hold, self.hold_position = hold, self.position
        self.retry_at_ms = now_ms + wait_ms
        return wait_ms

    def committed(self) -> None:
        """All results of a tick were committed without an error."""
        self._enter(Event.COMMITTED)
        self.failures, self.retry_at_ms, self.hold = 0, 0, None

    def compared(self, source_epoch: int, leader_epoch: int, *, is_proven: bool) -> None:
        """Leader epochs were compared after an election at the source.

        Args:
            source_epoch: The source's current leader epoch.
            leader_epoch: That of the batch before the position; -1: the source does not know it.
            is_proven: Whether the source is proven to hold that batch.
        """
        self._enter(Event.COMPARED)
        self.source_epoch, self.leader_epoch = source_epoch, leader_epoch
        if self.destination.follows or not is_proven:
            self.tail_checked = False

    def observe(self, source_end: int, now_ms: int, wall_ms: int = 0) -> None:
        """Record a polled end of the source. A lower end than before is ignored.

        Args:
            source_end: The source's last stable offset.
            now_ms: Monotonic time of the poll.
            wall_ms: The same moment in milliseconds since 1970.
        """
        self._enter(Event.OBSERVED)
        self.source_end = max(self.source_end, source_end)
        if self.source_end == self.position:
            self.current_ms = wall_ms
        if self.pending and self.pending_since_ms is None:
            self.pending_since_ms = now_ms

    def schedule_daily(self, wall_ms: int, *, is_planned: bool) -> None:
        """Schedule the next daily flush if this one was planned, or had nothing to flush.

        Args:
            wall_ms: Time in milliseconds since 1970, as passed to `plan`.
            is_planned: Whether `plan` returned a slice of this flow.
        """
        spec = self.destination
        is_done = is_planned or not self.pending
        if is_done and self.daily_is_due(wall_ms):
            self.next_daily_ms = next_daily_ms(spec.daily_at_utc_s, wall_ms)

    def must_rebuild(self, wall_ms: int) -> bool:
        """Whether the next snapshot must be built from the source's whole log.

        Merging with the previous snapshot is correct as long as every tombstone since then can
        still be read. Brokers keep tombstones for `delete.retention.ms` after cleaning.
        """
        age_ms = wall_ms - self.current_ms
        # A negative age: a clock was wrong, so the age is not known.
        return self.rebuild or not -MARGIN_MS <= age_ms < self.delete_retention_ms - MARGIN_MS

    def snapshot_written(self, seen_ms: int) -> None:
        """A snapshot has all records up to the end that the driver read at `seen_ms`."""
        self.current_ms, self.rebuild = seen_ms, False

    def advance(
        self, result: SliceResult, position: int, now_ms: int, *, newest: str | None = None
    ) -> None:
        """Update the flow after a committed result.

        Args:
            result: The result of the slice.
            position: The next offset to copy.
            now_ms: Monotonic time.
            newest: File name of the chain's last object. None: the flow is into a cluster.
        """
        self._enter(Event.ADVANCED)
        self.tail_checked |= result.tail_checked
        self.fenced |= result.fenced
        self.in_flight_max = result.in_flight_max
        self.newest = self.newest if newest is None else newest
        payload = sum(r.payload_bytes for r in result.receipts) + result.rest_bytes
        read = result.next_offset - result.slice.first
        if read > 0:
            self.bytes_per_offset = max(payload / read, 1.0)
        moved = position > self.position
        self.position = position
        if moved:
            epochs = (r.leader_epoch for r in result.receipts if r.covered.next_offset == position)
            self.leader_epoch = next(epochs, -1)
        self.probed_bytes = 0 if result.error else result.rest_bytes
        self.probed_end = position if result.error else max(result.next_offset, position)
        if moved or not self.pending:
            self.pending_since_ms = now_ms if self.pending else None


def next_daily_ms(at_utc_s: int | None, wall_ms: int) -> int | None:
    """Return the next time after `wall_ms` that is `at_utc_s` seconds past midnight UTC."""
    if at_utc_s is None:
        return None
    today = wall_ms - wall_ms % DAY_MS + at_utc_s * 1000
    return today if today > wall_ms else today + DAY_MS
