"""Brokers on one bucket, by a plan or by a seed: where each stops, crashes or meets a fault.

By a plan, the first owner takes over a bucket with some history and works. The second one takes it
over while the first is paused before one of its requests, or after it crashed. Then the first
continues, if it can. In the end a third one finds what there is. By a seed, several owners work,
and turns, work, faults and crashes are drawn. Readers read from every owner at every turn
(`bucket_watch`).
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from kit.runs.bucket_brokers import PARTITIONS, Owner, Sink
from kit.runs.bucket_calls import SHORT, Calls, Happened, Stored
from kit.runs.bucket_clients import Clients
from kit.runs.bucket_inline import one_thread
from kit.runs.bucket_plans import FIRST, HISTORY, WORK, Drawn, Plan
from kit.runs.bucket_watch import Watch
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kit.runs.bucket_plans import Director, Work

_LAST: Final = 99
_OWNERS: Final = 4


class Bucket(Sink):
    """A bucket, and everything that owners have said of it."""

    def __init__(self, before: Bucket | None = None) -> None:
        self.store, self.stored = MemoryStore(), Stored()
        self.watch = Watch(lambda number: self.stored.ends.get(number, 0))
        self.clients = Clients(self, self.is_replaced, self.watch.problems.append)
        self.values = 0
        self.appends: dict[tuple[int, int], set[bytes]] = defaultdict(set)
        self.acks: dict[tuple[int, int], bytes] = {}
        self.starts: dict[int, int] = defaultdict(int)
        self.happened: list[Happened] = []
        self.owners: list[Owner] = []
        self.began: dict[int, int] = {}
        self._seen: dict[tuple[int, int], tuple[object, ...]] = {}
        if before is not None:
            self.store.objects = dict(before.store.objects)
            self.stored, self.values = before.stored.copy(), before.values
            self.appends.update((at, set(values)) for at, values in before.appends.items())
            self.acks, self.starts = dict(before.acks), before.starts.copy()
            before.watch.copy_to(self.watch)

    # What owners say

    def new_value(self) -> bytes:
        self.values += 1
        return b"%08d" % self.values

    def appended(self, number: int, offset: int, value: bytes) -> None:
        self.appends[number, offset].add(value)

    def acked(self, owner: Owner, number: int, offset: int, value: bytes) -> None:
        found = owner.read(number, offset)
        self.watch.acked(owner.number, number, offset, value, found)

    def durable(self, owner: Owner, number: int, offset: int, value: bytes) -> None:
        del owner
        self.acks[number, offset] = value

    def deleting(self, number: int, start: int) -> None:
        self.watch.requested(number, start)

    def deleted(self, number: int, start: int) -> None:
        self.starts[number] = max(self.starts[number], start)

    # Readers

    def read_all(self) -> None:
        """Read from every owner that serves."""
        self.watch.tick()
        for owner in self.owners:
            if owner.is_open:
                for number in range(PARTITIONS):
                    self._read_from(owner, number)

    def _state(self, owner: Owner, number: int) -> tuple[object, ...]:
        """Everything that a read of a partition depends on."""
        objects = frozenset(one for one in self.store.objects if f"/{number}/" in one)
        return (*owner.state(number), objects, self.is_replaced(owner))

    def _read_from(self, owner: Owner, number: int) -> None:
        """Read everything of a partition, if it may have changed since the last time."""
        if self._seen.get((owner.number, number)) == self._state(owner, number):
            return
        found = owner.report(number)
        self._seen[owner.number, number] = self._state(owner, number)
        start, watermark, durable = found[:3]
        began = self.began[owner.number]
        self.watch.reported(
            owner.number,
            number,
            began=began,
            start=start,
            watermark=watermark,
            durable=durable,
            is_flushed=owner.is_flushed[number],
        )
        self.clients.read(owner, number, found, self.watch.now, began)
        if found.records is not None:
            self.watch.read(owner.number, number, found.records, durable=durable)
        is_coming = found.records is None and found.failure is None
        if not self.is_replaced(owner) and not is_coming:
            bounds, why = range(start, watermark), repr(found.failure or "")
            self.watch.served(owner.number, number, bounds, found.records, why)

    def is_replaced(self, owner: Owner) -> bool:
        """Whether another owner has created a fence since."""
        return self.stored.fences[-1:] != [owner.number]


class World:
    """One run.

    Args:
        folder: For working folders, new.
        director: Decides.
        before: The bucket at the beginning.
        works: What each owner does after its start.
        is_flushed: By partition, whether records are flushed before they are acknowledged.
    """

    def __init__(
        self,
        folder: Path,
        director: Director,
        before: Bucket | None = None,
        works: Sequence[Work] = (WORK, WORK),
        is_flushed: tuple[bool, ...] = (True,) * PARTITIONS,
    ) -> None:
        self.bucket, self._folder, self._director = Bucket(before), folder, director
        self._works, self._is_flushed = works, is_flushed
        self._counts: dict[int, int] = defaultdict(int)
        self._crashes: dict[int, str] = {}
        self.problems: list[str] = []

    def _owner(self, number: int, work: Work) -> Owner:
        bucket = self.bucket

        def calls(owner: Owner) -> Calls:
            return Calls(
                bucket.store,
                bucket.stored,
                number,
                lambda kind: self._before(owner, kind),
                lambda kind, what: self._after(owner, kind, what),
                lambda: owner.is_own,
            )

        return Owner(bucket, number, self._folder / str(number), work, calls, self._is_flushed)

    def _note(self, owner: Owner, kind: str, what: str) -> None:
        number = self._counts[owner.number] - 1
        self.bucket.happened.append(Happened(owner.number, number, kind, what))

    def _before(self, owner: Owner, kind: str) -> str:
        owner.pause()
        number = self._counts[owner.number]
        self._counts[owner.number] += 1
        fault, crash = self._director.decided(owner.number, number, kind)
        self._note(owner, kind, fault)
        self._crashes[owner.number] = crash
        if crash == "before":
            self._note(owner, kind, "crashed before")
            owner.crash()
        owner.was_short |= fault == SHORT
        return fault

    def _after(self, owner: Owner, kind: str, what: str) -> None:
        if what:
            self._note(owner, kind, what)
        if self._crashes[owner.number] == "after":
            self._note(owner, kind, "crashed after")
            owner.crash()

    def run(self) -> list[str]:
        """Run the owners, then one that finds everything; return what is wrong."""
        bucket = self.bucket
        with one_thread():
            for number, work in enumerate(self._works, FIRST):
                bucket.owners.append(self._owner(number, work))
            while live := [one for one in bucket.owners if not one.is_over]:
                self._step(self._director.chosen(live, self._counts))
            self._director = Plan()
            last = self._owner(_LAST, (("rest",), ("finish",)))
            bucket.owners.append(last)
            while not last.is_over:
                self._step(last)
        self._judge(last)
        shutil.rmtree(self._folder)
        return self.problems

    def _step(self, owner: Owner) -> None:
        bucket = self.bucket
        bucket.began.setdefault(owner.number, bucket.watch.now)
        owner.proceed()
        bucket.read_all()
        if bucket.watch.problems:
            self.problems += bucket.watch.problems
            bucket.watch.problems.clear()

    def _judge(self, last: Owner) -> None:
        bucket = self.bucket
        for one in bucket.owners:
            if one.failure is not None:
                self.problems.append(f"owner {one.number}: {one.failure!r}")
        if last.end is not None or last.failure is not None:
            self.problems.append(f"the bucket cannot be opened: {last.end!r}")
            return
        self.problems += [*bucket.clients.judge(last), *bucket.watch.problems]
        for number in range(PARTITIONS):
            found = last.report(number)
            copy = found.records or {}
            if found.log_start < bucket.starts[number]:
                self.problems.append(f"partition {number}: deleted records are back")
            truth = {at: value for (which, at), value in bucket.acks.items() if which == number}
            for at, value in copy.items():
                if value in bucket.appends[number, at]:
                    truth.setdefault(at, value)
            self.problems += bucket.watch.judge(number, truth, copy, found.log_start)


def history(folder: Path) -> Bucket:
    """Return a bucket with some history."""
    world = World(folder, Plan(), works=(HISTORY,))
    assert world.run() == []
    return world.bucket


def kinds_of(bucket: Bucket, owner: int) -> list[str]:
    """Return the kinds of an owner's requests, in order, of a run in which nothing happened."""
    return [one.kind for one in bucket.happened if one.owner == owner and not one.what]


def drawn(seed: int, folder: Path, before: Bucket) -> World:
    """Return a run by a seed."""
    director = Drawn(seed)
    works = [director.work() for _ in range(_OWNERS)]
    is_flushed = True, director.chance.random() < 0.5
    return World(folder, director, before, works, is_flushed)
