"""Executor: the gate of column types for batches that are copied as they are.

Who writes rows has them looked at as they are decoded (`shared_read`). Who copies batches decodes
them for this alone, and only where keys or values have a type that is checked.
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
    """Looks into fetched batches for values that are not of their column's type.

    Args:
        decoder: Shared with others; nothing of what it yields is kept.
    """

    def __init__(self, decoder: RecordDecoder) -> None:
        self._decoder = decoder

    def refused(self, work: Work, fetched: Fetched, first: int, end: int) -> Refused | None:
        """The first value that must not be copied, of the visible records first..end-1.

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
        """How far the records first..end-1 may be copied, and why no further."""
        refused = self.refused(work, fetched, first, end)
        return (end, None) if refused is None else (refused.offset, refused.error())
