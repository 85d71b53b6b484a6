"""Outcomes of the transactions in a native chain, for reads with read_committed.

A marker ends the transaction of its producer and applies to all transactional batches of that
producer since its previous marker. The outcome of a batch is therefore found after it, perhaps
several objects later. Batches are processed as arrays: a Python step per producer, not per record.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.wire.batch_header import MarkerType, parse_header
from logmirror.wire.records import marker_type
from logmirror.wire.scan import KIND_ABORTED, KIND_CONTROL, as_bytes_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from logmirror.wire.scan import Batches

    Words = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

_TRANSACTIONAL: Final = 0x10

# A marker as brokers write it: after the header one byte each for the record's length, attributes,
# timestamp delta, offset delta and the key's length, which is 4; then the key: version and type.
_KEY_LENGTH_AT: Final = 65
_KEY_LENGTH: Final = 8  # zigzag
_TYPE_AT: Final = 69
_USUAL_BYTES: Final = 78


class Outcomes:
    """Transaction outcomes from the markers read so far. Add the batches of a partition in order.

    Args:
        end: Markers at this offset or above are ignored, so all readers up to one end get the same
            result.
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self._offsets: dict[int, list[Words]] = defaultdict(list)
        self._aborts: dict[int, list[Flags]] = defaultdict(list)
        self._open: dict[int, int] = {}

    @property
    def open(self) -> Mapping[int, int]:
        """First offset of the open transaction of each producer that has one, by producer ID."""
        return self._open

    def add(self, data: memoryview, batches: Batches) -> None:
        """Add the next batches; `data` holds their bytes."""
        producers, bases = batches.producer_ids, batches.base_offsets
        is_part = _is_part(batches)
        at, aborts = _markers(data, batches)
        known = bases[at] < self._end
        at, aborts = at[known], aborts[known]
        ended = producers[at]
        for producer in np.unique(np.concatenate([producers[is_part], ended])).tolist():
            of_producer = ended == producer
            offsets = bases[at[of_producer]]
            began = bases[is_part & (producers == producer)]
            if len(offsets):
                self._offsets[producer].append(offsets)
                self._aborts[producer].append(aborts[of_producer])
            _follow(self._open, producer, offsets, began)

    def mark(self, batches: Batches) -> None:
        """Mark batches that were added before as aborted if their transaction did not commit.

        Batches of a transaction without a marker are marked too: its outcome is unknown.
        """
        producers, bases, is_part = batches.producer_ids, batches.base_offsets, _is_part(batches)
        for producer in np.unique(producers[is_part]).tolist():
            rows = np.flatnonzero(is_part & (producers == producer))
            offsets = np.concatenate([*self._offsets[producer], np.empty(0, np.int64)])
            aborts = np.concatenate([*self._aborts[producer], np.ones(1, np.bool_)])
            is_out = aborts[np.searchsorted(offsets, bases[rows])]
            batches.kinds[rows[is_out]] = KIND_ABORTED

    def forget(self) -> None:
        """Drop the outcomes; open transactions are kept."""
        self._offsets.clear()
        self._aborts.clear()


class OpenTransactions:
    """The transactions of one native object whose markers are not in it.

    A copy ends where the oldest open transaction begins. The markers of transactions that have
    ended may be behind that. The source has reported which of them were aborted.

    Attributes:
        is_aborted: Whether it was aborted, by producer ID.
    """

    def __init__(self) -> None:
        self.is_aborted: dict[int, bool] = {}

    def add(self, data: memoryview, batches: Batches, start: int, stop: int) -> None:
        """Add the next batches, from index `start` to `stop`; `data` holds the bytes of all."""
        is_part = _is_part(batches)
        is_part[:start] = is_part[stop:] = False
        if not self.is_aborted and not is_part.any():
            return
        at, _ = _markers(data, batches)
        at = at[(at >= start) & (at < stop)]
        ended = dict(zip(batches.producer_ids[at].tolist(), at.tolist(), strict=True))
        for producer in ended:
            self.is_aborted.pop(producer, None)
        rows = np.flatnonzero(is_part)[::-1]  # the last batch of each producer
        producers, last = np.unique(batches.producer_ids[rows], return_index=True)
        kinds = batches.kinds[rows[last]] == KIND_ABORTED
        found = zip(producers.tolist(), rows[last].tolist(), kinds.tolist(), strict=True)
        self.is_aborted |= {one: kind for one, row, kind in found if row > ended.get(one, -1)}


def _follow(firsts: dict[int, int], producer: int, ended: Words, began: Words) -> None:
    """Add the markers and the batches of a producer to its first offset of an open transaction."""
    if len(ended):
        firsts.pop(producer, None)
        began = began[began > ended[-1]]
    if len(began):
        firsts.setdefault(producer, int(began[0]))


def has_transactions(batches: Batches) -> bool:
    """Return whether any of the batches belongs to a transaction."""
    return bool(_is_part(batches).any())


def _is_part(batches: Batches) -> Flags:
    found: Flags = (batches.attributes & _TRANSACTIONAL != 0) & (batches.kinds != KIND_CONTROL)
    return found


def _markers(data: memoryview, batches: Batches) -> tuple[Words, Flags]:
    """Return the indexes of the batches that end a transaction, and whether each aborts it."""
    at = np.flatnonzero((batches.kinds == KIND_CONTROL) & (batches.record_counts > 0))
    view = as_bytes_array(data)
    begins = batches.positions[at]
    is_usual = batches.sizes[at] == _USUAL_BYTES
    is_usual[is_usual] = view[begins[is_usual] + _KEY_LENGTH_AT] == _KEY_LENGTH
    types = np.full(len(at), -1, np.int64)
    types[is_usual] = view[begins[is_usual] + _TYPE_AT]
    for row in np.flatnonzero(~is_usual).tolist():
        found = marker_type(data, parse_header(data, int(begins[row])))
        types[row] = -1 if found is None else found
    is_end = (types == MarkerType.ABORT) | (types == MarkerType.COMMIT)
    return at[is_end], types[is_end] == MarkerType.ABORT
