"""Driver: the planner, which turns positions and source ends into slices: a pure function.

The source's log is the buffer: no record is held between ticks, so a trigger that is not due costs
one comparison. The driver knows offsets, not bytes. It derives each flow's bytes per offset from
results, and reads for `max-bytes` only when that limit is likely to be reached.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from logmirror.mirror.ports import ArchiveSpec, DestinationSpec, FlowId, KafkaSpec, Slice
from logmirror.model import Trigger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.mirror.ports import SliceResult

SLICE_BYTES: Final = 256 << 20
"""A slice stops at the first object boundary after this many bytes: about one second of work. A
shutdown is prompt, and Spark's 20-40 ms per tick are a few per cent at most."""

COPY_BYTES: Final = 1 << 30
"""The same for destinations with `offsets: preserve`, whose slices end by time."""

ASSUMED_BYTES: Final = 1024
"""Assumed size of a record before any was read, where a read would cost a whole snapshot."""

MARGIN_MS: Final = 60_000
"""Safety margin within `delete.retention.ms`: for clock skew, and for the time between polling the
source and reading it."""

DAY_MS: Final = 86_400_000

_PROBE_GROWTH: Final = 1.05
"""A slice that filled no object is not repeated before this factor of its bytes, or of its offsets,
is expected."""


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

    retry_at_ms: int = 0
    """Monotonic time before which the flow backs off. 0: it does not."""

    failures: int = 0
    """Consecutive failures."""

    position_stale: bool = False
    """The position must be read from the destination before the flow resumes."""

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

    def expected_bytes(self) -> int:
        """Estimate the payload bytes that are not copied yet."""
        if self.bytes_per_offset is None:
            archive = self.destination
            if not isinstance(archive, ArchiveSpec):
                return SLICE_BYTES
            return self.pending * ASSUMED_BYTES if archive.compaction else archive.max_bytes
        known = max(min(self.probed_end, self.end) - self.position, 0)
        return self.probed_bytes + int((self.pending - known) * self.bytes_per_offset)

    def observe(self, source_end: int, now_ms: int, wall_ms: int = 0) -> None:
        """Record a polled end of the source. A lower end than before is ignored.

        Args:
            source_end: The source's last stable offset.
            now_ms: Monotonic time of the poll.
            wall_ms: The same moment in milliseconds since 1970.
        """
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
        if isinstance(spec, ArchiveSpec) and is_done and _daily_is_due(self, wall_ms):
            self.next_daily_ms = next_daily_ms(spec.daily_at_utc_s, wall_ms)

    def must_rebuild(self, wall_ms: int) -> bool:
        """Whether the next snapshot must be built from the source's whole log.

        Merging with the previous snapshot is correct as long as every tombstone since then can
        still be read. Brokers keep tombstones for `delete.retention.ms` after cleaning.
        """
        return self.rebuild or wall_ms - self.current_ms >= self.delete_retention_ms - MARGIN_MS

    def advance(self, result: SliceResult, position: int, now_ms: int) -> None:
        """Update the flow after a committed result.

        Args:
            result: The result of the slice.
            position: The next offset to copy.
            now_ms: Monotonic time.
        """
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


@dataclass(frozen=True, slots=True)
class Planned:
    """A slice and its expected payload in bytes."""

    slice: Slice
    estimated_bytes: int


@dataclass(slots=True)
class _Due:
    state: FlowState
    tail: Trigger | None
    parts: int = field(default=1)
    bytes_per_offset: float = 1.0
    """With several parts: that of the largest flow at the same place."""

    @property
    def place(self) -> object:
        """Group key: flows into archives at the same position share one read, and so a slot."""
        state = self.state
        if not _is_divisible(state.destination):
            return state.flow
        return (state.flow.source, state.topic_id, state.position, state.leader_epoch)


def plan(
    states: Iterable[FlowState], *, slots: int, now_ms: int, wall_ms: int, explicit: bool = False
) -> list[Planned]:
    """Plan the slices of one tick. Changes nothing; see `FlowState.schedule_daily`.

    Args:
        states: All flows of this process.
        slots: How many slices run in parallel, at least 1.
        now_ms: Monotonic time.
        wall_ms: Time in milliseconds since 1970, for daily flushes.
        explicit: Write every incomplete object (`--until-now`, or a shutdown).

    Returns:
        At most one slice for each flow that publishes, and further, staged ones if slots would be
        idle and the flow's backlog is long. A flow into a cluster has a slice in every tick, even
        an empty one, which follows the source. With `explicit`, flows that have reached their end
        have none.
    """
    due = []
    for state in states:
        archive = state.destination
        if not isinstance(archive, ArchiveSpec):
            if (
                state.retry_at_ms <= now_ms
                and not state.position_stale
                and (state.pending or not explicit)
            ):
                due.append(_Due(state, None))
            continue
        if not state.pending or state.retry_at_ms > now_ms or state.position_stale:
            continue
        is_due, tail = _due(state, archive, now_ms, wall_ms, explicit=explicit)
        if is_due:
            due.append(_Due(state, tail))
    _share_idle_slots(due, slots)
    return [planned for item in due for planned in _slices(item, wall_ms)]


