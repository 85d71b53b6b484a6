"""Archives in mirror-v3's format, written from the description of that format.

No code of the product is used: names, NDJSON lines, Parquet columns and snapshots are written here
with json and pyarrow, so that the product does not read its own output. No object was written by
mirror-v3 itself.

    objects = cut(rows, 7)                          ranges like those of its flushes
    write_chain(folder, "orders", 0, objects)       <root>/<destination>/<partition>
"""

from __future__ import annotations

import base64
import io
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from kit.judges.clients import CREATE_TIME, LOG_APPEND_TIME, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

NO_TIMESTAMP: Final = -1
COMPRESSIONS: Final = ("zstd-1", "zstd-3", "snappy", "lz4", "uncompressed")
HEAD: Final = "head"
"""As a type of keys and values: bytes in columns of bytes, which the first releases wrote."""

TYPES: Final = ("utf8", "json", "bytes", HEAD)

_TYPE_NAMES: Final = {CREATE_TIME: "create_time", LOG_APPEND_TIME: "log_append_time"}
_EXTENSIONS: Final = {"bytes": "mirror_v3.bytes_base64", "json": "arrow.json"}
_HEADERS: Final = pa.list_(
    pa.field(
        "item",
        pa.struct(
            [
                pa.field("key", pa.string(), nullable=False),
                pa.field("value", pa.large_binary()),
            ]
        ),
    )
)
_ALL_BYTES: Final = bytes(range(256))


class MirrorV3Object(NamedTuple):
    """One object: the offsets of its name, and its records."""

    first: int
    last: int
    rows: list[Row]


def name_of(found: MirrorV3Object, extension: str) -> str:
    """`<from>-<to>.<ext>`, both decimal with 20 digits."""
    return f"{found.first:020d}-{found.last:020d}.{extension}"


def cut(rows: Sequence[Row], max_offsets: int, *, first: int = 0) -> list[MirrorV3Object]:
    """Cut records as `max-offsets` does: by number. Gaps belong to the next object."""
    objects: list[MirrorV3Object] = []
    for at in range(0, len(rows), max_offsets):
        piece = list(rows[at : at + max_offsets])
        objects.append(MirrorV3Object(first, piece[-1].offset, piece))
        first = piece[-1].offset + 1
    return objects


def odd_rows(count: int, *, first: int = 0, text: bool = False, gaps: bool = True) -> list[Row]:
    """Return records of every shape; with gaps, every fifth offset is missing.

    Args:
        count: Number of offsets, including gaps; the last one is never a gap.
        first: The first offset.
        text: Keys and values are UTF-8, for text columns.
        gaps: Whether offsets are missing.
    """
    stamps = [(1_700_000_000_000, CREATE_TIME), (1, LOG_APPEND_TIME), (NO_TIMESTAMP, CREATE_TIME)]
    if text:
        payloads = [None, b"", b"key", 'größe 😀\0"\\\n\u2028'.encode(), b'{"a": [1, null]}']
    else:
        payloads = [None, b"", b"\0", _ALL_BYTES, _ALL_BYTES[::-1] * 3, b"\xff\xfe", b"abc"]
    headers = [
        (),
        ((b"trace", b"\0\xff"),),
        ((b"k", None), (b"k", b""), (b"k", _ALL_BYTES), (b"", b"x"), ("größe".encode(), None)),
    ]
    return [
        Row(
            offset,
            *stamps[offset % 3],
            payloads[offset * 2 % len(payloads)],
            payloads[offset // 2 % len(payloads)],
            headers[offset // 3 % 3],
        )
        for offset in range(first, first + count)
        if not (gaps and offset % 5 == 1 and offset != first + count - 1)
    ]


def write_chain(
    folder: Path,
    topic: str,
    partition: int,
    objects: Iterable[MirrorV3Object],
    *,
    form: str = "parquet",
    **options: str,
) -> list[str]:
    """Write objects into the folder of a partition; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for found in objects:
        names.append(name_of(found, form))
        (folder / names[-1]).write_bytes(encode(found.rows, topic, partition, form, **options))
    return names


def encode(rows: Sequence[Row], topic: str, partition: int, form: str, **options: str) -> bytes:
    """Return the bytes of an object."""
    if form == "ndjson":
        return b"".join(_line(row, topic, partition) for row in rows)
    return _parquet(rows, topic, partition, **options)


def snapshot(rows: Iterable[Row]) -> list[Row]:
    """Return the latest record of each key, sorted by key, without tombstones."""
    view: dict[bytes, Row] = {}
    for row in rows:
        assert row.key is not None
        view[row.key] = row
    return [view[key] for key in sorted(view) if view[key].value is not None]


def _line(row: Row, topic: str, partition: int) -> bytes:
    fields: dict[str, Any] = {"topic": topic, "partition": partition, "offset": row.offset}
    if row.timestamp_ms != NO_TIMESTAMP:
        fields["timestamp_ms"] = row.timestamp_ms
    fields["timestamp_type"] = _type_name(row)
    if row.key is not None:
        fields["key"] = _base64(row.key)
    if row.value is not None:
        fields["value"] = _base64(row.value)
    if row.headers:
        fields["headers"] = [
            {"key": key.decode()} | ({} if value is None else {"value": _base64(value)})
            for key, value in row.headers
        ]
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _parquet(  # noqa: PLR0913  # what, where, and how the configuration says
    rows: Sequence[Row],
    topic: str,
    partition: int,
    *,
    keys: str = "utf8",
    values: str = "utf8",
    compression: str = "zstd-1",
) -> bytes:
    fields = [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.uint64(), nullable=False),
        pa.field("timestamp_ms", pa.int64()),
        pa.field("timestamp_type", pa.string(), nullable=False),
        _payload_field("key", keys),
        _payload_field("value", values),
        pa.field("headers", _HEADERS, nullable=False),
    ]
    columns: list[list[Any]] = [
        [topic] * len(rows),
        [partition] * len(rows),
        [row.offset for row in rows],
        [None if row.timestamp_ms == NO_TIMESTAMP else row.timestamp_ms for row in rows],
        [_type_name(row) for row in rows],
        [_payload(row.key, keys) for row in rows],
        [_payload(row.value, values) for row in rows],
        [[{"key": key.decode(), "value": value} for key, value in row.headers] for row in rows],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]
    codec, _, level = compression.partition("-")
    out = io.BytesIO()
    pq.write_table(
        pa.table(arrays, schema=pa.schema(fields)),
        out,
        row_group_size=max(len(rows), 1),
        compression="none" if codec == "uncompressed" else codec,
        compression_level=int(level) if level else None,
        use_dictionary=True,
        write_statistics=True,
    )
    return out.getvalue()


def _payload_field(name: str, kind: str) -> Any:
    if kind == HEAD:
        return pa.field(name, pa.large_binary())
    metadata = {}
    if kind in _EXTENSIONS:
        metadata = {"ARROW:extension:name": _EXTENSIONS[kind], "ARROW:extension:metadata": ""}
    return pa.field(name, pa.string(), metadata=metadata)


def _payload(value: bytes | None, kind: str) -> bytes | str | None:
    if value is None or kind == HEAD:
        return value
    return _base64(value) if kind == "bytes" else value.decode()


def _type_name(row: Row) -> str:
    return "not_available" if row.timestamp_ms == NO_TIMESTAMP else _TYPE_NAMES[row.timestamp_type]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
