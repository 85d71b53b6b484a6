"""The checkpoints and heartbeats of one source at its target, as MirrorMaker 2 names them.

    <source>.checkpoints.internal   the checkpoints; MirrorMaker's readers use the last of each key
    heartbeats                      shows that the target is reached
    <source>.heartbeats             its name shows `MirrorClient` which sources the target has

Invariants:
1. One process writes: each write is a transaction, and a newer process fences the older one.
2. Nothing is written before all that the topic has was read: also what a dead process left there.
   Readers of MirrorMaker read uncommitted records, so what was aborted counts too. It is written
   again, because the log cleaner removes it, and the one before it would count again.
3. No record is a tombstone: MirrorMaker's readers fail on one.
4. A checkpoint has the ID of the topic that it is about, in a record header, which MirrorMaker's
   readers ignore. So it is known after a restart which ones are of a topic that was deleted.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logmirror import failpoints
from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.cluster.new_topics import await_leader
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import (
    CorruptionError,
    FencedError,
    InternalError,
    PositionError,
    UnavailableError,
    UsageError,
)
from logmirror.groups.emission import LastCheckpoints
from logmirror.model import TimestampType, TopicPartition
from logmirror.source.compare import chunks
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.wire.checksum import crc32c
from logmirror.wire.columns import fixed_column
from logmirror.wire.mirrormaker import (
    TOPIC_ID,
    Heartbeat,
    decode_checkpoint,
    encode_checkpoint,
    encode_heartbeat,
    topic_id_header,
)
from logmirror.wire.rebatch import stamp
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.replication_policy import HEARTBEATS, ReplicationPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.produce import ProducePipeline
    from logmirror.cluster.transactions import TransactionalProducer
    from logmirror.wire.decode import RecordDecoder
    from logmirror.wire.mirrormaker import Checkpoint

_LOG = logging.getLogger("logmirror.groups")

COMPACTED: Final = {"cleanup.policy": "compact"}

_BATCH_RECORDS: Final = 2_000
"""The most checkpoints in one batch; one with long names has some hundred bytes."""
_BATCH_BYTES: Final = 512 << 10

_SURELY_FITS: Final = 32_767 // 4
"""Characters of a text that fits, however it is encoded."""

_HEADER_BYTES: Final = 40

_FENCED_CODES: Final = frozenset({47, 90})
"""INVALID_PRODUCER_EPOCH and PRODUCER_FENCED: a newer process writes."""

_STALL_MS: Final = 30_000
"""How long the start waits for the topic's end: a transaction may be open there."""

_READY_MS: Final = 10_000
"""How long to wait for the leader of a topic that was just created."""

_READ_AGAIN_MS: Final = 60_000
"""How long after a refusal the topic is read again: the permission may have been granted."""


class _Session(NamedTuple):
    """What this process writes with, after it has fenced the others."""

    producer: TransactionalProducer
    pipeline: ProducePipeline
    sequences: defaultdict[TopicPartition, int]
    """The sequence of the next record of each partition."""


class Read(NamedTuple):
    """One checkpoint that was read."""

    checkpoint: Checkpoint
    topic_id: bytes | None
    """The ID of the topic that it is about; None: not known."""
    is_aborted: bool
    """Whether its transaction was aborted."""


