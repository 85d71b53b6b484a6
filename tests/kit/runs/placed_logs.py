"""A broker's partitions on two disks and in a bucket, which move while power and requests fail.

All of a broker but its network runs on a model of disks, which knows what is durable, and on a
store in memory: the database in the bucket, the chain, uploads, moves, flushes, starts. The threads
are those of a broker. A seed decides what is done and what fails; not how threads interleave.

A world has several lives of the broker. Each ends with a stop, a kill or a power loss at a call of
a disk or of the store. The judge compares what each start finds with what was acknowledged.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from kit.fakes.faulty_disk import PowerLossError
from kit.fakes.places import FailingStore, PlacesDisk, Power
from logmirror.broker.bucket import logs, uploads
from logmirror.broker.bucket.logs import BucketLogs
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.moves import mover
from logmirror.broker.moves.move import MoveState
from logmirror.broker.moves.throttle import Throttle
from logmirror.broker.options import BrokerOptions
from logmirror.broker.server import _commits, _moves
from logmirror.broker.topics import Topics
from logmirror.clock import SYSTEM_CLOCK
from logmirror.wire.records import Record, decode_reference, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.moves.move import Move
    from logmirror.testing.memory_store import MemoryStore

PARTITIONS: Final = 2
PLACES: Final = ("a", "b", "w")
"""Two disks, and the working folder of the bucket."""

_PRODUCER: Final = 7
_LIMIT_S: Final = 60.0
_CLEAN_S: Final = 20.0


@dataclass
class Known:
    """What the judge knows of a partition."""

    acked: dict[int, bytes] = field(default_factory=dict)
    """Records that must be there, by offset, unless they were deleted."""

    appended: dict[int, set[bytes]] = field(default_factory=dict)
    """Those that may be there, too."""

    sequence: int = 0
    deleted: int = 0
    """The log start that was acknowledged."""

    deleting: int = 0
    """The highest one that was requested."""


class Life:
    """A broker from its start to its end.

    Args:
        root: What the last one has left on the disks.
        store: The bucket.
        known: By partition.
        chance: Decides.
        power: Of this life.
    """

    def __init__(
        self,
        root: Path,
        store: FailingStore,
        known: list[Known],
        chance: random.Random,
        power: Power,
    ) -> None:
        self.root, self.store, self.known = root, store, known
        self.chance, self.power = chance, power
        self.problems: list[str] = []
        self.moved = 0
        self.ways: set[tuple[str, str]] = set()
        self.bucket: BucketLogs | None = None
        self.rows: MetadataStore | None = None
        self.threads: list[ThreadPoolExecutor] = []
        store.power = power

    # Start and stop

    def _made(self, store: MemoryStore, **more: Any) -> PlacesDisk:
        self.disk = PlacesDisk(self.root, self.power, store, **more)
        self.disk.adopt()
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
        self.threads = [ThreadPoolExecutor(2) for _ in range(4)]
        flushers, others, changers, movers = self.threads
        options = BrokerOptions(
            log_dir=self.root / "w",
            bucket="s3://b/p",
            more_log_dirs=(self.root / "a", self.root / "b"),
            topics=(("t", PARTITIONS),),
            commit_interval_ms=1,
        )
        cache = SegmentCache(disk, parts=disk.part)
        self.commits = _commits(options, SimpleNamespace(of=lambda _: flushers), disk, self.bucket)
        self.topics = Topics(options, self.rows, others, disk, cache, self.commits, self.bucket)
        self.topics.load()
        for log in self.topics.by_name["t"].logs if "t" in self.topics.by_name else ():
            log.segment_bytes = 700
        self.commits.opened()
        await self.topics.create_missing()
        self.topic = self.topics.by_name["t"]
        for number, log in enumerate(self.topic.logs):
            log.segment_bytes = 700
            self.judge(number, log, is_new=True)
        throttle = Throttle(SYSTEM_CLOCK)
        parts = self.topics, disk, self.commits, self.rows, (movers, changers), throttle
        self.topics.follow(_moves(*parts))
        assert self.topics.moves is not None
        when_moved = self.topics.moves.when_moved

        def moved(old: Path, new: Path) -> None:
            self.moved += 1
            self.ways.add((old.parent.parent.name, new.parent.parent.name))
            when_moved(old, new)

        self.topics.moves.when_moved = moved

    @property
    def _cache_bytes(self) -> int:
        return self.chance.choice([0, 2_000, 1_000_000])

    async def stop(self) -> None:
        """Stop as a broker does."""
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
        """Append batches of a producer at any pace."""
        log, known = self.topic.logs[number], self.known[number]
        for _ in range(count):
            first, sequence = log.log_end, known.sequence
            values = [b"%d %d" % (number, sequence + n) + b"." * 40 for n in (0, 1)]
            records = [Record(n, 1_000 + n, 0, None, one, ()) for n, one in enumerate(values)]
            batch = memoryview(
                bytearray(
                    encode_reference(
                        records, producer_id=_PRODUCER, producer_epoch=0, base_sequence=sequence
                    )
                )
            )
            known.sequence += 2
            for n, one in enumerate(values):
                known.appended.setdefault(first + n, set()).add(one)
            log.append(batch, check_batch(batch, max_bytes=10_000))

            def done(failure: object, first: int = first, values: list[bytes] = values) -> None:
                if failure is None and not self.power.is_off:
                    known.acked |= {first + n: one for n, one in enumerate(values)}

            log.when_durable(log.log_end, done)
            self.commits.schedule(log)
            await asyncio.sleep(self.chance.choice([0, 0, 0, 0.001, 0.003]))

    async def act(self) -> None:
        """Do something to a partition."""
        number = self.chance.randrange(PARTITIONS)
        log, known = self.topic.logs[number], self.known[number]
        kind = self.chance.choice(["move", "move", "move", "move", "stay", "delete", "roll"])
        if kind == "move":
            await self.move(number, self.chance.choice([*PLACES, "w"]))
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

    async def move(self, number: int, place: str) -> None:
        """Request a move."""
        log, moves = self.topic.logs[number], self.topics.moves
        assert moves is not None
        key = self.topic.topic_id.bytes, number
        async with moves.turn:
            await moves.change([(key, log, self.root / place)])

    async def live(self) -> None:
        """Write, and move, and let requests fail."""
        await self.start()
        self.store.rate = self.chance.choice([0.0, 0.0, 0.02, 0.2])
        writing = [
            asyncio.ensure_future(self.write(number, self.chance.randint(0, 25)))
            for number in range(PARTITIONS)
        ]
        for _ in range(self.chance.randint(1, 8)):
            await self.act()
            if self.chance.random() < 0.5:
                await self.quiet()
            await asyncio.sleep(self.chance.choice([0, 0.001, 0.01]))
        for one in writing:
            await one
        self.store.rate = 0.0
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
            self.judge(number, log)
        await self._cleaned()
        await self.stop()

    async def _cleaned(self) -> None:
        """Wait until the bucket has nothing of places that partitions have left (H4)."""
        assert self.rows is not None
        assert self.bucket is not None
        deadline_s = time.monotonic() + _CLEAN_S
        while True:
            kept = {self.bucket.folder_of(log) for log in self.bucket.logs}
            folders = {name.rpartition("/")[0] for name in self.store.objects if name[0] != "."}
            if not self.rows.left_partitions() and folders <= kept:
                return
            if time.monotonic() > deadline_s:
                self.problems.append(f"objects are left in {sorted(folders - kept)}")
                return
            await asyncio.sleep(0.001)

    async def flushed(self) -> None:
        """Wait until everything is durable."""
        for log in self.topic.logs:
            await self.commits.flushed(log, log.log_end)

    async def quiet(self) -> None:
        """Wait until no move is in progress."""
        moves, deadline_s = self.topics.moves, time.monotonic() + _LIMIT_S / 2
        assert moves is not None
        while moves.all:
            is_late = time.monotonic() > deadline_s
            if is_late or any(move.state is MoveState.FAILED for move in moves.all):
                raise AssertionError([vars_of(move) for move in moves.all])
            await asyncio.sleep(0.001)

    # The judge

    def judge(self, number: int, log: PartitionLog, *, is_new: bool = False) -> None:
        """Compare a log with what is known; at a start, what it holds must stay from then on."""
        known, where = self.known[number], f"partition {number} at {place_of(log)}"
        if self.power.is_off:
            return
        if log.failure is not None:
            self.problems.append(f"{where}: offline: {log.failure!r}")
            return
        found = dict(self.contents(log))
        self._judge_offsets(where, known, log, found)
        there = {offset: value for offset, value in found.items() if offset >= log.log_start}
        for offset, value in there.items():
            if value not in known.appended.get(offset, ()):
                self.problems.append(f"{where}: {offset} was never appended: {value!r}")
        for offset, value in known.acked.items():
            if offset >= log.log_start and found.get(offset) != value:
                self.problems.append(f"{where}: {offset} is {found.get(offset)!r}")
        if is_new:
            known.deleted = max(known.deleted, log.log_start)
            known.acked |= there
            known.appended = {offset: {value} for offset, value in known.acked.items()}
            self._judge_producer(where, known, log)

    def _judge_offsets(
        self, where: str, known: Known, log: PartitionLog, found: dict[int, bytes]
    ) -> None:
        start, end = log.log_start, log.log_end
        if not found and all(offset < known.deleted for offset in known.acked):
            known.deleted = start  # the first file of a log is lost, and nothing was acknowledged
        elif not known.deleted <= start <= max(known.deleted, known.deleting):
            self.problems.append(f"{where}: log start {start}, not {known.deleted}")
        if sorted(one for one in found if one >= start) != list(range(start, end)):
            self.problems.append(f"{where}: {sorted(found)}, not {start} to {end}")

    def _judge_producer(self, where: str, known: Known, log: PartitionLog) -> None:
        """The producer's last sequence is that of the last record."""
        producer = log.producers.get(_PRODUCER)
        last = producer.last_sequence if producer is not None else -1
        value = known.acked.get(log.log_end - 1)
        wanted = int(value.split(b".")[0].split()[1]) if value is not None else last
        if last != wanted:
            self.problems.append(f"{where}: last sequence {last}, not {wanted}")
        elif last < 0 and known.acked:
            self.problems.append(f"{where}: the producer is not known")
        known.sequence = last + 1

    def contents(self, log: PartitionLog) -> list[tuple[int, bytes]]:
        """Every record in the files, in order."""
        found: list[tuple[int, bytes]] = []
        for segment in log.segments:
            path = segment.path
            if not segment.is_sealed:
                path = segment.folder / f".{segment.first:020d}.open"
            file = self.disk.open_for_reading(path)
            with open(file.fd, "rb", closefd=False) as source:
                data = source.read()
            found += [(one.offset, one.value or b"") for one in decode_reference(data)]
        return found


