"""A broker's partitions on two disks and in a bucket, which move while power and requests fail.

All of a broker but its network runs on a model of disks, which knows what is durable, and on a
store in memory: the database in the bucket, the chain, uploads, moves, flushes, compaction, starts.
In some lives a disk, or the working folder of the bucket, fails: see `placed_faults`.
The threads are those of a broker. A seed decides what is done and what fails; not how threads
interleave.

A world has several lives of the broker. Each ends with a stop, a kill or a power loss at a call of
a disk or of the store. Meanwhile partitions are written, also in transactions, moved, compacted,
and deleted with their topic, which is created again. The judge (`placed_judge`) compares what each
start finds with what was acknowledged.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from kit.fakes.faulty_disk import PowerLossError
from kit.fakes.places import FailingStore, PlacesDisk, Power
from kit.runs.placed_faults import Failing
from kit.runs.placed_judge import Judge
from kit.runs.placed_known import PARTITIONS, Found, Known, KnownTopic
from kit.runs.placed_writer import Writer
from logmirror.broker.bucket import logs
from logmirror.broker.bucket.chain import PRODUCERS
from logmirror.broker.bucket.logs import BucketLogs
from logmirror.broker.bucket.replacing import InBucket
from logmirror.broker.compaction import ByPlace, Compactor, OnDisk
from logmirror.broker.dir_failures import StopLimit
from logmirror.broker.log.open_segments import DamagedLogError
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.moves.move import MoveState
from logmirror.broker.moves.throttle import Throttle
from logmirror.broker.options import BrokerOptions
from logmirror.broker.server import _commits, _dir_failures, _moves
from logmirror.broker.topics import RefusedTopicError, Topics
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import LogmirrorError, UnavailableError

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from kit.fakes.tree_disk import Doubtful
    from logmirror.broker.dir_failures import DirFailures
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.moves.move import Move
    from logmirror.broker.topic import Topic
    from logmirror.testing.memory_store import MemoryStore

PLACES: Final = ("a", "b", "w")
"""Two disks, and the working folder of the bucket."""

CONFIGS: Final = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0",
    "segment.bytes": "2000",
}
_SEGMENT_BYTES: Final = 700
LIMIT_S: Final = 60.0
"""Of a life."""

_CLEAN_S: Final = 20.0


class UndecidedError(Exception):
    """A start waits for the user, because no end of a partition was recorded (`open_segments`)."""


class Life:
    """A broker from its start to its end.

    Args:
        root: What the last one has left on the disks.
        store: The bucket.
        known: What is known of the topic.
        chance: Decides.
        power: Of this life.

    Attributes:
        doubtful: Of what is on the disks; see `tree_disk`.
        faults: Whether a disk has failed.
        again: How many moves have failed and were requested again.
    """

    topic: Topic
    failures: DirFailures

    def __init__(
        self,
        root: Path,
        store: FailingStore,
        known: KnownTopic,
        chance: random.Random,
        power: Power,
    ) -> None:
        self.root, self.store, self.known = root, store, known
        self.chance, self.power = chance, power
        self.problems: list[str] = []
        self.moved = self.passes = self.passes_beside = self.deletions = self.deletions_beside = 0
        self.faults = self.again = 0
        self.is_over = False
        """There is no topic, and the files of the last one are in the way of another."""

        self.ways: set[tuple[str, str]] = set()
        self.failing = Failing(self, chance, 0.0)
        self.doubtful: Doubtful = {}
        self.bucket: BucketLogs | None = None
        self.rows: MetadataStore | None = None
        self.threads: list[ThreadPoolExecutor] = []
        self.cleaning: asyncio.Future[None] | None = None
        self.writing: list[asyncio.Task[None]] = []
        store.power = power

    # Start and stop

    def _made(self, store: MemoryStore, **more: Any) -> PlacesDisk:
        self.disk = PlacesDisk(self.root, self.power, store, **more)
        self.disk.adopt(self.doubtful)
        return self.disk

    async def start(self) -> None:
        """Start as a broker does, and judge what it finds."""
        with mock.patch.object(logs, "BucketDisk", self._made):
            self.bucket = BucketLogs(
                self.store, self.root / "w", interval_ms=1, cache_bytes=self._cache_bytes
            )
        disk = self.disk
        self.bucket.journal.pause = lambda _: time.sleep(0.001)
        # So that nothing waits for the journal:
        self.power.when_lost = self.bucket.journal._closing.set  # noqa: SLF001  # it has no thread
        if self.power.is_off:
            raise PowerLossError
        path = self.root / "w" / ".logmirror" / "broker.sqlite"
        self.rows = MetadataStore(path, self.bucket.restored(path))
        self.bucket.snapshots.add(path.stem, self.rows.snapshot)
        self.threads = [ThreadPoolExecutor(2) for _ in range(4)] + [ThreadPoolExecutor(1)]
        flushers, others, changers, movers, cleaners = self.threads
        options = BrokerOptions(
            log_dir=self.root / "w",
            bucket="s3://b/p",
            more_log_dirs=(self.root / "a", self.root / "b"),
            commit_interval_ms=1,
        )
        cache = SegmentCache(disk, parts=disk.part)
        self.commits = _commits(options, SimpleNamespace(of=lambda _: flushers), disk, self.bucket)
        self.topics = Topics(options, self.rows, others, disk, cache, self.commits, self.bucket)
        stores: Any = (self.rows,)  # what reports errors of its disk
        self.failures = _dir_failures(self.topics, disk, stores, StopLimit())
        if self.failing.is_early:
            disk.fault = self.failing.fault
        self.topics.load()
        found = self.topics.by_name.get("t")
        self._limit_segments(found)
        self.commits.opened()
        if not self.power.is_off:
            self.problems += self.known.judge(found.topic_id if found is not None else None)
        if found is None:
            await self.create()
        else:
            self.topic = found
        for number, log in enumerate(self.topic.logs):
            self.judge(number, log, is_new=True)
        throttle = Throttle(SYSTEM_CLOCK)
        parts = self.topics, disk, self.commits, self.rows, (movers, changers), throttle
        self.topics.follow(_moves(*parts))
        replacing = ByPlace(
            self.commits,
            self.bucket.is_open,
            InBucket(self.commits, self.rows, cleaners),
            OnDisk(disk, cleaners),
        )
        self.compactor = Compactor(
            *(self.topics, self.commits, cache, disk, self.rows, cleaners, others, SYSTEM_CLOCK),
            *(lambda _: None, replacing),
        )
        self._judge_moves()

    def _judge_moves(self) -> None:
        """Count what moves, and judge the state after each swap."""
        assert self.topics.moves is not None
        when_moved = self.topics.moves.when_moved

        def moved(old: Path, new: Path) -> None:
            self.moved += 1
            self.ways.add((old.parent.parent.name, new.parent.parent.name))
            when_moved(old, new)
            number = int(new.name)
            log, known = self.topic.logs[number], self.known.partitions[number]
            where = f"partition {number} moved to {place_of(log)}"
            self.problems += Judge(known, log, where).judge_state()

        self.topics.moves.when_moved = moved

    @staticmethod
    def _limit_segments(topic: Topic | None) -> None:
        for log in topic.logs if topic is not None else ():
            log.segment_bytes = _SEGMENT_BYTES

    @property
    def _cache_bytes(self) -> int:
        return self.chance.choice([0, 2_000, 1_000_000])

    async def stop(self) -> None:
        """Stop as a broker does."""
        self.compactor.stop()
        if self.cleaning is not None:
            await self.cleaning
        await self.commits.drain()
        await self.topics.close()
        self.close()

    def close(self) -> None:
        """End the threads, as far as the start has come."""
        if self.bucket is not None:
            self.bucket.close()
        for threads in self.threads:
            threads.shutdown(cancel_futures=True)
        if self.rows is not None:
            self.rows.close()

    # Work

    async def write(self, number: int, count: int) -> None:
        """Append batches and markers at any pace."""
        await self.writer(number).write(count)

    def writer(self, number: int) -> Writer:
        """Return what appends to a partition of the present topic."""
        log, known = self.topic.logs[number], self.known.partitions[number]
        parts = self.commits, self.power, self.chance
        return Writer(number, log, known, *parts, may_fail=lambda: self.failing.concerns(log))

    def begin_writing(self) -> None:
        """Append to all partitions while other things are done."""
        self.writing += [
            asyncio.ensure_future(self.write(number, self.chance.randint(0, 25)))
            for number in range(PARTITIONS)
        ]

    async def act(self) -> None:
        """Do something to a partition; it may fail if a disk fails."""
        try:
            await self._act()
        except (LogmirrorError, OSError):
            if not self.failing.has_failed:
                raise

    async def _act(self) -> None:
        number = self.chance.randrange(PARTITIONS)
        log, known = self.topic.logs[number], self.known.partitions[number]
        kinds = ["move"] * 8 + [
            "stay",
            "delete",
            "roll",
            "compact",
            "compact",
            "both",
            "recreate",
        ]
        kind = self.chance.choice(kinds)
        if kind in {"move", "both"}:
            await self.move(number, self.chance.choice([*PLACES, "w"]))
        if kind in {"compact", "both"}:
            await self.compact(number)
        elif kind == "stay":
            await self.move(number, place_of(log))
        elif kind == "delete" and log.high_watermark > log.log_start:
            start = self.chance.randint(log.log_start, log.high_watermark)
            known.deleting = max(known.deleting, start)
            await self.topics.delete_records(self.topic, {number: start})
            known.deleted = max(known.deleted, start)
        elif kind == "roll" and log.tail is not None and log.tail.size_bytes:
            log.roll()
            self.commits.schedule(log)
        elif kind == "recreate":
            await self.recreate()

    async def move(self, number: int, place: str) -> None:
        """Request a move."""
        log, moves = self.topic.logs[number], self.topics.moves
        assert moves is not None
        key = self.topic.topic_id.bytes, number
        async with moves.turn:
            await moves.change([(key, log, self.root / place)])

    async def compact(self, number: int) -> None:
        """Begin to compact a partition, beside everything else."""
        if self.cleaning is not None and not self.cleaning.done():
            return
        log, topic, known = self.topic.logs[number], self.topic, self.known.partitions[number]
        now_ms = SYSTEM_CLOCK.now_ms()
        await self.compactor.consider(log, topic, number, now_ms)
        known.compacting = max(known.compacting, log.log_end)
        self.cleaning = asyncio.ensure_future(self._compacted(log, topic, number, known))

    async def _compacted(self, log: PartitionLog, topic: Topic, number: int, known: Known) -> None:
        """Compact what was considered, and judge what is left."""
        moves, upto = self.topics.moves, self.compactor._upto  # noqa: SLF001  # its result
        key = topic.topic_id.bytes, number
        before = upto.get(key)
        is_moving = moves is not None and moves.of(log) is not None
        may_fail = self.store.rate > 0
        await self.compactor.run_once()
        may_fail |= self.failing.has_failed
        failed = self.compactor._failed.pop(log, None)  # noqa: SLF001  # it is tried again at once
        if failed is not None and not may_fail and not self.power.is_off:
            self.problems.append(f"{log.folder} could not be compacted")
        end = upto.get(key)
        if end is None or end == before or log.failure is not None or self.power.is_off:
            return
        segments = [one for one in log.segments if one.first < end]
        try:
            found = Found.of(self._read(one) for one in segments)
        except OSError:  # a request for a segment in the bucket
            if not may_fail:
                raise
            return
        self.passes += 1
        self.passes_beside += is_moving
        where = f"partition {number} at {place_of(log)}"
        self.problems += Judge(known, log, where, found).judge_compacted(end)

    async def create(self) -> None:
        """Create the topic."""
        self.known.creating()
        try:
            created = await self.topics.create("t", PARTITIONS, CONFIGS)
        except RefusedTopicError as error:  # a file of the last one could not be removed
            raise UnavailableError("no topic can be created", cause=error.reason) from error
        assert created is not None
        self.topic = created
        self.known.created(created.topic_id)
        self._limit_segments(created)

    async def recreate(self) -> None:
        """Delete the topic, whatever its partitions are doing, and create one of its name."""
        moves = self.topics.moves
        assert moves is not None
        self.deletions += 1
        self.deletions_beside += any(move.log in self.topic.logs for move in moves.all)
        self.known.is_deleting = True
        self.is_over = True
        await self.topics.delete(self.topic)
        if self.power.is_off:
            return
        self.known.deleted()
        await asyncio.sleep(self.chance.choice([0, 0, 0.002, 0.02]))
        await self.create()
        self.is_over = False
        self.begin_writing()

    async def live(self) -> None:
        """Write, and move, and let requests fail."""
        try:
            await self.start()
        except (LogmirrorError, OSError):
            if not self.failing.has_failed_early:
                raise
            return
        if self.failing.has_failed_early:
            self.faults += 1
            await self.stop()
            return
        self.store.rate = self.chance.choice([0.0, 0.0, 0.02, 0.2])
        self.begin_writing()
        self.disk.fault = self.failing.fault
        for _ in range(self.chance.randint(1, 8)):
            if self.is_over or self.failures.fatal.done():
                break
            await self.act()
            if self.chance.random() < 0.5:
                await self.quiet()
            await asyncio.sleep(self.chance.choice([0, 0.001, 0.01]))
        for one in self.writing:
            await one
        self.store.rate = 0.0
        self.faults += self.failing.has_failed
        await self.failing.judge()
        if self.chance.random() < 0.7:
            await self.quiet()
        if self.chance.random() < 0.7:
            await self.flushed()
        await self.stop()

    async def end(self) -> None:
        """Start without failures, complete the moves, write more, and judge once more."""
        await self.start()
        await self.quiet()
        for number in range(PARTITIONS):
            await self.write(number, 2)
        await self.flushed()
        for number, log in enumerate(self.topic.logs):
            self.judge(number, log, is_last=True)
        await self._cleaned()
        await self.stop()

    async def _cleaned(self) -> None:
        """Wait until nothing is left of places and topics where no partition is (H4)."""
        deadline_s = time.monotonic() + _CLEAN_S
        while left := self._left():
            if time.monotonic() > deadline_s:
                self.problems.append(f"left are {left}")
                return
            await asyncio.sleep(0.001)

    def _left(self) -> list[str]:
        """Return what is left in the database, in the bucket, and on the disks."""
        assert self.rows is not None
        assert self.bucket is not None
        kept = {self.bucket.folder_of(log) for log in self.bucket.logs}
        names = [name.removeprefix(f"{PRODUCERS}/") for name in self.store.objects]
        folders = {name.rpartition("/")[0] for name in names if name[0] != "."}
        here = {log.folder for log in self.topic.logs}
        disks = [path for name in ("a", "b") for path in (self.root / name).glob("t/*")]
        return [
            *(str(one) for one in self.rows.left_partitions()),
            *(str(one) for one in self.rows.deleting()),
            *(str(one) for one in self.rows.moves()),
            *sorted(folders - kept),
            *(str(path) for path in disks if path not in here),
            *(str(path) for path in disks if [*path.glob("*.part")]),
        ]

    async def flushed(self) -> None:
        """Wait until everything is durable."""
        for log in self.topic.logs:
            try:
                await self.commits.flushed(log, log.log_end)
            except LogmirrorError:
                if not self.is_over and not self.failing.concerns(log):
                    raise

    async def quiet(self) -> None:
        """Wait until no move is in progress, unless the broker ends."""
        moves, deadline_s = self.topics.moves, time.monotonic() + LIMIT_S / 2
        assert moves is not None
        while moves.all and not self.failures.fatal.done():
            is_late = time.monotonic() > deadline_s
            failed = [move for move in moves.all if move.state is MoveState.FAILED]
            if is_late or not all(map(self.failing.may_end, failed)):
                raise AssertionError([vars_of(move) for move in moves.all])
            if len(failed) == len(moves.all):
                return
            await asyncio.sleep(0.001)

    # The judge

    def judge(
        self, number: int, log: PartitionLog, *, is_new: bool = False, is_last: bool = False
    ) -> None:
        """Compare a log with what is known; at a start, what it holds must stay from then on.

        At the end, also what a consumer is shown.
        """
        where = f"partition {number} at {place_of(log)}"
        if self.power.is_off:
            return
        if log.failure is not None and self.failing.has_failed_early:
            return
        if isinstance(log.failure, DamagedLogError) and log.failure.facts["durable_end"] == 0:
            raise UndecidedError
        if log.failure is not None:
            self.problems.append(f"{where}: offline: {log.failure!r}")
            return
        found = Found.of(self._read(segment) for segment in log.segments)
        judge = Judge(self.known.partitions[number], log, where, found)
        judge.judge(is_new=is_new)
        self.problems += judge.judge_consumed() if is_last else judge.problems

    def _read(self, segment: Segment) -> bytes:
        """Return what the file of a segment holds."""
        path = segment.path
        if not segment.is_sealed:
            path = segment.folder / f".{segment.first:020d}.open"
        return self.disk.read_anyway(path)


def place_of(log: PartitionLog) -> str:
    """The place of a log, one of `PLACES`."""
    return log.folder.parent.parent.name


def vars_of(move: Move) -> dict[str, Any]:
    """What a move is, for a message."""
    found = {name: repr(getattr(move, name))[:200] for name in move.__slots__}
    return found | {"failure": str(move.failure)}
