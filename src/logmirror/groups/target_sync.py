"""Which offsets of a group are committed at the target: forward only, and compared in every case.

MirrorMaker 2 commits without a comparison if it has not seen the group empty (its
`syncGroupOffset`), and so can move a group back. Here the target's offsets are always read first.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.groups import GroupOffset, ReadOffsets
    from logmirror.model import TopicPartition

_LOG = logging.getLogger("logmirror.groups")

_Offsets = dict["TopicPartition", "GroupOffset"]

IDLE_STATES: Final = frozenset({"", "Empty", "Dead"})
"""States of a group without members; empty: the target does not list the group."""

_SHOWN: Final = 10
"""The most refused partitions in one log event."""

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


@dataclass(slots=True)
class TargetRound:
    """What one round has committed."""

    committed: int = 0
    """Offsets that were committed and read back."""

    active: list[str] = field(default_factory=list)
    """Groups with members at the target. They are not touched."""

    ahead: int = 0
    """Groups that have a higher offset at the target, which is left as it is."""

    failed: dict[str, str] = field(default_factory=dict)
    """Groups of which an offset was not committed, with the reason."""


class TargetSync:
    """Commits the translated offsets of groups without members. Not thread-safe.

    Two requests per group and change, one per group and round.

    Args:
        client: The target.
    """

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._offsets = client.groups.followed()
        self._done: dict[str, tuple[_Offsets, ReadOffsets]] = {}
        """Groups that have what they should have: what that is, and what was read."""

        self._active: set[str] = set()
        self._ahead: set[str] = set()
        self._refused: dict[str, dict[str, str]] = {}
        """Why partitions of a group (empty: all) were refused, as last logged."""

    def round(self, wanted: Mapping[str, _Offsets]) -> TargetRound:
        """Compare all groups with the target, and commit what is behind.

        Raises:
            LogmirrorError: The target's groups could not be listed.
        """
        done = TargetRound()
        states = {one.group: one.state for one in self._client.groups.listed()}
        self._offsets.retain(list(wanted))
        for group, offsets in wanted.items():
            if states.get(group, "") not in IDLE_STATES:
                done.active.append(group)
                continue
            try:
                self._sync(group, offsets, done)
            except LogmirrorError as error:
                done.failed[group] = error.message
                facts = {**error.facts, "group": group, "error": error.message}
                self._refuse(group, {"": error.message}, facts)
        self._ahead &= wanted.keys()
        for gone in self._refused.keys() - wanted.keys():
            del self._refused[gone]
        done.ahead = len(self._ahead - set(done.active))
        for group in set(done.active) - self._active:
            _LOG.info(
                "a group has members at the target; its offsets are not touched",
                extra={"facts": {"group": group}},
            )
        self._active = set(done.active)
        return done

    def _sync(self, group: str, wanted: _Offsets, done: TargetRound) -> None:
        read = self._offsets.read(group)
        known = self._done.get(group)
        if known is not None and known[0] is wanted and known[1] is read:
            self._refused.pop(group, None)
            return
        self._ahead.discard(group)
        if any(
            partition in read.offsets and read.offsets[partition].offset > offset.offset
            for partition, offset in wanted.items()
        ):
            self._ahead.add(group)
        due = self._due(wanted, read)
        if due:
            errors = self._client.groups.commit(group, {one: wanted[one] for one in due})
            read = self._offsets.read(group)
            missing = self._due(wanted, read)
            done.committed += len(due) - len(missing)
            reasons = {str(one): error.message for one, error in errors.items() if error}
            facts: dict[str, object] = {"group": group, "partitions": len(due)}
            facts["missing"] = len(missing)
            if missing:
                done.failed[group] = next(iter(reasons.values()), "another commit came between")
                facts |= {"reasons": dict(list(reasons.items())[:_SHOWN])}
                self._refuse(group, reasons, facts)
                return
            _LOG.info("group offsets committed", extra={"facts": facts})
        self._refused.pop(group, None)
        self._done[group] = wanted, read

    def _refuse(self, group: str, reasons: dict[str, str], facts: dict[str, object]) -> None:
        if self._refused.get(group) != reasons:
            self._refused[group] = reasons
            _LOG.warning("group offsets not committed", extra={"facts": facts})

    @staticmethod
    def _due(wanted: _Offsets, read: ReadOffsets) -> dict[TopicPartition, int]:
        current: dict[TopicPartition, int | None] = dict.fromkeys(wanted)
        for partition in wanted:
            if partition in read.errors:
                del current[partition]
            elif partition in read.offsets:
                current[partition] = read.offsets[partition].offset
        return commits_due({one: offset.offset for one, offset in wanted.items()}, current)
