"""The catalogue of the embedded broker's metrics. `docs/metrics.md` is generated from it."""

from __future__ import annotations

from typing import Final, Literal

from logmirror.monitoring.metrics import READY, Metric

PARTITION: Final = ("topic", "partition")
TOPIC: Final = ("topic",)


def _metric(  # noqa: PLR0913, PLR0917  # a line of the catalogue
    name: str,
    kind: Literal["gauge", "counter", "histogram"],
    unit: str,
    meaning: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
) -> Metric:
    name = f"logmirror_broker_{name}"
    return Metric(name=name, kind=kind, unit=unit, meaning=meaning, labels=labels, buckets=buckets)


BYTES_IN: Final = _metric(
    "bytes_in_total",
    "counter",
    "bytes",
    "Batches that were appended, as producers sent them.",
    TOPIC,
)
BYTES_OUT: Final = _metric(
    "bytes_out_total", "counter", "bytes", "Records in responses to Fetch requests.", TOPIC
)
RECORDS_IN: Final = _metric(
    "records_in_total", "counter", "records", "Records that were appended.", TOPIC
)
PRODUCE_ERRORS: Final = _metric(
    "produce_errors_total",
    "counter",
    "batches",
    "Batches that were not acknowledged. The topic is empty if it does not exist.",
    ("topic", "error"),
)
REQUEST_SECONDS: Final = _metric(
    "request_seconds",
    "histogram",
    "seconds",
    "From a complete request to its complete response. Includes the flush of Produce, and the wait "
    "of a Fetch for new records. `_count` is the number of requests.",
    ("api",),
    (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0),
)
REQUEST_ERRORS: Final = _metric(
    "request_errors_total",
    "counter",
    "errors",
    "Error codes in responses: of partitions, topics or the whole response.",
    ("api", "error"),
)
THROTTLED: Final = _metric(
    "throttled_requests_total",
    "counter",
    "requests",
    "Requests of clients that exceeded a quota, by Kafka's key of the quota.",
    ("quota",),
)
LOG_START: Final = _metric(
    "log_start_offset", "gauge", "offset", "The log start offset.", PARTITION
)
LOG_END: Final = _metric(
    "log_end_offset",
    "gauge",
    "offset",
    "The log end offset. Includes batches that are not on disk yet.",
    PARTITION,
)
HIGH_WATERMARK: Final = _metric(
    "high_watermark",
    "gauge",
    "offset",
    "Records before it can be read. They are on disk, unless the topic is flushed in the "
    "background.",
    PARTITION,
)
DURABLE: Final = _metric(
    "durable_offset", "gauge", "offset", "Records before it survive a power loss.", PARTITION
)
LOG_BYTES: Final = _metric("log_bytes", "gauge", "bytes", "Size of the log's segments.", PARTITION)
TOPICS: Final = _metric("topics", "gauge", "topics", "Topics.")
OFFLINE: Final = _metric(
    "offline_partitions",
    "gauge",
    "partitions",
    "Partitions that are offline: damaged, or after a failure of the disk. The log has the reason.",
)
OFFLINE_DIRS: Final = _metric(
    "offline_log_dirs",
    "gauge",
    "directories",
    "Log directories that failed since the start, and are offline. The log has the reason.",
)
CONNECTIONS: Final = _metric("connections", "gauge", "connections", "Open connections.")

MOVES: Final = _metric(
    "moves_in_progress",
    "gauge",
    "moves",
    "Moves of partitions to another log directory that are in progress, also those that wait for "
    "others.",
)
MOVES_FAILED: Final = _metric(
    "moves_failed",
    "gauge",
    "moves",
    "Moves that have failed, and were not requested again. The log has the reason.",
)
MOVE_BYTES_LEFT: Final = _metric(
    "move_bytes_left", "gauge", "bytes", "What the moves in progress have not copied yet."
)
MOVE_BYTES_COPIED: Final = _metric(
    "move_bytes_copied_total",
    "counter",
    "bytes",
    "Bytes that moves have copied. A batch counts again if its segment is copied again.",
)
SWAPS: Final = _metric(
    "move_swaps_total", "counter", "moves", "Moves after which the copy became the partition."
)
SWAP_SECONDS: Final = _metric(
    "move_swap_seconds",
    "histogram",
    "seconds",
    "How long the event loop was held while a copy became the partition. No request is handled in "
    "this time.",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0),
)
MOVE_CATALOGUE: Final = (MOVES, MOVES_FAILED, MOVE_BYTES_LEFT, MOVE_BYTES_COPIED, SWAPS)
"""The numbers of moves. They have no values with a log directory in a bucket."""

