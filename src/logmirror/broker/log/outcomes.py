"""Which transactions of a part of a log were aborted, and where the first undecided one begins.

It is derived from the batches, for compaction: the part that is to be compacted is read, and behind
it as much as is needed to find the markers of transactions that began in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from logmirror.wire.batch_header import MarkerType, parse_header
from logmirror.wire.records import marker_type
from logmirror.wire.serve_markers import CONTROL_FLAG

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from logmirror.wire.scan import Batches

TRANSACTIONAL_FLAG: Final = 0x10


class Aborted(NamedTuple):
    """An aborted transaction: its producer, its first offset, and the offset of its marker."""

    producer_id: int
    first: int
    marker: int


class Outcomes:
    """Collects the transactions of batches, which are added in the order of the log.

    Args:
        archive_end: The end of the segments from an archive. It may be inside a transaction, whose
            records count as committed, whatever a producer with the same ID writes later.
        crossing: Offsets of markers behind `archive_end` that abort a transaction from before it.
    """

    def __init__(self, archive_end: int = 0, crossing: Collection[int] = ()) -> None:
        self.aborted: list[Aborted] = []
        self._archive_end = archive_end
        self._crossing = crossing
        self._open: dict[int, int] = {}
        self._is_closed = False

    @property
    def is_decided(self) -> bool:
        """Whether no transaction waits for its marker."""
        return not self._open

    def first_undecided(self, *, is_whole: bool) -> int | None:
        """Return the first offset of the oldest transaction without a marker.

        Args:
            is_whole: Whether all batches up to the high watermark were added. Only then is it known
                that a transaction of an archive has no marker.
        """
        start = self._archive_end if is_whole else 0
        return min((first for first in self._open.values() if first >= start), default=None)

    def close(self) -> None:
        """Ignore transactions that begin in the batches that follow."""
        self._is_closed = True

    def add(self, window: bytes, batches: Batches) -> None:
        """Add the batches of a window.

        Raises:
            CorruptionError: A marker is malformed.
        """
        attributes = batches.attributes
        rows = np.flatnonzero(
            (attributes & (TRANSACTIONAL_FLAG | CONTROL_FLAG) != 0) & (batches.record_counts > 0)
        )
        columns = (batches.positions, batches.base_offsets, batches.producer_ids)
        for position, base_offset, producer_id, flags in zip(
            *(column[rows].tolist() for column in columns), attributes[rows].tolist(), strict=True
        ):
            if flags & CONTROL_FLAG:
                self._end(window, position, producer_id)
            elif not self._is_closed:
                self._open.setdefault(producer_id, base_offset)

    def _end(self, window: bytes, position: int, producer_id: int) -> None:
        header = parse_header(window, position)
        kind = marker_type(window, header)
        if kind is not None:
            first = self._open.pop(producer_id, None)
            if first is not None and kind == MarkerType.ABORT:
                marker = header.base_offset
                if first < self._archive_end <= marker and marker not in self._crossing:
                    first = self._archive_end
                self.aborted.append(Aborted(producer_id, first, marker))

    def are_aborted(self, batches: Batches) -> npt.NDArray[np.bool_]:
        """Return for each batch whether it belongs to an aborted transaction."""
        found = np.zeros(len(batches), np.bool_)
        if not len(batches):
            return found
        begin, end = int(batches.base_offsets[0]), int(batches.last_offsets[-1])
        data = batches.attributes & (TRANSACTIONAL_FLAG | CONTROL_FLAG) == TRANSACTIONAL_FLAG
        for producer_id, first, marker in self.aborted:
            if first <= end and marker >= begin:
                bases = batches.base_offsets
                within = (bases >= first) & (bases < marker)
                found |= data & within & (batches.producer_ids == producer_id)
        return found
