"""Readers of archive objects that share no code with the writers.

The reference decoder reads native batches, pyarrow reads Parquet, and the standard library NDJSON.
Claims, chains and compiled kernels are not used.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq

from logmirror.archive.naming import split_name
from logmirror.testing.checker import Row
from logmirror.wire.batch_header import MarkerType, parse_header
from logmirror.wire.records import decode_reference, marker_type

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.testing.checker import Truth

_TYPES: Final = {"create_time": 0, "log_append_time": 1}


def covering(names: Iterable[str]) -> list[str]:
    """Return the names of the objects that are not part of a merged one.

    Args:
        names: Names without folder. Names that are not object names are included.

    Returns:
        The names in ascending order.
    """
    found: list[str] = []
    until = -1
    for name in sorted(names, key=_outer_first):
        parts = split_name(name)
        if parts is None or parts[1] > until:
            found.append(name)
            until = until if parts is None else parts[1]
    return found


def chain_end(names: Iterable[str]) -> int:
    """Return the end of the chain that starts at offset 0."""
    end = 0
    for name in covering(names):
        parts = split_name(name)
        if parts is None or parts[0] != end:
            break
        end = parts[1] + 1
    return end


def newest_end(names: Iterable[str]) -> int:
    """Return the end of the newest snapshot; older ones can be deleted."""
    return max((parts[1] + 1 for name in names if (parts := split_name(name))), default=0)


def _outer_first(name: str) -> tuple[int, int]:
    parts = split_name(name)
    return (-1, 0) if parts is None else (parts[0], -parts[1])


def read_rows(extension: str, data: bytes) -> list[Row]:
    """Return the records of one Parquet or NDJSON object.

    Args:
        extension: `parquet` or `ndjson`.
        data: The content of the object.
    """
    return _parquet(data) if extension == "parquet" else _ndjson(data)


def _parquet(data: bytes) -> list[Row]:
    # One thread: a pool would run outside the scheduler of a simulation.
    table = pq.ParquetFile(io.BytesIO(data)).read(use_threads=False)
    names = ("offset", "timestamp", "timestampType", "key", "value", "headers")
    columns = [table[name] for name in names]
    columns[1] = columns[1].cast("int64")
    rows = zip(*(column.to_pylist() for column in columns), strict=True)
    return [
        Row(
            offset, stamp, kind, key, value, tuple((h["key"].encode(), h["value"]) for h in headers)
        )
        for offset, stamp, kind, key, value, headers in rows
    ]


def _ndjson(data: bytes) -> list[Row]:
    return [_line(json.loads(line)) for line in data.splitlines()]


def _line(found: dict[str, Any]) -> Row:
    return Row(
        found["offset"],
        found.get("timestamp_ms", -1),
        _TYPES[found["timestamp_type"]],
        _bytes(found.get("key")),
        _bytes(found.get("value")),
        tuple(
            (header["key"].encode(), _bytes(header.get("value")))
            for header in found.get("headers", ())
        ),
    )


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)


def read_batches(parts: Iterable[bytes]) -> list[Row]:
    """Return the committed records of record batches.

    Args:
        parts: The objects of one chain or the batches of one log, in order.
    """
    shown: list[list[Row]] = []
    waiting: dict[int, list[list[Row]]] = {}
    for data in parts:
        at = 0
        while at < len(data):
            header = parse_header(data, at)
            batch = data[at : at + header.size_bytes]
            at += header.size_bytes
            if header.is_control:
                open_batches = waiting.pop(header.producer_id, [])
                if marker_type(batch, parse_header(batch, 0)) is MarkerType.ABORT:
                    for rows in open_batches:
                        rows.clear()
                continue
            rows = [Row(*record) for record in decode_reference(batch)]
            shown.append(rows)
            if header.is_transactional:
                waiting.setdefault(header.producer_id, []).append(rows)
    for open_batches in waiting.values():  # not decided: not visible
        for rows in open_batches:
            rows.clear()
    return [row for rows in shown for row in rows]


def latest_by_key(truth: Truth, end: int) -> Truth:
    """Return what a snapshot of the offsets below `end` must have: the latest record of each key.

    If the cleaner has removed that record, because of a later one at or after `end`, the one before
    it is allowed instead. A tombstone removes its key.
    """
    kept = [row for row in truth.rows if row.offset >= end]
    may_lack = set(truth.may_lack)
    seen: set[bytes | None] = set()
    confirmed: set[bytes | None] = set()
    for row in reversed(truth.rows):
        if row.offset >= end or row.key in confirmed:
            continue
        if row.value is not None:
            kept.append(row)
            if row.key in seen:
                may_lack.add(row.offset)
        seen.add(row.key)
        if row.offset not in truth.may_lack:
            confirmed.add(row.key)
    return dataclasses.replace(truth, rows=sorted(kept), may_lack=may_lack)
