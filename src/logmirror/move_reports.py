"""What the commands about moves between log directories report: frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class MovedReplica(NamedTuple):
    """A replica that is moved, or was: a partition on a broker."""

    topic: str
    partition: int
    broker: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStatus:
    """A move that is in progress, or failed."""

    replica: MovedReplica

    source: str
    """The log directory in which the replica is. Empty: not known, because it is offline."""

    target: str
    """The log directory of the copy."""

    copied_bytes: int
    """The size of the copy."""

    total_bytes: int
    """The size of the replica."""

    offset_lag: int
    """How many offsets the copy is behind the replica."""

    bytes_per_second: float | None = None
    """How fast the copy has grown. None: there was only one sample."""

    @property
    def fraction(self) -> float:
        """How much is copied, from 0 to 1."""
        return min(1.0, self.copied_bytes / self.total_bytes) if self.total_bytes > 0 else 1.0

    @property
    def eta_s(self) -> float | None:
        """Seconds until everything is copied, at this rate. None: not known."""
        left_bytes = max(0, self.total_bytes - self.copied_bytes)
        if not left_bytes:
            return 0.0
        return left_bytes / self.bytes_per_second if self.bytes_per_second else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSample:
    """The moves at one time."""

    moves: tuple[MoveStatus, ...]
    """Those in progress."""

    ended: tuple[tuple[MovedReplica, str], ...] = ()
    """Those that were in the sample before, and the log directory of each replica. Empty: it is in
    none now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOutcome:
    """The response to the request for one move."""

    replica: MovedReplica

    log_dir: str
    """The log directory that was requested."""

    error: str = ""
    """Kafka's name of the error. Empty: it was accepted."""

    hint: str = ""
    """What to do about the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDirBalance:
    """The bytes of one log directory, before and after a plan."""

    broker: int
    log_dir: str

    before_bytes: int
    """The replicas in it, with those that move there already."""

    after_bytes: int
    """The replicas in it when the plan is carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedMove:
    """A move of a plan."""

    replica: MovedReplica
    source: str
    target: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """Moves that balance the log directories of each broker."""

    moves: tuple[ProposedMove, ...]
    """In the order in which they were chosen. Empty: no move is worth it."""

    log_dirs: tuple[LogDirBalance, ...]
    text: str
    """The plan, as Kafka's `kafka-reassign-partitions` takes it."""
