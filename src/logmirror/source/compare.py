"""Compare the records of two partitions, column by column.

The timestamp type is not compared: the broker sets it from the topic's configuration, and a
producer cannot choose it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logmirror.wire.columns import NO_ROWS, boolean_column
from logmirror.wire.scan import KIND_ABORTED, KIND_DATA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.source.partition import KafkaSource
    from logmirror.wire.decode import RecordDecoder

_WAIT_MS: Final = 500
_TRANSACTIONAL: Final = 16
"""Attribute bit of transactional batches."""

_COMPARED: Final = ("offset", "key", "value", "headers")
_SHOWN_BYTES: Final = 16


def chunks(  # noqa: PLR0913  # the range, and what of it is shown
    log: KafkaSource,
    decoder: RecordDecoder,
    first: int,
    end: int,
    *,
    only_transactions: bool = False,
    with_aborted: bool = False,
) -> Iterator[tuple[pa.Table, int]]:
    """Yield the visible records first..end-1, each chunk with one past the last offset it covers.

    A chunk holds the records of one fetch, copied out of its buffers. Ends early at the last stable
    offset.

    Args:
        log: The partition.
        decoder: May be shared with other readers of the same thread.
        first: The first offset to read.
        end: One past the last offset to read.
        only_transactions: Skip records that were not written in a transaction.
        with_aborted: Include the records of aborted transactions. A column `is_aborted` shows which
            these are.
    """
    offset = first
    while offset < end:
        polled = log.poll(offset, max_wait_ms=_WAIT_MS)
        if polled.fetched is None:
            if polled.last_stable_offset <= offset:
                return
            continue
        batches = polled.fetched.batches
        is_aborted = batches.kinds == KIND_ABORTED
        if only_transactions:
            batches.kinds[batches.attributes & _TRANSACTIONAL == 0] = KIND_ABORTED
        if with_aborted:
            batches.kinds[is_aborted] = KIND_DATA
        tables = [_EMPTY]
        for rows in decoder.decode(polled.fetched.buffer, batches, first=offset, end=end):
            batch = rows.to_arrow("", 0)
            tables.append(pa.Table.from_batches([_copied(batch)]))
        table = pa.concat_tables(tables).combine_chunks()
        if with_aborted:
            places = np.searchsorted(batches.last_offsets, table["offset"].to_numpy())
            table = table.append_column("is_aborted", boolean_column(is_aborted[places]))
        offset = min(int(batches.last_offsets[batches.count - 1]) + 1, end)
        yield table, offset


def _copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def rows(
    log: KafkaSource,
    decoder: RecordDecoder,
    first: int,
    end: int,
    *,
    with_aborted: bool = False,
) -> pa.Table:
    """Return the visible records first..end-1 as one table; see `chunks`."""
    found = chunks(log, decoder, first, end, with_aborted=with_aborted)
    tables = [table.select(_EMPTY.column_names) for table, _ in found]
    return pa.concat_tables([_EMPTY, *tables]).combine_chunks()


def difference(
    found: pa.Table, expected: pa.Table, *, timestamps: bool, compacted: bool
) -> dict[str, object] | None:
    """Return the first record in which a replica differs from its source, or None.

    Args:
        found: The replica's records.
        expected: The source's records of the same offsets.
        timestamps: Whether timestamps must be equal.
        compacted: Whether the source may have removed records since. Records that it still has
            must exist in the replica.

    Returns:
        Facts for an error: `offset`, and the record of each side (`expected`, `found`).
    """
    if compacted:
        found = found.filter(pc.is_in(found["offset"], value_set=expected["offset"]))
    columns = [*_COMPARED, "timestamp"] if timestamps else list(_COMPARED)
    ours, theirs = found.select(columns), expected.select(columns)
    if ours.equals(theirs):
        return None
    at = first_difference(ours, theirs)
    offsets = [t["offset"][at].as_py() for t in (ours, theirs) if at < t.num_rows]
    return {
        "offset": min(offsets),
        "expected": shown(theirs, at),
        "found": shown(ours, at),
    }


def sequence_difference(
    found: Iterator[pa.Table], expected: Iterator[pa.Table], *, timestamps: bool
) -> tuple[int, dict[str, object] | None]:
    """Compare two sequences of records without their offsets.

    Returns:
        The number of equal records before the first difference, and facts about that difference
        (`record`, `expected`, `found`); None if there is none.
    """
    columns = [name for name in (*_COMPARED, "timestamp") if name != "offset"]
    ours = theirs = _EMPTY
    count = 0
    while True:
        while ours.num_rows == 0 and (more := next(found, None)) is not None:
            ours = more
        while theirs.num_rows == 0 and (more := next(expected, None)) is not None:
            theirs = more
        both = min(ours.num_rows, theirs.num_rows)
        kept = columns if timestamps else columns[:-1]
        one, other = ours.slice(0, both).select(kept), theirs.slice(0, both).select(kept)
        if not both or not one.equals(other):
            break
        count, ours, theirs = count + both, ours.slice(both), theirs.slice(both)
    if ours.num_rows == theirs.num_rows == 0:
        return count, None
    at = first_difference(one, other)
    return count + at, {
        "record": count + at,
        "expected": shown(theirs, at),
        "found": shown(ours, at),
    }


def first_difference(ours: pa.Table, theirs: pa.Table) -> int:
    """Return the first row that differs, or the length of the shorter table if none does.

    Uses bisection on slices, without a Python step per row.
    """
    low, high = 0, min(ours.num_rows, theirs.num_rows)
    while low < high:
        middle = (low + high) // 2
        if ours.slice(low, middle - low + 1).equals(theirs.slice(low, middle - low + 1)):
            low = middle + 1
        else:
            high = middle
    return low


def shown(table: pa.Table, at: int) -> object:
    """Return one record as a fact of an error: sizes and first bytes, not whole values."""
    if at >= table.num_rows:
        return f"no record after the first {table.num_rows}"
    (record,) = table.slice(at, 1).to_pylist()
    return {
        name: f"{len(value)} bytes {value[:_SHOWN_BYTES]!r}"
        if isinstance(value, bytes)
        else str(value)
        for name, value in record.items()
    }


_EMPTY: Final = pa.Table.from_batches([NO_ROWS])
