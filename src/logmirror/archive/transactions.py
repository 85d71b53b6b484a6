"""Outcomes of the transactions in a native chain, for reads with read_committed.

A marker ends the transaction of its producer and applies to all transactional batches of that
producer since its previous marker. The outcome of a batch is therefore found after it, perhaps
several objects later, or in the claim of its object. Batches are processed as arrays: a Python step
per producer, not per record.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from logmirror.model import OFFSET_MAX
from logmirror.wire.batch_header import MarkerType, parse_header
from logmirror.wire.records import marker_type
from logmirror.wire.scan import KIND_ABORTED, KIND_CONTROL, as_bytes_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy.typing as npt

    from logmirror.model import Decided
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


class _Ends(NamedTuple):
    """Where transactions end: arrays of the same length."""

    producers: Words
    offsets: Words
    aborts: Flags


class Outcomes:
    """Transaction outcomes, from markers and claims. Add the batches of a partition in order.

    Args:
        end: Outcomes at this offset or above are ignored, so all readers up to one end get the same
            result.
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self._offsets: dict[int, list[Words]] = defaultdict(list)
        self._aborts: dict[int, list[Flags]] = defaultdict(list)
        self._open: dict[int, int] = {}
        self._decided: deque[Decided] = deque()

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
        ends = [_Ends(producers[at], bases[at], aborts), *self._decided_before(int(bases[-1]))]
        self._add(producers[is_part], bases[is_part], ends)

    def begin(self, decided: Iterable[Decided]) -> None:
        """Begin an object, with the outcomes that its claim holds; `end` ends it."""
        self._decided = deque(one for one in decided if one.last < self._end)

    def end(self) -> None:
        """End the object."""
        if self._decided:
            nothing = np.empty(0, np.int64)
            self._add(nothing, nothing, [*self._decided_before(OFFSET_MAX)])

    def _decided_before(self, offset: int) -> Iterator[_Ends]:
        while self._decided and self._decided[0].last < offset:
            last, aborted, committed = self._decided.popleft()
            producers = np.array([*aborted, *committed], np.int64)
            yield _Ends(
                producers, np.full(len(producers), last), np.arange(len(producers)) < len(aborted)
            )

    def _add(self, producers: Words, bases: Words, ends: list[_Ends]) -> None:
        """Add batches of transactions, and ends of transactions before the last one of them."""
        ended, at, aborts = (np.concatenate(column) for column in zip(*ends, strict=True))
        order = np.argsort(at, kind="stable")
        for producer in np.unique(np.concatenate([producers, ended])).tolist():
            of_producer = order[ended[order] == producer]
            if len(of_producer):
                self._offsets[producer].append(at[of_producer])
                self._aborts[producer].append(aborts[of_producer])
            _follow(self._open, producer, at[of_producer], bases[producers == producer])

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
        is_aborted: Whether each was aborted, by producer ID.
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
    """Add ends and batches of a producer to its first offset of an open transaction."""
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
