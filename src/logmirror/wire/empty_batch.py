"""Headers of record batches that a server makes, and batches without records.

A batch without records takes offsets that have none, so that a consumer's position passes them.
Kafka's log cleaner writes such batches too.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from logmirror.wire.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER_BYTES: Final = 61
SPAN_MAX: Final = 2**31
"""Offsets that one batch can take."""

_START: Final = Struct(">qiibI")
_REST: Final = Struct(">hiqqqhii")
_REST_AT: Final = 21
_LENGTH_END: Final = 12
_MAGIC: Final = 2


def put_header(  # noqa: PLR0913  # the fields of the header
    batch: bytearray | memoryview,
    *,
    base_offset: int,
    last_offset: int,
    record_count: int,
    base_ms: int = -1,
    max_ms: int = -1,
    attributes: int = 0,
) -> None:
    """Write the header of a batch that has its records: leader epoch 0, no producer."""
    delta = last_offset - base_offset
    _REST.pack_into(batch, _REST_AT, attributes, delta, base_ms, max_ms, -1, -1, -1, record_count)
    checksum = crc32c(memoryview(batch)[_REST_AT:])
    _START.pack_into(batch, 0, base_offset, len(batch) - _LENGTH_END, 0, _MAGIC, checksum)


def empty_batches(first: int, last: int) -> Iterator[bytes]:
    """Yield the batches without records that take the offsets first..last."""
    while first <= last:
        end = min(last, first + SPAN_MAX - 1)
        batch = bytearray(HEADER_BYTES)
        put_header(batch, base_offset=first, last_offset=end, record_count=0)
        yield bytes(batch)
        first = end + 1
