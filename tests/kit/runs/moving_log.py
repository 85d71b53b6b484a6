"""A partition that moves between log directories on a model of disks, a step at a time.

The real log, its flushes, the moves and a start run in one thread at a time; threads stop before
each call of the disk, and continue in a random order. So a test can do something before any single
call: take the power away (`crash_at`), or act (`act_at`).
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import threading
import uuid
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any
from unittest import mock

from kit.fakes.tree_disk import TreeDisk
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.durable_ends import DurableEnd
from logmirror.broker.log.file_names import cleaned_path
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.recovery import recover
from logmirror.broker.log.segment import Segment
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.log_dirs.placement import LogDirs
from logmirror.broker.metadata import TopicRow
from logmirror.broker.moves.leftovers import Leftovers
from logmirror.broker.moves.move import Move
from logmirror.broker.moves.mover import Moves
from logmirror.broker.moves.throttle import Throttle
from logmirror.clock import SYSTEM_CLOCK
from logmirror.wire.records import Record, decode_reference, encode_reference

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.place_rows import MoveRow, Residence

ROW = TopicRow(name="t", topic_id=uuid.UUID(int=9), partition_count=1, configs={})
KEY = ROW.topic_id.bytes, 0
SEGMENT_BYTES = 700


class Job(threading.Thread):
    """A call in a thread of its own, which stops before each call of the disk."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.done: Future[Any] = Future()
        self._call = call
        self._may_run, self._has_stopped = threading.Lock(), threading.Lock()
        self._may_run.acquire()
        self._has_stopped.acquire()

    def run(self) -> None:
        self._may_run.acquire()
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001  # as executors do
            self.done.set_exception(error)
        else:
            self.done.set_result(result)
        self._has_stopped.release()

    def stop_here(self) -> None:
        """Wait until the job may continue. Called in its thread."""
        self._has_stopped.release()
        self._may_run.acquire()

    def proceed(self) -> None:
        """Run it to its next call of the disk, or to its end."""
        if not self.is_alive() and not self.done.done():
            self.start()
        self._may_run.release()
        self._has_stopped.acquire()


