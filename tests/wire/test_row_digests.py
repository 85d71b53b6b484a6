"""Two rows have one digest if, and only if, all that a copy must not change is equal.

Method: drawn batches, and records that differ in one place or divide the same bytes otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from kit.runs.record_batches import OFFSET_END, relaxed, runs_of_batches
from logmirror.model import TimestampType
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.row_digests import row_digests
from logmirror.wire.scan import BatchScanner


def digests(data: bytes) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    listed = BatchScanner().scan(data, len(data))
    records, keys = [], []
    for columns in RecordDecoder(1 << 20).decode(data, listed, first=0, end=OFFSET_END):
        found = row_digests(columns)
        records += [tuple(row) for row in found.records.tolist()]
        keys += [tuple(row) for row in found.keys.tolist()]
    return records, keys


@relaxed
@given(runs_of_batches())
def test_equal_records_and_no_others_have_equal_digests(drawn: Any) -> None:
    data, rows = drawn
    records, keys = digests(data)
    contents = [(r.timestamp_ms, r.key, r.value, r.headers) for r in rows]

    assert len(records) == len(rows)
    assert len(set(zip(records, contents, strict=True))) == len(set(records)) == len(set(contents))
    pairs = set(zip(keys, [row.key for row in rows], strict=True))
    assert len(pairs) == len(set(keys)) == len({row.key for row in rows})


@pytest.mark.parametrize(
    "changes",
    [
        {"timestamp_ms": 6},
        {"key": b"keyv", "value": b"alue"},
        {"key": None},
        {"key": b""},
        {"value": None},
        {"value": b""},
        {"headers": ()},
        {"headers": ((b"h", None),)},
        {"headers": ((b"h", b"x"), (b"h", b"x"))},
        {"headers": ((b"hx", b""),)},
        {"key": b"h", "headers": ((b"key", b"x"),)},
    ],
)
def test_a_change_in_one_place_changes_the_digest(changes: dict[str, Any]) -> None:
    base = Record(0, 5, TimestampType.CREATE_TIME, b"key", b"value", ((b"h", b"x"),))
    same = base._replace(offset=1)
    other = base._replace(offset=2, **changes)
    records, keys = digests(bytes(encode_reference([base, same, other], leader_epoch=-1)))

    assert records[0] == records[1] != records[2]
    assert keys[0] == keys[1]
    assert (keys[0] == keys[2]) is (other.key == base.key)
