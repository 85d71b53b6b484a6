"""Frozen value types that all layers share."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

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

    Offsets are not records: compaction and transaction markers leave offset gaps, so a batch of 3
    records may cover 10 offsets.
    """

    first: int
    """The first offset covered, 0..OFFSET_MAX."""

    last: int
    """The last offset covered, first..OFFSET_MAX."""

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last <= OFFSET_MAX:
            message = f"not an offset range: first={self.first} last={self.last}"
            raise ValueError(message)

    @property
    def next_offset(self) -> int:
        """The first offset after this range, at which the next range must begin."""
        return self.last + 1

    @property
    def offset_count(self) -> int:
        """The number of offsets covered, at least 1."""
        return self.last - self.first + 1


class EpochEnd(NamedTuple):
    """Where a leader epoch ends in a log (KIP-320)."""

    leader_epoch: int
    """The epoch that was asked for, or the largest one below it that the log has."""

    end_offset: int
    """The start of the next epoch; the log end offset if there is none."""


class GapCause(enum.StrEnum):
    """Why an offset has no record (I3)."""

    CONTROL = "control"
    """A transaction marker."""

    ABORTED = "aborted"
    """A record of an aborted transaction."""

    COMPACTED = "compacted"
    """A record that the source's log no longer has: compacted or deleted there."""

    UNRECORDED = "not-recorded"
    """Any of these. mirror-v3 records no causes. logmirror's own objects never have this cause,
    except for those that `compact` merged from mirror-v3's."""


class Decided(NamedTuple):
    """How the transactions ended that are open at the end of a native object."""

    last: int
    """The last offset of that object, as it was copied."""

    aborted: tuple[int, ...]
    """Producer IDs of those that were aborted."""

    committed: tuple[int, ...]
    """Producer IDs of those that were committed."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Gap:
    """A run of offsets without records, `first` and `last` included, and its cause."""

    first: int
    last: int
    cause: GapCause


class Trigger(enum.StrEnum):
    """What ended an object (R9)."""

    MAX_OFFSETS = "max-offsets"
    MAX_BYTES = "max-bytes"
    MAX_TIME = "max-time"
    DAILY = "daily"
    EXPLICIT = "explicit"
    """A shutdown, or `--until-now`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest record and the largest batch that are unpacked, in bytes.

    Brokers limit batches as they were compressed. A batch of a few kilobytes may unpack to
    gigabytes.
    """

    max_record_bytes: int = 256 << 20
    """One record: key, value, headers and their lengths."""

    max_batch_unpacked_bytes: int = 256 << 20
    """The records of one compressed batch, decompressed."""


class TimestampType(enum.IntEnum):
    """Kafka's `message.timestamp.type`, with the values of the attribute bit and of Spark."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


ColumnType = Literal["bytes", "utf8", "json", "json-parseable"]
"""The type of all keys or all values of a topic. `bytes`: any bytes. `utf8`: UTF-8 text. `json`:
text declared as JSON, not parsed. `json-parseable`: text that is one JSON value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnTypes:
    """The types of the keys and values of a topic. A null matches every type."""

    key: ColumnType = "bytes"
    value: ColumnType = "bytes"

    @property
    def are_checked(self) -> bool:
        """Whether records must be checked: whether any type but `bytes` is required."""
        return not self.key == self.value == "bytes"
