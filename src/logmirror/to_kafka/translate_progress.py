"""The progress of replicas with new offsets: a compacted topic at the destination.

With new offsets, the destination's log does not show how far a replica is. So each transaction with
records also holds a progress record: both are committed, or neither is. The topic is
`__logmirror-progress`, with one partition and compaction. Keys and values are JSON:

    ["next", mirror, topic, partition, target]  -> {"version": 1, "next": 5, "source_topic_id": hex,
                                                    "target_topic_id": hex, "writer": id,
                                                    "leader_epoch": 3}
    ["owner", mirror, topic, partition, target] -> {"version": 1, "writer": id}

`next` is the first source offset that is not copied; `leader_epoch`, if known, is the leader epoch
of the source's batch before it. `owner` names the run that started last, and is written outside any
transaction. A tombstone for a `next` makes the replica start again from the source's log start
offset.

Invariants:
1. A `next` counts once the marker that commits its transaction is in the topic. Readers go by the
   markers, not by the last stable offset: a transaction that another flow or a dead mirror left
   open delays no flow.
2. The last `owner` in the log is the owner. It changes only at the start of a run.
3. What was read is kept; the next `refresh` reads only new records.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import (
    CorruptionError,
    FencedError,
    LogmirrorError,
    OutcomeUnknownError,
    PositionError,
    PositionMovedError,
    UnavailableError,
    UsageError,
)
from logmirror.model import TimestampType, TopicPartition
from logmirror.to_kafka.idempotence import target
from logmirror.wire.batch_header import HEADER_SIZE, MarkerType, parse_header
from logmirror.wire.records import Record, decode_reference, encode_reference, marker_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.mirror.ports import FlowId, KafkaSpec
    from logmirror.wire.batch_header import BatchHeader

PROGRESS_TOPIC: Final = "__logmirror-progress"
PROGRESS: Final = TopicPartition(PROGRESS_TOPIC, 0)

PROGRESS_CONFIGS: Final = {
    "cleanup.policy": "compact",
    # Compaction skips the newest segment, which every start reads whole.
    "segment.bytes": str(1 << 20),  # the least that every release allows
    "min.cleanable.dirty.ratio": "0.1",
}

_VERSION: Final = 1
_BUFFER_BYTES: Final = 1 << 20
STALL_MS: Final = 30_000
"""How long the topic may deliver nothing below its log end."""

_WAIT_MS: Final = 500
_MARKERS_MS: Final = 200
"""How long to wait for the markers of a transaction that was just committed."""
_POLL_MS: Final = 10

_UNDECIDED_CODES: Final = frozenset({45, 46, 48, 59, 120})
"""The coordinator or the leader has another state of the transaction than this process. The next
take-over of the flow reads which."""


class FlowKey(NamedTuple):
    """The identity of a flow at its destination cluster, without the destination's name."""

    mirror: str
    topic: str
    partition: int
    target: str

    @property
    def transactional_id(self) -> str:
        """The transactional ID of all writers of this flow; each fences the previous one."""
        digest = hashlib.sha256(_json(list(self))).hexdigest()[:16]
        return f"{self.prefix(self.mirror, self.target)}{self.partition}-{digest}"

    @staticmethod
    def prefix(mirror: str, target: str) -> str:
        """The prefix of a mirror's transactional IDs, for all partitions of a destination topic."""
        return f"logmirror-{mirror}-{target}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a flow."""

    next_offset: int
    """The first source offset that is not copied."""

    source_topic_id: bytes | None
    target_topic_id: bytes | None
    """The topic IDs that the progress refers to; None where a cluster has no topic IDs."""

    writer: str
    leader_epoch: int = -1
    """The source's leader epoch of the batch before `next_offset`; -1: unknown."""


def flow_key(spec: KafkaSpec, flow: FlowId) -> FlowKey:
    """The identity of a flow."""
    where = target(spec, flow)
    return FlowKey(flow.mirror, flow.topic, flow.partition, where.topic)


def encode_progress(key: FlowKey, progress: Progress, now_ms: int) -> bytearray:
    """A batch with a `next` record; without producer fields, which `stamp` sets."""
    value: dict[str, object] = {
        "version": _VERSION,
        "next": progress.next_offset,
        "source_topic_id": _hex(progress.source_topic_id),
        "target_topic_id": _hex(progress.target_topic_id),
        "writer": progress.writer,
    }
    if progress.leader_epoch >= 0:
        value["leader_epoch"] = progress.leader_epoch
    return _batch(["next", *key], value, now_ms)


