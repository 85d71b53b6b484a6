"""The judge of translated groups: it knows which record of a replica is which record of the source.

    G1   skip       a position is behind a record of the replica that the group has not read
    G2   rewind     a checkpoint went back, although its group did not, and the replica has it
    G3   moved back a committed offset at the target was lowered
    G4   late       faults are over, and a checkpoint is missing, or further back than it must be
    G5   fenced     a process wrote a checkpoint after another one had taken over and written
    G6   unfounded  a checkpoint of an offset that its group never committed
    A22  stuck      faults are over, and no round succeeds

It shares no code with `groups`. Positions are judged when they become visible to a reader of
uncommitted records, such as MirrorMaker's `RemoteClusterUtils`. What a replica lost while a round
ran is unknown to that round; what it wrote is then judged at the end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.simulation.group_mirror import GAP
from logmirror.testing.checker import Anomaly
from logmirror.wire.batch_header import parse_header
from logmirror.wire.records import decode_reference

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logmirror.model import TopicPartition
    from logmirror.simulation.group_coordinator import Change, Committed
    from logmirror.simulation.group_mirror import MirroredPartition
    from logmirror.simulation.log import Log
    from logmirror.simulation.schedule import Schedule

_VALUE: Final = struct.Struct(">hqq")
_UNKNOWN: Final = -1
"""Generation of a checkpoint whose replica lost records after the translation began."""


class Shown(NamedTuple):
    """One checkpoint, as a reader sees it."""

    group: str
    topic: str
    upstream: int
    downstream: int
    generation: int = 0
    """The generation of the replica when it was written."""


@dataclass(slots=True)
class _Writer:
    """What is known about a process."""

    round_ms: int = -1
    """When its round began."""

    turn: int = 0
    """Its number in the order in which processes have taken over; 0: never."""

    took_ms: int = -1
    """When it last took over."""

    is_blind: bool = False
    """Whether it was refused to read the checkpoints topic since it has taken over."""


class GroupJudge:
    """Judges what links write.

    Args:
        schedule: The scheduler.
        pairs: The partitions.
        target_offsets: The committed offsets at the target, by group.
    """

    def __init__(
        self,
        schedule: Schedule,
        pairs: Iterable[MirroredPartition],
        target_offsets: dict[str, dict[TopicPartition, Committed]],
    ) -> None:
        self._schedule, self._target_offsets = schedule, target_offsets
        self._pairs = {pair.copy.topic: pair for pair in pairs}
        self._history: dict[tuple[str, str], list[int]] = {}
        self._went_back_ms: dict[tuple[str, str], int] = {}
        self._shown: dict[tuple[str, str], Shown] = {}
        self._writers: dict[str, _Writer] = {}
        self._turn = self._written_turn = 0
        self._found: dict[str, list[str]] = {}
        self.checkpoints = self.rewinds = self.commits = 0

    @property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """What was found, by code."""
        return tuple(
            Anomaly(code=code, count=len(found), example=found[0])
            for code, found in sorted(self._found.items())
        )

    def add(self, code: str, example: str) -> None:
        """Add an anomaly."""
        self._schedule.note(f"anomaly {code}: {example}")
        at = f"at {self._schedule.monotonic_ms()} ms: "
        self._found.setdefault(code, []).append(at + example)

    # -- what happens ----------------------------------------------------------------------------

    def committed(self, group: str, pair: MirroredPartition, offset: int) -> None:
        """A group has committed at the source."""
        at = group, pair.copy.topic
        history = self._history.setdefault(at, [])
        if history and offset < history[-1]:
            self._went_back_ms[at] = self._schedule.monotonic_ms()
        history.append(offset)

    def round_began(self, process: str) -> None:
        """A process begins a round."""
        self._writer(process).round_ms = self._schedule.monotonic_ms()

    def took(self, process: str) -> None:
        """A process has fenced the others."""
        self._turn += 1
        writer = self._writer(process)
        writer.turn, writer.is_blind = self._turn, False
        writer.took_ms = self._schedule.monotonic_ms()

    def refused(self, process: str) -> None:
        """A process may not read the checkpoints topic."""
        self._writer(process).is_blind = True

    def is_owner(self, process: str) -> bool:
        """Whether a process is the last one that has taken over."""
        return 0 < self._writer(process).turn == self._turn

    def _writer(self, process: str) -> _Writer:
        return self._writers.setdefault(process, _Writer())

    # -- checkpoints -----------------------------------------------------------------------------

    def appended(self, process: str, data: bytes) -> None:
        """A batch was appended to the checkpoints topic."""
        writer = self._writer(process)
        if writer.turn < self._written_turn:
            self.add("G5", f"{process} wrote after it was fenced")
        self._written_turn = max(self._written_turn, writer.turn)
        for one in _checkpoints(data):
            pair = self._pairs[one.topic]
            self._judge(writer, pair, one)
            was_kept = pair.reset_ms < writer.round_ms
            generation = pair.generation if was_kept else _UNKNOWN
            self._shown[one[:2]] = one._replace(generation=generation)
            self.checkpoints += 1

    def _judge(self, writer: _Writer, pair: MirroredPartition, one: Shown) -> None:
        if one.upstream not in self._history.get(one[:2], ()):
            self.add("G6", f"{one}")
        if not pair.exists or pair.reset_ms >= writer.round_ms:
            return
        if problem := skipped(pair, one.upstream, one.downstream):
            self.add("G1", f"{one}: {problem}")
        before = self._shown.get(one[:2])
        if before is None or one.downstream >= before.downstream:
            return
        self.rewinds += 1
        is_asked = one.upstream < before.upstream
        is_out_of_reach = before.generation != pair.generation
        is_out_of_reach |= before.downstream > pair.lowest_end(writer.round_ms)
        if writer.is_blind:
            offset = self._target_offsets.get(one.group, {}).get(pair.copy)
            is_out_of_reach |= offset is None or one.downstream >= offset.offset
            # It knows no checkpoint, and follows what a group does from then on.
            is_asked |= self._went_back_ms.get(one[:2], -1) >= writer.took_ms
        if not (is_asked or is_out_of_reach):
            self.add("G2", f"{one} after {before}")

    def cleaned(self, log: Log) -> None:
        """The log cleaner has run on the checkpoints topic: read it again."""
        shown: dict[tuple[str, str], Shown] = {}
        for entry in log.entries:
            if not entry.is_control:
                for one in _checkpoints(entry.data):
                    before = self._shown[one[:2]]
                    generation = before.generation if before[:4] == one[:4] else 0
                    shown[one[:2]] = one._replace(generation=generation)
        self._shown = shown

    # -- offsets at the target -------------------------------------------------------------------

    def target_committed(self, change: Change) -> None:
        """A link has committed at the target. What came between its read and this is a race."""
        process, group, partition, before, made, is_raced = change
        self.commits += 1
        if before is not None and made.offset < before.offset and not is_raced:
            self.add("G3", f"{group} of {partition}: {before.offset} to {made.offset}")
        pair = self._pairs[partition.topic]
        if pair.exists and pair.reset_ms < self._writer(process).round_ms:
            highest = max(self._history.get((group, partition.topic), [-1]))
            if problem := skipped(pair, highest, made.offset):
                self.add("G1", f"commit of {group} at {made.offset}: {problem}")

    # -- the end ---------------------------------------------------------------------------------

    def finish(
        self, offsets: dict[str, dict[TopicPartition, Committed]], syncs: Iterable[bytes]
    ) -> None:
        """Judge all checkpoints after the faults.

        Args:
            offsets: The committed offsets at the source, by group.
            syncs: The batches of the topic of offset syncs.
        """
        known = list(_syncs(syncs))
        for group, committed in offsets.items():
            for partition, (upstream, _) in committed.items():
                pair = next(one for one in self._pairs.values() if one.partition == partition)
                mine = [sync[1:] for sync in known if sync[0] == partition.topic]
                if not (mine or pair.keeps):
                    continue  # without a sync, not even a rewind can be translated
                while pair.first_sync in mine:  # those before it are of a replica that is gone
                    mine = mine[mine.index(pair.first_sync) + 1 :]
                self._judge_last(group, pair, upstream, mine)

    def _judge_last(
        self, group: str, pair: MirroredPartition, upstream: int, syncs: list[tuple[int, int]]
    ) -> None:
        one = self._shown.get((group, pair.copy.topic))
        what = f"{group} is at {upstream} of {pair.copy.topic}; {one}"
        if one is None:
            self.add("G4", f"{what}: missing")
            return
        if problem := skipped(pair, upstream, one.downstream):
            self.add("G1", f"{what}: {problem}")
        end = len(pair.replica)
        least = max(min(upstream, end), pair.start) if pair.keeps else _least(pair, upstream, syncs)
        is_late = _next(pair, one.downstream) < _next(pair, least)
        if is_late or (pair.keeps and one.downstream != least):
            self.add("G4", f"{what}: expected {least}, the log is {pair.start}..{end}")


def skipped(pair: MirroredPartition, upstream: int, downstream: int) -> str:
    """Return which record a group skips that continues at `downstream`; empty if none."""
    if downstream > len(pair.replica):
        return f"the replica ends at {len(pair.replica)}"
    for place in range(pair.start, downstream):
        if pair.replica[place] >= upstream:
            return f"the record of {pair.replica[place]} is at {place}"
    return ""


def _least(pair: MirroredPartition, upstream: int, syncs: list[tuple[int, int]]) -> int:
    """Return the position that the syncs of this replica allow: the last one up to the group's."""
    found = pair.start
    for up, down in syncs:
        is_true = down < len(pair.replica) and pair.replica[down] == up != GAP
        if is_true and up <= upstream:
            found = max(found, down + (up < upstream))
    return found


def _next(pair: MirroredPartition, place: int) -> int:
    """Return the place of the next record in the replica."""
    while place < len(pair.replica) and pair.replica[place] == GAP:
        place += 1
    return place


def _syncs(batches: Iterable[bytes]) -> Iterator[tuple[str, int, int]]:
    for data in batches:
        for record in decode_reference(data):
            topic, _ = _text(record.key or b"", 0)
            yield (topic, *struct.unpack_from(">qq", record.value or b""))


def _checkpoints(data: bytes) -> Iterator[Shown]:
    if parse_header(data, 0).is_control:
        return
    for record in decode_reference(data):
        group, at = _text(record.key or b"", 0)
        topic, _ = _text(record.key or b"", at)
        _, upstream, downstream = _VALUE.unpack_from(record.value or b"")
        yield Shown(group, topic, upstream, downstream)


def _text(data: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from(">h", data, at)
    return data[at + 2 : at + 2 + size].decode(), at + 2 + size
