"""Driver: positions and watermarks to slices. Pure: takes the time, returns values.

The source's log is the buffer: nothing is held between ticks, so a trigger that is not due costs
nothing but the question. The driver knows offsets, not bytes; it learns each flow's bytes per
offset from results, so that `max-bytes` is asked about only when it is likely to be reached.
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
"""A slice stops at the first object boundary after this much: about a second of work, so that a
stop is prompt and Spark's 20-40 ms a tick stay below a few per cent."""

COPY_BYTES: Final = 1 << 30
"""The same for a copy at the source's offsets, whose slices end by time."""

ASSUMED_BYTES: Final = 1024
"""Of a record, before one was seen, where looking would cost a whole snapshot."""

MARGIN_MS: Final = 60_000
"""Of a tombstone's life: between clocks, and between a look at the source and its reading."""

DAY_MS: Final = 86_400_000

_PROBE_GROWTH: Final = 1.05
"""A slice that filled no object is not asked again before this much more is expected."""


@dataclass(slots=True, kw_only=True)
class FlowState:
    """What the driver knows of one flow between ticks; all of it can be derived anew."""

    flow: FlowId
    destination: DestinationSpec
    topic_id: bytes | None
    compacted: bool
    position: int
    source_end: int = -1
    """One past the last offset that may be copied, as last seen; -1: not seen yet."""

    pending_since_ms: int | None = None
    """Monotonic time at which records beyond the position were first seen."""

    bytes_per_offset: float | None = None
    probed_bytes: int = 0
    """Payload between `position` and `probed_end`, known from a slice that filled no object."""

    probed_end: int = 0
    next_daily_ms: int | None = None
    """Wall-clock time of the next daily flush."""

    target: int | None = None
    """Stop here (`--until-now`, or a graceful stop)."""

    retry_at_ms: int = 0
    failures: int = 0

    lost: bool = False
    """The position must be read from the destination again before the flow goes on."""

    log_start: int = 0
    """The first offset that the source had when the position was read."""

    delete_retention_ms: int = 0
    """How long the source keeps tombstones readable; of compacted topics."""

    current_ms: int = 0
    """`compaction: log`: wall-clock time at which the newest snapshot was known to lack nothing."""

    rebuild: bool = False
    """`compaction: log`: the next snapshot is built from all that the source has."""

    newest: str = ""
    """Name, without folder, of the last object that was committed or found; empty: none."""

    proven: bool = True
    """Whether what the destination holds is known to continue the source; archives have claims."""

    fenced: bool = False
    """See `Work.fenced`."""

    @property
    def end(self) -> int:
        """One past the last offset to copy now."""
        return self.source_end if self.target is None else min(self.target, self.source_end)

    @property
    def pending(self) -> int:
        """How many offsets wait to be copied."""
        return max(self.end - self.position, 0)

    @property
    def reached(self) -> bool:
        """Whether the flow stands at its target."""
        return self.target is not None and self.position >= self.target

    def expected_bytes(self) -> int:
        """A guess at the payload that waits."""
        if self.bytes_per_offset is None:
            archive = self.destination
            if not isinstance(archive, ArchiveSpec):
                return SLICE_BYTES
            return self.pending * ASSUMED_BYTES if archive.compaction else archive.max_bytes
        known = max(min(self.probed_end, self.end) - self.position, 0)
        return self.probed_bytes + int((self.pending - known) * self.bytes_per_offset)

    def observe(self, source_end: int, now_ms: int, wall_ms: int = 0) -> None:
        """Take a watermark in that was asked for at these times; it never moves the flow back."""
        self.source_end = max(self.source_end, source_end)
        if self.source_end == self.position:
            self.current_ms = wall_ms
        if self.pending and self.pending_since_ms is None:
            self.pending_since_ms = now_ms

    def must_rebuild(self, wall_ms: int) -> bool:
        """Whether the next snapshot must not be merged with the one before.

        Merging is right as long as every tombstone since the last look is still there to be read,
        which brokers promise for `delete.retention.ms` from its cleaning on.
        """
        return self.rebuild or wall_ms - self.current_ms >= self.delete_retention_ms - MARGIN_MS

    def advance(self, result: SliceResult, position: int, now_ms: int) -> None:
        """Take a committed result in: the flow now stands at `position`."""
        payload = sum(r.payload_bytes for r in result.receipts) + result.rest_bytes
        read = result.next_offset - result.slice.first
        if read > 0:
            self.bytes_per_offset = max(payload / read, 1.0)
        moved = position > self.position
        self.position = position
        self.probed_bytes = 0 if result.error else result.rest_bytes
        self.probed_end = position if result.error else max(result.next_offset, position)
        if moved or not self.pending:
            self.pending_since_ms = now_ms if self.pending else None


