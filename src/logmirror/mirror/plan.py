"""Driver: the planner, which turns positions and source ends into slices: a pure function.

The source's log is the buffer: no record is held between ticks, so a trigger that is not due costs
one comparison. The driver knows offsets, not bytes. It derives each flow's bytes per offset from
results, and reads for `max-bytes` only when that limit is likely to be reached.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from logmirror.mirror.flow_state import SLICE_BYTES
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec, Slice
from logmirror.model import Trigger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.ports import DestinationSpec

COPY_BYTES: Final = 1 << 30
"""`SLICE_BYTES` for destinations with `offsets: preserve`, whose slices end by time."""

_PROBE_GROWTH: Final = 1.05
"""A slice that filled no object is not repeated before this factor of its bytes, or of its offsets,
is expected."""


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
        have none. A flow whose source was not polled yet has none.
    """
    due = []
    for state in (each for each in states if each.is_free(now_ms)):
        archive = state.destination
        if not isinstance(archive, ArchiveSpec):
            if state.pending or (state.source_end >= 0 and not explicit):
                due.append(_Due(state, None))
            continue
        if not state.pending:
            continue
        is_due, tail = _due(state, archive, now_ms, wall_ms, explicit=explicit)
        if is_due:
            due.append(_Due(state, tail))
    _share_idle_slots(due, slots)
    return [planned for item in due for planned in _slices(item, wall_ms)]


def _due(
    state: FlowState, archive: ArchiveSpec, now_ms: int, wall_ms: int, *, explicit: bool
) -> tuple[bool, Trigger | None]:
    if explicit:
        return True, Trigger.EXPLICIT
    if state.daily_is_due(wall_ms):
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
    return not (destination.follows or destination.compaction)


def _expected_bytes(item: _Due) -> int:
    return item.state.expected_bytes()


def _slices(item: _Due, wall_ms: int) -> list[Planned]:
    state = item.state
    archive = state.destination
    if archive.compaction:
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
