"""Fetched batches -> batches that a broker accepts from a producer, for the same offsets.

A producer's batch starts at offset 0, has a record for each of its offsets, is part of no
transaction that the broker does not know, and has create time. A request holds one batch per
partition. Therefore:

- R1 A batch without missing offsets, with create time, all of whose offsets are requested, is
passed
  through: only its header is patched, in the caller's buffer. Its records are not read (the broker
  reads them), and the source's checksum still protects them.
- R2 Small adjacent batches that could be passed through are merged where that costs less than a
  request. A request costs about 0.2 ms of broker CPU and 0.05 ms of client CPU. Uncompressed
  batches are merged below 384 KiB: 0.2 to 0.3 ms per MB (3 to 4.5 GB/s, records of 100 B and 1
  KiB). Compressed batches must be decompressed and compressed again: 3 to 4 ms per MB of records
  with any codec; 0.02 to 0.03 ms for a batch of 3 KB, 0.07 ms for 9 KB, 0.2 ms for 30 KB. They are
  merged below 4 KiB, where that saves client CPU, too. A batch that could be passed through is
  never split.
- R3 All other batches are rewritten: batches with offset gaps, with offsets that are not requested,
  or with log-append time (every record gets the batch's max timestamp, as readers see it).
- R4 A piece ends at an offset gap. The caller sees the gap from `base_offset` and `count`.
- R5 Rewritten records keep their codec, unless that makes them larger. Their uncompressed size
counts
  against the limit, so only a piece with a single record can exceed it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from logmirror.errors import CorruptionError, InternalError
from logmirror.model import Limits
from logmirror.wire import kernels_rebatch as k
from logmirror.wire.compression import Codec, Decompressor, compress, is_over_limit
from logmirror.wire.kernels_columns import COMPRESSED, DONE, FULL, WHY
from logmirror.wire.kernels_encode import BATCH_HEADER_BYTES
from logmirror.wire.kernels_patch import (
    BAD_BATCH,
    patch_listed,
    patch_producer,
    patch_transactional,
)
from logmirror.wire.limits import batch_too_large
from logmirror.wire.scan import address_of, as_bytes_array

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from logmirror.wire.scan import Batches, Buffer

_MIB: Final = 1024 * 1024
_LIMITS: Final = Limits()
_CHUNK_BYTES_MIN: Final = 4 * _MIB
_CHUNK_BATCHES: Final = 4
"""New pieces are made in chunks of memory, each for at least that many of full size."""

_SPARE_CHUNKS: Final = 4
_PIECES_LISTED: Final = 512


class Piece(NamedTuple):
    """One batch to produce.

    Attributes:
        base_offset: Source offset of its first record.
        count: Its records, and the offsets it takes.
        data: The batch: base offset 0, no leader epoch, no producer. Writable.
        max_timestamp_ms: The largest timestamp of its records, as the batch says.
        verbatim: Whether the records are the source's unread bytes.
    """

    base_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    data: memoryview
    max_timestamp_ms: int
    verbatim: bool


class Rebatcher:
    """Makes pieces of one buffer after the other. Not thread-safe, one run at a time.

    New pieces are made in chunks of 4 MiB or more, shared by small runs. Four of them are kept for
    use again; what is held beyond that is what pieces are alive.

    Args:
        max_batch_bytes: The most that a new batch takes; see R5. What passes as it is may be
            larger.
        merge_below_bytes: Uncompressed batches of fewer bytes are merged; 0: none.
        merge_compressed_below_bytes: The same for compressed ones.
        limits: The most that one batch may hold decompressed.
    """

    def __init__(
        self,
        *,
        max_batch_bytes: int = 1_000_000,
        merge_below_bytes: int = 384 * 1024,
        merge_compressed_below_bytes: int = 4 * 1024,
        limits: Limits = _LIMITS,
    ) -> None:
        self._limits = (max_batch_bytes, merge_below_bytes, merge_compressed_below_bytes)
        self._max_unpacked_bytes = limits.max_batch_unpacked_bytes
        self._decompressor = Decompressor()
        self._chunks = _Chunks(max(_CHUNK_BYTES_MIN, _CHUNK_BATCHES * max_batch_bytes))
        self._run: _Run | None = None

    def pieces(  # noqa: PLR0913  # a buffer, its batches, two ranges
        self, buffer: Buffer, batches: Batches, start: int, stop: int, *, first: int, end: int
    ) -> Iterator[Piece]:
        """Yield the data records with first <= offset < end, as pieces in offset order.

        Args:
            buffer: What was scanned; writable. Batches that pass as they are, are patched there, so
                it cannot be scanned again; the same run may be made again.
            batches: The result of the scan. Control and aborted batches are skipped.
            start: The first batch.
            stop: The batch after the last one.
            first: The first offset.
            end: The offset after the last one.

        Yields:
            Pieces without gaps inside. A piece's memory is its own while it lives: a new one's
            chunk is used again when no piece in it is left, and of what passed as it is, the
            buffer cannot be resized.

        Raises:
            CorruptionError: A record that had to be read breaks the format, or a batch cannot be
                decompressed (facts `position`, `offset`, `why`). What lies before that batch was
                yielded, but for what it was to be merged with.
            UsageError: The same for a batch above its limit; see `limits.batch_too_large`.
        """
        array = as_bytes_array(buffer)
        if not array.flags.writeable:
            raise InternalError("buffer to make pieces of is read-only")
        if not 0 <= start <= stop <= batches.count:
            raise InternalError("batches out of range", start=start, stop=stop, count=batches.count)
        run = _Run(array, batches, stop, self._chunks)
        run.set(k.ROW, start)
        run.set(k.FIRST, first)
        run.set(k.END, end)
        run.state[k.MAX_BATCH // 8 : k.PIECES // 8] = self._limits
        self._run = run
        return self._go(run)

    def _go(self, run: _Run) -> Iterator[Piece]:
        status = FULL
        while status != DONE:
            if self._run is not run:
                raise InternalError("pieces of another buffer were asked for meanwhile")
            status = run.step()
            yield from run.drain()
            if status == COMPRESSED:
                run.unpack(self._decompressor, self._max_unpacked_bytes)
            elif status == k.SEAL:
                run.seal()
            elif status == k.NO_ROOM:
                run.move()
            elif status < 0:
                raise run.error(WHY[status])


class _Chunks:
    """The memory of new pieces: filled from front to back, used again when no piece is left in it.

    The current chunk is kept between runs, so that small runs share one.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._spare: list[npt.NDArray[np.uint8]] = []
        self.current: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.used = 0

    def begin(self, need_bytes: int) -> None:
        """Make a fresh chunk the current one; larger ones than usual are not kept."""
        self.used = 0
        if need_bytes > self._chunk_bytes:
            self.current = np.empty(need_bytes, np.uint8)
            return
        whole = self._spare.pop() if self._spare else np.empty(self._chunk_bytes, np.uint8)
        # All pieces are views of this view: when it dies, none is left.
        self.current = whole.view()
        weakref.finalize(self.current, self._give_back, whole).atexit = False

    def _give_back(self, whole: npt.NDArray[np.uint8]) -> None:
        if len(self._spare) < _SPARE_CHUNKS:
            self._spare.append(whole)


