"""Executor: the check of batches that are copied without decoding.

The times of a mirror with `until` are checked by the headers of the batches: a source may have
found a later offset for the time than that of the first such record.

Archives check rows when they decode them (`to_archive.shared_read`). Destinations that copy batches
decode them for this check only, and only if a type other than `bytes` is configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.cluster.time_lookup import first_since
from logmirror.wire.gate import Late, first_refused

if TYPE_CHECKING:
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.ports import Work
    from logmirror.source.partition import Fetched
    from logmirror.wire.decode import RecordDecoder
    from logmirror.wire.gate import Refused


class Gate:
    """Checks fetched batches for values of the wrong type, and for records that are too new.

    Args:
        decoder: May be shared; nothing that it yields is kept.
    """

    def __init__(self, decoder: RecordDecoder) -> None:
        self._decoder = decoder

    def refused(self, work: Work, fetched: Fetched, first: int, end: int) -> Refused | Late | None:
        """Return the first of the visible records first..end-1 that must not be copied, or None.

        Raises:
            CorruptionError: A batch cannot be decoded.
        """
        late: Late | None = None
        if work.until_ms is not None:
            offsets = range(first, end)
            found = first_since(fetched.buffer, fetched.batches, offsets, work.until_ms)
            if found is not None:
                late, end = Late(0, found), found
        types = work.destination.types
        if not types.are_checked:
            return late
        for columns in self._decoder.decode(fetched.buffer, fetched.batches, first=first, end=end):
            refused = first_refused(columns, types)
            if refused is not None:
                return refused
        return late

    def limit(
        self, work: Work, fetched: Fetched, first: int, end: int
    ) -> tuple[int, LogmirrorError | None]:
        """Return how far the records first..end-1 may be copied.

        Returns:
            One past the last offset that may be copied, and the error of the next record; `end`
            and None if all may be.

        Raises:
            CorruptionError: A batch cannot be decoded.
        """
        refused = self.refused(work, fetched, first, end)
        return (end, None) if refused is None else (refused.offset, refused.error())
