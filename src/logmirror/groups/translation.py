"""Where a consumer group continues in a replica.

    offsets: preserve     the group's offset, within the replica's log
    offsets: translate    the last offset sync at or before it, within the replica's log

Invariant: no record that the group has not read is skipped, if the replica has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from logmirror.groups.offset_syncs import SyncIndex


Cause = Literal[
    "not-replicated",
    "no-syncs",
    "before-syncs",
    "between-syncs",
    "before-start",
    "beyond-end",
    "recreated",
]
"""Why an offset is not translated exactly: the label of metrics."""

_BEGINS_AFTER: Final = "the replica begins after the group's offset"

CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)


class Log(NamedTuple):
    """The bounds of a replica's partition."""

    start: int
    """The log start offset."""
    end: int
    """The log end offset."""


class Translated(NamedTuple):
    """The offset in the replica that belongs to a group's offset at the source."""

    offset: int | None
    """The next offset that the group reads from the replica. None: not known."""

    read_again_from: int
    """Source records from here up to the group's offset are read again, as far as the replica has
    them; equal to the group's offset if none is."""

    reason: str = ""
    """Why it is not exact, or not known, for people. Empty if it is exact, or between two syncs."""

    cause: Cause | None = None
    """The same as a label; None: it is exact."""


def preserved(offset: int, copy: Log) -> Translated:
    """Return the translation for a replica that keeps the source's offsets."""
    if offset > copy.end:
        reason = f"the replica ends {offset - copy.end} offsets before the group"
        return Translated(copy.end, copy.end, reason, "beyond-end")
    if offset < copy.start:
        return Translated(copy.start, offset, _BEGINS_AFTER, "before-start")
    return Translated(offset, offset)


def recreated(copy: Log) -> Translated:
    """Return the translation for a replica about which no offset sync is."""
    reason = "the offset syncs are about another log: its topic was recreated or truncated"
    return Translated(copy.start, 0, reason, "recreated")


def translated(offset: int, copy: Log, syncs: SyncIndex | None) -> Translated:
    """Return the translation for a replica with new offsets.

    Args:
        offset: The group's offset at the source.
        copy: The bounds of the replica's log.
        syncs: The offset syncs of the partition; None if there are none.
    """
    if not syncs:
        return Translated(None, offset, "there are no offset syncs of the partition", "no-syncs")
    sync = syncs.at_or_before(offset)
    if sync is None:
        # Nothing is known about records before the first pair: all of the replica may be unread.
        reason = "the group's offset is before the oldest offset sync"
        return Translated(copy.start, 0, reason, "before-syncs")
    is_exact = sync.upstream == offset
    found = sync.downstream if is_exact else sync.downstream + 1
    if found > copy.end:
        return recreated(copy)
    if found < copy.start:
        return Translated(copy.start, offset, _BEGINS_AFTER, "before-start")
    read_again_from = offset if is_exact else sync.upstream + 1
    if read_again_from == offset:
        return Translated(found, offset)
    return Translated(found, read_again_from, cause="between-syncs")
