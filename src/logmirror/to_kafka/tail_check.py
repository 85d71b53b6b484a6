"""Executor: compares the last batch of a replica with the source, and aligns their log starts.

Runs once per flow of a process, and after every error, before anything is written. Equal offsets
alone prove nothing: the last batch of the destination must hold what the source holds at the same
offsets.

If the source's log starts above offset 0, the destination needs the offsets below it as well. They
are filled with padding records, which are deleted at once, step by step. So at any moment the
destination is either empty or ends with padding, which a later start recognises by its producer ID.
A long head takes several turns, and several slices: each continues at the log end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.client import EARLIEST
from logmirror.errors import PositionError, PositionMovedError
from logmirror.source.compare import difference, rows
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.to_kafka.gap_writer import gap_too_long
from logmirror.to_kafka.idempotence import (
    SEND_DEADLINE_MS,
    SEQUENCE_MASK,
    is_of_another_source,
    padding_producer_id,
)
from logmirror.to_kafka.trimmed import trimmed_error
from logmirror.wire.padding import padding
from logmirror.wire.rebatch import stamp
from logmirror.wire.scan import KIND_CONTROL

if TYPE_CHECKING:
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.produce import ProducePipeline
    from logmirror.model import TopicPartition
    from logmirror.to_kafka.preserve_slice import PreserveSlice
    from logmirror.wire.decode import RecordDecoder

PADDING_RECORDS: Final = 500_000
"""Records of one padding batch: some 700 kB, below the usual max.message.bytes."""

_MARKERS_COMPARED: Final = 16
"""How many offsets are compared where a log ends with a control record: a duplicate marker, with
others behind it, may have taken the offset of a record."""

_BUFFER_BYTES: Final = 1 << 20
_WAIT_MS: Final = 500


class TailCheck:
    """Compares the last batch of a replica with its source, and writes padding below its log start.

    Args:
        client: The destination cluster.
        pipeline: For padding alone; nothing else is in flight on it.
        decoder: The decoder that this process shares.
        clock: Time.
    """

    def __init__(
        self,
        client: ClusterClient,
        pipeline: ProducePipeline,
        decoder: RecordDecoder,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._client, self._pipeline = client, pipeline
        self._decoder, self._clock = decoder, clock
        self._buffer = FetchBuffer(_BUFFER_BYTES)

    def check(self, copy: PreserveSlice, *, source_start: int, until_ms: int) -> int:
        """Compare the last batch, or write padding up to the source's log start.

        Args:
            copy: The slice; nothing of it is in flight.
            source_start: The source's log start offset.
            until_ms: Monotonic time at which no further step of padding is begun, but one always.

        Returns:
            The log end of the destination, which padding may have moved. Below `source_start`: the
            time was over.

        Raises:
            PositionError: The destination differs from the source at the same offset, or the source
                no longer has the next record. No record was written.
        """
        where, end = copy.writer.partition, copy.writer.verified
        log = KafkaSource(self._client, where, topic_id=None, buffer=self._buffer)
        producer = padding_producer_id(copy.writer.producer)
        start = self._drop_padding(log, where, self._start_of(where), end, producer)
        if end < source_start:
            if start < end:
                raise trimmed_error(end, start, source_start)
            return self._write_padding(where, end, source_start, producer, until_ms)
        if start < end:
            self._compare_last(copy, log, max(start, source_start), end)
        return end

    def _start_of(self, where: TopicPartition) -> int:
        return self._client.list_offsets([where], EARLIEST)[where]

    # -- the last batch --------------------------------------------------------------------------

    def _compare_last(self, copy: PreserveSlice, log: KafkaSource, oldest: int, end: int) -> None:
        fetched = log.poll(end - 1, max_wait_ms=_WAIT_MS).fetched
        if fetched is None:
            raise PositionMovedError("the destination's last batch cannot be read yet", end=end)
        is_marker = fetched.batches.kinds[fetched.start] == KIND_CONTROL
        base = int(fetched.batches.base_offsets[fetched.start])
        first = max(end - _MARKERS_COMPARED if is_marker else base, oldest)
        writer = int(fetched.batches.producer_ids[fetched.start])
        found = rows(log, self._decoder, first, end)
        expected = rows(copy.source, self._decoder, first, end)
        differs = difference(
            found,
            expected,
            timestamps=copy.work.kafka.keeps_timestamps,
            compacted=copy.work.slice.compacted,
        )
        if differs is None:
            # Equal records count more than the ID: a source may be an exact replica of another.
            if expected.num_rows == 0 and is_of_another_source(writer, copy.writer.producer):
                raise _recreated(copy, end)
            return
        lost = differs["offset"]
        if is_marker and isinstance(lost, int) and lost not in found["offset"].to_pylist():
            raise gap_too_long(copy.writer.partition, expected=lost, found=end)
        raise PositionError(
            "the destination's last batch is not what the source holds at its offsets",
            hint="another client wrote to the destination topic, or the source is another topic "
            "than the one that was copied (recreated, or of another cluster). If the topic is "
            "mirrored back after a failover, the destination has records that the source never "
            "got (docs/fail-over.md#fail-back). Nothing was written; copy into an empty topic.",
            reason="ContentDiffers",
            first=first,
            last=end - 1,
            **differs,
        )

    # -- padding ---------------------------------------------------------------------------------

    def _drop_padding(
        self, log: KafkaSource, where: TopicPartition, start: int, end: int, producer: int
    ) -> int:
        """Delete padding at the log start that a crash of a mirror or a broker has left."""
        at = start
        while at < end:
            fetched = log.poll(at, max_wait_ms=_WAIT_MS).fetched
            if fetched is None or fetched.batches.producer_ids[fetched.start] != producer:
                break
            at = int(fetched.batches.last_offsets[fetched.start]) + 1
        if at > start:
            self._client.admin.delete_records({where: at})
        return at

    def _write_padding(  # the parts of `check`
        self, where: TopicPartition, first: int, end: int, producer: int, until_ms: int
    ) -> int:
        batch, size = bytearray(), 0
        while True:
            if size != min(PADDING_RECORDS, end - first):
                size = min(PADDING_RECORDS, end - first)
                batch = bytearray(padding(size, timestamp_ms=self._clock.now_ms()))
            view = memoryview(batch)
            stamp(view, producer_id=producer, producer_epoch=0, sequence=first & SEQUENCE_MASK)
            send_until_ms = self._clock.monotonic_ms() + SEND_DEADLINE_MS
            self._pipeline.send([(where, view)], not_after_ms=send_until_ms)
            (response,) = self._pipeline.collect(block=True)
            if response.error is not None:
                raise response.error
            if response.base_offset != first:
                raise PositionError(
                    "the destination appended padding at another offset than expected",
                    hint="another client writes to the destination topic; copy the topic again "
                    "(docs/recopy-a-partition.md)",
                    reason="ForeignRecord",
                    expected=first,
                    found=response.base_offset,
                )
            failpoints.reach("head.filled")
            first += size
            self._client.admin.delete_records({where: first})
            failpoints.reach("head.deleted")
            if first >= end or self._clock.monotonic_ms() >= until_ms:
                return first


def _recreated(copy: PreserveSlice, end: int) -> PositionError:
    topic_id = copy.work.slice.topic_id
    return PositionError(
        "the replica is of another source topic, and its last batch cannot be compared",
        hint="the source topic was recreated, or is in another cluster, and was compacted or "
        "trimmed. Records of two topics must not share a log. Keep this replica unchanged, and "
        "copy into another topic.",
        reason="SourceRecreated",
        position=end,
        found_topic_id=topic_id.hex() if topic_id else "",
    )