def next_daily_ms(at_utc_s: int | None, wall_ms: int) -> int | None:
    """Return the next time after `wall_ms` that is `at_utc_s` seconds past midnight UTC."""
    if at_utc_s is None:
        return None
    today = wall_ms - wall_ms % DAY_MS + at_utc_s * 1000
    return today if today > wall_ms else today + DAY_MS


def _daily_is_due(state: FlowState, wall_ms: int) -> bool:
    return state.next_daily_ms is not None and wall_ms >= state.next_daily_ms


def _due(
    state: FlowState, archive: ArchiveSpec, now_ms: int, wall_ms: int, *, explicit: bool
) -> tuple[bool, Trigger | None]:
    if explicit:
        return True, Trigger.EXPLICIT
    if _daily_is_due(state, wall_ms):
        return True, Trigger.DAILY
    if state.pending_since_ms is not None:
        age_ms = now_ms - state.pending_since_ms
        if age_ms >= archive.max_time_ms:
            return True, Trigger.MAX_TIME
    # A snapshot covers all pending offsets; otherwise the executor finds the end of the object.
    whole = archive.compaction is not None
    if state.pending >= _needed_offsets(state, archive):
        return True, Trigger.MAX_OFFSETS if whole else None
    needed = max(archive.max_bytes, int(state.probed_bytes * _PROBE_GROWTH))
    return state.expected_bytes() >= needed, Trigger.MAX_BYTES if whole else None


def _needed_offsets(state: FlowState, archive: ArchiveSpec) -> int:
    """Return how many offsets must be pending before a slice is likely to fill an object by them.

    An object does not end inside an offset gap. If a slice has read `max-offsets` and found no end,
    a gap reaches to the end of the log: it is not read again before more follows.
    """
    probed = state.probed_end - state.position
    if probed < archive.max_offsets:
        return archive.max_offsets
    return max(probed + 1, int(probed * _PROBE_GROWTH))


def _share_idle_slots(due: list[_Due], slots: int) -> None:
    """Divide long backlogs among the slots that no other flow needs.

    Flows at the same place get the same parts, so that they share the reads of these too.
    """
    places: dict[object, list[_Due]] = defaultdict(list)
    for item in due:
        places[item.place].append(item)
    idle = slots - len(places)
    for items in sorted(places.values(), key=lambda d: -max(_expected_bytes(i) for i in d)):
        known = [
            item
            for item in items
            if item.state.bytes_per_offset and _is_divisible(item.state.destination)
        ]
        if not known:
            continue
        heaviest = max(known, key=_expected_bytes)
        extra = max(min(idle, _expected_bytes(heaviest) // SLICE_BYTES - 1), 0)
        for item in known:
            item.parts += extra
            item.bytes_per_offset = heaviest.state.bytes_per_offset or 1
        idle -= extra


def _is_divisible(destination: DestinationSpec) -> bool:
    return isinstance(destination, ArchiveSpec) and not destination.compaction


def _expected_bytes(item: _Due) -> int:
    return item.state.expected_bytes()


def _slices(item: _Due, wall_ms: int) -> list[Planned]:
    state = item.state
    archive = state.destination
    if isinstance(archive, ArchiveSpec) and archive.compaction:
        whole = _slice(state, state.position, state.end, item.tail)
        due = replace(whole, seen_ms=wall_ms, rebuild=state.must_rebuild(wall_ms))
        return [Planned(due, state.expected_bytes())]
    if item.parts == 1 or isinstance(archive, KafkaSpec):
        estimate = min(state.expected_bytes(), SLICE_BYTES)
        return [Planned(_slice(state, state.position, state.end, item.tail), estimate)]
    width = max(int(SLICE_BYTES / item.bytes_per_offset), 1)
    if width > archive.max_offsets:
        # Where the log has no gaps, boundaries coincide with those of `max-offsets`.
        width -= width % archive.max_offsets
    return [
        Planned(
            _slice(state, first, first + width, Trigger.EXPLICIT, staged=first > state.position),
            SLICE_BYTES,
        )
        for first in range(state.position, state.position + item.parts * width, width)
        if first + width <= state.end
    ] or [Planned(_slice(state, state.position, state.end, item.tail), SLICE_BYTES)]


def _slice(
    state: FlowState, first: int, end: int, tail: Trigger | None, *, staged: bool = False
) -> Slice:
    whole = staged or end < state.end
    spec = state.destination
    is_timed = isinstance(spec, KafkaSpec) and spec.offsets == "preserve"
    return Slice(
        flow=state.flow,
        topic_id=state.topic_id,
        compacted=state.compacted,
        first=first,
        end=end,
        tail=tail,
        staged=staged,
        leader_epoch=state.leader_epoch if first == state.position else -1,
        # A slice that another one follows must be copied whole, of any size.
        budget_bytes=2**62 if whole else COPY_BYTES if is_timed else SLICE_BYTES,
    )
