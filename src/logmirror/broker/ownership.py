"""What a broker responds only while it is the owner.

Another broker may have replaced the owner of a bucket without this one knowing it. What a former
owner refuses for good may be right for the next one. It may also take a request for the repetition
of one that belonged to an earlier transaction. So it makes sure first that it still is the owner.
Otherwise the client gets an error after which it repeats the request:

    response                                            otherwise
    of a coordinator, with a code in `NEEDS_OWNER`      COORDINATOR_NOT_AVAILABLE
    to Produce: a sound batch is refused                KAFKA_STORAGE_ERROR
    to Fetch: an offset is behind the log end           KAFKA_STORAGE_ERROR
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from logmirror.broker.error_codes import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from logmirror.broker.log.group_commit import GroupCommit

    T = TypeVar("T")

_WAIT_S: Final = 5.0
"""How long a coordinator's request waits for the bucket to show who owns it."""

NEEDS_OWNER: Final = frozenset(
    {
        ErrorCode.NONE,
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.UNRELEASED_INSTANCE_ID,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.TRANSACTION_ABORTABLE,
    }
)
"""Codes after which clients do not repeat a request. NONE: what it asks for was done before."""


async def confirmed(commits: GroupCommit, code: ErrorCode) -> ErrorCode:
    """Return the code of a coordinator's response to a request that has changed nothing.

    It is COORDINATOR_NOT_AVAILABLE if only the owner may respond with `code`, and this broker may
    no longer be it.
    """
    if code in NEEDS_OWNER and not await commits.is_owner(_WAIT_S):
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    return code


async def confirm_refusals(
    commits: GroupCommit,
    refused: Collection[T],
    refuse: Callable[[T, ErrorCode], None],
    timeout_s: float,
) -> None:
    """Refuse partitions with KAFKA_STORAGE_ERROR instead, if this broker may not be the owner.

    Args:
        commits: Of the logs.
        refused: Those that only the owner may refuse as they are.
        refuse: Sets the error code of one.
        timeout_s: How long to wait for the bucket.
    """
    if refused and not await commits.is_owner(timeout_s):
        for one in refused:
            refuse(one, ErrorCode.KAFKA_STORAGE_ERROR)