def place_of(log: PartitionLog) -> str:
    """The place of a log, one of `PLACES`."""
    return log.folder.parent.parent.name


def vars_of(move: Move) -> dict[str, Any]:
    """What a move is, for a message."""
    found = {name: repr(getattr(move, name))[:200] for name in move.__slots__}
    return found | {"failure": str(move.failure)}


class World:
    """Several lives, one after the other."""

    def __init__(self, seed: int, folder: Path, *, lives: int = 4) -> None:
        self.chance = random.Random(seed)
        self.folder, self._lives = folder, lives
        self.store = FailingStore(self.chance)
        self.known = [Known() for _ in range(PARTITIONS)]
        self.ended: list[str] = []
        self.moved = 0
        self.ways: set[tuple[str, str]] = set()

    def run(self) -> list[str]:
        """Return what is wrong."""
        root = self.folder / "now"
        for name in ("a", "b"):
            (root / name / ".logmirror").mkdir(parents=True)
        with (
            mock.patch.multiple(mover, _RETRY_S=0, _PAUSE_S=0.005),
            mock.patch.object(uploads, "_FIRST_PAUSE_MS", 1),
            mock.patch.object(uploads, "_LONGEST_PAUSE_MS", 5),
            mock.patch.object(threading, "excepthook"),
        ):
            for number in range(1, self._lives + 1):
                is_last = number == self._lives
                lost_at = (
                    0
                    if is_last
                    else self.chance.choice([0, *(self.chance.randint(1, 300) for _ in range(3))])
                )
                life = Life(root, self.store, self.known, self.chance, Power(lost_at))
                self.store.rate = 0.0
                try:
                    is_off = _run(life, life.end if is_last else life.live)
                except Exception as error:  # noqa: BLE001  # what a life does not expect
                    is_off, life.problems = False, [*life.problems, repr(error)]
                self.moved += life.moved
                self.ways |= life.ways
                if life.problems:
                    return [f"life {number} {self.ended}: {one}" for one in life.problems]
                self._end(life, root, is_off=is_off)
        shutil.rmtree(self.folder)
        return []

    def _end(self, life: Life, root: Path, *, is_off: bool) -> None:
        """Leave what the next life finds on the disks."""
        mood = self.chance.choice([0.0, 0.5, 1.0])
        how = "lost" if is_off else "stopped"
        self.ended.append(f"{how} {life.power.count} {mood}")
        self.store.staged.clear()
        left = self.folder / "next"
        life.disk.after_power_loss(
            left,
            keep=lambda n: self.chance.randint(0, n) if mood == 0.5 else round(mood * n),
            some=lambda: self.chance.random() < mood,
        )
        shutil.rmtree(root)
        left.rename(root)