def encode_owner(key: FlowKey, writer: str, now_ms: int) -> bytearray:
    """A batch with an `owner` record."""
    return _batch(["owner", *key], {"version": _VERSION, "writer": writer}, now_ms)


def _batch(key: list[object], value: dict[str, object], now_ms: int) -> bytearray:
    record = Record(0, now_ms, TimestampType.CREATE_TIME, _json(key), _json(value), ())
    return bytearray(encode_reference([record], leader_epoch=-1))


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _hex(topic_id: bytes | None) -> str | None:
    return None if topic_id is None else topic_id.hex()


class ProgressReader:
    """Reads the progress topic of one cluster. Not thread-safe.

    Args:
        client: The destination cluster.
        where: The topic's only partition.
        clock: For deadlines.
    """

    def __init__(
        self,
        client: ClusterClient,
        where: TopicPartition = PROGRESS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._client, self._where, self._clock = client, where, clock
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._topic_id: bytes | None = None
        self._next: int | None = None
        """The next offset to read."""

        self._open: defaultdict[int, list[ProgressRecord]] = defaultdict(list)
        """The records of open transactions, by producer ID."""

        self._progress: dict[FlowKey, Progress] = {}
        self._owners: dict[FlowKey, str] = {}

    def refresh(self, *, may_be_missing: bool = False) -> Self:
        """Read to the current end of the topic.

        Args:
            may_be_missing: Whether a missing topic means that nothing was copied yet. A writer must
                not assume that: a broker may not have the topic's metadata yet.

        Raises:
            PositionError: The topic was recreated or truncated since it was last read.
            CorruptionError: A record breaks the format.
            UsageError: No permission to read, or written by another version of logmirror.
            UnavailableError: The destination did not respond in time, or has no such topic.
        """
        if self._next is None:
            try:
                self._topic_id = self._client.topic(self._where.topic).topic_id
            except NotFoundError as error:
                if may_be_missing:
                    return self
                raise UnavailableError(error.message, hint=error.hint, **error.facts) from error
            self._next = self._offset_at(EARLIEST)
        end = self._offset_at(LATEST)
        if end < self._next:
            raise PositionError(
                "the progress topic ends below the offset up to which it was read",
                hint="it was truncated (unclean leader election, or a restored disk), and progress "
                "records are lost. Compare the replicas with their sources.",
                topic=self._where.topic,
                expected=self._next,
                found=end,
            )
        give_up_ms = self._clock.monotonic_ms() + STALL_MS
        while self._next < end:
            self._next = self._read(self._next)
            if self._clock.monotonic_ms() > give_up_ms:
                raise UnavailableError(
                    "the progress topic could not be read to its end in time",
                    topic=self._where.topic,
                    expected=end,
                    found=self._next,
                )
        return self

    def await_markers(self, keys: Iterable[FlowKey]) -> None:
        """Wait up to 200 ms for the markers of transactions with progress of these flows.

        A coordinator responds that a transaction is committed before all its markers are written,
        so this topic may still show the previous position. The markers of an abandoned transaction
        come much later: this does not wait for them.

        Raises:
            LogmirrorError: See `refresh`.
        """
        wanted = {_json(["next", *key]) for key in keys}
        give_up_ms = self._clock.monotonic_ms() + _MARKERS_MS
        while self._clock.monotonic_ms() < give_up_ms and any(
            one.key in wanted for records in self._open.values() for one in records
        ):
            self._clock.sleep_ms(_POLL_MS)
            self.refresh()

    def progress(self, key: FlowKey) -> Progress | None:
        """The progress of a flow at the last `refresh`; None if nothing was ever committed."""
        return self._progress.get(key)

    def owner(self, key: FlowKey) -> str | None:
        """The run that started last, at the last `refresh`."""
        return self._owners.get(key)

    def of_target(self, where: TopicPartition) -> Iterator[tuple[FlowKey, Progress]]:
        """The progress of all flows into a partition."""
        for key, progress in self._progress.items():
            if (key.target, key.partition) == (where.topic, where.partition):
                yield key, progress

    def _offset_at(self, at: int) -> int:
        found = self._client.list_offsets([self._where], at, read_committed=False)
        return found[self._where]

    def _read(self, offset: int) -> int:
        """Fetch once from `offset`, apply the batches, and return the next offset."""
        response = self._client.fetch(
            self._where,
            offset,
            self._buffer,
            topic_id=self._topic_id,
            max_wait_ms=_WAIT_MS,
            read_committed=False,
        )
        if response.needed_bytes:
            self._buffer = memoryview(bytearray(response.needed_bytes))
            return offset
        data, at = bytes(self._buffer[: response.size]), 0
        while at + HEADER_SIZE <= len(data):
            header = parse_header(data, at)
            if at + header.size_bytes > len(data):
                break
            if header.size_bytes < HEADER_SIZE:
                raise CorruptionError("record batch breaks its format", position=at, why="length")
            at += header.size_bytes
            if header.last_offset >= offset:
                self._apply_batch(data, header)
                offset = header.last_offset + 1
        return offset

    def _apply_batch(self, data: bytes, header: BatchHeader) -> None:
        if header.is_control:
            records = self._open.pop(header.producer_id, [])
            if marker_type(data, header) is MarkerType.COMMIT:
                self._apply(records)
            return
        batch = data[header.position : header.position + header.size_bytes]
        records = [ProgressRecord(record.key, record.value) for record in decode_reference(batch)]
        if header.is_transactional:
            self._open[header.producer_id] += records
        else:
            self._apply(records)

    def _apply(self, records: list[ProgressRecord]) -> None:
        for key, value in records:
            kind, flow = _parsed_key(key)
            if flow is None:
                continue
            if value is None:
                (self._owners if kind == "owner" else self._progress).pop(flow, None)
            elif kind == "owner":
                self._owners[flow] = _parsed(key, value).writer
            else:
                self._progress[flow] = _parsed(key, value)


def current(
    reader: ProgressReader, kafka: KafkaSpec, flow: FlowId, target_id: bytes | None
) -> Progress | None:
    """The progress of a flow; None also if it refers to a deleted destination topic."""
    progress = reader.progress(flow_key(kafka, flow))
    if progress is None or target_id is None or progress.target_topic_id in (None, target_id):
        return progress
    return None


def taken_over(flow: FlowId, owner: str | None) -> FencedError:
    """The error of a run whose flow another run owns now."""
    return FencedError(
        "another run of this mirror has taken over the flow",
        hint="two instances copy the same flow; the one that started last continues",
        mirror=flow.mirror,
        destination=flow.destination,
        topic=flow.topic,
        partition=flow.partition,
        owner=owner,
    )


def reclassified(error: LogmirrorError) -> LogmirrorError:
    """Reclassify the error of a transaction that was not committed: read the position again."""
    if isinstance(error, FencedError):
        return PositionMovedError(
            "another writer has fenced this one",
            hint="a newer instance, or an earlier attempt at this slice that is still running",
            **error.facts,
        )
    if error.facts.get("code") in _UNDECIDED_CODES:
        return OutcomeUnknownError(
            "the brokers have another state of the transaction", hint=error.hint, **error.facts
        )
    return error


class ProgressRecord(NamedTuple):
    """A record of the progress topic, not parsed yet."""

    key: bytes | None
    value: bytes | None


def _parsed_key(key: bytes | None) -> tuple[str, FlowKey | None]:
    """The kind of a record and its flow; "" and None if logmirror did not write it."""
    try:
        kind, mirror, topic, partition, name = json.loads(key or b"")
        flow = FlowKey(str(mirror), str(topic), int(partition), str(name))
    except (ValueError, TypeError):
        return "", None
    return (kind, flow) if kind in ("next", "owner") else ("", None)


def _parsed(key: bytes | None, value: bytes) -> Progress:
    try:
        entry = json.loads(value)
        version = entry["version"]
        ids = (entry.get(name) for name in ("source_topic_id", "target_topic_id"))
        source_id, target_id = (None if one is None else bytes.fromhex(one) for one in ids)
        progress = Progress(
            next_offset=int(entry.get("next", 0)),
            source_topic_id=source_id,
            target_topic_id=target_id,
            writer=str(entry["writer"]),
            leader_epoch=int(entry.get("leader_epoch", -1)),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptionError(
            "the progress topic has a record that logmirror did not write",
            hint="no other client may write to it",
            topic=PROGRESS_TOPIC,
            key=key,
        ) from error
    if version != _VERSION:
        raise UsageError(
            "the progress topic was written by another version of logmirror",
            hint="use the version that wrote it, or a newer one",
            topic=PROGRESS_TOPIC,
            version=version,
        )
    return progress
