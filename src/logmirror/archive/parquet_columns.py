"""The column layouts of Parquet objects, and their conversion to `wire.columns.SCHEMA`.

A file's columns must be exactly those of a known layout. Readers see the same rows for every
layout, with keys and values as bytes. So digests and comparisons do not depend on the layout, and
the objects of a chain may have different layouts.

To support the columns of another program, add an entry to `_LAYOUTS`, as for mirror-v3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from logmirror.archive import mirror_v3
from logmirror.model import ColumnTypes
from logmirror.wire.columns import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logmirror.model import ColumnType

_TYPED: Final = 2
"""The number of typed columns: key and value, the first two. The others never differ."""

_JSON: Final = "arrow.json"
_EXTENSION_NAME: Final = "ARROW:extension:name"
_JSON_METADATA: Final = {_EXTENSION_NAME: _JSON, "ARROW:extension:metadata": ""}
"""Arrow's mark for JSON text. Readers that do not support it see plain text."""


class Layout(NamedTuple):
    """The layout of an object's columns."""

    types: ColumnTypes
    """Types of keys and values, as far as the columns show them: all JSON is `json`."""

    to_rows: Callable[[Any], Any]
    """Converts a record batch of the file, which is valid for its schema (text is UTF-8), to one of
    `wire.columns.SCHEMA`. The result may have nulls in columns without nulls: the caller checks.
    Raises CorruptionError for rows that the program of this layout cannot have written."""

    is_mirror_v3: bool = False
    """The layout is mirror-v3's."""


def layout_of(schema: Any) -> Layout | None:  # noqa: ANN401  # pyarrow has no types
    """Return the layout of a file with this Arrow schema; None: unknown columns."""
    found = (recognise(schema) for recognise in _LAYOUTS)
    return next((layout for layout in found if layout is not None), None)


def schema_for(types: ColumnTypes) -> Any:  # noqa: ANN401  # pyarrow has no types
    """Return the Arrow schema of new objects with keys and values of these types."""
    typed = [_field("key", types.key), _field("value", types.value)]
    return pa.schema([*typed, *list(SCHEMA)[_TYPED:]])


def as_written(batches: list[Any], schema: Any) -> Any:  # noqa: ANN401  # pyarrow has no types
    """Return rows of `wire.columns.SCHEMA` as a table of `schema_for`; no copy, no check."""
    table = pa.Table.from_batches(batches, SCHEMA)
    columns = [
        pa.chunked_array([chunk.view(field.type) for chunk in column.chunks], field.type)
        for field, column in zip(list(schema)[:_TYPED], table.columns, strict=False)
    ]
    return pa.Table.from_arrays([*columns, *table.columns[_TYPED:]], schema=schema)


def common_types(layouts: Iterable[ColumnTypes]) -> ColumnTypes:
    """Return the narrowest types that can hold the values of all of these."""
    found = list(layouts)
    return ColumnTypes(
        key=_common({types.key for types in found}), value=_common({types.value for types in found})
    )


def _common(types: set[ColumnType]) -> ColumnType:
    if "bytes" in types:
        return "bytes"
    return next(iter(types)) if len(types) == 1 else "utf8"


def _field(name: str, kind: ColumnType) -> Any:  # noqa: ANN401  # pyarrow has no types
    if kind == "bytes":
        return pa.field(name, pa.binary())
    return pa.field(name, pa.string(), metadata=None if kind == "utf8" else _JSON_METADATA)


# -- the layouts, each: a schema -> its layout, or None --------------------------------------------


def _spark_columns(schema: Any) -> Layout | None:  # noqa: ANN401  # pyarrow has no types
    """The layout of new objects, Spark's Kafka source; key and value as bytes or as text."""
    if schema.names != SCHEMA.names:
        return None
    key, value = (_type_of(schema.field(index)) for index in range(_TYPED))
    rest = all(schema.field(i).equals(SCHEMA.field(i)) for i in range(_TYPED, len(SCHEMA)))
    if key is None or value is None or not rest:
        return None
    types = ColumnTypes(key=key, value=value)
    return Layout(types, _with_bytes if types.are_checked else _as_they_are)


def _type_of(field: Any) -> ColumnType | None:  # noqa: ANN401  # pyarrow has no types
    kind, metadata = field.type, field.metadata or {}
    extension = metadata.get(_EXTENSION_NAME.encode(), b"").decode(errors="replace")
    if isinstance(kind, pa.BaseExtensionType):  # if this pyarrow supports the mark
        kind, extension = kind.storage_type, kind.extension_name
    if not field.nullable or extension not in {"", _JSON}:
        return None
    if kind == pa.string():
        return "json" if extension else "utf8"
    return "bytes" if kind == pa.binary() and not extension else None


def _with_bytes(batch: Any) -> Any:  # noqa: ANN401  # pyarrow has no types
    columns = [
        getattr(column, "storage", column).view(pa.binary()) for column in batch.columns[:_TYPED]
    ]
    return pa.RecordBatch.from_arrays([*columns, *batch.columns[_TYPED:]], schema=SCHEMA)


def _as_they_are(batch: Any) -> Any:  # noqa: ANN401  # pyarrow has no types
    return batch


def _mirror_v3_columns(schema: Any) -> Layout | None:  # noqa: ANN401  # pyarrow has no types
    convert = mirror_v3.converter(schema)
    return None if convert is None else Layout(mirror_v3.types(schema), convert, is_mirror_v3=True)


_LAYOUTS: Final[tuple[Callable[[Any], Layout | None], ...]] = (_spark_columns, _mirror_v3_columns)
