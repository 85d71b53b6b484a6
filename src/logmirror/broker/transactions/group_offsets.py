"""What transactions need of the coordinator of consumer groups (KIP-98, KIP-447).

Offsets that a transaction commits are pending until it ends: durable, and visible to no group. The
groups keep them, by producer ID.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logmirror.broker.error_codes import ErrorCode
    from logmirror.broker.transactions.transaction import Partition, Row


class PendingOffset(NamedTuple):
    """An offset that a transaction commits."""

    offset: int
    leader_epoch: int
    metadata: str


class Member(NamedTuple):
    """Who commits. The default is a client that does not belong to the group."""

    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


class GroupOffsets(Protocol):
    """The groups' part in a transaction. Methods run on the event loop, and do not wait."""

    def add_pending(
        self,
        producer_id: int,
        group_id: str,
        member: Member,
        offsets: Mapping[Partition, PendingOffset],
    ) -> tuple[ErrorCode, Sequence[Row]]:
        """Add offsets to the producer's transaction.

        Returns:
            An error code if the member may not commit, and the rows to be made durable.
        """

    def end(self, producer_id: int, *, is_commit: bool) -> Sequence[Row]:
        """Commit or drop the producer's pending offsets.

        The outcome is durable already. The rows become durable together with the transaction's
        completion, or this is called again after a restart.
        """
