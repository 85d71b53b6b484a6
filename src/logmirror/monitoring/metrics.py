"""The metrics: what each one is called and means, and where their values are kept.

`docs/metrics.md` is written from the catalogue. Values are kept as plain numbers; only
`monitoring.http` knows what Prometheus wants to read. Sums over partitions and the names of
mirror-v3 are not kept: they are made from the others when somebody asks.
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
"""The labels of all flows of a mirror into one destination."""

PEER: Final = ("topic", "partition", "mirror")
"""mirror-v3's labels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One line of the catalogue."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    """What is counted or measured: offsets, records, bytes, seconds, ..."""

    meaning: str
    """One sentence or two, for the page and for `# HELP`."""

    labels: Labels = FLOW
    buckets: tuple[float, ...] = ()
    """Of a histogram: upper bounds, without the infinite one."""

    is_age: bool = False
    """What is set is a moment, in seconds since 1970, and what is read is how long ago that was:
    it grows while nobody says anything. A moment without end is 0."""

    of: Metric | None = None
    """Made from the values of this one, those with the same values of our labels taken together."""

    how: Literal["sum", "max", "min"] = "sum"


_COMBINE: Final[dict[str, Callable[[float, float], float]]] = {
    "sum": operator.add,
    "max": max,
    "min": min,
}

NEVER: Final = math.inf
"""The moment of an age that is 0."""

