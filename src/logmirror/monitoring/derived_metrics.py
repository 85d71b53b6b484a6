"""Metrics that are not recorded: each is computed from a recorded one at a scrape."""

from __future__ import annotations

from typing import Final, Literal

from logmirror.monitoring.metrics import (
    BYTES,
    COMMITS,
    CONFLICTS,
    ERRORS,
    FLOW,
    GAPS,
    KEYS,
    LAG,
    LAG_SECONDS,
    LAST_FLUSH,
    MIRROR,
    OFFSET_VERIFIED,
    RECORDS,
    RESTARTS,
    RETRY,
    STALLED,
    Metric,
)

MIRROR_V3: Final = ("topic", "partition", "mirror")
"""The labels of mirror-v3's metrics."""


def _sum(name: str, of: Metric, meaning: str, *more: str) -> Metric:
    """A counter, summed over all partitions."""
    return Metric(
        name=f"logmirror_mirror_{name}_total",
        kind="counter",
        unit=of.unit,
        meaning=meaning,
        labels=(*MIRROR, *more),
        of=of,
    )


def _max(name: str, of: Metric, meaning: str) -> Metric:
    """A gauge, the maximum over all partitions."""
    return Metric(
        name=f"logmirror_mirror_{name}_max",
        kind="gauge",
        unit=of.unit,
        meaning=meaning,
        labels=MIRROR,
        of=of,
        how="max",
    )


AGGREGATES: Final = (
    Metric(
        name="logmirror_mirror_lag_offsets",
        kind="gauge",
        unit="offsets",
        meaning="Sum of `logmirror_source_lag_offsets` over all partitions.",
        labels=MIRROR,
        of=LAG,
    ),
    _max("lag_offsets", LAG, "Maximum of `logmirror_source_lag_offsets` over all partitions."),
    _max(
        "lag_seconds", LAG_SECONDS, "Maximum of `logmirror_source_lag_seconds` over all partitions."
    ),
    _max(
        "stalled_seconds",
        STALLED,
        "Maximum of `logmirror_flow_stalled_seconds` over all partitions.",
    ),
    _sum("records", RECORDS, "Committed records."),
    _sum("bytes", BYTES, "Committed bytes."),
    _sum("commits", COMMITS, "Commits of a position."),
    _sum("gap_offsets", GAPS, "Offsets without a record, by cause.", "cause"),
    _sum(
        "errors",
        ERRORS,
        "Errors by kind. Errors of a whole mirror have an empty destination.",
        "kind",
    ),
    _sum("create_conflicts", CONFLICTS, "Objects that another writer claimed or published first."),
    _sum("restarts", RESTARTS, "How often a flow failed and backed off."),
)
"""Aggregates over partitions: one series for each mirror and destination."""


def _mirror_v3(
    name: str, of: Metric, how: Literal["sum", "max", "min"], meaning: str, unit: str = ""
) -> Metric:
    return Metric(
        name=f"mirror_v3_{name}",
        kind="counter" if name.endswith("_total") else "gauge",
        unit=unit or of.unit,
        meaning=meaning,
        labels=MIRROR_V3,
        of=of,
        how=how,
    )


_GAPS_OF_FLOW: Final = Metric(
    name="", kind="counter", unit=GAPS.unit, meaning="", labels=FLOW, of=GAPS
)
"""Gaps of one flow, summed over causes. A second destination counts the same gaps again."""

MIRROR_V3_CATALOGUE: Final = (
    _mirror_v3(
        "destination_offset_verified",
        OFFSET_VERIFIED,
        "min",
        "The lowest position of all destinations.",
    ),
    _mirror_v3(
        "destination_offset_inflight_retry",
        RETRY,
        "max",
        "Most consecutive failures of a destination that backs off. 0: none waits.",
    ),
    _mirror_v3("destination_records_total", RECORDS, "sum", "Records, over all destinations."),
    _mirror_v3(
        "destination_last_flush_timestamp_seconds",
        LAST_FLUSH,
        "min",
        "Oldest time of a last commit, over all destinations.",
    ),
    _mirror_v3("destination_bytes_total", BYTES, "sum", "Bytes, over all destinations."),
    _mirror_v3("destination_flushes_total", COMMITS, "sum", "Commits, over all destinations."),
    _mirror_v3("destination_compaction_keys", KEYS, "max", "Keys in the newest snapshot."),
    _mirror_v3(
        "source_offset_gap_records_total",
        _GAPS_OF_FLOW,
        "max",
        "Offsets without a record, maximum over all destinations.",
    ),
    _mirror_v3("source_lag_offsets", LAG, "max", "Lag of the destination furthest behind."),
    _mirror_v3(
        "mirror_restarts_total", RESTARTS, "sum", "Restarts of flows, over all destinations."
    ),
)
"""The metrics under mirror-v3's names and labels. These have no label for the destination; each
meaning says how several destinations are combined."""
