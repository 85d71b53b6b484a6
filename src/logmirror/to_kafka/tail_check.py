"""Executor: does what the destination holds continue the source? And where both begin.

Asked once for each flow of a process, and after everything that went wrong, before anything is
written. Count alone proves nothing: the last batch of the destination must hold what the source
holds at those offsets.

A source whose log begins above 0 has offsets that nobody can read any more. The destination takes
them with filler records and deletes those at once, step by step, so that at any moment it is either
empty or ends with filler of ours, which a later start recognises by its producer id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.client import EARLIEST
from logmirror.errors import PositionError
from logmirror.mirror.ports import PositionMovedError
from logmirror.source.compare import difference, rows
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.to_kafka.gap_writer import gap_too_long
from logmirror.to_kafka.idempotence import (
    SEND_DEADLINE_MS,
    SEQUENCE_MASK,
    filler_producer_id,
    is_of_another_source,
)
from logmirror.wire.rebatch import filler, stamp
from logmirror.wire.scan import KIND_CONTROL

if TYPE_CHECKING:
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.produce import ProducePipeline
    from logmirror.model import TopicPartition
    from logmirror.to_kafka.preserve_slice import Copy
    from logmirror.wire.decode import RecordDecoder

FILLER_RECORDS: Final = 500_000
"""Records of one filler batch: some 700 kB, below the usual max.message.bytes."""

_MARKERS_COMPARED: Final = 16
"""Where a log ends with a control record, so many offsets are compared: one of the source's records
may have lost its place to a marker that was written twice, behind which further ones stand."""

_BUFFER_BYTES: Final = 1 << 20
_WAIT_MS: Final = 500


class TailCheck:
    """Compares the end of a copy with its source, and makes a missing head.

    Args:
        client: Of the destination.
        pipeline: For filler alone; nothing else is under way on it.
        decoder: Shared with whoever decodes in this process.
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

    def prove(self, copy: Copy, *, source_start: int) -> int:
        """Compare the end of a copy with its source; see `Prover`.

        Raises:
            PositionError: The destination holds something else than the source at the same offset,
                or the source no longer has what comes next. Nothing was written.
        """
        where, end = copy.writer.partition, copy.writer.verified
        log = KafkaSource(self._client, where, topic_id=None, buffer=self._buffer)
        producer = filler_producer_id(copy.writer.producer)
        start = self._drop_filler(log, where, self._start_of(where), end, producer)
        if end < source_start:
            if start < end:
                raise _trimmed(end, start, source_start)
            self._take_head(where, end, source_start, producer)
            return source_start
        if start < end:
            self._compare_last(copy, log, max(start, source_start), end)
        return end

    def _start_of(self, where: TopicPartition) -> int:
        return self._client.list_offsets([where], EARLIEST)[where]

    # -- the last batch --------------------------------------------------------------------------

    def _compare_last(self, copy: Copy, log: KafkaSource, oldest: int, end: int) -> None:
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
            # Equal records prove more than a name: a source may be an exact copy of another one.
            if expected.num_rows == 0 and is_of_another_source(writer, copy.writer.producer):
                raise _recreated(copy, end)
            return
        lost = differs["offset"]
        if is_marker and isinstance(lost, int) and lost not in found["offset"].to_pylist():
            raise gap_too_long(copy.writer.partition, expected=lost, found=end)
        raise PositionError(
            "the destination's last batch is not what the source holds at its offsets",
            hint="the destination's topic has records of someone else, or the source is "
            "another topic than the one that was copied (deleted and created again, another "
            "cluster). Nothing was written; copy into an empty topic.",
            reason="ContentDiffers",
            first=first,
            last=end - 1,
            **differs,
        )

    # -- the head --------------------------------------------------------------------------------

    def _drop_filler(
        self, log: KafkaSource, where: TopicPartition, start: int, end: int, producer: int
    ) -> int:
        """Delete filler at the log start that a crash of ours or of a broker has left."""
        at = start
        while at < end:
            fetched = log.poll(at, max_wait_ms=_WAIT_MS).fetched
            if fetched is None or fetched.batches.producer_ids[fetched.start] != producer:
                break
            at = int(fetched.batches.last_offsets[fetched.start]) + 1
        if at > start:
            self._client.admin.delete_records({where: at})
        return at

    def _take_head(self, where: TopicPartition, first: int, end: int, producer: int) -> None:
        batch, size = bytearray(), 0
        while first < end:
            if size != min(FILLER_RECORDS, end - first):
                size = min(FILLER_RECORDS, end - first)
                batch = bytearray(filler(size, timestamp_ms=self._clock.now_ms()))
            view = memoryview(batch)
            stamp(view, producer_id=producer, producer_epoch=0, sequence=first & SEQUENCE_MASK)
            until_ms = self._clock.monotonic_ms() + SEND_DEADLINE_MS
            self._pipeline.send([(where, view)], not_after_ms=until_ms)
            (response,) = self._pipeline.collect(block=True)
            if response.error is not None:
                raise response.error
            if response.base_offset != first:
                raise PositionError(
                    "the destination appended filler at another offset than expected",
                    hint="someone else writes to the destination's topic; copy this partition "
                    "anew into an empty one",
                    reason="ForeignRecord",
                    expected=first,
                    found=response.base_offset,
                )
            failpoints.reach("head.filled")
            first += size
            self._client.admin.delete_records({where: first})
            failpoints.reach("head.deleted")


def _recreated(copy: Copy, end: int) -> PositionError:
    topic_id = copy.work.slice.topic_id
    return PositionError(
        "the copy is of another topic than the source's, and nothing at its end can be compared",
        hint="the topic was deleted and created again, or is in another cluster, and was compacted "
        "or trimmed. Records of two topics must not share a log. Keep this copy as it is, and copy "
        "into another topic.",
        reason="SourceRecreated",
        position=end,
        found_topic_id=topic_id.hex() if topic_id else "",
    )


def _trimmed(end: int, start: int, source_start: int) -> PositionError:
    return PositionError(
        "the source no longer has the next record: retention or DeleteRecords passed it",
        hint="the records between position and source_start are gone at the source. What is copied "
        "is kept; to copy what is left, use another topic at the destination.",
        reason="SourceTrimmed",
        position=end,
        log_start=start,
        source_start=source_start,
    )
