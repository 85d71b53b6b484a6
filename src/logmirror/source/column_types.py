"""Executor: the check of column types for batches that are copied without decoding.

Archives check rows when they decode them (`to_archive.shared_read`). Destinations that copy batches
decode them for this check only, and only if a type other than `bytes` is configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.wire.gate import first_refused

if TYPE_CHECKING:
    from logmirror.errors import UsageError
    from logmirror.mirror.ports import Work
    from logmirror.source.partition import Fetched
    from logmirror.wire.decode import RecordDecoder
    from logmirror.wire.gate import Refused


class Gate:
    """Checks fetched batches for values that do not match their column's type.

    Args:
        decoder: May be shared; nothing that it yields is kept.
    """

    def __init__(self, decoder: RecordDecoder) -> None:
        self._decoder = decoder

    def refused(self, work: Work, fetched: Fetched, first: int, end: int) -> Refused | None:
        """Return the first value of the wrong type in the visible records first..end-1, or None.

        Raises:
            CorruptionError: A batch cannot be decoded.
        """
        types = work.destination.types
        if not types.are_checked:
            return None
        for columns in self._decoder.decode(fetched.buffer, fetched.batches, first=first, end=end):
            refused = first_refused(columns, types)
            if refused is not None:
                return refused
        return None

    def limit(
        self, work: Work, fetched: Fetched, first: int, end: int
    ) -> tuple[int, UsageError | None]:
        """Return how far the records first..end-1 may be copied.

        Returns:
            One past the last offset that may be copied, and the error of the next record; `end`
            and None if all may be.

        Raises:
            CorruptionError: A batch cannot be decoded.
        """
        refused = self.refused(work, fetched, first, end)
        return (end, None) if refused is None else (refused.offset, refused.error())
