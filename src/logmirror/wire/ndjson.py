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
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.errors import InternalError, UsageError
from logmirror.wire.columns import header_key_error
from logmirror.wire.kernels_ndjson import (
    RESULT_WORDS,
    ROW_DONE,
    ROW_FULL,
    ROW_NOT_UTF8,
    TEXTS,
    put_lines,
)
from logmirror.wire.scan import address_of, as_bytes_array

if TYPE_CHECKING:
    from logmirror.wire.columns import Columns

_TEXTS: Final = [np.frombuffer(text or b"\0", np.uint8) for text in TEXTS]
_FIRST_BYTES: Final = 64 * 1024


def encode_ndjson(  # noqa: PLR0913  # the interface that the archive's encoder needs
    columns: Columns,
    start: int,
    stop: int,
    *,
    topic: str,
    partition: int,
    out: bytearray,
    utf8: bool,
) -> int:
    """Write rows start..stop (excluded) as lines into `out`.

    Args:
        columns: Decoded records.
        start: First row.
        stop: First row not written any more.
        topic: For the field of that name.
        partition: For the field of that name.
        out: Overwritten from its beginning and grown as needed; use it again. Fast while it stays
            in the cache: give rows worth 1-4 MiB at a time.
        utf8: Write keys and values as text. Header values stay base64.

    Returns:
        Bytes written; what `out` holds behind them means nothing.

    Raises:
        UsageError: With `utf8`, a key or a value is not UTF-8; without, a header key is not (facts
            `topic`, `partition`, `offset`). `out` holds the lines of the rows before.
    """
    if not 0 <= start <= stop <= columns.rows:
        raise InternalError("rows out of range", start=start, stop=stop, rows=columns.rows)
    head = f'{{"topic":{json.dumps(topic, ensure_ascii=False)},"partition":{partition},"offset":'
    literals = [np.frombuffer(head.encode(), np.uint8), *_TEXTS[1:]]
    texts = np.array([(address_of(text), text.size) for text in literals], np.int64)
    result = np.zeros(RESULT_WORDS, np.int64)
    written, row = 0, start
    while True:
        target = as_bytes_array(out)
        status = put_lines(
            *(address_of(target) + written, len(out) - written, columns.context_address),
            *(row, stop, address_of(texts), int(utf8), address_of(result)),
        )
        del target  # numpy's hold on the bytearray would forbid to resize it
        more, row, need = result.tolist()
        written += more
        if status == ROW_DONE:
            return written
        if status != ROW_FULL:
            raise _not_utf8(columns, row, topic, partition, status)
        out.extend(bytes(max(_FIRST_BYTES, len(out) // 2, written + need - len(out))))


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
