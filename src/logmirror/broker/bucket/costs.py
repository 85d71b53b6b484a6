"""What a broker in a bucket costs: requests by kind, from its settings and its load. Does no I/O.

The load is steady, and each partition gets the same share. A commit object is written in every
interval; a partition is sealed when its segment is full, or when its oldest commit is too old.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from logmirror.broker.bucket import bundles
from logmirror.broker.bucket.chain import CHECK_MS, HEARTBEAT_MS, MOST_BYTES
from logmirror.broker.bucket.tiling import INDEXED_BYTES, MIN_OBJECTS, SPAN_MS
from logmirror.broker.topic_configs import TopicConfigs, check_overrides
from logmirror.errors import UsageError
from logmirror.reports import CostCause, CostReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.broker.options import BrokerOptions

MONTH_S: Final = 30 * 24 * 3600
PUT_BYTES: Final = 96 << 20
"""A larger object is uploaded in parts of `PART_BYTES`, with a request before and one behind."""

PART_BYTES: Final = 16 << 20
_FIRST_MERGED: Final = 11
"""Segments that become one: from 8 to 16, as the next cell has twice as many. Merged objects fill
their cells, so 8 of them become one."""

READ_BYTES: Final = 8 << 20
"""Bytes of one request for a cold segment, after one for its size."""


def explain(  # noqa: PLR0913  # the load, the time and the prices
    options: BrokerOptions,
    *,
    write_bytes_s: float,
    read_bytes_s: float,
    partitions: int,
    seconds: float = MONTH_S,
    prices: Mapping[str, float] | None = None,
) -> CostReport:
    """Return what some time costs.

    Args:
        options: The broker's settings.
        write_bytes_s: Bytes per second that producers send, as they are stored, of all partitions.
        read_bytes_s: Bytes per second that consumers read of what is not on the machine any more.
        partitions: Partitions that are written to.
        seconds: The time.
        prices: Price of 1,000 requests, by kind.

    Raises:
        UsageError: The broker would refuse a setting, or has fewer partitions.
    """
    check_overrides(options.overrides)
    if partitions > options.max_partitions:
        raise UsageError(
            f"this broker allows at most {options.max_partitions} partitions", found=partitions
        )
    configs = TopicConfigs({}, options)
    interval_s = options.commit_interval_ms / 1000
    causes = []
    life_s = segment_bytes = 0.0
    if write_bytes_s:
        life_s = _life_s(options, configs.segment_bytes, write_bytes_s, partitions)
        segment_bytes = write_bytes_s * life_s / partitions
        commits = seconds / interval_s
        count = seconds * partitions / life_s
        causes += [
            CostCause(
                cause="commits", put=commits, delete=commits, put_bytes=write_bytes_s * seconds
            ),
            _bundled(write_bytes_s * interval_s, commits),
            _sealed(segment_bytes, count, deletes=_is_deleted(configs)),
            _merged(segment_bytes, count, configs.segment_bytes, life_s),
        ]
    else:
        causes.append(CostCause(cause="checks of the ownership", list=seconds * 1000 / CHECK_MS))
    if read_bytes_s:
        size = segment_bytes or configs.segment_bytes
        gets = (1 + math.ceil(size / READ_BYTES)) * read_bytes_s / size
        read = CostCause(
            cause="reads of old records", get=seconds * gets, get_bytes=seconds * read_bytes_s
        )
        causes.append(read)
    beats = seconds * 1000 / HEARTBEAT_MS
    causes.append(CostCause(cause="heartbeats", put=beats, delete=beats))
    return CostReport(
        seconds=seconds,
        causes=tuple(causes),
        segment_bytes=segment_bytes,
        segment_s=life_s,
        prices=dict(prices or {}),
    )


def _life_s(
    options: BrokerOptions, segment_bytes: int, write_bytes_s: float, partitions: int
) -> float:
    """Return how long a segment is open."""
    old_s = min(
        options.commit_age_ms / 1000,
        options.max_commits * options.commit_interval_ms / 1000,
        MOST_BYTES / write_bytes_s,
    )
    sealed_s = max(old_s, partitions / options.max_seals_per_s)
    return min(segment_bytes * partitions / write_bytes_s, sealed_s)


def _bundled(commit_bytes: float, commits: float) -> CostCause:
    count = min(bundles.MOST_COMMITS, bundles.MOST_BYTES // max(1, commit_bytes))
    if count < bundles.LEAST_COMMITS:
        return CostCause(cause="bundles of commits")
    made = commits / count
    return CostCause(
        cause="bundles of commits", put=made, delete=made, put_bytes=commits * commit_bytes
    )


def _sealed(size_bytes: float, count: float, *, deletes: bool) -> CostCause:
    """A segment, its index, and the producer state at its end.

    The state before it is listed and deleted. A segment is deleted with its index.
    """
    parts = 1 if size_bytes <= PUT_BYTES else 2 + math.ceil(size_bytes / PART_BYTES)
    return CostCause(
        cause="sealed segments",
        put=count * (1 + parts + _index(size_bytes)),
        list=count,
        delete=count * (3 if deletes else 1),
        put_bytes=count * size_bytes,
    )


def _index(size_bytes: float) -> int:
    return size_bytes >= INDEXED_BYTES


def _merged(size_bytes: float, count: float, target_bytes: int, life_s: float) -> CostCause:
    """Objects of which some become one, again and again, up to its limits of size and time.

    They are read on this machine. Each merged object is a commit more, which others share.
    """
    put = put_bytes = delete = 0.0
    factor = _FIRST_MERGED
    while size_bytes * factor <= target_bytes and life_s * factor * 1000 <= SPAN_MS:
        delete += 2 * count
        size_bytes, life_s, count = size_bytes * factor, life_s * factor, count / factor
        factor = MIN_OBJECTS
        put += count * (1 + _index(size_bytes))
        put_bytes += count * size_bytes
    return CostCause(cause="merged segments", put=put, delete=delete, put_bytes=put_bytes)


def _is_deleted(configs: TopicConfigs) -> bool:
    return configs.retention_ms >= 0 or configs.retention_bytes >= 0
