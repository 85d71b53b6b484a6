"""Driver: where the copy of a mirror with `until` ends: before a time or an offset.

A lookup by time comes after the source's end was read. If it finds no record, all records before
that end are older, so the end is the limit. Markers and aborted records do not count. A broker that
serves an archive may find a later offset if times are out of order, so the copy checks the time of
each record, and ends earlier (`EndsEarlierError`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logmirror.cluster.client import NO_OFFSET
from logmirror.errors import LogmirrorError, PositionError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.mirror.flow_state import FlowState
    from logmirror.model import TopicPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """Where each partition of a mirror ends; one of the two is not None."""

    time_ms: int | None = None
    """Before the first record with this timestamp or a later one, in milliseconds since 1970."""

    offset: int | None = None
    """Before this offset."""


Limits = Mapping[tuple["TopicPartition", Until], int | LogmirrorError]
"""The first offset that is not copied, or why the lookup failed, by partition and what is wanted.
No entry: no limit."""


def limits(
    client: ClusterClient,
    wanted: Iterable[tuple[TopicPartition, Until]],
    ends: Mapping[TopicPartition, int],
    clock: Clock,
) -> Limits:
    """Return the first offset that is not copied, where there is a limit.

    Args:
        client: The source.
        wanted: Partitions, each with where it ends.
        ends: Their last stable offsets, which were read before.
        clock: For deadlines.
    """
    found: dict[tuple[TopicPartition, Until], int | LogmirrorError] = {}
    by_time: dict[Until, set[TopicPartition]] = defaultdict(set)
    for partition, until in wanted:
        if until.offset is not None:
            found[partition, until] = until.offset
        else:
            by_time[until].add(partition)
    for until, partitions in by_time.items():
        for at, first in _firsts(client, partitions, until.time_ms or 0).items():
            if isinstance(first, LogmirrorError):
                found[at, until] = first
                continue
            offsets = range(first, ends[at] if first != NO_OFFSET else first)
            try:
                limit = _first_committed(client, at, offsets, until, clock)
            except LogmirrorError as error:
                found[at, until] = error
                continue
            if limit is not None:
                found[at, until] = limit
    return found


def _firsts(
    client: ClusterClient, partitions: Collection[TopicPartition], time_ms: int
) -> Mapping[TopicPartition, int | LogmirrorError]:
    """Look up the first offsets since a time; with retries only if no partition responds."""
    firsts = client.try_list_offsets(partitions, time_ms)
    if not all(isinstance(first, LogmirrorError) for first in firsts.values()):
        return firsts
    try:
        return client.list_offsets(partitions, time_ms)
    except LogmirrorError as error:
        return {at: error.copy() for at in partitions}


def _first_committed(
    client: ClusterClient, partition: TopicPartition, offsets: range, until: Until, clock: Clock
) -> int | None:
    if not offsets:
        return None
    from logmirror.cluster.time_lookup import (  # noqa: PLC0415  # loads the kernels
        first_committed_since,
    )

    return first_committed_since(client, partition, offsets, until.time_ms or 0, clock)


def limited(state: FlowState, limit: int | LogmirrorError | None, end: int) -> int:
    """Return where a flow ends: at the limit, or at the source's end if that is lower.

    A flow that is at the source's log start has copied nothing beyond a limit below it.

    Raises:
        PositionError: The destination has records beyond the limit.
        LogmirrorError: The lookup of the limit failed.
    """
    if limit is None:
        return end
    if isinstance(limit, LogmirrorError):
        raise limit
    if state.position > max(limit, state.log_start):
        raise PositionError(
            "the destination has records beyond `until`",
            hint="copy to a new topic or directory, or remove `until`",
            reason="BeyondUntil",
            flow=str(state.flow),
            position=state.position,
            until_offset=limit,
        )
    return min(end, limit)
