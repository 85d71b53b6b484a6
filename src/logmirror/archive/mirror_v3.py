"""Parquet objects of mirror-v3: how they are recognised, and the conversion of their rows.

`docs/formats/mirror-v3.md` describes the columns. There are two layouts: keys and values as bytes,
and as text, where an extension name distinguishes base64 from plain text. No other module handles
these layouts: the rows are converted to record batches of `wire.columns.SCHEMA`.

Strict, because readers detect damage: an unknown timestamp type, or base64 that no encoder writes,
is an error. All work is on whole columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logmirror.errors import CorruptionError
from logmirror.model import ColumnTypes, TimestampType
from logmirror.wire.base64_column import decode_column
from logmirror.wire.columns import HEADERS_TYPE, SCHEMA, TIMESTAMP_TYPE

Converter = Callable[[Any], Any]
"""Converts a record batch of the file to one of `SCHEMA`, which may share its memory.

Raises CorruptionError (facts: `column`, `offset`) for rows that mirror-v3 cannot have written.
"""

_PLAIN: Final = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.uint64(),
    "timestamp_ms": pa.int64(),
    "timestamp_type": pa.string(),
}
_COLUMNS: Final = (*_PLAIN, "key", "value", "headers")
_NULL_ALLOWED: Final = frozenset(("timestamp_ms", "key", "value"))

_EXTENSION: Final = b"ARROW:extension:name"
_BASE64: Final = "mirror_v3.bytes_base64"
_TEXTS: Final = frozenset(("", "arrow.json"))

_NO_TIMESTAMP: Final = 2
_TIMESTAMP_TYPES: Final = ("create_time", "log_append_time", "not_available")
"""The index is the value of `TimestampType`, except for the last one. Such a row gets -1 ms and
create time, the values of a record without a timestamp in Kafka's batches."""


def converter(schema: Any) -> Converter | None:  # noqa: ANN401  # pyarrow has no types
    """Return the converter for a file with this schema; None: mirror-v3 did not write the file."""
    if tuple(schema.names) != _COLUMNS or not _is_headers(_storage(schema.field("headers").type)):
        return None
    if any(_storage(schema.field(name).type) != kind for name, kind in _PLAIN.items()):
        return None
    payloads = {name: _payload_reader(schema.field(name)) for name in ("key", "value")}
    if None in payloads.values():
        return None

    def convert(batch: Any) -> Any:  # noqa: ANN401  # pyarrow has no types
        return _Rows(batch).convert(payloads)

    return convert


def types(schema: Any) -> ColumnTypes:  # noqa: ANN401  # pyarrow has no types
    """Return the types of keys and values of a file of mirror-v3, after conversion."""
    key, value = (_payload_reader(schema.field(name)) for name in ("key", "value"))
    return ColumnTypes(
        key="utf8" if key == "text" else "bytes", value="utf8" if value == "text" else "bytes"
    )


def _storage(kind: Any) -> Any:  # noqa: ANN401  # pyarrow has no types
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _is_headers(kind: Any) -> bool:  # noqa: ANN401  # pyarrow has no types
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    pair = kind.value_type
    if not pa.types.is_struct(pair) or [field.name for field in pair] != ["key", "value"]:
        return False
    return pair[0].type == pa.string() and pair[1].type in {pa.binary(), pa.large_binary()}


def _payload_reader(field: Any) -> str | None:  # noqa: ANN401  # pyarrow has no types
    """Return the encoding of a key or value column: `bytes`, `text`, `base64`; None: unknown."""
    kind = _storage(field.type)
    if kind in {pa.binary(), pa.large_binary()}:
        return "bytes"
    if isinstance(field.type, pa.BaseExtensionType):
        extension = str(field.type.extension_name)
    else:
        extension = (field.metadata or {}).get(_EXTENSION, b"").decode(errors="replace")
    if kind != pa.string():
        return None
    if extension == _BASE64:
        return "base64"
    return "text" if extension in _TEXTS else None


class _Rows:
    """One record batch of a file."""

    def __init__(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        self._columns = {}
        for column in _COLUMNS:
            found = batch.column(column)
            self._columns[column] = found.storage if isinstance(found, pa.ExtensionArray) else found
            if column not in _NULL_ALLOWED and found.null_count:
                raise CorruptionError("null in a column without nulls", column=column)
        try:
            self._offsets = self._columns["offset"].cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise CorruptionError("an offset exceeds 2^63 - 1", column="offset") from error

    def convert(self, payloads: dict[str, str | None]) -> Any:  # noqa: ANN401  # pyarrow has no types
        """Return the rows as a record batch of `SCHEMA`."""
        stamps = self._columns["timestamp_ms"]
        return pa.RecordBatch.from_arrays(
            [
                self._payload("key", payloads["key"]),
                self._payload("value", payloads["value"]),
                self._columns["topic"],
                self._columns["partition"],
                self._offsets,
                stamps.fill_null(-1).cast(TIMESTAMP_TYPE),
                self._timestamp_types(stamps),
                self._headers(),
            ],
            schema=SCHEMA,
        )

    def _payload(self, column: str, reader: str | None) -> Any:  # noqa: ANN401  # pyarrow has no types
        values = self._columns[column]
        return self._from_base64(column, values) if reader == "base64" else values.cast(pa.binary())

    def _timestamp_types(self, stamps: Any) -> Any:  # noqa: ANN401  # pyarrow has no types
        found = pc.index_in(self._columns["timestamp_type"], value_set=pa.array(_TIMESTAMP_TYPES))
        self._fail_where(found.is_null(), "timestamp_type", "an unknown timestamp type")
        is_none = pc.equal(found, _NO_TIMESTAMP)
        self._fail_where(
            pc.and_(is_none, stamps.is_valid()),
            "timestamp_type",
            "a timestamp with the type not_available",
        )
        create_time = pa.scalar(TimestampType.CREATE_TIME.value, pa.int32())
        return pc.if_else(is_none, create_time, found)

    def _headers(self) -> Any:  # noqa: ANN401  # pyarrow has no types
        lists = self._columns["headers"]
        pairs = lists.flatten()
        keys, values = pairs.field(0), pairs.field(1)
        if pairs.null_count or keys.null_count:
            raise CorruptionError("null in a column without nulls", column="headers")
        counts = pc.list_value_length(lists).to_numpy()
        edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        fields = list(HEADERS_TYPE.value_type)
        return pa.ListArray.from_arrays(
            pa.array(edges),
            pa.StructArray.from_arrays([keys, values.cast(pa.binary())], fields=fields),
        )

    def _from_base64(self, column: str, texts: Any) -> Any:  # noqa: ANN401  # pyarrow has no types
        values, bad = decode_column(texts)
        if bad is not None:
            raise self._bad(bad, column, "base64 that no encoder writes")
        return values

    def _fail_where(self, is_wrong: Any, column: str, problem: str) -> None:  # noqa: ANN401  # pyarrow has no types
        row = pc.index(is_wrong, True).as_py()
        if row >= 0:
            raise self._bad(row, column, problem)

    def _bad(self, row: int, column: str, problem: str) -> CorruptionError:
        return CorruptionError(
            f"the object holds {problem}",
            column=column,
            offset=self._offsets[row].as_py(),
        )
