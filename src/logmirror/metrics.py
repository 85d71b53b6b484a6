"""The metrics: what each one is called and means, and where their values are kept.

`docs/metrics.md` is written from the catalogue. Values are kept as plain numbers; only
`logmirror.http_port` knows what Prometheus wants to read.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, Literal

Labels = tuple[str, ...]
"""The values of a metric's labels, in the order of `Metric.labels`."""

FLOW: Final = ("mirror", "destination", "topic", "partition")
"""The labels of one flow."""


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
    labels=("mirror", "destination"),
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
LAST_FLUSH: Final = Metric(
    name="logmirror_destination_last_flush_timestamp_seconds",
    kind="gauge",
    unit="seconds since 1970",
    meaning="When something was last committed by this process; absent before the first time.",
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

CATALOGUE: Final = (
    OFFSET_VERIFIED,
    SOURCE_END,
    LAG,
    RECORDS,
    BYTES,
    FLUSHES,
    FLUSH_SECONDS,
    LAST_FLUSH,
    GAPS,
    ERRORS,
    CONFLICTS,
    RESTARTS,
)
"""All metrics of ours. Those of the process (`process_*`) are Prometheus's own."""


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
        """Set a gauge."""
        self._numbers[metric][labels] = value

    def add(self, metric: Metric, labels: Labels, count: float = 1) -> None:
        """Increase a counter; by 0 makes it visible before anything has happened."""
        values = self._numbers[metric]
        values[labels] = values.get(labels, 0) + count

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Put one observation into a histogram."""
        values = self._distributions[metric]
        before = values.get(labels) or Distribution((0,) * (len(metric.buckets) + 1))
        counts = list(before.counts)
        counts[bisect_left(metric.buckets, value)] += 1
        values[labels] = Distribution(tuple(counts), before.total + value)

    def numbers(self, metric: Metric) -> list[tuple[Labels, float]]:
        """The values of a gauge or counter now."""
        return list(self._numbers[metric].items())

    def distributions(self, metric: Metric) -> list[tuple[Labels, Distribution]]:
        """The values of a histogram now."""
        return list(self._distributions[metric].items())
