"""What goes into the coordinator of consumer groups and what comes out of it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from logmirror.broker.error_codes import ErrorCode

NO_GENERATION: Final = -1
NO_MEMBER: Final = ""
NO_OFFSET: Final = -1
NO_EPOCH: Final = -1
NO_EXPIRY: Final = -1

GROUP: Final = "group"
GROUP_MEMBER: Final = "group-member"
OFFSET: Final = "offset"
PENDING_OFFSET: Final = "pending-offset"
"""The kinds of durable state."""

Token = object
"""Stands for the request that a delayed response belongs to. The coordinator only keeps it."""


Rows = Callable[[str], Iterable[tuple[bytes, bytes]]]
"""Returns the keys and values of a kind that are durable at the start."""


class Now(NamedTuple):
    """A reading of both clocks."""

    monotonic_ms: int
    """Never steps back; for timeouts."""

    time_ms: int
    """Since 1970; for the age of committed offsets."""


class StateChange(NamedTuple):
    """A new value in the durable state."""

    kind: str
    key: bytes
    value: bytes | None
    """None: the key is removed."""


class State(enum.Enum):
    """The state of a group, by Kafka's names."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    RECONCILING = "Reconciling"
    DEAD = "Dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Limits and timeouts. Names and meaning are Kafka's where it has the setting."""

    initial_rebalance_delay_ms: int = 0
    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    max_members: int = 1_000
    max_groups: int = 20_000
    max_bytes: int = 256 * 1024 * 1024
    """Subscriptions and assignments of all members together."""

    max_offsets: int = 500_000
    """Committed offsets of all groups together, those of open transactions included."""

    offset_metadata_max_bytes: int = 4096
    offsets_retention_ms: int = 7 * 24 * 3600 * 1000
    offsets_check_ms: int = 600_000
    heartbeat_interval_ms: int = 5_000
    """Of members that use the protocol of KIP-848, as is the next one."""

    session_timeout_ms: int = 45_000


class JoinRequest(NamedTuple):
    """A JoinGroup request."""

    group_id: str
    member_id: str
    instance_id: str | None
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    session_timeout_ms: int
    rebalance_timeout_ms: int
    client_id: str
    client_host: str
    new_member_id: str
    """The ID that the member gets if it has none: unique, made by the caller."""

    requires_known_id: bool = True
    """Version 4 or later: a member asks for its ID first (KIP-394)."""

    may_skip_assignment: bool = True
    """Version 9 or later: a returning leader need not assign (KIP-814)."""


class JoinResult(NamedTuple):
    """A JoinGroup response."""

    error: ErrorCode
    member_id: str
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = NO_MEMBER
    skips_assignment: bool = False
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    """Member ID, instance ID and subscription; for the leader only."""


class Identity(NamedTuple):
    """Who a member says it is."""

    group_id: str
    member_id: str
    generation: int
    instance_id: str | None = None
    knows_epochs: bool = True
    """Of a commit: whether its version permits the epoch of a KIP-848 member."""


class SyncRequest(NamedTuple):
    """A SyncGroup request."""

    member: Identity
    protocol_type: str | None
    protocol: str | None
    assignments: dict[str, bytes]


class SyncResult(NamedTuple):
    """A SyncGroup response."""

    error: ErrorCode
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class CommittedOffset(NamedTuple):
    """A committed offset of one partition."""

    topic_id: bytes
    offset: int
    leader_epoch: int
    metadata: str
    commit_ms: int
    expire_ms: int = NO_EXPIRY
    """When it expires, if its request said so (OffsetCommit 2 to 4)."""


Partition = tuple[str, int]
"""Topic name and partition."""


@dataclass(slots=True)
class Effects:
    """What the caller has to do: make the changes durable, then send the responses."""

    changes: list[StateChange] = field(default_factory=list)
    replies: list[tuple[Token, JoinResult | SyncResult]] = field(default_factory=list)


class RefusedError(Exception):
    """A request that a group refuses with Kafka's error code."""

    def __init__(self, code: ErrorCode, reason: str = "") -> None:
        super().__init__(reason or code.name)
        self.code = code
        self.reason = reason
