"""Rows of Arrow record batches -> Kafka record batches, at the rows' own offsets.

- E1 Offsets, timestamps, timestamp types, null and empty keys and values, and headers with their
  order are those of the rows.
- E2 A batch ends at about `BATCH_BYTES`, where the timestamp type changes, and where a timestamp of
  log-append time changes: such a batch has one timestamp for all of its records.
- E3 The batches take all offsets up to the end of the range, so that a consumer's position passes
  offsets without records at the end; see `empty_batch`.
- E4 The same rows always make the same bytes. Batches are not compressed.
- E5 Objects and the one that they are merged into have their records in the same batches, however
  Parquet divides the rows: a reader that continues at the end of a batch finds the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logmirror.errors import CorruptionError
from logmirror.wire import kernels_serve as k
from logmirror.wire.columns import payload_bytes
from logmirror.wire.empty_batch import HEADER_BYTES, SPAN_MAX, empty_batches, put_header
from logmirror.wire.scan import address_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

BATCH_BYTES: Final = 256 * 1024
_ROW_BYTES: Final = 40
"""More than a record takes beside key, value and headers: six varints, and the attributes."""

_PAIR_BYTES: Final = 10
_LOG_APPEND_TIME: Final = 8


def serve_columns(
    rows: Iterable[Any], first: int, last: int, starts: Sequence[int] = ()
) -> Iterator[bytearray]:
    """Yield record batches.

    Args:
        rows: Arrow record batches of `wire.columns.SCHEMA`, in the order of their offsets.
        first: The first offset of the range.
        last: Its last offset.
        starts: Offsets at which a batch begins in any case, ascending (E5).

    Raises:
        CorruptionError: An offset is not in the range, or not above the one before.
    """
    left: _Columns | None = None
    begin = 0  # of the rows in `left` that no batch has yet: they may not be all of its rows
    next_offset = first
    for batch in rows:
        if not len(batch):
            continue
        offsets = batch["offset"].to_numpy()
        _check(offsets, next_offset, last)
        next_offset = int(offsets[-1]) + 1
        more = [batch] if left is None else [left.rows.slice(begin), batch]
        left = _Columns(pa.concat_batches(more) if len(more) > 1 else batch)
        *whole, (begin, _) = left.cuts(starts)
        for start, stop in whole:
            yield _batch(left, start, stop)
    edges = [*(one for one in starts if one >= next_offset), last + 1]
    if left is not None:
        end = min(edges[0], int(left.offsets[begin]) + SPAN_MAX) - 1
        yield _batch(left, begin, len(left.offsets), last_offset=end)
        next_offset = end + 1
    for edge in edges:
        for empty in empty_batches(next_offset, edge - 1):
            yield bytearray(empty)
        next_offset = edge


def _batch(columns: _Columns, start: int, stop: int, **header: int) -> bytearray:
    encoded, fields = columns.encoded(start, stop)
    put_header(encoded, **(fields | header))
    return encoded


def _check(offsets: npt.NDArray[np.int64], first: int, last: int) -> None:
    is_ascending = bool((np.diff(offsets) > 0).all())
    if int(offsets[0]) < first or int(offsets[-1]) > last or not is_ascending:
        raise CorruptionError(
            "offsets of an object are not ascending within its range",
            expected=first,
            found=int(offsets[0]),
            last=int(offsets[-1]),
        )


class _Columns:
    """The columns of one Arrow batch, as the kernel reads them."""

    def __init__(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        self.rows = batch
        self.offsets = np.ascontiguousarray(batch["offset"].to_numpy())
        self._times = np.ascontiguousarray(batch["timestamp"].cast(pa.int64()).to_numpy())
        self._types = batch["timestampType"].to_numpy()
        headers = batch["headers"]
        edges = np.frombuffer(headers.buffers()[1], np.int32)
        self._edges = edges[headers.offset : headers.offset + len(headers) + 1]
        pairs = headers.values
        self._kept: list[Any] = []
        self._state = np.zeros(k.STATE_WORDS, np.int64)
        self._state[:3] = [address_of(one) for one in (self.offsets, self._times, self._edges)]
        self._point(k.KEYS, batch["key"])
        self._point(k.VALUES, batch["value"])
        self._point(k.HEADER_KEYS, pairs.field(0))
        self._point(k.HEADER_VALUES, pairs.field(1))
        sizes = payload_bytes(batch) + _ROW_BYTES + 2 * _PAIR_BYTES * np.diff(self._edges)
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def _point(self, place: int, column: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        if not len(column):
            return
        lengths = pc.fill_null(pc.binary_length(column), -1).to_numpy().astype(np.int32)
        _, edges, data = column.buffers()
        starts = np.frombuffer(edges, np.int32)[column.offset :]
        self._kept += [lengths, starts, data, column]
        address = 0 if data is None else data.address
        self._state[place // 8 : place // 8 + 3] = address_of(starts), address_of(lengths), address

    def cuts(self, starts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the rows of each batch: start and stop (E2, E5)."""
        rows = len(self.offsets)
        changed = np.diff(self._types) != 0
        changed |= (np.diff(self._times) != 0) & (self._types[1:] == 1)
        wanted = np.searchsorted(self.offsets, np.asarray(starts, np.int64))
        edges = np.unique(np.concatenate((np.flatnonzero(changed) + 1, wanted, [rows])))
        start = number = 0
        while start < rows:
            if edges[number] <= start:
                number += 1
                continue
            before = int(self._ends[start - 1]) if start else 0
            stop = int(np.searchsorted(self._ends, before + BATCH_BYTES, side="right"))
            far = int(self.offsets[start]) + SPAN_MAX
            stop = min(stop, int(np.searchsorted(self.offsets, far)), int(edges[number]))
            stop = max(stop, start + 1)
            yield start, stop
            start = stop

    def encoded(self, start: int, stop: int) -> tuple[bytearray, dict[str, int]]:
        """Return a batch without its header, and the header's fields."""
        capacity = int(self._ends[stop - 1]) - (int(self._ends[start - 1]) if start else 0)
        out = np.empty(HEADER_BYTES + capacity, np.uint8)
        times = self._times[start:stop]
        base_ms = int(times[0])
        size = k.put_records(
            address_of(self._state), start, stop, base_ms, address_of(out) + HEADER_BYTES, capacity
        )
        fields = {
            "base_offset": int(self.offsets[start]),
            "last_offset": int(self.offsets[stop - 1]),
            "record_count": stop - start,
            "base_ms": base_ms,
            "max_ms": int(times.max()),
            "attributes": _LOG_APPEND_TIME if self._types[start] == 1 else 0,
        }
        return bytearray(out[: HEADER_BYTES + size]), fields