REQUESTS: Final = ("of", "kind")
COPIES: Final = ("of",)
BUCKET_REQUESTS: Final = _metric(
    "bucket_requests_total",
    "counter",
    "requests",
    "Requests to the bucket of the log directory (`log`) or of mounted archives (`archives`). Each "
    "attempt counts. Kinds are `put`, `get` with HEAD, `list` and `delete`.",
    REQUESTS,
)
BUCKET_BYTES: Final = _metric(
    "bucket_bytes_total",
    "counter",
    "bytes",
    "Bytes of objects in these requests: sent with `put`, received with `get`.",
    REQUESTS,
)
COPIES_BYTES: Final = _metric(
    "local_copies_bytes",
    "gauge",
    "bytes",
    "Local copies of objects: of sealed segments in a bucket (`log`), of archives (`archives`).",
    COPIES,
)
COPIES_HITS: Final = _metric(
    "local_copies_hits_total",
    "counter",
    "reads",
    "Reads of a segment whose copy was here, also those behind the one that fetched it. The hit "
    "ratio is this rate, divided by the sum of this rate and that of the misses.",
    COPIES,
)
COPIES_MISSES: Final = _metric(
    "local_copies_misses_total",
    "counter",
    "files",
    "Copies that were not, and were made from an object, or a part of one.",
    COPIES,
)
COMMIT_OBJECTS: Final = _metric(
    "commit_objects_total", "counter", "objects", "Commit objects that were created in the bucket."
)
COMMIT_BYTES: Final = _metric("commit_bytes_total", "counter", "bytes", "Their bytes.")
COMMITS_HELD: Final = _metric(
    "commits_held", "gauge", "objects", "Commit objects that a start would read now."
)
COMMITS_SINCE_SNAPSHOT: Final = _metric(
    "commits_since_snapshot",
    "gauge",
    "objects",
    "Commit objects behind the last snapshot of one of the broker's databases.",
    ("database",),
)
SEALED_OBJECTS: Final = _metric(
    "sealed_objects_total",
    "counter",
    "objects",
    "Objects of full segments that were created in the bucket.",
)
SEALED_BYTES: Final = _metric("sealed_bytes_total", "counter", "bytes", "Their bytes.")
UNFLUSHED_SECONDS: Final = _metric(
    "oldest_unflushed_seconds",
    "gauge",
    "seconds",
    "Age of the oldest record that is not in the bucket yet. 0: all of them are.",
)

BUCKET_CATALOGUE: Final = (
    *(BUCKET_REQUESTS, BUCKET_BYTES, COPIES_BYTES, COPIES_HITS, COPIES_MISSES),
    *(COMMIT_OBJECTS, COMMIT_BYTES, COMMITS_HELD, COMMITS_SINCE_SNAPSHOT),
    *(SEALED_OBJECTS, SEALED_BYTES, UNFLUSHED_SECONDS),
)
"""Those that have values only with a log directory in a bucket or with mounted archives."""

BROKER_CATALOGUE: Final = (
    *(BYTES_IN, BYTES_OUT, RECORDS_IN, PRODUCE_ERRORS, REQUEST_SECONDS, REQUEST_ERRORS, THROTTLED),
    *(LOG_START, LOG_END, HIGH_WATERMARK, DURABLE, LOG_BYTES, TOPICS, OFFLINE, OFFLINE_DIRS),
    *(CONNECTIONS, READY),
    *MOVE_CATALOGUE,
    SWAP_SECONDS,
    *BUCKET_CATALOGUE,
)
