"""The catalogue of metrics, and the recorder that holds their values.

`docs/metrics.md` is generated from the catalogue. Values are stored as plain numbers; only
`monitoring.http` uses Prometheus's types. Aggregates over partitions and the metrics of mirror-v3
are not stored: `derived_metrics` has them, and they are computed from the others at each scrape.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Labels = tuple[str, ...]
"""The values of a metric's labels, in the order of `Metric.labels`."""

FLOW: Final = ("mirror", "destination", "topic", "partition")
"""The labels of one flow."""

MIRROR: Final = ("mirror", "destination")
"""The labels of an aggregate over one mirror's flows into one destination."""

LINK: Final = ("source", "destination")
"""The labels of the groups of one source for one target; the source by its alias."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One line of the catalogue."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    """Unit of the value: offsets, records, bytes, seconds, ..."""

    meaning: str
    """One or two sentences, for the page and for `# HELP`."""

    labels: Labels = FLOW
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without the infinite one. Empty: not a histogram."""

    is_age: bool = False
    """The stored value is a time in seconds since 1970; the exported value is the age of that time,
    which grows without further updates. `NEVER` is exported as 0."""

    of: Metric | None = None
    """The metric that this one aggregates, grouped by `labels`. None: the values are recorded."""

    how: Literal["sum", "max", "min"] = "sum"
    """The aggregation of `of`."""


_COMBINE: Final[dict[str, Callable[[float, float], float]]] = {
    "sum": operator.add,
    "max": max,
    "min": min,
}

NEVER: Final = math.inf
"""The stored time of an age that is exported as 0."""

