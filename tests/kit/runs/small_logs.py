"""Logs of one partition, of small numbered batches, used without a broker.

A batch of a number has records with the values `NUMBER-0`, `NUMBER-1`, so that what is read shows
which batches it is of.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.durable_ends import DurableEnd
from logmirror.broker.log.reading import ColdSegmentError
from logmirror.broker.log.recovery import recover
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.wire.records import Record, decode_reference, encode_reference

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.errors import LogmirrorError

SEGMENT_BYTES = 300
"""Small enough that a handful of batches fills several segments."""

PRODUCER = 8


def open_log(  # noqa: PLR0913  # what decides what a start finds
    folder: Path,
    disk: Disk | None = None,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    durable: int | DurableEnd | None = None,
    log_start: int = 0,
    accept_loss: bool = False,
) -> PartitionLog:
    """Open a log as a start does; `durable` is the end that was recorded, if one was."""
    disk = disk or Disk()
    return recover(
        folder,
        disk=disk,
        cache=SegmentCache(disk),
        segment_bytes=segment_bytes,
        durable=DurableEnd(durable, 0) if isinstance(durable, int) else durable,
        log_start=log_start,
        accept_loss=accept_loss,
    )


def batch_of(number: int, count: int = 2, **fields: int) -> memoryview:
    """Return the batch of a number; `fields` as in `encode_reference`."""
    records = [
        Record(n, 1000 + number, 0, None, b"%02d-%d" % (number, n), ()) for n in range(count)
    ]
    return memoryview(bytearray(encode_reference(records, **fields)))


def append_batch(log: PartitionLog, data: bytes) -> int:
    """Append a batch as a producer's; returns its base offset."""
    batch = memoryview(bytearray(data))
    return log.append(batch, check_batch(batch, max_bytes=10**6))


def append(log: PartitionLog, number: int, count: int = 2, **fields: int) -> int:
    """Append the batch of a number; returns its base offset."""
    return append_batch(log, batch_of(number, count, **fields))


def flush(log: PartitionLog) -> None:
    """Make everything durable that was appended."""
    job = log.begin_sync()
    if job is not None:
        job.run()
        log.finish_sync(job, None)


def workload(log: PartitionLog, acked: list[int], batches: int = 24) -> None:
    """Append batches, flushing after every third; `acked` gets the number of each durable one."""
    for number in range(batches):
        base_offset = append(
            log, number, producer_id=PRODUCER, producer_epoch=0, base_sequence=number * 2
        )
        assert base_offset == number * 2

        def done(failure: LogmirrorError | None, number: int = number) -> None:
            assert failure is None
            acked.append(number)

        log.when_durable(log.log_end, done)
        if number % 3 == 2:
            flush(log)


def fetched(log: PartitionLog, offset: int) -> bytes:
    """Return the batches of one response to a consumer."""
    for _ in range(len(log.segments) + 1):
        try:
            ranges = log.read(offset, 1000, at_least_one=True)
        except ColdSegmentError as cold:
            log._cache.loaded(cold.segment)  # noqa: SLF001  # what the fetch handler does
            continue
        assert ranges, "no progress"
        return b"".join(os.pread(r.file.fd, r.size_bytes, r.position) for r in ranges)
    raise AssertionError("a segment is never loaded")


def read(log: PartitionLog, offset: int | None = None) -> list[Record]:
    """Read all records from an offset on, as a consumer does, one response after the other."""
    offset = log.log_start if offset is None else offset
    found: list[Record] = []
    while offset < log.high_watermark:
        data = fetched(log, offset)
        records = [record for record in decode_reference(data) if record.offset >= offset]
        found += records
        offset = records[-1].offset + 1
    return found


def values(log: PartitionLog) -> list[bytes | None]:
    """Return the values of all records that a consumer reads."""
    return [record.value for record in read(log)]


def expected(numbers: range) -> list[bytes]:
    """Return the values of whole batches of these numbers."""
    return [b"%02d-%d" % (number, n) for number in numbers for n in range(2)]