class CheckpointTopics:
    """Writes the checkpoints of one source to its target. Not thread-safe.

    Args:
        client: The target.
        source_alias: The name of the source.
        target_alias: The name of the target, for heartbeats.
        transactional_id: The same for all processes that write checkpoints of these topics.
        topics: The topics of the target that are written about; others are of other processes.
        decoder: May be shared with other readers of the same thread.
        clock: Time.
    """

    def __init__(  # noqa: PLR0913  # who writes where about what
        self,
        client: ClusterClient,
        *,
        source_alias: str,
        target_alias: str,
        transactional_id: str,
        topics: Collection[str],
        decoder: RecordDecoder,
        clock: Clock,
    ) -> None:
        self._client, self._decoder, self._clock = client, decoder, clock
        self._aliases, self._mine = (source_alias, target_alias), frozenset(topics)
        policy = ReplicationPolicy()
        name = policy.checkpoints_topic(source_alias)
        heartbeats = [HEARTBEATS, policy.remote_topic(source_alias, HEARTBEATS)]
        if name is None or None in heartbeats:
            raise UsageError("the alias of the source is not valid in a topic name", alias=name)
        self._where = TopicPartition(name, 0)
        self._heartbeats = [TopicPartition(topic, 0) for topic in heartbeats if topic]
        self._transactional_id = transactional_id
        self._session: _Session | None = None
        self._buffer = FetchBuffer()
        self._topic_id: bytes | None = None
        self._next = self._written = -1
        """Where reading continues, and what the log at least reaches."""

        self._read_again_ms = 0
        self.last = LastCheckpoints()
        self.unreadable: UsageError | None = None
        """Why the checkpoints topic cannot be read."""

    @property
    def is_begun(self) -> bool:
        """Whether this process is the one that writes, as far as it knows."""
        return self._session is not None

    # -- the start ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Fence the previous process, and read what it has left.

        Raises:
            UsageError: No permission to write, or to create a topic that is missing.
            UnavailableError: The target did not respond in time, or a transaction is open.
        """
        self._create_topics()
        producer = self._client.transactional_producer(self._transactional_id)
        producer.init()
        failpoints.reach("groups.taken")
        self.last, self.unreadable = LastCheckpoints(), None
        self._next = self._written = -1
        try:
            self._read_all()
        except UsageError as error:
            self.unreadable = error
            self.last = LastCheckpoints()
            self._read_again_ms = self._clock.monotonic_ms() + _READ_AGAIN_MS
        pipeline = self._client.pipeline(transactional_id=self._transactional_id)
        self._session = _Session(producer, pipeline, defaultdict(int))

    def close(self) -> None:
        """Abandon what is in flight. The next `begin` aborts it."""
        if self._session is not None:
            self._session.pipeline.close()
        self._session = None

    def _create_topics(self) -> None:
        self._create(self._where.topic)
        for heartbeats in list(self._heartbeats):
            try:
                self._create(heartbeats.topic)
            except UsageError as error:
                self._heartbeats.remove(heartbeats)
                facts = {**error.facts, "topic": heartbeats.topic, "error": error.message}
                _LOG.warning(
                    "heartbeats disabled: their topic cannot be created", extra={"facts": facts}
                )

    def _create(self, topic: str) -> None:
        try:
            self._client.topic(topic)
        except NotFoundError:
            try:
                self._client.admin.create_topic(topic, partition_count=1, configs=COMPACTED)
            except UsageError as error:
                if error.facts.get("error") != "TOPIC_ALREADY_EXISTS":
                    raise
            with contextlib.suppress(UsageError):
                where = TopicPartition(topic, 0)
                await_leader(self._client, where, self._clock, timeout_ms=_READY_MS)

    # -- reading -----------------------------------------------------------------------------------

    def follow(self) -> bool:
        """Read what other processes have written; return whether there was anything.

        Raises:
            PositionError: The topic was deleted or truncated; call `begin`, which reads it again.
            LogmirrorError: The topic could not be read.
        """
        if self.unreadable is not None:
            return self._is_readable_again()
        first = self._next
        try:
            end = self._offset_at(LATEST)
            if end >= max(first, self._written):
                return self._read_to(end) and self._next > first
        except (NotFoundError, PositionError):
            self.close()
            raise
        self.close()
        raise PositionError(
            "the checkpoints topic was deleted or truncated",
            topic=self._where.topic,
            expected=max(first, self._written),
            found=end,
        )

    def _is_readable_again(self) -> bool:
        """Try to read the topic, now and then. What this process has written is there too."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._read_again_ms:
            return False
        self._read_again_ms = now_ms + _READ_AGAIN_MS
        before, self.last = self.last, LastCheckpoints()
        try:
            self._read_all()
        except BaseException as error:
            self.last = before
            if isinstance(error, UsageError):
                return False
            raise
        self.unreadable = None
        facts = {"topic": self._where.topic}
        _LOG.info("the checkpoints topic can be read again", extra={"facts": facts})
        return True

    def _read_all(self) -> None:
        self._topic_id = self._client.topic(self._where.topic).topic_id
        self._next = self._offset_at(EARLIEST)
        end, give_up_ms = self._offset_at(LATEST), self._clock.monotonic_ms() + _STALL_MS
        while self._next < end:
            self._read_to(end)
            if self._next < end and self._clock.monotonic_ms() > give_up_ms:
                raise UnavailableError(
                    "the checkpoints topic could not be read to its end in time",
                    hint="another producer has left a transaction open there",
                    topic=self._where.topic,
                    expected=end,
                    found=self._next,
                )

    def _offset_at(self, at: int) -> int:
        found = self._client.list_offsets([self._where], at, read_committed=False)
        return found[self._where]

    def _read_to(self, end: int) -> bool:
        """Read up to an offset or the last stable offset; return whether there was a checkpoint."""
        found = False
        log = KafkaSource(self._client, self._where, topic_id=self._topic_id, buffer=self._buffer)
        for table, offset in chunks(log, self._decoder, self._next, end, with_aborted=True):
            for one, topic_id, is_aborted in last_of_each_key(table):
                if one.topic in self._mine:
                    ids = {one.topic: topic_id}
                    self.last.remember([one], ids, are_aborted=is_aborted)
                    found = True
            self._next = offset
        return found

    # -- writing -----------------------------------------------------------------------------------

    def write(
        self, checkpoints: Sequence[Checkpoint], topic_ids: Mapping[str, bytes | None]
    ) -> None:
        """Write checkpoints and a heartbeat in one transaction; remember them if it is committed.

        Args:
            checkpoints: The checkpoints.
            topic_ids: The IDs of the topics that they are about, as far as known.

        Raises:
            FencedError: A newer process writes. This one must not call `begin` again.
            LogmirrorError: It may have been written; call `begin`, which reads the outcome.
        """
        if self._session is None:
            raise InternalError("checkpoints were written before `begin`")
        now_ms = self._clock.now_ms()
        heartbeat = encode_heartbeat(Heartbeat(*self._aliases, now_ms))
        batches = [(self._where, batch) for batch in _batches(checkpoints, topic_ids, now_ms)]
        batches += [(one, _batch([(*heartbeat, None)], now_ms)) for one in self._heartbeats]
        if batches:
            try:
                self._transact(self._session, batches)
            except FencedError as error:
                self.close()
                raise FencedError(
                    "another process translates these groups now",
                    hint="two instances translate the same groups; the other one continues",
                    **error.facts,
                ) from error
            except BaseException:
                self.close()
                raise
        self.last.remember(checkpoints, topic_ids)

    def _transact(
        self, session: _Session, batches: Sequence[tuple[TopicPartition, tuple[bytearray, int]]]
    ) -> None:
        producer, pipeline, sequences = session
        self._join(producer, [where for where, _ in batches])
        for where, (batch, count) in batches:
            sequence = sequences[where]
            identity = producer.identity._asdict()
            stamp(memoryview(batch), **identity, sequence=sequence, transactional=True)
            sequences[where] = (sequence + count) & 0x7FFFFFFF
            pipeline.send([(where, memoryview(batch))])
            failpoints.reach("groups.sent")
        self._await(pipeline)
        failpoints.reach("groups.written")
        producer.end(commit=True)
        failpoints.reach("groups.committed")
        if producer.has_stray:
            self.close()  # it must not end the next transaction, which gets a newer epoch

    def _join(self, producer: TransactionalProducer, partitions: Iterable[TopicPartition]) -> None:
        """Add partitions to the transaction."""
        try:
            producer.add_partitions(dict.fromkeys(partitions))
        except UsageError as error:
            if error.facts.get("topic") == self._where.topic:
                error.hint = "permit Write on the topic; see `logmirror acls print`"
            elif self._heartbeats:
                self._heartbeats = []
                facts = {**error.facts, "error": error.message}
                _LOG.warning("heartbeats disabled: a write was refused", extra={"facts": facts})
            raise

    def _await(self, pipeline: ProducePipeline) -> None:
        """Wait for the responses to all that was sent."""
        while pipeline.in_flight():
            for response in pipeline.collect(block=True):
                if response.error_code in _FENCED_CODES:
                    raise FencedError("a newer process writes the checkpoints")
                if response.error is not None:
                    raise response.error
                if response.partition == self._where:
                    self._written = response.base_offset + 1


