"""Memory limits of one slot, derived from its share of the process group's memory.

    share = fetched + decoded + unpacked + objects under construction

A small share leads to fewer decoded rows at a time, smaller row groups, bucket objects that are
moved to a temporary file earlier, and fewer objects in parallel: the slices of a group are
processed in several waves. It never changes which offsets an object covers, which depends on the
log only (`cut`); otherwise two writers with different memory would conflict at every object.

A single batch or record that exceeds these limits needs additional memory: it cannot be split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.locations import S3Location

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.mirror.ports import ArchiveSpec, Work

_MIB: Final = 1 << 20

SLOT_BYTES_MIN: Final = 32 * _MIB
"""The minimum share: enough for one object of the most expensive kind, in pieces of 4 MiB."""

_FETCHED_BYTES: Final = 4 * _MIB
_CHUNK_BYTES: Final = 32 * _MIB
_ROW_GROUP_BYTES: Final = 32 * _MIB
_HELD_BYTES: Final = 96 * _MIB
_TEXT_BYTES: Final = 8 * _MIB
"""Buffer of NDJSON lines: 2 MiB of payload in its longest encoding."""

_STREAM_BYTES: Final = 1 * _MIB
"""Buffer of bytes that are streamed to a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory limits of one slot, in bytes."""

    chunk_bytes: int
    """Decoded rows."""

    row_group_bytes: int
    """Rows of one Parquet row group."""

    held_bytes: int
    """One object for a bucket; a larger one is kept in a temporary file."""

    objects_bytes: int
    """All objects under construction together."""

    @classmethod
    def of_share(cls, share_bytes: int) -> Memory:
        """Return the limits for a share of at least `SLOT_BYTES_MIN`."""
        piece = share_bytes // 8
        chunk = min(_CHUNK_BYTES, piece)
        return cls(
            chunk_bytes=chunk,
            row_group_bytes=min(_ROW_GROUP_BYTES, piece),
            held_bytes=min(_HELD_BYTES, 3 * piece),
            objects_bytes=share_bytes - _FETCHED_BYTES - 2 * chunk,
        )

    def object_bytes(self, spec: ArchiveSpec) -> int:
        """Return the maximum memory of one object under construction, without oversized records."""
        if spec.format == "parquet":
            encoder = 2 * self.row_group_bytes  # the waiting rows, and the row group being written
        else:
            encoder = _TEXT_BYTES if spec.format == "ndjson" else _STREAM_BYTES
        return encoder + (self.held_bytes if isinstance(spec.location, S3Location) else 0)

    def waves(self, works: Sequence[Work]) -> list[list[Work]]:
        """Divide slices that read the same partition into waves that run one after the other.

        The slices of one wave run in parallel and fit into `objects_bytes` together. There are as
        few waves as possible in this order; each has at least one slice.
        """
        waves: list[list[Work]] = []
        room = 0
        for work in works:
            needed = self.object_bytes(work.archive)
            if not waves or needed > room:
                waves.append([])
                room = self.objects_bytes
            waves[-1].append(work)
            room -= needed
        return waves
