"""Which offsets of a group are committed at the target: forward only, and compared in every case.

MirrorMaker 2 commits without a comparison if it has not seen the group empty (its
`syncGroupOffset`), and so can move a group back. Here the target's offsets are always read first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.model import TopicPartition

IDLE_STATES: Final = frozenset({"", "Empty", "Dead"})
"""States of a group without members; empty: the target does not list the group."""

AHEAD: Final = "the destination is ahead"
UNCHANGED: Final = "unchanged"


def compared(wanted: int, current: int | None) -> str:
    """Return why an offset is not committed; empty if it is.

    Args:
        wanted: The translated offset.
        current: The committed offset at the target; None: there is none.
    """
    if current is None or current < wanted:
        return ""
    return AHEAD if current > wanted else UNCHANGED


def commits_due(
    wanted: Mapping[TopicPartition, int], current: Mapping[TopicPartition, int | None]
) -> dict[TopicPartition, int]:
    """Return the offsets to commit for a group without members.

    Args:
        wanted: The translated offsets.
        current: The target's committed offsets of the same partitions. A partition that is missing
            here was not read, and is not committed.
    """
    return {
        partition: offset
        for partition, offset in wanted.items()
        if partition in current and not compared(offset, current[partition])
    }