def too_long(checkpoints: Iterable[Checkpoint]) -> UsageError | None:
    """Return why a group's checkpoints cannot be written: MirrorMaker's texts have a limit."""
    try:
        for one in checkpoints:
            if max(len(one.metadata), len(one.group), len(one.topic)) > _SURELY_FITS:
                encode_checkpoint(one)
    except UsageError as error:
        return error
    return None


def last_of_each_key(records: pa.Table) -> Iterator[Read]:
    """Yield the last checkpoint of each key, in the order of the topic; the rest is no checkpoint.

    Args:
        records: Columns `key`, `value`, `headers` and `is_aborted`.
    """
    records = records.filter(pc.is_valid(records["key"])).combine_chunks()
    if not records.num_rows:
        return
    keys = records["key"].combine_chunks().dictionary_encode()
    numbers = np.frombuffer(keys.indices.buffers()[1], np.int32, count=len(keys))
    rows = np.empty(len(keys.dictionary), np.int64)
    rows[numbers] = np.arange(len(numbers))  # the last one of a key counts
    places = np.sort(rows)
    last = records.take(fixed_column(pa.int64(), places))
    for place, row in zip(places, _rows(last), strict=True):
        key = row[0]
        try:
            yield _read(row)
        except CorruptionError:
            yield from _earlier(records.slice(0, int(place)), key)


