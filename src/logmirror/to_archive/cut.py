"""The end of an object: a deterministic function of the log and of the two limits.

Two attempts at one slice, on two machines, must produce the same objects. The end therefore does
not depend on a clock, on the size of fetch responses or on compressed sizes. Rows are counted one
by one, batches as a whole.

An object of rows ends at `max-offsets`, except inside an offset gap: then it ends where the gap
ends, right before the next record. Its name spans the gap, so a gap of any length costs no object
without records. The end of a gap is known when the next record is read. Until then the object stays
open, and at the end of the slice it is written only if the slice has a tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from logmirror.errors import PositionError
from logmirror.model import OFFSET_MAX, Trigger

if TYPE_CHECKING:
    from logmirror.mirror.ports import ArchiveSpec
    from logmirror.wire.columns import Columns
    from logmirror.wire.scan import Batches


@dataclass(slots=True)
class Cut:
    """The limits of the object under construction."""

    first: int
    limit: int
    """One past the last offset of the object, unless that lies in an offset gap: then the object
    ends with the gap. A native object ends with the batch that reaches it."""

    limit_trigger: Trigger
    bytes_left: int
    forced: bool = False
    """The range is claimed: end exactly at `limit`, whatever the current configuration is."""

    @classmethod
    def fresh(cls, first: int, spec: ArchiveSpec) -> Cut:
        """Return the limits of an object whose range is not claimed."""
        limit = min(first + spec.max_offsets, OFFSET_MAX)
        return cls(first, limit, Trigger.MAX_OFFSETS, spec.max_bytes)

    @classmethod
    def claimed(cls, first: int, last: int, trigger: Trigger) -> Cut:
        """Return the limits that a claim has fixed (I2: one successor per position)."""
        return cls(first, last + 1, trigger, OFFSET_MAX, forced=True)

    def rows(self, columns: Columns, start: int) -> tuple[int, int | None, Trigger | None]:
        """Return which rows from `start` on belong to the object.

        Returns:
            One past the last row; if the object ends there, also its last offset and the trigger.
        """
        if self.forced:
            stop = int(np.searchsorted(columns.offsets, self.limit))
            if stop < columns.rows:
                return stop, self.limit - 1, self.limit_trigger
            return columns.rows, None, None
        sizes = columns.payload_bytes[start:]
        at_bytes = start + int(np.searchsorted(np.cumsum(sizes), self.bytes_left))
        at_limit = start + int(np.searchsorted(columns.offsets[start:], self.limit - 1))
        if at_bytes < at_limit:
            return at_bytes + 1, int(columns.offsets[at_bytes]), Trigger.MAX_BYTES
        if at_limit < columns.rows:
            # The first record at the last offset, or behind the gap in which the last offset lies.
            found = int(columns.offsets[at_limit])
            if found < self.limit:
                return at_limit + 1, found, self.limit_trigger
            return at_limit, found - 1, self.limit_trigger
        self.bytes_left -= int(sizes.sum())
        return columns.rows, None, None

    def batches(
        self, batches: Batches, start: int, stop: int
    ) -> tuple[int, int | None, Trigger | None]:
        """As `rows`, for whole batches start..stop."""
        sizes = batches.sizes[start:stop]
        lasts = batches.last_offsets[start:stop]
        filled = int(np.searchsorted(np.cumsum(sizes), self.bytes_left))
        reached = int(np.searchsorted(lasts, self.limit - 1))
        index = min(filled, reached)
        if index == len(sizes):
            self.bytes_left -= int(sizes.sum())
            return stop, None, None
        if self.forced and batches.base_offsets[start + index] >= self.limit:
            # The log cleaner removed the last batch of the claimed range, and perhaps others.
            return start + index, self.limit - 1, self.limit_trigger
        last = int(lasts[index])
        if self.forced and last + 1 != self.limit:
            raise PositionError(
                "a claimed range does not end where a batch of the source ends",
                hint="the source's log was rewritten after the claim was made. Compare the archive "
                "with the source; nothing was written.",
                claimed_last=self.limit - 1,
                batch_last=last,
            )
        trigger = self.limit_trigger if index == reached else Trigger.MAX_BYTES
        return start + index + 1, last, trigger
