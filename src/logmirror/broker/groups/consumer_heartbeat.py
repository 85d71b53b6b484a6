"""ConsumerGroupHeartbeat: what a request says, which requests are valid, and the response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.assignors import ASSIGNORS
from logmirror.broker.groups.values import RefusedError

if TYPE_CHECKING:
    from logmirror.broker.groups.assignors import TopicPartition

JOINING: Final = 0
LEAVING: Final = -1
LEAVING_FOR_A_MOMENT: Final = -2
UNCHANGED: Final = -1

MAX_TOPICS: Final = 20_000
"""Limit for the topics that a member subscribes to."""


class ConsumerHeartbeat(NamedTuple):
    """A ConsumerGroupHeartbeat request. None: unchanged since the last one."""

    group_id: str
    member_id: str
    member_epoch: int
    instance_id: str | None
    rack_id: str | None
    rebalance_timeout_ms: int
    topics: tuple[str, ...] | None
    regex: str | None
    """A regular expression for further topics; empty: no longer."""

    matched: frozenset[str]
    """The topics that the member's regular expression matches now and that it may describe."""

    viewer: str
    """Whose permissions decided that; empty: those of everybody."""

    assignor: str | None
    owned: frozenset[TopicPartition] | None
    client_id: str
    client_host: str

    @property
    def is_full(self) -> bool:
        """Whether the member states everything, because it may have missed a response."""
        timeout = self.rebalance_timeout_ms != UNCHANGED
        named = self.topics is not None or self.regex is not None
        return timeout and named and self.owned is not None


class ConsumerResult(NamedTuple):
    """What a ConsumerGroupHeartbeat response says."""

    member_id: str
    member_epoch: int
    assignment: frozenset[TopicPartition] | None = None
    """Everything that the member has now; None: unchanged."""


def check_heartbeat(request: ConsumerHeartbeat) -> None:
    """Check the fields of a request, as Kafka does.

    Raises:
        RefusedError: INVALID_REQUEST or UNSUPPORTED_ASSIGNOR.
    """
    reason = ""
    epoch = request.member_epoch
    if not request.group_id:
        reason = "the group ID must not be empty"
    elif not request.member_id:
        reason = "the member ID must not be empty"
    elif "" in {request.instance_id, request.rack_id, request.assignor}:
        reason = "instance ID, rack ID and assignor must not be empty"
    elif epoch < LEAVING_FOR_A_MOMENT:
        reason = f"member epoch {epoch} is not valid"
    elif epoch == LEAVING_FOR_A_MOMENT and request.instance_id is None:
        reason = "only a static member leaves with epoch -2"
    elif len(request.topics or ()) > MAX_TOPICS:
        reason = f"a member may subscribe to at most {MAX_TOPICS} topics"
    elif epoch == JOINING:
        reason = _join_mistake(request)
    if reason:
        raise RefusedError(ErrorCode.INVALID_REQUEST, reason)
    if epoch >= JOINING and request.assignor not in {None, *ASSIGNORS}:
        known = ", ".join(ASSIGNORS)
        raise RefusedError(ErrorCode.UNSUPPORTED_ASSIGNOR, f"supported assignors: {known}")


def _join_mistake(request: ConsumerHeartbeat) -> str:
    """Return what is wrong with the first heartbeat of a member; empty if nothing is."""
    if request.rebalance_timeout_ms <= 0:
        return "a member that joins must have a rebalance timeout"
    if request.owned is None or request.owned:
        return "a member that joins must own no partitions"
    has_topics = request.topics is not None or request.regex is not None
    return "" if has_topics else "a member that joins must have a subscription"