OFFSET_VERIFIED: Final = Metric(
    name="logmirror_destination_offset_verified",
    kind="gauge",
    unit="offset",
    meaning="The position: the first offset that the destination does not durably hold. Never "
    "ahead of what a fresh look at the destination shows.",
)
SOURCE_END: Final = Metric(
    name="logmirror_source_end_offset",
    kind="gauge",
    unit="offset",
    meaning="One past the last offset of the source that may be copied, as last seen.",
)
LAG: Final = Metric(
    name="logmirror_source_lag_offsets",
    kind="gauge",
    unit="offsets",
    meaning="How far the position is behind the source; offsets without a record count.",
)
LAG_SECONDS: Final = Metric(
    name="logmirror_source_lag_seconds",
    kind="gauge",
    unit="seconds",
    meaning="Age of the oldest record that is not copied yet: now minus the timestamp of the first "
    "record of its batch, 0 where nothing waits. Records that were produced with old timestamps "
    "are as old as they say.",
    is_age=True,
)
STALLED: Final = Metric(
    name="logmirror_flow_stalled_seconds",
    kind="gauge",
    unit="seconds",
    meaning="For how long there has been something to copy without anything being committed, by "
    "our own clock; 0 where nothing waits. Up to `max-time-ms` is as it should be.",
    is_age=True,
)
RETRY: Final = Metric(
    name="logmirror_flow_inflight_retry",
    kind="gauge",
    unit="failures",
    meaning="Failures in a row of a flow that waits to try again; 0: it does not wait.",
)
RETRY_SECONDS: Final = Metric(
    name="logmirror_flow_inflight_retry_seconds",
    kind="gauge",
    unit="seconds",
    meaning="For how long the flow has been failing; 0: it does not wait.",
    is_age=True,
)
RECORDS: Final = Metric(
    name="logmirror_destination_records_total",
    kind="counter",
    unit="records",
    meaning="Records that were committed at the destination by this process.",
)
BYTES: Final = Metric(
    name="logmirror_destination_bytes_total",
    kind="counter",
    unit="bytes",
    meaning="Bytes of the objects, or of the batches for a cluster, that were committed.",
)
BATCHES: Final = Metric(
    name="logmirror_destination_batches_total",
    kind="counter",
    unit="batches",
    meaning="Record batches that another cluster has acknowledged. Clusters only.",
)
COMMITS: Final = Metric(
    name="logmirror_destination_commits_total",
    kind="counter",
    unit="commits",
    meaning="How often the position moved: with each object of an archive, and with each slice "
    "that another cluster has acknowledged.",
)
FLUSHES: Final = Metric(
    name="logmirror_destination_flushes_total",
    kind="counter",
    unit="objects",
    meaning="Committed objects by what ended them: max-offsets, max-bytes, max-time, daily or "
    "explicit. Archives only.",
    labels=(*FLOW, "trigger"),
)
FLUSH_SECONDS: Final = Metric(
    name="logmirror_destination_flush_duration_seconds",
    kind="histogram",
    unit="seconds",
    meaning="From the first byte of an object to its durable end. Archives only.",
    labels=MIRROR,
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
LAST_FLUSH: Final = Metric(
    name="logmirror_destination_last_flush_timestamp_seconds",
    kind="gauge",
    unit="seconds since 1970",
    meaning="When something was last committed by this process; absent before the first time.",
)
KEYS: Final = Metric(
    name="logmirror_destination_compaction_keys",
    kind="gauge",
    unit="keys",
    meaning="Keys in the newest snapshot that this process has written. `compaction: log` only.",
)
MAX_TIME: Final = Metric(
    name="logmirror_destination_max_time_seconds",
    kind="gauge",
    unit="seconds",
    meaning="How long a record may wait for others, as configured by `max-time-ms`; 0 for "
    "clusters, where none waits.",
    labels=MIRROR,
)
GAPS: Final = Metric(
    name="logmirror_source_offset_gap_records_total",
    kind="counter",
    unit="offsets",
    meaning="Offsets that carried no record, by cause: control, aborted or compacted.",
    labels=(*FLOW, "cause"),
)
ERRORS: Final = Metric(
    name="logmirror_errors_total",
    kind="counter",
    unit="errors",
    meaning="Errors by kind, those that are tried again included. Without destination and "
    "partition: of the whole mirror.",
    labels=(*FLOW, "kind"),
)
CONFLICTS: Final = Metric(
    name="logmirror_create_conflicts_total",
    kind="counter",
    unit="objects",
    meaning="Objects that another writer had claimed or published first. A second instance runs.",
)
RESTARTS: Final = Metric(
    name="logmirror_flow_restarts_total",
    kind="counter",
    unit="restarts",
    meaning="How often the flow failed for now, waited, and read its position anew.",
)
FLOWS: Final = Metric(
    name="logmirror_mirror_flows",
    kind="gauge",
    unit="flows",
    meaning="Flows by state: running, waiting (failed for now) or stopped (for good).",
    labels=(*MIRROR, "state"),
)
READY: Final = Metric(
    name="logmirror_ready",
    kind="gauge",
    unit="0 or 1",
    meaning="Whether `/readyz` says yes: each mirror is opened, none waits or has stopped.",
    labels=(),
)
BUDGET: Final = Metric(
    name="logmirror_memory_budget_bytes",
    kind="gauge",
    unit="bytes",
    meaning="What all slots together may hold of records on their way into archives.",
    labels=(),
)
SLOT_PEAK: Final = Metric(
    name="logmirror_slot_memory_peak_bytes",
    kind="gauge",
    unit="bytes",
    meaning="The most memory that a Python process of a slot has ever had resident, by what the "
    "system says of it: its share of the budget, and the program itself.",
    labels=(),
)

CATALOGUE: Final = (
    OFFSET_VERIFIED,
    SOURCE_END,
    LAG,
    LAG_SECONDS,
    STALLED,
    RETRY,
    RETRY_SECONDS,
    RECORDS,
    BYTES,
    BATCHES,
    COMMITS,
    FLUSHES,
    FLUSH_SECONDS,
    LAST_FLUSH,
    KEYS,
    MAX_TIME,
    GAPS,
    ERRORS,
    CONFLICTS,
    RESTARTS,
    FLOWS,
    READY,
    BUDGET,
    SLOT_PEAK,
)
"""What is recorded. Metrics of the process (`process_*`) are Prometheus's own."""


def _sum(name: str, of: Metric, meaning: str, *more: str) -> Metric:
    """A counter over all partitions."""
    return Metric(
        name=f"logmirror_mirror_{name}_total",
        kind="counter",
        unit=of.unit,
        meaning=meaning,
        labels=(*MIRROR, *more),
        of=of,
    )


def _max(name: str, of: Metric, meaning: str) -> Metric:
    """A gauge of the worst partition."""
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
    _max("lag_offsets", LAG, "`logmirror_source_lag_offsets` of the partition furthest behind."),
    _max("lag_seconds", LAG_SECONDS, "`logmirror_source_lag_seconds` of the worst partition."),
    _max("stalled_seconds", STALLED, "`logmirror_flow_stalled_seconds` of the worst partition."),
    _sum("records", RECORDS, "Records that were committed."),
    _sum("bytes", BYTES, "Bytes that were committed."),
    _sum("commits", COMMITS, "How often a position moved."),
    _sum("gap_offsets", GAPS, "Offsets that carried no record, by cause.", "cause"),
    _sum("errors", ERRORS, "Errors by kind; those of a whole mirror have no destination.", "kind"),
    _sum("create_conflicts", CONFLICTS, "Objects that another writer had first."),
    _sum("restarts", RESTARTS, "How often a flow failed for now and waited."),
)
"""One series for each mirror and destination, whatever the number of partitions."""


