"""Owners of one bucket in turns that a seed draws, each step of which may fail, be late, or be the
last one. The chain, the journal, the recovery and the objects are the product's own code.

An owner keeps records of `PARTITIONS` partitions in memory, commits, seals, merges, compacts and
deletes them. What a compaction removes is drawn, too. The judge compares what was acknowledged, and
not removed, with what a last owner finds: what was removed must not come back either. Readers read
from each owner at every turn. Crashes and faults are drawn here; `bucket_plans` enumerates them.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from kit.runs.bucket_calls import Crashed, Stored
from kit.runs.bucket_judge import REMOVED, Judge, Readers
from kit.runs.bucket_turns import OwnStore, Turns
from logmirror.archive.chain import ArchiveObject
from logmirror.archive.cover import cells
from logmirror.broker.bucket import bundles
from logmirror.broker.bucket.chain import commit_name
from logmirror.broker.bucket.commit_format import Entry, Kind, of_database
from logmirror.broker.bucket.journal import Journal, Submission
from logmirror.broker.bucket.recovery import take_over
from logmirror.broker.bucket.sealed_objects import (
    create_object,
    folder_of,
    object_name,
    sealed_objects,
    upload,
)
from logmirror.broker.place_rows import Compacted
from logmirror.errors import FencedError, LogmirrorError, OutcomeUnknownError, UnavailableError
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logmirror.broker.bucket.commit_format import Commit

PARTITIONS: Final = 2
TOPIC: Final = uuid.UUID(int=7)
_RECORD: Final = len(REMOVED)
STEPS: Final = 60
_BUSY: Final = 0.7
"""How often another one creates a commit object before each fence that an owner tries to create."""

_STARTS_AFTER: Final = 8
"""In a busy bucket, so many commit objects are between the starts of two owners."""


class Owner:
    """A broker on the bucket, reduced to what it does to the bucket."""

    def __init__(self, world: World, number: int, spool: Path) -> None:
        self.world, self.number = world, number
        self.turn = threading.Semaphore(0)
        self.is_over = False
        self.waits_for: Callable[[], bool] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self._spool = spool
        self._chance = world.turns.chance
        self.store: Any = OwnStore(self, world.store)
        self.end: BaseException | None = None
        self.failure: BaseException | None = None
        self.ends = [0] * PARTITIONS
        self.acked_ends = [0] * PARTITIONS
        self.is_open = False
        self.parts: list[list[tuple[int, bytes]]] = [[] for _ in range(PARTITIONS)]
        self.firsts = [0] * PARTITIONS
        self.starts = [0] * PARTITIONS
        self.sealed: list[list[Compacted]] = [[] for _ in range(PARTITIONS)]
        self.rows: list[list[Compacted]] = [[] for _ in range(PARTITIONS)]

    def before_commit_object(self) -> None:
        world = self.world
        if world.is_busy and not self.is_open and self._chance.random() < _BUSY:
            before = world.created
            world.turns.wait_until(self, lambda: world.created > before)

    def before_request(self) -> str:
        self.world.turns.wait(self)
        if self._chance.random() < self.world.crash_rate:
            raise Crashed
        return self._chance.choices(["", "before", "after"], [8, 1, 1])[0]

    def after_request(self) -> None:
        if self._chance.random() < self.world.crash_rate:
            raise Crashed

    def _run(self) -> None:
        self.turn.acquire()
        world = self.world
        try:
            if world.is_busy:
                world.turns.wait_until(self, lambda: world.created >= _STARTS_AFTER * self.number)
            self._live()
        except (Crashed, FencedError) as end:
            self.end = end
        except BaseException as error:  # noqa: BLE001  # reported by the judge
            self.failure = error
        finally:
            self.is_over, self.is_open = True, False
            self.world.turns.end()

    def _until_done(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except FencedError:
                raise
            except (UnavailableError, OutcomeUnknownError):
                continue

    def open(self) -> None:
        """Take the bucket over and read it."""
        writer = b"%08d" % self.number
        owner, found = self._until_done(lambda: take_over(self.store, writer, self._spool))
        self.owner = owner
        self.journal = Journal(owner, found.coverage, interval_ms=0)
        self.journal.pause = lambda _: None
        self.bundler = bundles.Bundler(least=2, most=3)
        for one in found.bundles:
            self.bundler.exists(one)
        self.due: list[tuple[bundles.Bundle, bytes]] = []
        self.journal.when_created = self._bundle
        if self.world.bug == "bundled early":
            create = owner.create

            def bundle_and_create(data: bytes) -> int:
                self._bundle(owner.next_sequence, data)
                self._bundle_due()
                return create(data)

            owner.create = bundle_and_create  # type: ignore[method-assign]  # the planted bug
            self.journal.when_created = lambda *_: None
        self.changes = list(found.databases["broker"].changes)
        if found.databases["broker"].snapshot:
            self.changes = found.databases["broker"].snapshot.split(b",") + self.changes
        for one in self.changes:
            kind, _, rest = one.partition(b":")
            if kind == b"start":
                number, start = map(int, rest.split(b":"))
                self.starts[number] = max(self.starts[number], start)
            elif kind == b"row":
                self._count(rest.decode())
        for number in range(PARTITIONS):
            self._open_partition(number, found)
        self.acked_ends = list(self.ends)
        self.is_open = True

    def _count(self, text: str) -> None:
        """Apply a row, as `MetadataStore.add_compacted` does."""
        number, first, end, version = text.split(":")
        new, rows = Compacted(int(first), int(end), version), self.rows[int(number)]
        rows[:] = [one for one in rows if one.next <= new.first or one.first >= new.next]
        rows.append(new)
        rows.sort()

    def _open_partition(self, number: int, found: Any) -> None:
        folder = folder_of("t", TOPIC, number)
        objects, stretches = self._until_done(lambda: self._listed(number, folder, found))
        end = objects[-1].next if objects else None
        for one in objects:
            segment = Compacted(one.first, one.next, one.version)
            self._remember(number, one.first, self._fetched(folder, segment))
            self.sealed[number].append(segment)
        self.ends[number] = max(end or 0, self.starts[number])
        for stretch in stretches:
            bodies = []
            for piece in stretch.pieces:
                whole = piece.file.read_bytes()
                bodies.append(whole[piece.position : piece.position + piece.size_bytes])
            self._remember(number, stretch.first, b"".join(bodies))
            self.ends[number] = stretch.pieces[-1].next
            if stretch.next is not None:
                self._upload(number, stretch.first, stretch.next)
        self.journal.coverage.covered((TOPIC.bytes, number), end or 0)
        self.firsts[number] = self.ends[number]
        last = stretches[-1] if stretches else None
        if last is not None and last.next is None:
            self.firsts[number] = last.first

    def _listed(self, number: int, folder: str, found: Any) -> tuple[Any, Any]:
        with self.owner.opening():
            sizes = self.store.sizes(folder)
            objects, _ = sealed_objects(sizes, folder, self.starts[number], self.rows[number])
            end = objects[-1].next if objects else None
            start = self.starts[number]
            found = found.tails[TOPIC.bytes, number].stretches(end, start)
            return objects, [one for one in found if not one.is_before(start)]

    def _remember(self, number: int, first: int, body: bytes) -> None:
        for at in range(0, len(body), _RECORD):
            self.parts[number].append((first + at // _RECORD, body[at : at + _RECORD]))

    def folder_of(self, number: int) -> str:
        """The folder of a partition's objects."""
        return folder_of("t", TOPIC, number)

    def _body(self, number: int, first: int, after: int) -> bytes:
        return b"".join(value for offset, value in self.parts[number] if first <= offset < after)

    def _live(self) -> None:
        self.open()
        for _ in range(STEPS):
            kind = self._chance.choices(
                ["commit", "seal", "change", "snapshot", "delete", "merge", "read", "compact"],
                [10, 3, 2, 1, 1, 2, 2, 2 * self.world.is_compacted],
            )[0]
            getattr(self, f"_{kind}")()

    def _commit_all(self, entries: list[Entry]) -> int:
        outcome: list[tuple[int, BaseException | None]] = []
        self.journal.submit(Submission(0, lambda: entries, lambda *found: outcome.append(found)))
        self.journal.commit()
        [(sequence, error)] = outcome
        if error is not None:
            raise error
        return sequence

    def _commit(self, cut: int | None = None) -> None:
        entries, acks = list[Entry](), []
        for number in range(PARTITIONS):
            count = self._chance.randint(0, 3)
            first = self.ends[number]
            values = [self.world.new_value() for _ in range(count)]
            if values:
                body = b"".join(values)
                entries.append(Entry(Kind.DATA, TOPIC.bytes, number, first, first + count, body))
                self._remember(number, first, body)
                self.ends[number] += count
                acks += [(number, first + at, value) for at, value in enumerate(values)]
            if number == cut and self.firsts[number] < self.ends[number]:
                bounds = self.firsts[number], self.ends[number]
                entries.append(Entry(Kind.CUT, TOPIC.bytes, number, *bounds))
        if self.world.bug == "cut late":
            entries = [entry for entry in entries if entry.kind != Kind.CUT]
        if self.world.bug == "reported early":
            self.acked_ends = list(self.ends)
        self._commit_all(entries)
        self._bundle_due()
        for number, offset, value in acks:
            self.world.acked[number, offset] = value
        self.acked_ends = list(self.ends)

    def _seal(self) -> None:
        number = self._chance.randrange(PARTITIONS)
        self._commit(cut=number)
        first, end = self.firsts[number], self.ends[number]
        if first < end:
            self._upload(number, first, end)
            self.firsts[number] = end
            self._remove()

    def _upload(self, number: int, first: int, end: int) -> None:
        folder, body = folder_of("t", TOPIC, number), self._body(number, first, end)
        self.world.cut.add((number, first, end))
        self._until_done(lambda: upload(self.store, folder, first, end, [body], b"state"))
        self.sealed[number].append(Compacted(first, end, ""))
        self.journal.coverage.covered((TOPIC.bytes, number), end)

    def _remove(self) -> None:
        for sequence in self.journal.coverage.take_removable():
            self._until_done(lambda s=sequence: self.store.delete(commit_name(s)))
        for bundle in self.bundler.take_deletable(self.journal.coverage.oldest):
            self._until_done(lambda b=bundle: self.store.delete(b.name))

    def _bundle(self, sequence: int, data: bytes) -> None:
        due = self.bundler.add(sequence, data)
        if due is not None:
            self.due.append(due)

    def _bundle_due(self) -> None:
        due, self.due = self.due, []
        for bundle, data in due:
            self._until_done(lambda b=bundle, d=data: bundles.create(self.store, b, d))
            self.bundler.exists(bundle)

    def _merge(self) -> None:
        number = self._chance.randrange(PARTITIONS)
        folder, held = folder_of("t", TOPIC, number), self.sealed[number]
        compacted = [at for at, one in enumerate(held) if one.version]
        behind = held[compacted[-1] + 1 :] if compacted else held
        if self.world.bug == "merged over":
            behind = held
        named = [ArchiveObject("", one.first, one.next - 1) for one in behind]
        if self.world.bug == "merged anywhere":
            at = self._chance.randrange(len(named) + 1)
            found = [tuple(named[at : at + 3])] if len(named[at : at + 3]) > 1 else []
        else:
            sizes = [one.next - one.first for one in behind]
            found = cells(named, sizes, target_bytes=60, min_objects=2) if named else []
            if compacted and found and found[0][0] == named[0]:
                del found[0]  # its cell may begin before
        if not found:
            return
        first, end = found[0][0].first, found[0][-1].last + 1
        new = Compacted(first, end, "")
        old = [one for one in held if first <= one.first < end]
        body = self._body(number, first, end)
        if not self.world.starts[number]:
            self.world.joined.add((number, first, end))
        steps: list[Callable[[], object]] = [
            lambda: self._until_done(lambda: create_object(self.store, folder, first, end, [body])),
            lambda: self._commit_all([Entry(Kind.MERGED, TOPIC.bytes, number, first, end)]),
            lambda: self._replace(number, old, new),
        ]
        if self.world.bug == "merged without a commit":
            del steps[1]
        if self.world.bug == "deleted first":
            steps.reverse()
        for step in steps:
            step()
        self.world.merged += 1

    def _compact(self) -> None:
        number = self._chance.randrange(PARTITIONS)
        folder, held, bug = folder_of("t", TOPIC, number), self.sealed[number], self.world.bug
        at, count = self._chance.randrange(len(held) + 1), self._chance.randint(1, 3)
        old = held[at : at + count]
        if not old:
            return
        first, end = old[0].first, old[-1].next
        gone = {n for n in range(first, end) if self._chance.random() < 0.3}
        version = "" if bug == "compacted under the same name" else self.world.new_version()
        new = Compacted(first, end, version)
        kept = [
            (offset, REMOVED if offset in gone else value) for offset, value in self.parts[number]
        ]
        body = b"".join(value for offset, value in kept if first <= offset < end)
        self.world.removing |= {(number, offset) for offset in gone}
        row = b"row:%d:%d:%d:%s" % (number, first, end, version.encode())
        steps: list[Callable[[], object]] = [
            lambda: self._until_done(
                lambda: create_object(self.store, folder, first, end, [body], version=version)
            ),
            lambda: self._change(row),
            lambda: self._replace(number, old, new),
        ]
        if bug == "row first":
            steps[0], steps[1] = steps[1], steps[0]
        if bug == "row last":
            steps[1], steps[2] = steps[2], steps[1]
        if bug == "no row":
            del steps[1]
        for step in steps:
            step()
        self.world.removed |= {(number, offset) for offset in gone}
        self.world.compacted += 1
        self._count(row.partition(b":")[2].decode())
        self.parts[number] = kept

    def _replace(self, number: int, old: list[Compacted], new: Compacted) -> None:
        """Switch the log over, then delete the objects of the old segments."""
        if self.world.bug == "switched late":
            self._delete_all(self.folder_of(number), old)
        kept = [one for one in self.sealed[number] if one not in old]
        self.sealed[number] = sorted([*kept, new])
        self._delete_all(self.folder_of(number), old)

    def _delete_all(self, folder: str, old: list[Compacted]) -> None:
        for one in old:
            self._until_done(lambda o=one: self.store.delete(object_name(folder, *o)))

    def _read(self) -> None:
        """Read a sealed object, as a consumer of old records does."""
        number = self._chance.randrange(PARTITIONS)
        if self.sealed[number]:
            self._fetched(folder_of("t", TOPIC, number), self._chance.choice(self.sealed[number]))

    def _fetched(self, folder: str, segment: Compacted) -> bytes:
        name = object_name(folder, *segment)
        try:
            return bytes(self._until_done(lambda: self.store.read(name)))
        except KeyError:
            self._until_done(self.owner.check)  # a later owner may have deleted it
            raise

    def _change(self, text: bytes | None = None) -> None:
        text = text or b"c%d" % self.world.next_change()
        sequence = self._commit_all([of_database(Kind.CHANGE, "broker", text)])
        self.changes.append(text)
        self.world.changes.append((sequence, text))

    def _snapshot(self) -> None:
        if self.changes:
            whole = b",".join(self.changes)
            self._commit_all([of_database(Kind.SNAPSHOT, "broker", whole)])
            self._remove()

    def _delete(self) -> None:
        number = self._chance.randrange(PARTITIONS)
        if len(self.sealed[number]) > 1:
            end = self.sealed[number][0].next
            self.world.readers.watch.requested(number, end)
            self._change(b"start:%d:%d" % (number, end))
            self.starts[number] = max(self.starts[number], end)
            self.world.starts[number] = max(self.world.starts[number], end)
            self._delete_all(folder_of("t", TOPIC, number), [self.sealed[number].pop(0)])


