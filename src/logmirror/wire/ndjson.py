"""Columns -> newline-delimited JSON.

One object per line, without spaces, with fields in this order:

    topic            string
    partition        number
    offset           number
    timestamp_ms     number; omitted if the record has none (-1)
    timestamp_type   "create_time" or "log_append_time"
    key              base64, or text; omitted if null
    value            like key
    headers          list of {"key": text, "value": base64}; omitted if empty; a header's value is
                     omitted if null

Lines are made in a buffer of a fixed size. A line that is longer is made in pieces, so memory does
not depend on the size of a record.
"""

from __future__ import annotations

import binascii
import codecs
import json
from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.errors import InternalError, UsageError
from logmirror.model import TimestampType
from logmirror.wire.columns import header_key_error
from logmirror.wire.kernels_ndjson import (
    HEADER_NOT_UTF8,
    RESULT_WORDS,
    ROW_DONE,
    ROW_FULL,
    ROW_NOT_UTF8,
    TEXTS,
    put_lines,
)
from logmirror.wire.scan import address_of, as_bytes_array

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from logmirror.wire.columns import Columns

_TEXTS: Final = [np.frombuffer(text or b"\0", np.uint8) for text in TEXTS]
_PIECE_BYTES: Final = 3 << 18
"""A longer line is made from this many bytes at a time; a multiple of 3, as base64 needs it."""


def ndjson_pieces(  # noqa: PLR0913  # the interface that the archive's encoder needs
    columns: Columns,
    start: int,
    stop: int,
    *,
    topic: str,
    partition: int,
    out: bytearray,
    utf8: bool,
) -> Iterator[memoryview | bytes]:
    """Yield rows start..stop (excluded) as lines, in pieces of text to write one after another.

    Args:
        columns: Decoded records.
        start: First row.
        stop: First row not written any more.
        topic: For the field of that name.
        partition: For the field of that name.
        out: Where lines are made; a piece is valid until the next one is requested. Use it again.
            Fast while it stays in the cache: give it 1-4 MiB.
        utf8: Write keys and values as text. Header values stay base64.

    Raises:
        UsageError: With `utf8`, a key or a value is not UTF-8; without, a header key is not (facts
            `topic`, `partition`, `offset`). The lines of the rows before were yielded.
    """
    if not 0 <= start <= stop <= columns.rows:
        raise InternalError("rows out of range", start=start, stop=stop, rows=columns.rows)
    head = f'{{"topic":{json.dumps(topic, ensure_ascii=False)},"partition":{partition},"offset":'
    literals = [np.frombuffer(head.encode(), np.uint8), *_TEXTS[1:]]
    texts = np.array([(address_of(text), text.size) for text in literals], np.int64)
    result = np.zeros(RESULT_WORDS, np.int64)
    target, row, status = as_bytes_array(out), start, ROW_FULL
    while status == ROW_FULL:
        status = put_lines(
            *(address_of(target), target.size, columns.context_address),
            *(row, stop, address_of(texts), int(utf8), address_of(result)),
        )
        written, row = result.tolist()
        if written:
            yield target[:written].data
        elif status == ROW_FULL:
            try:
                yield from _long_line(columns, row, head.encode(), utf8=utf8)
            except _NotUtf8Error as error:
                status = error.status
            else:
                row += 1
    if status != ROW_DONE:
        raise _not_utf8(columns, row, topic, partition, status)


class _NotUtf8Error(Exception):
    """Internal: a text of a long line is not UTF-8."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _long_line(columns: Columns, row: int, head: bytes, *, utf8: bool) -> Iterator[bytes]:
    """Yield one line in pieces. It costs Python steps for each piece, not for each record."""
    _, timestamp_text, created, appended, key, value, headers, header_key, close, end = TEXTS
    timestamp = int(columns.timestamps_ms[row])
    stamped = timestamp_text + b"%d" % timestamp if timestamp != -1 else b""
    is_appended = columns.timestamp_types[row] == TimestampType.LOG_APPEND_TIME
    yield head + b"%d" % columns.offsets[row] + stamped + (appended if is_appended else created)
    for label, edges, data, valid in (
        (key, columns.key_offsets, columns.key_data, columns.key_valid),
        (value, columns.value_offsets, columns.value_data, columns.value_valid),
    ):
        if valid[row]:
            yield label
            content = data[edges[row] : edges[row + 1]]
            yield from _text(content, ROW_NOT_UTF8) if utf8 else _base64(content)
            yield b'"'
    first, stop = columns.header_offsets[row : row + 2].tolist()
    for index in range(first, stop):
        low, high = columns.header_key_offsets[index : index + 2]
        yield (headers if index == first else b",") + header_key
        yield from _text(columns.header_key_data[low:high], HEADER_NOT_UTF8)
        yield b'"'
        if columns.header_value_valid[index]:
            low, high = columns.header_value_offsets[index : index + 2]
            yield value
            yield from _base64(columns.header_value_data[low:high])
            yield b'"'
        yield b"}" + (close if index == stop - 1 else b"")
    yield end


def _base64(content: npt.NDArray[np.uint8]) -> Iterator[bytes]:
    for at in range(0, content.size, _PIECE_BYTES):
        yield binascii.b2a_base64(content[at : at + _PIECE_BYTES].data, newline=False)


def _text(content: npt.NDArray[np.uint8], status: int) -> Iterator[bytes]:
    """Yield the content of a JSON string; raises `_NotUtf8Error` with this status."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for at in range(0, content.size, _PIECE_BYTES):
            piece = content[at : at + _PIECE_BYTES]
            is_last = at + _PIECE_BYTES >= content.size
            text = decoder.decode(piece.tobytes(), final=is_last)
            yield json.dumps(text, ensure_ascii=False)[1:-1].encode()
    except UnicodeDecodeError:
        raise _NotUtf8Error(status) from None


def _not_utf8(columns: Columns, row: int, topic: str, partition: int, status: int) -> UsageError:
    offset = int(columns.offsets[row])
    if status == ROW_NOT_UTF8:
        return UsageError(
            "key or value is not UTF-8",
            hint="Use encoding base64, which keeps any bytes.",
            topic=topic,
            partition=partition,
            offset=offset,
        )
    for index in range(columns.header_offsets[row], columns.header_offsets[row + 1]):
        low, high = columns.header_key_offsets[index : index + 2]
        key = columns.header_key_data[low:high].tobytes()
        try:
            key.decode()
        except UnicodeDecodeError:
            return header_key_error(key, topic=topic, partition=partition, offset=offset)
    raise InternalError("header key is UTF-8 and was refused", offset=offset)