def _peer(
    name: str, of: Metric, how: Literal["sum", "max", "min"], meaning: str, unit: str = ""
) -> Metric:
    return Metric(
        name=f"mirror_v3_{name}",
        kind="counter" if name.endswith("_total") else "gauge",
        unit=unit or of.unit,
        meaning=meaning,
        labels=PEER,
        of=of,
        how=how,
    )


_GAPS_OF_FLOW: Final = Metric(
    name="", kind="counter", unit=GAPS.unit, meaning="", labels=FLOW, of=GAPS
)
"""Of all causes: what a second destination counts again is the same gap."""

MIRROR_V3_CATALOGUE: Final = (
    _peer("destination_offset_verified", OFFSET_VERIFIED, "min", "The lowest position."),
    _peer(
        "destination_offset_inflight_retry",
        RETRY,
        "max",
        "Failures in a row of a destination that waits to try again; 0: none waits.",
    ),
    _peer("destination_records_total", RECORDS, "sum", "Records, over all destinations."),
    _peer(
        "destination_last_flush_timestamp_seconds",
        LAST_FLUSH,
        "min",
        "When the destination that has waited longest last committed something.",
    ),
    _peer("destination_bytes_total", BYTES, "sum", "Bytes, over all destinations."),
    _peer("destination_flushes_total", COMMITS, "sum", "Commits, over all destinations."),
    _peer("destination_compaction_keys", KEYS, "max", "Keys in the newest snapshot."),
    _peer(
        "source_offset_gap_records_total",
        _GAPS_OF_FLOW,
        "max",
        "Offsets that carried no record; of the destination that has counted most.",
    ),
    _peer("source_lag_offsets", LAG, "max", "Lag of the destination furthest behind."),
    _peer("mirror_restarts_total", RESTARTS, "sum", "Restarts of flows, over all destinations."),
)
"""mirror-v3's names and labels, which know no destination: with several of them, each line says
which one counts."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of a histogram for one set of labels."""

    counts: tuple[int, ...]
    """Observations in each bucket, not summed up; the last one is the infinite bucket."""

    total: float = 0.0
    """The sum of what was observed."""


class Recorder:
    """The values of all metrics. One thread writes; others may read at any time, without a lock.

    That holds because a value is replaced in one step, and because `list(dict.items())` is one.
    Its size depends on the sets of labels, not on how long the process runs.
    """

    def __init__(self) -> None:
        self._numbers: dict[Metric, dict[Labels, float]] = {
            metric: {} for metric in CATALOGUE if metric.kind != "histogram"
        }
        self._distributions: dict[Metric, dict[Labels, Distribution]] = {
            metric: {} for metric in CATALOGUE if metric.kind == "histogram"
        }

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        """Set a gauge; of an age, the moment it counts from, or `NEVER`."""
        self._numbers[metric][labels] = value

    def add(self, metric: Metric, labels: Labels, count: float = 1) -> None:
        """Increase a counter, or a gauge that counts; 0 makes it visible beforehand."""
        values = self._numbers[metric]
        values[labels] = values.get(labels, 0) + count

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Put one observation into a histogram."""
        values = self._distributions[metric]
        before = values.get(labels) or Distribution((0,) * (len(metric.buckets) + 1))
        counts = list(before.counts)
        counts[bisect_left(metric.buckets, value)] += 1
        values[labels] = Distribution(tuple(counts), before.total + value)

    def numbers(self, metric: Metric, now_s: float = 0) -> list[tuple[Labels, float]]:
        """The values of a gauge or counter now.

        Args:
            metric: Of the catalogue, or made from one of it.
            now_s: Seconds since 1970, for ages.
        """
        if metric.of is not None:
            return self._made(metric, metric.of, now_s)
        values = list(self._numbers[metric].items())
        if metric.is_age:
            return [(labels, max(now_s - moment, 0.0)) for labels, moment in values]
        return values

    def distributions(self, metric: Metric) -> list[tuple[Labels, Distribution]]:
        """The values of a histogram now."""
        return list(self._distributions[metric].items())

    def _made(self, metric: Metric, of: Metric, now_s: float) -> list[tuple[Labels, float]]:
        places = [of.labels.index(label) for label in metric.labels]
        combine = _COMBINE[metric.how]
        made: dict[Labels, float] = {}
        for labels, value in self.numbers(of, now_s):
            kept = tuple(labels[place] for place in places)
            made[kept] = combine(made[kept], float(value)) if kept in made else float(value)
        return list(made.items())
