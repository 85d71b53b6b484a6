"""Executor: one read of the source for all slices at the same position.

Slices of one partition to several archives, with any formats, limits and stores, share the same
fetch responses. A response is fetched once, checked once and, if any slice needs rows, decoded
once. At any moment there is one response, one chunk of rows and one object for each slice.

Slices are independent. A slice that has reached its end leaves, and the others continue reading. A
slice that finds a claim restarts at the start of the claim, in a separate read unless others are at
the same position. A slice that fails ends. A read or decode error fails the slices that need the
data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.errors import LogmirrorError
from logmirror.wire.gate import first_not_copied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.mirror.ports import SliceResult
    from logmirror.source.partition import Fetched, KafkaSource
    from logmirror.to_archive.transfer import Transfer
    from logmirror.wire.decode import RecordDecoder


def carry_out(
    transfers: Sequence[Transfer], source: KafkaSource, decoder: RecordDecoder
) -> list[SliceResult]:
    """Run slices of one partition together; a LogmirrorError is part of the result.

    Args:
        transfers: At least one, new; those that begin at the same offset share a read.
        source: The partition.
        decoder: The decoder of the transfers.
    """
    try:
        for transfer in transfers:
            transfer.begin()
            transfer.check_tail(source)
        while waiting := [transfer for transfer in transfers if not transfer.is_ended]:
            position = min(transfer.position for transfer in waiting)
            _read([t for t in waiting if t.position == position], source, decoder)
    finally:
        for transfer in transfers:
            transfer.abandon()
    return [transfer.result() for transfer in transfers]


def _read(transfers: list[Transfer], source: KafkaSource, decoder: RecordDecoder) -> None:
    """Read for slices at one position, up to the lowest end among them."""
    for transfer in transfers:
        transfer.join()
    readers = transfers
    end = min(transfer.end for transfer in transfers)
    try:
        for fetched in source.read(transfers[0].position, end):
            _feed(readers, fetched, decoder)
            readers = _reading(readers)
            if not readers:
                return
    except LogmirrorError as error:
        _fail(readers, error)
    for transfer in transfers:
        transfer.leave()


def _feed(readers: list[Transfer], fetched: Fetched, decoder: RecordDecoder) -> None:
    position = readers[0].position
    for reader in readers:
        reader.take(fetched)
    wanting = [reader for reader in _reading(readers) if reader.wants_rows]
    for end in sorted({reader.end for reader in wanting}):
        # Piece by piece if slices end within the response: an error after the end of a slice must
        # not fail that slice.
        some = [reader for reader in wanting if reader.end >= end]
        _decode(some, fetched, decoder, (position, end))
        position = end
    for reader in readers:
        reader.end_response()


def _decode(
    readers: list[Transfer], fetched: Fetched, decoder: RecordDecoder, wanted: tuple[int, int]
) -> None:
    """Pass the rows of a response with first <= offset < end to the readers."""
    first, end = wanted
    last = int(fetched.batches.last_offsets[fetched.batches.count - 1])
    if first > last or not _reading(readers):
        return
    try:
        for columns in decoder.decode(fetched.buffer, fetched.batches, first=first, end=end):
            reading = _reading(readers)
            checks = {(reader.types, reader.until_ms) for reader in reading}
            stops = {check: first_not_copied(columns, *check) for check in checks}
            for reader in reading:
                reader.append(columns, stops[reader.types, reader.until_ms])
            if not _reading(readers):
                return
    except LogmirrorError as error:
        _fail(_reading(readers), error)


def _reading(transfers: list[Transfer]) -> list[Transfer]:
    return [transfer for transfer in transfers if transfer.is_reading]


def _fail(transfers: list[Transfer], error: LogmirrorError) -> None:
    for transfer in transfers:
        transfer.fail(error.copy())  # each adds the facts of its own flow