class Stepped(Executor):
    """Runs calls in steps, each up to the next call of the disk, in any order: as threads would."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._jobs: list[Job] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        job = Job(functools.partial(call, *args, **named))
        self._jobs.append(job)
        return job.done

    def step(self) -> None:
        """Let one of the calls proceed, or none."""
        if self._jobs and self._chance.random() < 0.6:
            job = self._chance.choice(self._jobs)
            job.proceed()
            if job.done.done():
                self._jobs.remove(job)

    def end(self) -> None:
        """Let all calls come to their ends; the power is off."""
        while self._jobs:
            job = self._jobs.pop()
            while not job.done.done():
                job.proceed()


class Rows:
    """The rows of moves; a change is durable at once, or not made."""

    def __init__(self) -> None:
        self.rows: dict[tuple[bytes, int], MoveRow] = {}
        self.before: Callable[[], None] = lambda: None

    def change_moves(
        self,
        begun: Collection[MoveRow],
        ended: Collection[tuple[bytes, int]],
        left: Collection[Residence] = (),
    ) -> None:
        assert not left
        self.before()
        for key in ended:
            self.rows.pop(key, None)
        self.rows |= {(row.topic_id, row.partition): row for row in begun}


class Life:
    """A broker from its start to its end, with one partition and two or three log directories."""

    def __init__(  # noqa: PLR0913  # what an earlier life leaves
        self,
        root: Path,
        rows: Rows,
        chance: random.Random,
        *,
        appended: int = 0,
        acked: int = 0,
        log_start: int = 0,
    ) -> None:
        self.disk = TreeDisk(root)
        self.disk.adopt()
        self.rows, self.chance = rows, chance
        self.appended, self.acked, self._log_start = appended, acked, log_start
        self.dirs = LogDirs([root / name for name in ("a", "b", "c")])
        self.executor = Stepped(chance)
        self.crash_at = self.act_at = 0
        self.act: Callable[[], None] = lambda: None
        self.disk.before = self._before

    def _before(self, count: int, _: str) -> None:
        job = threading.current_thread()
        if isinstance(job, Job):
            job.stop_here()
        if count == self.crash_at:
            self.disk.is_off = True
        if count == self.act_at:
            self.loop.call_soon_threadsafe(self.act)

    async def start(self) -> None:
        """Open the partition as a start of the broker does, and continue its move."""
        self.loop = asyncio.get_running_loop()
        leftovers = Leftovers(self.dirs, self.disk, self.rows.rows)
        leftovers.finish(ROW, 0)
        folder = self.dirs.find(ROW.name, 0)
        found = self.dirs.having(ROW.name, 0)
        assert len(found) <= 1, "one place"
        leftovers.list_others(ROW.name)
        self.log = recover(
            folder,
            disk=self.disk,
            cache=SegmentCache(self.disk),
            segment_bytes=SEGMENT_BYTES,
            log_start=self._log_start,
            durable=DurableEnd(self.acked, 0) if self.acked else None,
        )
        self.rows.change_moves([], leftovers.ended)
        self.commits = GroupCommit(lambda _: self.executor, self.disk)
        parts = self.rows, self.commits, self.disk, self.executor, self.executor
        self.moves = Moves(*parts, Throttle(SYSTEM_CLOCK))  # type: ignore[arg-type]  # the rows
        self.moves.open(
            [Move(row[:2], self.log, target, row.nonce) for row, target in leftovers.unfinished],
            leftovers.folders,
        )

    async def write(self, count: int) -> None:
        """Append batches at any pace; `acked` follows the acknowledgements."""
        for _ in range(count):
            self.appended += 1  # also if the power fails behind the first of two files
            append(self.log, self.appended - 1)
            end = self.log.log_end
            self.log.when_durable(end, lambda failure, end=end: self._acknowledged(failure, end))
            self.commits.schedule(self.log)
            for _ in range(self.chance.choice([0, 0, 1, 5, 20])):
                await asyncio.sleep(0)

    def _acknowledged(self, failure: object, end: int) -> None:
        if failure is None:
            self.acked = end

    async def move(self, name: str) -> None:
        """Request the log directory `a`, `b` or `c`."""
        target = next(path for path in self.dirs.paths if path.name == name)
        await self.moves.change([(KEY, self.log, target)])

    @property
    def place(self) -> str:
        """The log directory: `a`, `b` or `c`."""
        return self.log.folder.parent.parent.name

    async def quiet(self) -> None:
        """Wait until no move is in progress."""
        for _ in range(20_000):
            if not self.moves.all or self.disk.is_off:
                return
            await asyncio.sleep(0)
        raise AssertionError([(move.state, move.failure) for move in self.moves.all])


def compact(life: Life) -> None:
    """Put a compacted segment in the place of the first one. It holds the same records."""
    [old, *_] = life.log.segments
    path = cleaned_path(life.log.folder, old.first)
    life.disk.write_synced(path, [old.path.read_bytes()])
    new = Segment(life.log.folder, old.first, old.next_offset, old.size_bytes)
    assert life.log.replace([old], new, path)


async def until(is_true: Callable[[], bool]) -> None:
    """Let everything proceed until a condition is true."""
    for _ in range(20_000):
        if is_true():
            return
        await asyncio.sleep(0)
    raise TimeoutError


def append(log: PartitionLog, number: int) -> None:
    batch = bytearray(
        encode_reference([Record(n, 1_000 + number, 0, None, value(number, n), ()) for n in (0, 1)])
    )
    log.append(memoryview(batch), check_batch(memoryview(batch), max_bytes=10_000))


def value(number: int, place: int) -> bytes:
    return b"%d-%d " % (number, place) + b"." * 40


def contents(log: PartitionLog) -> list[tuple[int, bytes | None]]:
    """Every record in the files, in order."""
    found = []
    for segment in log.segments:
        data = (
            segment.path if segment.is_sealed else segment.folder / f".{segment.first:020d}.open"
        ).read_bytes()
        found += [(one.offset, one.value) for one in decode_reference(data)]
    return found


def check(life: Life) -> None:
    """All acknowledged records are there, once and in order; nothing that was never appended is."""
    found = contents(life.log)
    start = found[0][0] if found else life.log.log_start
    wanted = [(2 * n + place, value(n, place)) for n in range(life.appended) for place in (0, 1)]
    assert found == wanted[start : start + len(found)]
    assert life.acked <= life.log.log_end == start + len(found)


async def scenario(life: Life) -> None:
    """Write, and move to two other directories and back while more is written."""
    await life.start()
    await life.write(5)
    writing = asyncio.ensure_future(life.write(30))
    for target in ("b", "c", "a"):
        await life.move(target)
        await life.quiet()
        assert life.place == target
    await writing
    await life.commits.flushed(life.log, life.log.log_end)
    await life.moves.close()


def run(life: Life, work: Callable[[], Any]) -> bool:
    """Run until the end, or until the power is gone; returns whether that happened."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        off = loop.create_future()
        loop.set_exception_handler(lambda _, found: None)
        task = asyncio.ensure_future(work())

        async def watch() -> None:
            while not life.disk.is_off:
                life.executor.step()
                await asyncio.sleep(0)
            off.set_result(None)

        watcher = asyncio.ensure_future(watch())
        await asyncio.wait([task, off], return_when=asyncio.FIRST_COMPLETED)
        if hasattr(life, "moves"):
            life.moves.stop()  # so that asyncio cancels no step that has not begun
        life.executor.end()
        for _ in range(3):
            await asyncio.sleep(0)
        for one in (task, watcher):
            one.cancel()
        try:
            await task
        except BaseException:
            if not life.disk.is_off:
                raise

    with mock.patch.object(shutil, "rmtree", life.disk.remove_tree):
        asyncio.run(main())
    return life.disk.is_off


def prepare(root: Path) -> Path:
    """Make the log directories."""
    for name in ("a", "b", "c"):
        (root / name).mkdir(parents=True)
    return root
