"""How much one slot holds at a time, derived from its share of the process group's memory.

    share = fetched + decoded + unpacked + objects under construction

A small share makes smaller pieces wait: fewer decoded rows, smaller row groups, bucket objects that
go to a temporary file earlier, and fewer objects side by side, the rest of a group after them. It
never changes which offsets an object covers: that is a function of the log alone (`cut`), else two
writers with different memory would meet each other's claims at every object.

What a single batch or record needs by its own size comes on top: it cannot be cut.
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
"""The least share: one object of the most expensive kind can be written, in pieces of 4 MiB."""

_FETCHED_BYTES: Final = 4 * _MIB
_CHUNK_BYTES: Final = 32 * _MIB
_ROW_GROUP_BYTES: Final = 32 * _MIB
_HELD_BYTES: Final = 96 * _MIB
_TEXT_BYTES: Final = 8 * _MIB
"""Of NDJSON lines that are made at once: 2 MiB of payload in its longest form."""

_STREAM_BYTES: Final = 1 * _MIB
"""Of what goes through to a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one slot may hold."""

    chunk_bytes: int
    """Of decoded rows."""

    row_group_bytes: int
    """Of rows that wait for their Parquet row group."""

    held_bytes: int
    """Of an object for a bucket, until it goes to a temporary file."""

    objects_bytes: int
    """For all objects under construction together."""

    @classmethod
    def of_share(cls, share_bytes: int) -> Memory:
        """The pieces that fit into a share of at least `SLOT_BYTES_MIN`."""
        piece = share_bytes // 8
        chunk = min(_CHUNK_BYTES, piece)
        return cls(
            chunk_bytes=chunk,
            row_group_bytes=min(_ROW_GROUP_BYTES, piece),
            held_bytes=min(_HELD_BYTES, 3 * piece),
            objects_bytes=share_bytes - _FETCHED_BYTES - 2 * chunk,
        )

    def object_bytes(self, spec: ArchiveSpec) -> int:
        """The most that one object under construction holds, records larger than a piece apart."""
        if spec.format == "parquet":
            encoder = 2 * self.row_group_bytes  # what waits, and what of it is being written
        else:
            encoder = _TEXT_BYTES if spec.format == "ndjson" else _STREAM_BYTES
        return encoder + (self.held_bytes if isinstance(spec.location, S3Location) else 0)

    def waves(self, works: Sequence[Work]) -> list[list[Work]]:
        """Divide works that read the same: those of one crew are carried out side by side.

        As few crews as fit, one after the other; each has one work at least.
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
