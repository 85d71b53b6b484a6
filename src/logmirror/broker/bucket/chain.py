"""The rules of the chain of commit objects of one log dir. Takes values, does no I/O.

- K1 Sequence numbers have no gap. Objects are removed from the oldest on, never the newest.
- K2 An object is created and never replaced, so a number is given to one writer only.
- K3 An owner begins with a fence, whose epoch is higher than every earlier one. The number of the
  fence is the one that the former owner would take next, so its next commit cannot be created. A
  fence is never removed, or an owner that was paused for long could create that number. If another
  one has the number that seemed to be next, the fence is created behind it. Each epoch begins with
  a number of its own, so none is higher than its number + 1: such a fence has this epoch, and what
  is before it need not be read.
- K4 An owner that begins checks that nothing is behind its fence: it may have been paused while the
  end of the chain moved on and the number, which it had read as the next one, was removed. Such a
  fence counts for nothing. So numbers decide which entries count, and epochs are only reported.
- K5 A commit is removed only when nothing of it is needed (`Coverage`): its records are in sealed
  objects, its changes in a snapshot of a later commit, or their topic is gone. That never becomes
  untrue, and no number is used again: a paused former owner that removes such objects late does no
  harm.
- K6 The cut of a segment is in the chain before its object is created. So each owner creates the
  same objects with the same bytes, and a paused former owner cannot create another one.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.bucket.commit_format import Kind
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logmirror.broker.bucket.commit_format import Entry

COMMITS: Final = ".logmirror/broker/commits"
PRODUCERS: Final = ".logmirror/broker/producers"
_DIGITS: Final = 20
MOST_BYTES: Final = 512 * 1024 * 1024
"""Bytes in commits that a start reads at most, plus what is in a few seconds."""

CHECK_MS: Final = 5_000
"""How often an idle owner lists the end of the chain."""

HEARTBEAT_MS: Final = 2_000
"""How often an owner writes a heartbeat: Kafka's `broker.heartbeat.interval.ms`."""

MOST_WALKED: Final = 20_000
"""Old commits that are searched for what holds them, each second. Beyond, more are there only while
a partition that is offline holds the oldest one."""

SNAPSHOT_COMMITS: Final = 500
"""A snapshot is repeated after so many commits; of a large database after more."""

SNAPSHOT_BYTES: Final = 64 * 1024 * 1024
"""Or after so many bytes and four times its own."""

_SNAPSHOT_BYTES_PER_COMMIT: Final = 8 * 1024

Key = tuple[bytes, int]
"""Topic ID and partition; in the place of the topic ID the ID of a residence (`residences`)."""


def commit_name(sequence: int) -> str:
    """Return the name of a commit object."""
    return f"{COMMITS}/{sequence:0{_DIGITS}d}"


def sequence_of(name: str) -> int | None:
    """Return the sequence number in a name without its folder; None: it is not a commit's."""
    return int(name) if len(name) == _DIGITS and name.isdecimal() else None


def needed(sequences: Sequence[int], is_fence: Callable[[int], bool]) -> Sequence[int]:
    """Return the objects that may be needed, which have no gap (K1).

    Args:
        sequences: Those that exist.
        is_fence: Whether one of them is a fence, which stays when those around it are removed.

    Raises:
        CorruptionError: An object is missing.
    """
    start = 0
    for number, (before, after) in enumerate(itertools.pairwise(sequences), 1):
        if after == before + 1:
            continue
        start = number
        if not is_fence(before):
            raise CorruptionError(
                "commit objects are missing",
                hint="acknowledged records may be in them; restore them, for example from an "
                "earlier version of the bucket",
                first=before + 1,
                last=after - 1,
            )
    return sequences[start:]


class _Needs(NamedTuple):
    """What must be elsewhere before a commit can be removed."""

    sequence: int
    at_ms: int
    ends: dict[Key, int]
    names: set[str]
    is_fence: bool
    before_bytes: int
    """Bytes in all commits before it."""


class _Snapshot(NamedTuple):
    """The last snapshot of a database, or what is before its first change."""

    sequence: int
    size_bytes: int
    end_bytes: int
    """Bytes in all commits up to it."""


class Held(NamedTuple):
    """What keeps old commits from being removed."""

    ends: dict[Key, int]
    """Partitions, with offsets before which they must be sealed."""

    names: set[str]
    """Databases that need a snapshot."""


