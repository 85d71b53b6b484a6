"""The progress of copies at new offsets: a compacted topic at the destination, read and written.

A copy at new offsets cannot tell from the destination's log how far it is. So each transaction that
carries records carries a record that says so, too: both are there, or neither is. The topic is
`__logmirror-progress`, with one partition and compaction. Keys and values are JSON:

    ["next", mirror, topic, partition, target]  -> {"version": 1, "next": 5, "source_topic_id": hex,
                                                    "target_topic_id": hex, "writer": id}
    ["owner", mirror, topic, partition, target] -> {"version": 1, "writer": id}

`next` is the first source offset that is not copied; `owner` names the run that began last, and is
written outside any transaction. A tombstone makes us forget: of a `next`, that anything was copied.

Invariants:
1. A `next` counts once the marker that commits its transaction is in the topic. Who reads goes by
   the markers themselves, not by the last stable offset: an open transaction of another flow, or of
   a mirror that died, holds nobody up.
2. The last `owner` in the log is the owner. It only ever changes at the start of a run.
3. What was read is kept, and the next look reads what came since.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, defaultdict
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
    UnavailableError,
    UsageError,
)
from logmirror.mirror.ports import PositionMovedError
from logmirror.model import TimestampType, TopicPartition
from logmirror.to_kafka.idempotence import target
from logmirror.wire.records import (
    HEADER_SIZE,
    MarkerType,
    Record,
    decode_reference,
    encode_reference,
    marker_type,
    parse_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.produce import ProducePipeline
    from logmirror.cluster.transactions import TransactionalProducer
    from logmirror.mirror.ports import FlowId, KafkaSpec
    from logmirror.wire.records import BatchHeader

PROGRESS_TOPIC: Final = "__logmirror-progress"
PROGRESS: Final = TopicPartition(PROGRESS_TOPIC, 0)

PROGRESS_CONFIGS: Final = {
    "cleanup.policy": "compact",
    # Compaction leaves the newest segment alone, and who starts reads it whole.
    "segment.bytes": str(1 << 20),  # the least that every release allows
    "min.cleanable.dirty.ratio": "0.1",
}

_VERSION: Final = 1
_BUFFER_BYTES: Final = 1 << 20
STALL_MS: Final = 30_000
"""How long the topic may deliver nothing below its end."""

_WAIT_MS: Final = 500
_MARKERS_MS: Final = 200
"""How long the markers of a transaction may take that was committed just now."""
_LOOK_AGAIN_MS: Final = 10
_LINKS_MAX: Final = 16

_UNDECIDED_CODES: Final = frozenset({45, 46, 48, 59, 120})
"""The coordinator or the leader knows another state of our transaction than we do. Whoever takes
the flow over next finds out which."""


class FlowKey(NamedTuple):
    """What identifies a flow at its destination's cluster, whatever the destination is called."""

    mirror: str
    topic: str
    partition: int
    target: str

    @property
    def transactional_id(self) -> str:
        """The id under which all copiers of this flow write, so that each fences those before."""
        digest = hashlib.sha256(_json(list(self))).hexdigest()[:16]
        return f"{self.prefix(self.mirror, self.target)}{self.partition}-{digest}"

    @staticmethod
    def prefix(mirror: str, target: str) -> str:
        """What the transactional ids of a mirror begin with, for all partitions of a copy."""
        return f"logmirror-{mirror}-{target}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a flow is."""

    next_offset: int
    """The first source offset that is not copied."""

    source_topic_id: bytes | None
    target_topic_id: bytes | None
    """Incarnations that this was said of; None where a cluster has no ids."""

    writer: str


def flow_key(spec: KafkaSpec, flow: FlowId) -> FlowKey:
    """The identity of a flow."""
    where = target(spec, flow)
    return FlowKey(flow.mirror, flow.topic, flow.partition, where.topic)


