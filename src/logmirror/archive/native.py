"""Read native objects: runs of whole batches, their offset gaps, and their records."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from logmirror.archive.gap_facts import Runs
from logmirror.errors import CorruptionError, UsageError
from logmirror.model import GapCause
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.scan import KIND_ABORTED, KIND_CONTROL, BatchScanner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import WriteableBuffer

    from logmirror.archive.gap_facts import Causes
    from logmirror.model import OffsetRange
    from logmirror.wire.scan import Batches

_READ_BYTES: Final = 4 << 20


def seen_gaps(batches: Batches, first: int, *, aborted: bool = False) -> Causes:
    """Return the gaps that batches show from offset `first` on.

    Args:
        batches: Scanned batches.
        first: Offsets below it are ignored.
        aborted: Include aborted batches, not only transaction markers.
    """
    kinds = {GapCause.CONTROL: KIND_CONTROL}
    if aborted:
        kinds[GapCause.ABORTED] = KIND_ABORTED
    found = {}
    for cause, kind in kinds.items():
        is_kind = (batches.kinds == kind) & (batches.last_offsets >= first)
        if is_kind.any():
            firsts = np.maximum(batches.base_offsets[is_kind], first)
            found[cause] = Runs(firsts, batches.last_offsets[is_kind].copy())
    return found


def native_batches(file: BinaryIO, name: str) -> Iterator[tuple[memoryview, Batches]]:
    """Yield runs of whole batches, each with the bytes it was scanned from."""
    scanner, buffer = BatchScanner(), np.empty(_READ_BYTES, np.uint8).data
    filled = position = 0
    while True:
        got = _fill(file, buffer, filled)
        if got == 0 and filled == 0:
            return
        try:
            batches = scanner.scan(buffer, filled + got)
        except UsageError as error:  # for a source a usage error, in an object damage
            raise CorruptionError(
                "not record batches of format 2", name=name, found=error.facts.get("magic")
            ) from error
        if batches.count:
            yield buffer, batches
        elif got == 0:
            raise CorruptionError(
                "the object ends inside a batch",
                name=name,
                position=position,
                expected=batches.needed_bytes,
                found=filled,
            )
        position += batches.consumed_bytes
        rest = filled + got - batches.consumed_bytes
        needed = batches.needed_bytes
        old, filled = buffer[batches.consumed_bytes :][:rest], rest
        if needed > len(buffer):
            buffer = np.empty(needed, np.uint8).data
        buffer[:rest] = bytes(old)


def _fill(file: BinaryIO, buffer: memoryview, filled: int) -> int:
    """Read until the buffer is full or the file ends; returns the number of bytes read."""
    began = filled
    while filled < len(buffer):
        got = file.readinto(buffer[filled:])  # type: ignore[attr-defined]  # typeshed lacks it
        if not got:
            break
        filled += got
    return filled - began


def native_rows(
    file: BinaryIO, name: str, covered: OffsetRange, topic: str, partition: int
) -> Iterator[Any]:
    """Yield the rows of a range as Arrow record batches of `wire.columns.SCHEMA`, in order."""
    decoder = RecordDecoder()
    for view, batches in native_batches(file, name):
        for columns in decoder.decode(view, batches, first=covered.first, end=covered.next_offset):
            yield columns.to_arrow(topic, partition)


class _Tee(io.RawIOBase):
    """A file whose bytes are also passed to a function as they are read."""

    def __init__(self, file: BinaryIO, take: Callable[[memoryview], None]) -> None:
        self._file, self._take = file, take

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        with memoryview(buffer).cast("B") as view:
            got: int = self._file.readinto(view)  # type: ignore[attr-defined]  # typeshed lacks it
            self._take(view[:got])
        return got


def tee(file: BinaryIO, take: Callable[[memoryview], None]) -> BinaryIO:
    """Return a file to read instead of `file`; `take` receives all bytes, in order.

    The bytes are valid during the call only.
    """
    return io.BufferedReader(_Tee(file, take), _READ_BYTES)