OFFSET_VERIFIED: Final = Metric(
    name="logmirror_destination_offset_verified",
    kind="gauge",
    unit="offset",
    meaning="The position: the first offset that the destination does not durably hold. Never "
    "ahead of the position that a new read of the destination returns.",
)
SOURCE_END: Final = Metric(
    name="logmirror_source_end_offset",
    kind="gauge",
    unit="offset",
    meaning="The last stable offset of the source, as last read: one past the last offset that may "
    "be copied.",
)
LAG: Final = Metric(
    name="logmirror_source_lag_offsets",
    kind="gauge",
    unit="offsets",
    meaning="Source end minus position. Offsets without a record count.",
)
LAG_SECONDS: Final = Metric(
    name="logmirror_source_lag_seconds",
    kind="gauge",
    unit="seconds",
    meaning="Age of the oldest record that is not copied yet: now minus the timestamp of the first "
    "record of its batch. 0 without lag. Records produced with old timestamps have that age.",
    is_age=True,
)
STALLED: Final = Metric(
    name="logmirror_flow_stalled_seconds",
    kind="gauge",
    unit="seconds",
    meaning="Time since the last commit while there are records to copy, by the mirror's own "
    "clock. 0 without lag. Values up to `max-time-ms` are expected.",
    is_age=True,
)
RETRY: Final = Metric(
    name="logmirror_flow_inflight_retry",
    kind="gauge",
    unit="failures",
    meaning="Consecutive failures of a flow that backs off. 0: it does not wait.",
)
RETRY_SECONDS: Final = Metric(
    name="logmirror_flow_inflight_retry_seconds",
    kind="gauge",
    unit="seconds",
    meaning="Time since the first of the consecutive failures. 0: the flow does not wait.",
    is_age=True,
)
RECORDS: Final = Metric(
    name="logmirror_destination_records_total",
    kind="counter",
    unit="records",
    meaning="Records that this process committed at the destination.",
)
BYTES: Final = Metric(
    name="logmirror_destination_bytes_total",
    kind="counter",
    unit="bytes",
    meaning="Bytes of the committed objects, or of the batches committed to a cluster.",
)
BATCHES: Final = Metric(
    name="logmirror_destination_batches_total",
    kind="counter",
    unit="batches",
    meaning="Record batches that the destination cluster acknowledged. Clusters only.",
)
COMMITS: Final = Metric(
    name="logmirror_destination_commits_total",
    kind="counter",
    unit="commits",
    meaning="Commits of the position: one for each object of an archive, and one for each slice "
    "that a destination cluster acknowledged.",
)
FLUSHES: Final = Metric(
    name="logmirror_destination_flushes_total",
    kind="counter",
    unit="objects",
    meaning="Committed objects by trigger: max-offsets, max-bytes, max-time, daily or explicit. "
    "Archives only.",
    labels=(*FLOW, "trigger"),
)
FLUSH_SECONDS: Final = Metric(
    name="logmirror_destination_flush_duration_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Time from the first byte of an object until it is durable. Archives only.",
    labels=MIRROR,
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
LAST_FLUSH: Final = Metric(
    name="logmirror_destination_last_flush_timestamp_seconds",
    kind="gauge",
    unit="seconds since 1970",
    meaning="Time of the last commit by this process. Absent before the first commit.",
)
KEYS: Final = Metric(
    name="logmirror_destination_compaction_keys",
    kind="gauge",
    unit="keys",
    meaning="Keys in the newest snapshot that this process wrote. `compaction: log` only.",
)
MAX_TIME: Final = Metric(
    name="logmirror_destination_max_time_seconds",
    kind="gauge",
    unit="seconds",
    meaning="The configured `max-time-ms`: how long a record may wait before it is written. 0 for "
    "clusters, where records do not wait.",
    labels=MIRROR,
)
GAPS: Final = Metric(
    name="logmirror_source_offset_gap_records_total",
    kind="counter",
    unit="offsets",
    meaning="Offsets without a record, by cause: control, aborted or compacted.",
    labels=(*FLOW, "cause"),
)
ERRORS: Final = Metric(
    name="logmirror_errors_total",
    kind="counter",
    unit="errors",
    meaning="Errors by kind, including those that are retried. Errors of a whole mirror have empty "
    "labels for destination and partition.",
    labels=(*FLOW, "kind"),
)
CONFLICTS: Final = Metric(
    name="logmirror_create_conflicts_total",
    kind="counter",
    unit="objects",
    meaning="Objects that another writer claimed or published first: a second instance is running.",
)
RESTARTS: Final = Metric(
    name="logmirror_flow_restarts_total",
    kind="counter",
    unit="restarts",
    meaning="How often the flow failed, backed off, and read its position again.",
)
FLOWS: Final = Metric(
    name="logmirror_mirror_flows",
    kind="gauge",
    unit="flows",
    meaning="Flows by state: running, waiting (backing off after a failure) or stopped (by an "
    "error that is not retriable).",
    labels=(*MIRROR, "state"),
)
READY: Final = Metric(
    name="logmirror_ready",
    kind="gauge",
    unit="0 or 1",
    meaning="1 if `/readyz` returns 200: every mirror is opened and none waits or has stopped.",
    labels=(),
)
BUDGET: Final = Metric(
    name="logmirror_memory_budget_bytes",
    kind="gauge",
    unit="bytes",
    meaning="Memory that all slots together may use for records that are being archived.",
    labels=(),
)
SLOT_PEAK: Final = Metric(
    name="logmirror_slot_memory_peak_bytes",
    kind="gauge",
    unit="bytes",
    meaning="Peak resident memory of a slot's Python process, as the operating system reports it: "
    "its share of the budget plus the program itself.",
    labels=(),
)


def _of_groups(
    name: str, kind: Literal["gauge", "counter"], unit: str, meaning: str, *, is_age: bool = False
) -> Metric:
    name = f"logmirror_groups_{name}"
    return Metric(name=name, kind=kind, unit=unit, meaning=meaning, labels=LINK, is_age=is_age)


GROUPS: Final = _of_groups(
    "translated", "gauge", "groups", "Consumer groups with committed offsets of mirrored topics."
)
GROUPS_INEXACT: Final = _of_groups(
    "inexact", "gauge", "groups", "Those that read records again, or lack a translated partition."
)
GROUPS_FAILED: Final = _of_groups(
    "failed", "gauge", "groups", "Groups whose committed offsets could not be read at the source."
)
GROUPS_ACTIVE: Final = _of_groups(
    "active", "gauge", "groups", "Groups with members at the target, where nothing is committed."
)
GROUPS_BY_REASON: Final = Metric(
    name="logmirror_groups_by_reason",
    kind="gauge",
    unit="groups",
    meaning="Groups with an offset that is not translated exactly, or is not committed at the "
    "target, by reason. A group counts for each of its reasons.",
    labels=(*LINK, "reason"),
)
OFFSETS_INEXACT: Final = _of_groups(
    "inexact_offsets", "gauge", "offsets", "Committed offsets that are not translated exactly."
)
ROUND_DURATION: Final = Metric(
    name="logmirror_groups_round_duration_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Time in which all groups were read, translated and written once.",
    labels=LINK,
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
CHECKPOINT_DELAY: Final = Metric(
    name="logmirror_groups_checkpoint_delay_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Time from when a changed offset was seen at the source until its checkpoint was "
    "acknowledged; for each round with checkpoints that of the oldest one.",
    labels=LINK,
    buckets=ROUND_DURATION.buckets,
)
ROUND_SECONDS: Final = _of_groups(
    "checkpoint_seconds",
    "gauge",
    "seconds",
    "Time since all checkpoints that were due are written, or since the start if they never were. "
    "Usually less than `interval-ms`.",
    is_age=True,
)
CHECKPOINTS: Final = _of_groups(
    "checkpoints_total", "counter", "checkpoints", "Checkpoints written."
)
GROUP_COMMITS: Final = _of_groups(
    "commits_total", "counter", "offsets", "Offsets of groups that were committed at the target."
)
GROUPS_ARCHIVED: Final = _of_groups(
    "archived", "gauge", "groups", "Consumer groups in the newest snapshots beside an archive."
)
ARCHIVED_SECONDS: Final = _of_groups(
    "archived_seconds",
    "gauge",
    "seconds",
    "Time since the newest snapshots beside an archive were written, or were found to be what "
    "groups have committed. Usually less than `archive-interval-ms`.",
    is_age=True,
)
SNAPSHOTS: Final = _of_groups(
    "snapshots_total", "counter", "snapshots", "Snapshots of groups written beside an archive."
)
SNAPSHOT_FAILURES: Final = _of_groups(
    "snapshot_failures_total",
    "counter",
    "failures",
    "How often snapshots of groups could not be read or written, and were tried again later.",
)

CATALOGUE: Final = (
    *(OFFSET_VERIFIED, SOURCE_END, LAG, LAG_SECONDS, STALLED, RETRY, RETRY_SECONDS, RECORDS),
    *(BYTES, BATCHES, COMMITS, FLUSHES, FLUSH_SECONDS, LAST_FLUSH, KEYS, MAX_TIME, GAPS, ERRORS),
    *(CONFLICTS, RESTARTS, FLOWS, READY, BUDGET, SLOT_PEAK),
    GROUPS,
    GROUPS_BY_REASON,
    OFFSETS_INEXACT,
    ROUND_DURATION,
    CHECKPOINT_DELAY,
    GROUPS_INEXACT,
    GROUPS_FAILED,
    GROUPS_ACTIVE,
    ROUND_SECONDS,
    CHECKPOINTS,
    GROUP_COMMITS,
    *(GROUPS_ARCHIVED, ARCHIVED_SECONDS, SNAPSHOTS, SNAPSHOT_FAILURES),
)
"""The recorded metrics. `process_*` come from Prometheus's client library."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of a histogram for one set of labels."""

    counts: tuple[int, ...]
    """Observations in each bucket, not cumulative. The last one is the infinite bucket."""

    total: float = 0.0
    """The sum of all observed values."""


def _none_of(metric: Metric) -> Distribution:
    return Distribution((0,) * (len(metric.buckets) + 1))


class Recorder:
    """The values of all metrics. One thread writes; others may read at any time, without a lock.

    This is safe because values are replaced atomically and `dict.copy()` is atomic. `list(items())`
    is not: it allocates, and a garbage collection may run code that lets the writer in. Memory
    depends on the number of label sets, not on uptime.
    """

    def __init__(self) -> None:
        self._numbers: dict[Metric, dict[Labels, float]] = {
            metric: {} for metric in CATALOGUE if metric.kind != "histogram"
        }
        self._distributions: dict[Metric, dict[Labels, Distribution]] = {
            metric: {} for metric in CATALOGUE if metric.kind == "histogram"
        }

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        """Set a gauge. For an age, `value` is its start in seconds since 1970, or `NEVER`."""
        self._numbers[metric][labels] = value

    def add(self, metric: Metric, labels: Labels, count: float = 1) -> None:
        """Increase a counter, or a gauge that counts. A count of 0 exports the series as 0."""
        values = self._numbers[metric]
        values[labels] = values.get(labels, 0) + count

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Add one observation to a histogram."""
        values = self._distributions[metric]
        before = values.get(labels) or _none_of(metric)
        counts = list(before.counts)
        counts[bisect_left(metric.buckets, value)] += 1
        values[labels] = Distribution(tuple(counts), before.total + value)

    def expect(self, metric: Metric, labels: Labels) -> None:
        """Export a histogram as 0 until its first observation, which a rate then shows."""
        self._distributions[metric].setdefault(labels, _none_of(metric))

    def numbers(self, metric: Metric, now_s: float = 0) -> list[tuple[Labels, float]]:
        """Return the current values of a gauge or counter, by labels.

        Args:
            metric: A metric of `CATALOGUE`, or an aggregate of one.
            now_s: The current time in seconds since 1970; used for ages.
        """
        if metric.of is not None:
            return self._aggregated(metric, metric.of, now_s)
        values = list(self._numbers[metric].copy().items())
        if metric.is_age:
            return [(labels, max(now_s - moment, 0.0)) for labels, moment in values]
        return values

    def distributions(self, metric: Metric) -> list[tuple[Labels, Distribution]]:
        """Return the current values of a histogram, by labels."""
        return list(self._distributions[metric].copy().items())

    def _aggregated(self, metric: Metric, of: Metric, now_s: float) -> list[tuple[Labels, float]]:
        kept_of = operator.itemgetter(*(of.labels.index(label) for label in metric.labels))
        combine = _COMBINE[metric.how]
        values: dict[Labels, float] = {}
        for labels, value in self.numbers(of, now_s):
            kept = kept_of(labels)
            values[kept] = combine(values[kept], value) if kept in values else value
        return list(values.items())