def encode_progress(key: FlowKey, progress: Progress, now_ms: int) -> bytearray:
    """A batch that says how far a flow is; without producer, to be stamped."""
    return _batch(
        ["next", *key],
        {
            "version": _VERSION,
            "next": progress.next_offset,
            "source_topic_id": _hex(progress.source_topic_id),
            "target_topic_id": _hex(progress.target_topic_id),
            "writer": progress.writer,
        },
        now_ms,
    )


def encode_owner(key: FlowKey, writer: str, now_ms: int) -> bytearray:
    """A batch that says whose a flow is."""
    return _batch(["owner", *key], {"version": _VERSION, "writer": writer}, now_ms)


def _batch(key: list[object], value: dict[str, object], now_ms: int) -> bytearray:
    record = Record(0, now_ms, TimestampType.CREATE_TIME, _json(key), _json(value), ())
    return bytearray(encode_reference([record], leader_epoch=-1))


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _hex(topic_id: bytes | None) -> str | None:
    return None if topic_id is None else topic_id.hex()


class ProgressReader:
    """Follows the progress topic of one cluster. Not thread-safe.

    Args:
        client: Of the destination.
        where: The topic's one partition.
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
        """The first offset of the topic that was not read."""

        self._open: defaultdict[int, list[_Said]] = defaultdict(list)
        """By producer id, what its open transaction says."""

        self._progress: dict[FlowKey, Progress] = {}
        self._owners: dict[FlowKey, str] = {}

    def refresh(self, *, may_be_missing: bool = False) -> Self:
        """Read what is there now.

        Args:
            may_be_missing: Whether a topic that does not exist says that nothing was copied yet.
                Who writes must not believe that: a broker may only not know the topic yet.

        Raises:
            PositionError: The topic was deleted and created again, or cut, since it was last read.
            CorruptionError: What is read breaks its format.
            UsageError: It may not be read, or was written by another version of logmirror.
            UnavailableError: The destination did not answer in time, or has no such topic.
        """
        if self._next is None:
            try:
                self._topic_id = self._client.topic(self._where.topic).topic_id
            except NotFoundError as error:
                if may_be_missing:
                    return self
                raise UnavailableError(error.message, hint=error.hint, **error.facts) from error
            self._next = self._ask(EARLIEST)
        end = self._ask(LATEST)
        if end < self._next:
            raise PositionError(
                "the progress topic ends below where it was read to",
                hint="it was cut (unclean leader election, or a restored disk), and progress that "
                "it had told is gone. Compare the copies with their sources.",
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
        """Wait a moment for the markers of transactions that have told of these flows.

        A coordinator answers that a transaction is committed before all its markers are written.
        Whoever goes by this topic alone would see the position of before. A transaction that
        somebody left open has no markers for a long time: nobody waits for those.

        Raises:
            LogmirrorError: See `refresh`.
        """
        wanted = {_json(["next", *key]) for key in keys}
        give_up_ms = self._clock.monotonic_ms() + _MARKERS_MS
        while self._clock.monotonic_ms() < give_up_ms and any(
            one.key in wanted for said in self._open.values() for one in said
        ):
            self._clock.sleep_ms(_LOOK_AGAIN_MS)
            self.refresh()

    def progress(self, key: FlowKey) -> Progress | None:
        """How far a flow is, as of the last look; None: nothing was ever committed."""
        return self._progress.get(key)

    def owner(self, key: FlowKey) -> str | None:
        """The run that began last, as of the last look."""
        return self._owners.get(key)

    def of_target(self, where: TopicPartition) -> Iterator[tuple[FlowKey, Progress]]:
        """All flows that have copied into a partition."""
        for key, progress in self._progress.items():
            if (key.target, key.partition) == (where.topic, where.partition):
                yield key, progress

    def _ask(self, at: int) -> int:
        found = self._client.list_offsets([self._where], at, read_committed=False)
        return found[self._where]

    def _read(self, offset: int) -> int:
        """Fetch once from `offset`, take in what came, return where that ends."""
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
                self._take(data, header)
                offset = header.last_offset + 1
        return offset

    def _take(self, data: bytes, header: BatchHeader) -> None:
        """Take one batch in."""
        if header.is_control:
            said = self._open.pop(header.producer_id, [])
            if marker_type(data, header) is MarkerType.COMMIT:
                self._accept(said)
            return
        batch = data[header.position : header.position + header.size_bytes]
        said = [_Said(record.key, record.value) for record in decode_reference(batch)]
        if header.is_transactional:
            self._open[header.producer_id] += said
        else:
            self._accept(said)

    def _accept(self, said: list[_Said]) -> None:
        for key, value in said:
            kind, of = _parsed_key(key)
            if of is None:
                continue
            if value is None:
                (self._owners if kind == "owner" else self._progress).pop(of, None)
            elif kind == "owner":
                self._owners[of] = _parsed(key, value).writer
            else:
                self._progress[of] = _parsed(key, value)


@dataclass(slots=True)
class Link:
    """What writes under one transactional id."""

    producer: TransactionalProducer
    pipeline: ProducePipeline


class Links:
    """The open links of one process into one cluster; the least recently used are closed."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._links: OrderedDict[str, Link] = OrderedDict()

    def take(self, transactional_id: str) -> Link:
        """A link that has just fenced whoever wrote under this id before.

        Raises:
            UsageError: We may not write under that id.
            UnavailableError: No coordinator answered within the budget.
        """
        link = self._links.pop(transactional_id, None) or Link(
            self._client.transactional_producer(transactional_id),
            self._client.pipeline(transactional_id=transactional_id),
        )
        self._links[transactional_id] = link
        while len(self._links) > _LINKS_MAX:
            self._links.popitem(last=False)[1].pipeline.close()
        link.producer.init()
        return link

    def drop(self, transactional_id: str) -> None:
        """Close a link, and give up what is under way on it."""
        link = self._links.pop(transactional_id, None)
        if link is not None:
            link.pipeline.close()


