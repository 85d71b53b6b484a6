"""What is known of the partitions in `placed_logs`: appended, acknowledged, deleted, compacted.

Transactions are worked out a second time here, from the records and markers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from logmirror.wire.batch_header import parse_header
from logmirror.wire.records import decode_reference

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterable, Mapping

PARTITIONS: Final = 2
PLAIN: Final = 7
"""The producer of plain batches."""

TRANSACTIONAL: Final = 8
"""That of transactions."""

COORDINATOR_EPOCH: Final = 3
COMMIT: Final = b"commit"
ABORT: Final = b"abort"
BATCH: Final = 2
"""Records in a batch."""

_MARKER_TYPE_AT: Final = 69


class Entry(NamedTuple):
    """A record, or a marker, which has no sequence."""

    producer: int
    sequence: int
    key: bytes | None
    value: bytes

    @property
    def is_marker(self) -> bool:
        """Whether it ends a transaction."""
        return self.sequence < 0


class Found(NamedTuple):
    """What files of a log hold."""

    entries: dict[int, Entry]
    covered: list[int]
    """The offsets of all batches, also of what compaction has removed."""

    @classmethod
    def of(cls, files: Iterable[bytes]) -> Self:
        """Read files, in order."""
        found = cls({}, [])
        for data in files:
            position = 0
            while position < len(data):
                header = parse_header(data, position)
                batch = data[position : position + header.size_bytes]
                first, position = header.base_offset, position + header.size_bytes
                found.covered.extend(range(first, header.last_offset + 1))
                if header.is_control:
                    outcome = COMMIT if batch[_MARKER_TYPE_AT] else ABORT
                    found.entries[first] = Entry(header.producer_id, -1, None, outcome)
                    continue
                for one in decode_reference(batch):
                    sequence = header.base_sequence + one.offset - first
                    entry = Entry(header.producer_id, sequence, one.key, one.value or b"")
                    found.entries[one.offset] = entry
        return found


class Transactions:
    """The transactions in a log, from its start to its end.

    Args:
        history: What has ever been in the log, by offset.
        watermark: The high watermark.

    Attributes:
        open: The first offset of each transaction that is in progress, by producer.
        undecided: The first offsets of all that have no marker before the watermark.
        aborted: Producer, first offset and marker of each.
        hidden: The offsets of their records.
    """

    def __init__(self, history: Mapping[int, Entry], watermark: int) -> None:
        begun: dict[int, list[int]] = {}
        self.undecided: list[int] = []
        self.aborted: list[tuple[int, int, int]] = []
        self.hidden: set[int] = set()
        for offset, entry in sorted(history.items()):
            if not entry.is_marker:
                if entry.producer == TRANSACTIONAL:
                    begun.setdefault(entry.producer, []).append(offset)
                continue
            offsets = begun.pop(entry.producer, [])
            if offsets and offset >= watermark:
                self.undecided.append(offsets[0])
            if offsets and entry.value == ABORT:
                self.aborted.append((entry.producer, offsets[0], offset))
                self.hidden.update(offsets)
        self.open = {producer: offsets[0] for producer, offsets in begun.items()}
        self.undecided += self.open.values()


@dataclass
class Known:
    """What is known of a partition."""

    generation: int = 0
    """Of the topic. It is in each value."""

    acked: dict[int, Entry] = field(default_factory=dict)
    """What must be there, by offset, unless it was deleted or compacted."""

    appended: dict[int, set[Entry]] = field(default_factory=dict)
    """What may be there, too."""

    sequences: dict[int, int] = field(default_factory=dict)
    """The next one, by producer."""

    deleted: int = 0
    """The log start that was acknowledged."""

    deleting: int = 0
    """The highest one that was requested."""

    compacting: int = 0
    """Passes may have removed records before this offset."""

    removed: dict[int, str] = field(default_factory=dict)
    """What a pass that has ended, or is durable, has removed, and where that was seen: it must not
    come back."""

    def history(self, end: int) -> dict[int, Entry]:
        """Return what was ever appended, up to an offset."""
        made = {offset: next(iter(some)) for offset, some in self.appended.items() if offset < end}
        return made | {offset: entry for offset, entry in self.acked.items() if offset < end}

    def next_sequence(self, producer: int) -> int:
        """Return the sequence of a producer's next batch, and count it."""
        found = self.sequences.get(producer, 0)
        self.sequences[producer] = found + BATCH
        return found


@dataclass
class KnownTopic:
    """What is known of the topic, which is deleted and created again.

    Attributes:
        partitions: Of the topic that exists.
        topic_id: None: not known.
        is_creating: A creation was requested, and not acknowledged.
        is_deleting: The same of the deletion of the topic with this ID.
        gone: The IDs of those whose deletion was acknowledged.
        generation: The number of topics so far.
    """

    partitions: list[Known] = field(default_factory=lambda: [Known() for _ in range(PARTITIONS)])
    topic_id: uuid.UUID | None = None
    is_creating: bool = False
    is_deleting: bool = False
    gone: set[uuid.UUID] = field(default_factory=set)
    generation: int = 0

    def creating(self) -> None:
        """Note that a topic without records is being created; the one before is gone."""
        self.generation += 1
        self.partitions = [Known(self.generation) for _ in range(PARTITIONS)]
        self.topic_id, self.is_creating, self.is_deleting = None, True, False

    def created(self, topic_id: uuid.UUID) -> None:
        """Note that it was."""
        self.topic_id, self.is_creating = topic_id, False

    def deleted(self) -> None:
        """Note that the deletion was acknowledged."""
        assert self.topic_id is not None
        self.gone.add(self.topic_id)

    def judge(self, found: uuid.UUID | None) -> list[str]:
        """Compare the ID of the topic that a start has found; None: it has found none."""
        if found in self.gone:
            return ["a deleted topic came back"]
        if found is None:
            is_lost = self.topic_id is not None and not self.is_deleting
            return ["the topic is lost"] if is_lost and self.topic_id not in self.gone else []
        if self.topic_id is None and self.is_creating:
            self.created(found)
        if found != self.topic_id:
            return ["the topic has another ID"]
        self.is_deleting = False  # it has not happened
        return []