class World:
    """A bucket, its owners and what they acknowledged.

    Args:
        seed: Decides what happens.
        spool: A folder.
        owners: How many there are, beside the last one.
        bug: What an owner does wrong.
        is_busy: Whether owners commit while others try to take over.
    """

    def __init__(
        self, seed: int, spool: Path, *, owners: int = 4, bug: str = "", is_busy: bool = False
    ) -> None:
        self.turns = Turns(random.Random(seed))
        self.store = MemoryStore()
        self.spool, self.bug = spool, bug
        self.crash_rate = self.turns.chance.choice([0, 0.005, 0.02])
        self.is_compacted, self.is_busy = seed % 2 == 1, is_busy
        self.acked: dict[tuple[int, int], bytes] = {}
        self.changes: list[tuple[int, bytes]] = []
        self.starts: dict[int, int] = defaultdict(int)
        self.cut: set[tuple[int, int, int]] = set()
        self.joined: set[tuple[int, int, int]] = set()
        self.removing: set[tuple[int, int]] = set()
        """Records that a compaction began to remove."""

        self.removed: set[tuple[int, int]] = set()
        """Those of compactions that ended."""

        self.stored, self.object_changes = Stored(), 0
        self.readers = Readers(self)
        self.turns.when_paused = self.readers.read_all
        self._values = self._changes = self._versions = self.merged = self.compacted = 0
        self._owners = owners
        self.created = self.passed = 0
        """Commit objects, and fences behind numbers that their owners have not read."""

        self._end, self._epoch = -1, 0
        self.problems: list[str] = []

    def new_value(self) -> bytes:
        self._values += 1
        return b"%08d" % self._values

    def new_version(self) -> str:
        self._versions += 1
        return f"{self._versions:016x}"

    def next_change(self) -> int:
        self._changes += 1
        return self._changes

    def note(self, commit: Commit) -> None:
        """Judge a commit object that was created (K3)."""
        self.created += 1
        if commit.sequence < self._end:  # a number that was removed: it counts for nothing (K4)
            return
        if commit.is_fence and commit.epoch <= self._epoch:
            self.problems.append(f"{commit.epoch} is the epoch of a fence behind {self._epoch}")
        self.passed += commit.epoch > self._epoch + 1
        self._end, self._epoch = commit.sequence, commit.epoch

    def run(self) -> list[str]:
        """Run the owners, then a last one that finds everything; return what is wrong."""
        for number in range(self._owners):
            owner = Owner(self, number, self._folder(number))
            owner.thread.start()
            self.turns.owners.append(owner)
        self.turns.run()
        self.problems += [
            f"owner {one.number}: {one.failure!r}" for one in self.turns.owners if one.failure
        ]
        last = Owner(self, 99, self._folder(99))
        last.thread = threading.Thread()  # its requests never fail
        try:
            last.open()
        except LogmirrorError as error:
            return [*self.problems, f"cannot be opened: {error!r}"]
        self.readers.read_from(last)
        return [*self.problems, *self.readers.problems(last), *Judge(self, last).problems()]

    def _folder(self, number: int) -> Path:
        folder = self.spool / str(number)
        folder.mkdir(parents=True)
        return folder