def current(
    reader: ProgressReader, kafka: KafkaSpec, flow: FlowId, target_id: bytes | None
) -> Progress | None:
    """The progress of a flow; None also where the topic that it was said of is gone."""
    progress = reader.progress(flow_key(kafka, flow))
    if progress is None or target_id is None or progress.target_topic_id in (None, target_id):
        return progress
    return None


def taken_over(flow: FlowId, owner: str | None) -> FencedError:
    """The error of a run whose flow another run owns now."""
    return FencedError(
        "another run of this mirror has taken the flow over",
        hint="two instances copy the same; the one that began last goes on",
        mirror=flow.mirror,
        destination=flow.destination,
        topic=flow.topic,
        partition=flow.partition,
        owner=owner,
    )


def looked_into(error: LogmirrorError) -> LogmirrorError:
    """The error of a transaction that did not end: what to do is known after another look."""
    if isinstance(error, FencedError):
        return PositionMovedError(
            "another copier has fenced this one",
            hint="a newer instance, or an attempt of this slice that was thought dead",
            **error.facts,
        )
    if error.facts.get("code") in _UNDECIDED_CODES:
        return OutcomeUnknownError(
            "the brokers know another state of the transaction", hint=error.hint, **error.facts
        )
    return error


class _Said(NamedTuple):
    key: bytes | None
    value: bytes | None


def _parsed_key(key: bytes | None) -> tuple[str, FlowKey | None]:
    """The kind of a record and whom it is about; None: it is none of ours."""
    try:
        kind, mirror, topic, partition, name = json.loads(key or b"")
        of = FlowKey(str(mirror), str(topic), int(partition), str(name))
    except (ValueError, TypeError):
        return "", None
    return (kind, of) if kind in ("next", "owner") else ("", None)


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
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptionError(
            "the progress topic holds a record that nobody of us wrote",
            hint="nothing else may write to it",
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
