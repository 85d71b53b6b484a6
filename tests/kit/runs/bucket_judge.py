"""Compares what owners of a bucket acknowledged and removed with what readers and the last find."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from kit.runs.bucket_watch import Watch
from logmirror.broker.bucket.sealed_objects import object_name

if TYPE_CHECKING:
    from kit.runs.bucket_owners import Owner, World

REMOVED: Final = b"-" * 8
"""What is in the place of a record that a compaction removed."""


class Readers:
    """Reads from every owner that serves: sealed segments from the bucket, the others from memory.

    Args:
        world: The run.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.watch = Watch(
            lambda number: world.stored.ends.get(number, 0), lambda *at: at in world.removing
        )
        self._began: dict[int, int] = {}
        self._seen: dict[tuple[int, int], tuple[object, ...]] = {}

    def read_all(self) -> None:
        """Read, while all owners are paused."""
        self.watch.tick()
        for owner in self._world.turns.owners:
            if owner.thread.is_alive():
                self._began.setdefault(owner.number, self.watch.now)
            if owner.is_open:
                self.read_from(owner)

    def read_from(self, owner: Owner) -> None:
        """Read everything of an owner that may have changed since the last time."""
        is_replaced = self._world.stored.fences[-1:] != [owner.number]
        for number in range(len(owner.parts)):
            facts = owner.starts[number], owner.acked_ends[number], len(owner.parts[number])
            sealed = tuple(owner.sealed[number])
            state = (*facts, sealed, is_replaced, self._world.object_changes)
            if self._seen.get((owner.number, number)) != state:
                self._seen[owner.number, number] = state
                self._read(owner, number, is_replaced=is_replaced)

    def _read(self, owner: Owner, number: int, *, is_replaced: bool) -> None:
        start, end = owner.starts[number], owner.acked_ends[number]
        began = self._began.get(owner.number, self.watch.now)
        self.watch.reported(
            owner.number, number, began=began, start=start, watermark=end, durable=end
        )
        found = {at: one for at, one in self._records(owner, number).items() if start <= at < end}
        self.watch.read(owner.number, number, found, durable=end)
        if not is_replaced:
            self.watch.served(owner.number, number, range(start, end), found, "")

    def _records(self, owner: Owner, number: int) -> dict[int, bytes]:
        found = dict(owner.parts[number])
        folder = owner.folder_of(number)
        for one in owner.sealed[number]:
            data = self._world.store.objects.get(object_name(folder, *one), b"")
            for at in range(one.first, one.next):
                place = (at - one.first) * len(REMOVED)
                found[at] = data[place : place + len(REMOVED)]
                if not found[at]:
                    del found[at]
        return found

    def problems(self, last: Owner) -> list[str]:
        """Return what is wrong."""
        found = list(self.watch.problems)
        for number in range(len(last.parts)):
            found += self.watch.judge(number, {}, {}, last.starts[number])
        return found


class Judge:
    """Judges one run.

    Args:
        world: The run.
        last: The last owner, which has opened the bucket.
    """

    def __init__(self, world: World, last: Owner) -> None:
        self._world, self._last = world, last
        self._found: list[str] = []

    def problems(self) -> list[str]:
        """Return what is wrong."""
        values: list[bytes] = []
        for number in range(len(self._last.parts)):
            found = dict(self._last.parts[number])
            start = self._last.starts[number]
            if len(found) != len(self._last.parts[number]):
                self._found.append(f"partition {number} has an offset twice")
            offsets = sorted(offset for offset in found if offset >= start)
            if offsets != list(range(start, start + len(offsets))):
                self._found.append(f"partition {number} has a gap: {offsets}")
            values += [value for value in found.values() if value != REMOVED]
            for (partition, offset), value in self._world.acked.items():
                if partition == number and offset >= start:
                    self._judge_record((number, offset), value, found.get(offset))
            if start < self._world.starts[number]:
                self._found.append(f"partition {number}: deleted records are back")
        if len(values) != len(set(values)):
            self._found.append("a record is stored twice")
        self._judge_objects()
        self._judge_changes()
        return self._found

    def _judge_record(self, at: tuple[int, int], value: bytes, found: bytes | None) -> None:
        if found == REMOVED and at in self._world.removing:
            return
        if found != value:
            self._found.append(f"acknowledged {at} is {found!r}")
        elif at in self._world.removed:
            self._found.append(f"a record that was removed is back: {at}")

    def _judge_objects(self) -> None:
        """Segments are the same for all owners (K6); merged ones are disjoint or nested (M3)."""
        for one, other in itertools.combinations(sorted(self._world.cut), 2):
            if one[0] == other[0] and other[1] < one[2]:
                self._found.append(f"segments that overlap: {one} and {other}")
        for one, other in itertools.combinations(sorted(self._world.joined), 2):
            if one[0] == other[0] and one[1] < other[1] < one[2] < other[2]:
                self._found.append(f"merged objects that cross: {one} and {other}")

    def _judge_changes(self) -> None:
        changes = [text for _, text in sorted(self._world.changes)]
        missing = [one for one in changes if one not in self._last.changes]
        if missing:
            self._found.append(f"changes are missing: {missing}")
        if [one for one in self._last.changes if one in changes] != changes:
            self._found.append("changes are in another order")