class _Run:
    """One call of `Rebatcher.pieces`: the buffer, and how far we got in it."""

    def __init__(
        self, array: npt.NDArray[np.uint8], batches: Batches, stop: int, chunks: _Chunks
    ) -> None:
        self._array = array
        self._batches = batches
        self._stop = stop
        self._chunks = chunks
        self._pieces: npt.NDArray[np.int64] = np.empty((_PIECES_LISTED, k.PIECE_WORDS), np.int64)
        self._payload: npt.NDArray[np.uint8] | None = None
        self._payload_row = -1
        self.state: npt.NDArray[np.int64] = np.zeros(k.STATE_WORDS, np.int64)
        self.set(k.PREVIOUS, -1)
        self.set(k.PIECES, address_of(self._pieces))
        self.set(k.CAPACITY, _PIECES_LISTED)
        self.set(k.OPEN, chunks.used)
        self._point()

    def get(self, word: int) -> int:
        return int(self.state[word // 8])

    def set(self, word: int, value: int) -> None:
        self.state[word // 8] = value

    def _point(self) -> None:
        self.set(k.OUT, address_of(self._chunks.current))
        self.set(k.ROOM, self._chunks.current.size)

    def step(self) -> int:
        """Continue until the kernel needs Python."""
        table, payload = self._batches.table, self._payload
        if payload is not None and self.get(k.ROW) != self._payload_row:
            payload = self._payload = None
        return k.rebatch(
            address_of(self._array),
            self._array.size,
            address_of(table),
            table.strides[0],
            self._stop,
            address_of(self.state),
            0 if payload is None else address_of(payload),
            0 if payload is None else payload.size,
        )

    def drain(self) -> Iterator[Piece]:
        """Patch and yield what is listed."""
        count = self.get(k.LISTED)
        if count == 0:
            return
        where = (address_of(self._array), self._array.size)
        if patch_listed(*where, address_of(self._pieces), count) == BAD_BATCH:
            raise InternalError("buffer was changed since it was scanned")
        self.set(k.LISTED, 0)
        self._chunks.used = self.get(k.OPEN)
        new, source = self._chunks.current.data, self._array.data
        for offset, records, in_source, at, size, timestamp_ms in self._pieces[:count].tolist():
            data = (source if in_source else new)[at : at + size]
            yield Piece(offset, records, data, timestamp_ms, in_source == 1)

    def unpack(self, decompressor: Decompressor, max_bytes: int) -> None:
        """Decompress the row at hand."""
        row = self.get(k.ROW)
        position, size = int(self._batches.positions[row]), int(self._batches.sizes[row])
        codec = Codec(int(self._batches.attributes[row]) & 7)
        data = self._array.data[position + BATCH_HEADER_BYTES : position + size]
        try:
            unpacked = decompressor.decompress(codec, data, max_bytes=max_bytes)
        except CorruptionError as error:
            offset = int(self._batches.base_offsets[row])
            if is_over_limit(error):
                raise batch_too_large(
                    offset=offset, size=size, codec=codec, limit_bytes=max_bytes
                ) from None
            raise error.add_facts(position=position, offset=offset) from None
        self._payload, self._payload_row = as_bytes_array(unpacked), row

    def seal(self) -> None:
        """Compress the open piece's records where they lie."""
        codec = Codec(self.get(k.CODEC))
        begin, fill = self.get(k.OPEN) + BATCH_HEADER_BYTES, self.get(k.FILL)
        records = self._chunks.current[begin:fill]
        packed = as_bytes_array(compress(codec, records.data))
        if packed.size < records.size:
            records[: packed.size] = packed
            k.seal(address_of(self.state), packed.size, codec)
        else:
            k.seal(address_of(self.state), records.size, Codec.NONE)

    def move(self) -> None:
        """Take the open piece along into a fresh chunk."""
        begin, fill = self.get(k.OPEN), self.get(k.FILL)
        carried = self._chunks.current[begin:fill] if self.get(k.COUNT) else None
        self._chunks.begin(self.get(k.NEED_BYTES))
        if carried is not None:
            self._chunks.current[: carried.size] = carried
        self.state[[k.OPEN // 8, k.FILL // 8]] = 0, fill - begin
        self.state[k.SAVED_FILL // 8] -= begin
        self._point()

    def error(self, why: str) -> CorruptionError:
        """What is wrong with the row at hand."""
        row = self.get(k.ROW)
        return CorruptionError(
            "record batch breaks its format",
            hint="Its checksum is valid, so it was written like this: check its producer.",
            position=int(self._batches.positions[row]),
            offset=int(self._batches.base_offsets[row]),
            why=why,
        )


def stamp(
    data: memoryview,
    *,
    producer_id: int,
    producer_epoch: int,
    sequence: int,
    transactional: bool = False,
) -> None:
    """Set the producer of a piece, and patch its checksum.

    Args:
        data: A piece's batch.
        producer_id: The producer ID; -1 for none, with epoch and sequence -1.
        producer_epoch: The producer epoch.
        sequence: The sequence of the first record, 0..2^31-1.
        transactional: Whether the batch is part of a transaction of the producer.
    """
    array = as_bytes_array(data)
    patch = patch_transactional if transactional else patch_producer
    where = (address_of(array), array.size)
    if patch(*where, producer_id, producer_epoch, sequence) == BAD_BATCH:
        raise InternalError("not a piece", size=array.size)