def _earlier(records: pa.Table, key: bytes) -> Iterator[Read]:
    """Yield the last valid checkpoint of a key whose last record is none."""
    for row in reversed(list(_rows(records))):
        if row[0] == key:
            try:
                yield _read(row)
            except CorruptionError:
                continue
            return


def _rows(records: pa.Table) -> Iterator[tuple[Any, ...]]:
    columns = (records[name].to_pylist() for name in ("key", "value", "headers", "is_aborted"))
    return zip(*columns, strict=True)


def _read(row: tuple[Any, ...]) -> Read:
    key, value, headers, is_aborted = row
    ids = [one["value"] for one in headers if one["key"] == TOPIC_ID]
    return Read(decode_checkpoint(key, value), ids[-1] if ids else None, is_aborted)


def _batches(
    checkpoints: Iterable[Checkpoint], topic_ids: Mapping[str, bytes | None], now_ms: int
) -> Iterator[tuple[bytearray, int]]:
    records: list[tuple[bytes, bytes, bytes | None]] = []
    size = 0
    for one in checkpoints:
        key, value = encode_checkpoint(one)
        if records and (len(records) == _BATCH_RECORDS or size + len(key + value) > _BATCH_BYTES):
            yield _batch(records, now_ms)
            records, size = [], 0
        records.append((key, value, topic_ids.get(one.topic)))
        size += len(key) + len(value) + _HEADER_BYTES
    if records:
        yield _batch(records, now_ms)


def _batch(
    records: Sequence[tuple[bytes, bytes, bytes | None]], now_ms: int
) -> tuple[bytearray, int]:
    """Encode records, each with the topic ID for its header."""
    made = [
        Record(at, now_ms, TimestampType.CREATE_TIME, key, value, topic_id_header(topic_id))
        for at, (key, value, topic_id) in enumerate(records)
    ]
    return bytearray(encode_reference(made, leader_epoch=-1, checksum=crc32c)), len(made)
