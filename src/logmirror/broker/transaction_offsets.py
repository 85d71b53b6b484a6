"""Offsets that transactions commit: the groups keep them, the transactions decide (KIP-447)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.values import CommittedOffset, Effects, Identity, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logmirror.broker.group_service import GroupService
    from logmirror.broker.topics import Topics
    from logmirror.broker.transactions.group_offsets import Member, PendingOffset
    from logmirror.broker.transactions.transaction import Partition, Row


class TransactionOffsets:
    """The groups' part in transactions; see `transactions.group_offsets.GroupOffsets`.

    Args:
        groups: The groups.
        topics: For the topic IDs of committed offsets.
    """

    def __init__(self, groups: GroupService, topics: Topics) -> None:
        self._groups, self._topics = groups, topics

    def add_pending(
        self,
        producer_id: int,
        group_id: str,
        member: Member,
        offsets: Mapping[Partition, PendingOffset],
    ) -> tuple[ErrorCode, Sequence[Row]]:
        """See `GroupOffsets.add_pending`. Offsets of topics that were deleted are left out."""
        now, out = self._groups.now(), Effects()
        committed = {
            (name, number): CommittedOffset(
                topic_id=self._topics.by_name[name].topic_id.bytes,
                offset=offset.offset,
                leader_epoch=offset.leader_epoch,
                metadata=offset.metadata,
                commit_ms=now.time_ms,
            )
            for (name, number), offset in offsets.items()
            if name in self._topics.by_name
        }
        who = Identity(group_id, member.member_id, member.generation_id, member.group_instance_id)
        try:
            self._groups.coordinator.commit(who, committed, now, out, producer_id=producer_id)
        except RefusedError as refused:
            return refused.code, self._rows(out)
        return ErrorCode.NONE, self._rows(out)

    def end(self, producer_id: int, *, is_commit: bool) -> Sequence[Row]:
        """See `GroupOffsets.end`."""
        out = Effects()
        self._groups.coordinator.end_transaction(producer_id, out, is_committed=is_commit)
        return self._rows(out)

    def _rows(self, out: Effects) -> list[Row]:
        """Return the changes, which the transactions make durable, and perform the rest."""
        rows: list[Row] = [(kind, key, value) for kind, key, value in out.changes]
        out.changes.clear()
        self._groups.perform(out)
        return rows