async def _abandon(life: Life) -> None:
    """Cancel everything that is in progress."""
    if hasattr(life, "topics") and life.topics.moves is not None:
        life.topics.moves.is_stopping = True  # so that no step is begun, and cancelled before
    for _ in range(3):
        await asyncio.sleep(0)
    for one in asyncio.all_tasks() - {asyncio.current_task()}:
        one.cancel()


def _run(life: Life, work: Callable[[], Any]) -> bool:
    """Run until the end, or until the power is lost; returns whether that happened."""

    async def main() -> None:
        def unexpected(_: object, context: dict[str, Any]) -> None:
            if not life.power.is_off:
                error = context.get("exception")
                life.problems.append(f"{context['message']}: {traceback.format_exception(error)}")

        asyncio.get_running_loop().set_exception_handler(unexpected)
        task = asyncio.ensure_future(work())
        deadline_s = time.monotonic() + _LIMIT_S
        while not task.done() and not life.power.is_off:
            await asyncio.wait([task], timeout=0.001)
            if time.monotonic() > deadline_s:
                raise AssertionError([str(one) for one in asyncio.all_tasks()])
        await _abandon(life)
        try:
            await task
        except BaseException:
            if not life.power.is_off:
                raise

    try:
        asyncio.run(main())
    finally:
        life.close()
    return life.power.is_off
