"""Read NDJSON objects: lines back to rows.

Strict, because it detects damage: a line must be one that the encoder could have written, except
for the order of its fields and for spaces. Any JSON library can read the lines.

A line does not show whether keys and values are base64 or text; the destination's `encoding` does.
"""

from __future__ import annotations

import binascii
import json
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NoReturn

import pyarrow as pa

from logmirror.errors import CorruptionError
from logmirror.model import OFFSET_MAX
from logmirror.wire.columns import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LINE_BYTES_MAX: Final = 512 << 20
"""A longer line is rejected. The largest batch that is decoded, 256 MiB, is 342 MiB of base64."""

_BATCH_BYTES: Final = 8 << 20
_BATCH_ROWS: Final = 16_384
_NO_TIMESTAMP: Final = "not_available"
"""mirror-v3 writes it for records without a timestamp; logmirror writes `create_time`, as Kafka."""

_TYPES: Final = {"create_time": 0, "log_append_time": 1, _NO_TIMESTAMP: 0}
_FIELDS: Final = frozenset(
    ("topic", "partition", "offset", "timestamp_ms", "timestamp_type", "key", "value", "headers")
)
_INT64_MIN: Final = -(2**63)


def read_ndjson(file: BinaryIO, *, name: str, utf8: bool = False) -> Iterator[Any]:
    """Yield the rows of an object as Arrow record batches of `wire.columns.SCHEMA`.

    Args:
        file: The object, read from its current position to its end.
        name: The object's name, for errors.
        utf8: Keys and values are text, not base64.

    Raises:
        CorruptionError: A line is not a record. Facts: `name`, `line` (1-based), `reason`.
    """
    text = _utf8 if utf8 else _base64
    rows: list[tuple[Any, ...]] = []
    size_bytes = line_number = 0
    while line := file.readline(LINE_BYTES_MAX):
        line_number += 1
        try:
            rows.append(_row(line, text))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CorruptionError(
                "a line of the object is not a record",
                name=name,
                line=line_number,
                reason=repr(error)[:200],
            ) from error
        size_bytes += len(line)
        if size_bytes >= _BATCH_BYTES or len(rows) >= _BATCH_ROWS:
            yield _batch(rows)
            rows, size_bytes = [], 0
    if rows:
        yield _batch(rows)


def _row(line: bytes, text: Callable[[object], bytes | None]) -> tuple[Any, ...]:
    if not line.endswith(b"\n"):
        raise ValueError("no line feed at the end")
    if line.endswith(b"\r\n"):
        raise ValueError("carriage return at the end")
    fields = _LOADER.decode(line.decode())
    if not isinstance(fields, dict) or not fields.keys() <= _FIELDS:
        raise ValueError("not the fields of a record")
    if fields["timestamp_type"] == _NO_TIMESTAMP and "timestamp_ms" in fields:
        raise ValueError("a timestamp with the type not_available")
    return (
        text(fields.get("key")),
        text(fields.get("value")),
        _string(fields["topic"]),
        _whole(fields["partition"], 0, 2**31 - 1),
        _whole(fields["offset"], 0, OFFSET_MAX),
        _whole(fields.get("timestamp_ms", -1), _INT64_MIN, OFFSET_MAX),
        _TYPES[fields["timestamp_type"]],
        [_header(header) for header in fields.get("headers", ())],
    )


def _header(header: Any) -> tuple[str, bytes | None]:  # noqa: ANN401  # any JSON value
    if not isinstance(header, dict) or not header.keys() <= {"key", "value"}:
        raise ValueError("not a header")
    return _string(header["key"]), _base64(header.get("value"))


def _base64(value: object) -> bytes | None:
    if value is None:
        return None
    text = _string(value)
    found = binascii.a2b_base64(text, strict_mode=True)
    # The last character before padding has unused bits; an encoder sets them to 0.
    rest = found[len(found) // 3 * 3 :]
    if rest and binascii.b2a_base64(rest, newline=False) != text[-4:].encode():
        raise ValueError("base64 with unused bits that are not 0")
    return found


def _utf8(value: object) -> bytes | None:
    return None if value is None else _string(value).encode()


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    if not value.isascii():
        value.encode()  # JSON can encode a lone surrogate, which is not text
    return value


def _whole(value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:  # bool is an int too
        raise ValueError("not a whole number in range")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field appears twice")
    return fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)  # NaN and Infinity are not JSON


_LOADER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _batch(rows: list[tuple[Any, ...]]) -> Any:  # noqa: ANN401  # pyarrow has no types
    columns = zip(SCHEMA, zip(*rows, strict=True), strict=True)
    return pa.record_batch(
        [pa.array(list(values), field.type) for field, values in columns], schema=SCHEMA
    )