class Coverage:
    """Which commits are still needed (K5). Not safe to call from several threads."""

    def __init__(self) -> None:
        self._commits: deque[_Needs] = deque()
        self._ends: dict[Key, int] = {}
        self._gone: set[bytes] = set()
        self._left: set[Key] = set()
        self._snapshots: dict[str, _Snapshot] = {}
        self._newest, self._total_bytes = -1, 0

    def __len__(self) -> int:
        return len(self._commits)

    @property
    def oldest(self) -> int:
        """The oldest commit that is needed."""
        return self._commits[0].sequence if self._commits else 0

    def since_snapshot(self) -> dict[str, int]:
        """Return how many commits are behind the last snapshot of each database in the chain."""
        return {name: self._newest - one.sequence for name, one in self._snapshots.items()}

    def add(
        self, sequence: int, entries: Iterable[Entry], at_ms: int, *, is_fence: bool = False
    ) -> None:
        """Add the next commit of the chain."""
        ends, names = dict[tuple[bytes, int], int](), set[str]()
        before_bytes = self._total_bytes
        for entry in entries:
            self._total_bytes += len(entry.body)
            if entry.kind in {Kind.CHANGE, Kind.SNAPSHOT}:
                names.add(entry.name)
                known = self._snapshots.get(entry.name)
                if entry.kind == Kind.SNAPSHOT:
                    found = _Snapshot(sequence, len(entry.body), self._total_bytes)
                    self._snapshots[entry.name] = found
                elif known is None:
                    self._snapshots[entry.name] = _Snapshot(sequence - 1, 0, before_bytes)
            elif entry.kind not in {Kind.FENCE, Kind.MERGED}:
                key = entry.id, entry.partition
                ends[key] = max(ends.get(key, 0), entry.next)
        self._newest = sequence
        self._commits.append(_Needs(sequence, at_ms, ends, names, is_fence, before_bytes))

    def covered(self, key: Key, end: int) -> None:
        """Record that everything of a partition before an offset is in objects, or deleted."""
        self._ends[key] = max(end, self._ends.get(key, 0))

    def end(self, key: Key) -> int:
        """Return the highest offset of `covered`."""
        return self._ends.get(key, 0)

    def gone(self, topic_id: bytes) -> None:
        """Record that a topic is deleted."""
        self._gone.add(topic_id)

    def left(self, key: Key) -> None:
        """Record that a partition is not in the bucket any more."""
        self._left.add(key)

    def take_removable(self) -> list[int]:
        """Return the commits that can be removed now, oldest first, and forget them."""
        found = []
        while len(self._commits) > 1 and not self._missing(self._commits[0]):
            commit = self._commits.popleft()
            if not commit.is_fence:  # K3
                found.append(commit.sequence)
        return found

    def _missing(self, commit: _Needs) -> bool:
        if any(self._is_latest(name, commit) for name in commit.names):
            return True
        return any(self._is_missing(key, end) for key, end in commit.ends.items())

    def _is_latest(self, name: str, commit: _Needs) -> bool:
        """Whether a database's changes in a commit are in no later snapshot."""
        return self._snapshots[name].sequence <= commit.sequence

    def _is_missing(self, key: Key, end: int) -> bool:
        is_here = key[0] not in self._gone and key not in self._left
        return is_here and self._ends.get(key, 0) < end

    def holding(self, before_ms: int, most: int, most_bytes: int = MOST_BYTES) -> Held:
        """Return what holds old commits, the oldest ones first (`MOST_WALKED`).

        A snapshot keeps all commits behind it, and costs no request, so it is repeated long before
        the segments of quiet partitions are sealed, each of which costs two.

        Args:
            before_ms: Commits made before this time are old.
            most: So many commits may stay; older ones are old too.
            most_bytes: The same for their bytes.
        """
        excess = len(self._commits) - most
        held = Held({}, {name for name in self._snapshots if self._is_snapshot_due(name)})
        for number, commit in enumerate(itertools.islice(self._commits, MOST_WALKED)):
            is_small = self._total_bytes - commit.before_bytes <= most_bytes
            if commit.at_ms >= before_ms and number >= excess and is_small:
                break
            held.names.update(name for name in commit.names if self._is_latest(name, commit))
            for key, end in commit.ends.items():
                if self._is_missing(key, end):
                    held.ends[key] = max(end, held.ends.get(key, 0))
        return held

    def _is_snapshot_due(self, name: str) -> bool:
        last = self._snapshots[name]
        commits, size_bytes = self._newest - last.sequence, self._total_bytes - last.end_bytes
        return (
            commits > max(SNAPSHOT_COMMITS, last.size_bytes // _SNAPSHOT_BYTES_PER_COMMIT)
            or size_bytes > SNAPSHOT_BYTES + 4 * last.size_bytes
        )
