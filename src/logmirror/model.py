"""Frozen value types that every layer speaks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal

OFFSET_MAX: Final = 2**63 - 1
"""Largest Kafka offset. Offsets are signed 64-bit on the wire and never negative at rest."""


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One Kafka partition by name."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class OffsetRange:
    """A run of source offsets, both ends included.

    A range covers offsets, it does not count records: compaction and transaction markers leave
    offsets that carry no record, so a batch of 3 records may cover 10 offsets.
    """

    first: int
    """Offset of the first position covered, 0..OFFSET_MAX."""

    last: int
    """Offset of the last position covered, never below `first`."""

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last <= OFFSET_MAX:
            message = f"not an offset range: first={self.first} last={self.last}"
            raise ValueError(message)

    @property
    def next_offset(self) -> int:
        """The first offset after this range: where the next range must begin."""
        return self.last + 1

    @property
    def offset_count(self) -> int:
        """How many offsets the range covers."""
        return self.last - self.first + 1


class GapCause(enum.StrEnum):
    """Why an offset carries no record in a copy (I3)."""

    CONTROL = "control"
    """A transaction marker."""

    ABORTED = "aborted"
    """A record of an aborted transaction."""

    COMPACTED = "compacted"
    """Not in the log that the source served: compacted or deleted there."""

    UNRECORDED = "not-recorded"
    """Any of these: mirror-v3 wrote the object, which keeps no causes. Our own objects never have
    it, but for those that `compact` made of mirror-v3's."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Gap:
    """A run of offsets without records, and why."""

    first: int
    last: int
    cause: GapCause


class Trigger(enum.StrEnum):
    """Why an object ends where it ends (R9)."""

    MAX_OFFSETS = "max-offsets"
    MAX_BYTES = "max-bytes"
    MAX_TIME = "max-time"
    DAILY = "daily"
    EXPLICIT = "explicit"


class TimestampType(enum.IntEnum):
    """Kafka's message.timestamp.type, as its attribute bit and as Spark's `timestampType`."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


ColumnType = Literal["bytes", "utf8", "json", "json-parseable"]
"""What all keys or all values of a topic are. `bytes`: anything. `utf8`: UTF-8 text. `json`: text
that is marked as JSON, and not looked into. `json-parseable`: text that is one JSON value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnTypes:
    """What the keys and the values of a topic are; a null is of every type."""

    key: ColumnType = "bytes"
    value: ColumnType = "bytes"

    @property
    def are_checked(self) -> bool:
        """Whether a record may be refused."""
        return not self.key == self.value == "bytes"