@dataclass(frozen=True, slots=True)
class Planned:
    """A slice and how much it is likely to weigh."""

    slice: Slice
    estimated_bytes: int


@dataclass(slots=True)
class _Due:
    state: FlowState
    tail: Trigger | None
    parts: int = field(default=1)
    bytes_per_offset: float = 1.0
    """Where there are several parts: of the heaviest flow that stands there."""

    @property
    def stands_at(self) -> object:
        """Flows into archives that stand at the same place share their reading, and so a slot."""
        state = self.state
        if not _may_be_cut(state.destination):
            return state.flow
        return (state.flow.source, state.topic_id, state.position)


def plan(
    states: Iterable[FlowState], *, slots: int, now_ms: int, wall_ms: int, explicit: bool = False
) -> list[Planned]:
    """The slices of this tick.

    Args:
        states: All flows of this process.
        slots: How many slices run side by side.
        now_ms: Monotonic time.
        wall_ms: Time since the epoch, for daily flushes.
        explicit: Write every tail (`--until-now`, or a graceful stop).

    Returns:
        At most one unstaged slice for each flow; further, staged ones where slots would stay idle
        and a flow's backlog is long. A flow into a cluster has a slice in every tick, also an empty
        one, which waits at the source for what comes; only `explicit` leaves out those that have
        reached their end.
    """
    due = []
    for state in states:
        archive = state.destination
        if not isinstance(archive, ArchiveSpec):
            if state.retry_at_ms <= now_ms and not state.lost and (state.pending or not explicit):
                due.append(_Due(state, None))
            continue
        if not state.pending and _daily_is_due(state, wall_ms):
            state.next_daily_ms = next_daily_ms(archive.daily_at_utc_s, wall_ms)
        if not state.pending or state.retry_at_ms > now_ms or state.lost:
            continue
        is_due, tail = _due(state, archive, now_ms, wall_ms, explicit=explicit)
        if is_due:
            due.append(_Due(state, tail))
    _share_idle_slots(due, slots)
    return [planned for item in due for planned in _slices(item, wall_ms)]


def next_daily_ms(at_utc_s: int | None, wall_ms: int) -> int | None:
    """The first moment after `wall_ms` that is `at_utc_s` seconds past midnight UTC."""
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
        state.next_daily_ms = next_daily_ms(archive.daily_at_utc_s, wall_ms)
        return True, Trigger.DAILY
    if state.pending_since_ms is not None:
        age_ms = now_ms - state.pending_since_ms
        if age_ms >= archive.max_time_ms:
            return True, Trigger.MAX_TIME
    # A snapshot takes in all that waits; elsewhere the executor finds the object's end.
    whole = archive.compaction is not None
    if state.pending >= archive.max_offsets:
        return True, Trigger.MAX_OFFSETS if whole else None
    needed = max(archive.max_bytes, int(state.probed_bytes * _PROBE_GROWTH))
    return state.expected_bytes() >= needed, Trigger.MAX_BYTES if whole else None


def _share_idle_slots(due: list[_Due], slots: int) -> None:
    """Let long backlogs use the slots that no flow needs.

    Flows that stand at the same place get the same parts, so that these share their readings too.
    """
    places: dict[object, list[_Due]] = defaultdict(list)
    for item in due:
        places[item.stands_at].append(item)
    idle = slots - len(places)
    for items in sorted(places.values(), key=lambda d: -max(_expected_bytes(i) for i in d)):
        known = [
            item
            for item in items
            if item.state.bytes_per_offset and _may_be_cut(item.state.destination)
        ]
        if not known:
            continue
        heaviest = max(known, key=_expected_bytes)
        extra = max(min(idle, _expected_bytes(heaviest) // SLICE_BYTES - 1), 0)
        for item in known:
            item.parts += extra
            item.bytes_per_offset = heaviest.state.bytes_per_offset or 1
        idle -= extra


def _may_be_cut(destination: DestinationSpec) -> bool:
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
        width -= width % archive.max_offsets  # so that a boundary is one that was due anyway
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
        # A slice that another one follows must be copied whole, whatever it weighs.
        budget_bytes=2**62 if whole else COPY_BYTES if is_timed else SLICE_BYTES,
    )
