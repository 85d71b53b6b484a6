"""The end of an object: a deterministic function of the immutable log and of the two limits.

Two attempts at one slice, on two machines, must produce the same objects. The end therefore does
not depend on a clock, on the size of fetch responses or on compressed sizes. Rows are counted one
by one, batches as a whole.
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
    """One past the last offset that the object may cover; a native object must reach it."""

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
        sizes = columns.payload_bytes[start:]
        filled = int(np.searchsorted(np.cumsum(sizes), self.bytes_left))
        by_bytes = start + filled + 1
        by_limit = int(np.searchsorted(columns.offsets, self.limit))
        if filled < len(sizes) and by_bytes <= by_limit:
            last = int(columns.offsets[by_bytes - 1])
            if last + 1 < self.limit:
                return by_bytes, last, Trigger.MAX_BYTES
        if by_limit < columns.rows:
            return by_limit, self.limit - 1, self.limit_trigger
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
