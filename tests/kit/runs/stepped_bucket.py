"""All of a broker on disks and a bucket in steps: each thread stops before each of its calls.

The broker is a `placed_logs.Life`. Its pools of threads, the thread of its journal, that of its
uploads, and those of its snapshots are jobs here, of which one runs at a time, up to its next
point. A point is a call of a disk or of the store, a failpoint of moves, or the end of a job. So a
request can begin before and after every call, and every run is the same: no clock decides anything.
What waits for another thread, or for the lock of the database, is not run until that is there.

What the event loop calls itself is a point, too. The request begins behind that callback then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from kit.fakes.faulty_disk import PowerLossError
from kit.fakes.places import FailingStore, PlacesDisk, Power
from kit.runs import placed_logs
from kit.runs.bucket_inline import DueUploads, Inline, _NoHeart, _Snapshots, silent
from kit.runs.enumerated_requests import run_out
from kit.runs.moving_log import Job
from logmirror import failpoints
from logmirror.broker.bucket import journal, logs, opening, recovery, uploads
from logmirror.broker.bucket.journal import Journal
from logmirror.broker.log import durable_ends, in_progress
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.moves import copier, mover, upload

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.runs.placed_logs import Life

_IDLE: Final = 6
"""Turns of the event loop after which a request waits for something else."""

_STUCK: Final = 30
"""The same for everything else: nothing more can run."""

_ROWS: Final = (1, 2)
"""The numbers of the pools of a life that change the database."""

ENDED: Final = "ended"
"""The name of the point at the end of a job."""


class Work(Job):
    """A call in a thread of its own, which stops before each point."""

    def __init__(self, call: Callable[[], Any], power: Power, *, is_change: bool = False) -> None:
        super().__init__(call)
        self._power = power
        self.is_change = is_change
        """Whether it changes the database."""

        self.is_ready: Callable[[], bool] = lambda: True

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Let others run until a condition is true. Called in its thread."""
        self.is_ready = is_over
        while not is_over():
            self.stop_here()
            if self._power.is_off:
                raise PowerLossError
        self.is_ready = lambda: True


class _Outcome(Future[Any]):
    """What other jobs wait for."""

    def result(self, timeout: float | None = None) -> Any:
        """See `Future.result`; others run meanwhile."""
        del timeout
        job = threading.current_thread()
        if isinstance(job, Work):
            job.wait(self.done)
        return super().result(0)


class _Lock:
    """The lock of the database: while it is held, others run."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self._is_held = steps, False

    def __enter__(self) -> None:
        job = threading.current_thread()
        if isinstance(job, Work):
            job.wait(lambda: not self._is_held)
        while self._is_held:
            self._steps.help()
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False


class _Journal(Journal):
    """Writes in a job; in a start, which is on the event loop, at once."""

    def start(self) -> None:
        """Start no thread."""

    def begin_shipping(self, name: str, payload: bytes, *, is_snapshot: bool = False) -> Any:
        outcome = super().begin_shipping(name, payload, is_snapshot=is_snapshot)
        if not isinstance(threading.current_thread(), Work):
            self.work()
        return outcome

    def is_due(self) -> bool:
        """Whether something was submitted."""
        return bool(self._waiting)

    def work(self) -> None:
        """Write what was submitted."""
        while self._waiting:
            self.commit()

    def close(self, timeout_s: float) -> None:
        del timeout_s
        self._closing.set()


class _Uploads(DueUploads):
    """Works in a job."""

    def is_due(self) -> bool:
        """Whether something was submitted."""
        return bool(self._queues)


class _SnapshotsInJobs(_Snapshots):
    """Makes snapshots in a job."""

    def is_due(self) -> bool:
        """Whether some are."""
        return bool(self._due)

    def work(self) -> None:
        """Make them."""
        self.drain()


class _StoppedHeart(_NoHeart):
    def say_stopped(self, *_: object) -> None:
        """Say nothing."""


class _Pool(Executor):
    """A pool of threads, of which each call is a job."""

    def __init__(self, steps: Steps, number: int = -1) -> None:
        self._steps, self._is_change = steps, number in _ROWS

    def submit(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        return self._steps.add(partial(call, *args, **named), is_change=self._is_change).done


class Steps:
    """Decides which job runs, and when the request begins.

    Args:
        chance: Decides which of several jobs proceeds, until there is a request.
        power: Of this life.
        begin: Before which point the request begins; 0: there is none.
        wait: Between what the request does in memory and its change of the database, others make
            so many steps.

    Attributes:
        names: Of all points.
        ask: Begins the request; it sets `request`.
        waited: How many steps it has waited for.
    """

    def __init__(self, chance: random.Random, power: Power, begin: int = 0, wait: int = 0) -> None:
        self._chance, self._power = chance, power
        self._begin, self._wait = begin, wait
        self.names: list[str] = []
        self.ask: Callable[[], None] = lambda: None
        self.request: asyncio.Task[None] | None = None
        self.waited = self._idle = 0
        self._has_waited = False
        self._mine: list[Work] = []
        self._others: list[Work] = []
        self._threads: dict[Any, Work] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.life: Life | None = None

    def point(self, name: str) -> None:
        """Stop before a point. Called in any thread, without locks."""
        job = threading.current_thread()
        if isinstance(job, Work):
            job.stop_here()
        if self._power.is_off:
            raise PowerLossError
        self.names.append(name)
        if len(self.names) == self._begin and self.loop is not None:
            self.loop.call_soon_threadsafe(self.ask)
            if isinstance(job, Work):
                job.stop_here()
            if self._power.is_off:
                raise PowerLossError

    def add(self, call: Callable[[], Any], *, is_change: bool = False) -> Work:
        """Add a job."""

        def run() -> Any:
            try:
                return call()
            finally:
                if not self._power.is_off:
                    self.point(ENDED)

        work = Work(run, self._power, is_change=is_change)
        with contextlib.suppress(RuntimeError):  # another job adds it
            is_mine = self.request is not None and asyncio.current_task() is self.request
            (self._mine if is_mine else self._others).append(work)
            return work
        self._others.append(work)
        return work

    def _run_threads(self) -> None:
        """Let those threads run that have something to do."""
        bucket: Any = self.life.bucket if self.life is not None else None
        if bucket is None:
            return
        for one in (bucket.journal, bucket._uploads, bucket.snapshots):  # noqa: SLF001  # its threads
            work = self._threads.get(one)
            if one.is_due() and (work is None or work.done.done()):
                self._threads[one] = self.add(one.work)

    @property
    def is_idle(self) -> bool:
        """Whether no job is left."""
        self._run_threads()
        return not self._mine and not self._others

    def _proceed(self, jobs: list[Work], job: Work) -> None:
        self._idle = 0
        job.proceed()
        if job.done.done():
            jobs.remove(job)

    def step(self) -> None:
        """Let one of the jobs proceed, or none."""
        self._run_threads()
        others = [one for one in self._others if one.is_ready()]
        if self.request is None:
            if others and self._chance.random() < 0.6:
                self._proceed(self._others, self._chance.choice(others))
            return
        mine = [one for one in self._mine if one.is_ready()]
        is_held = bool(mine) and mine[0].is_change and not self._has_waited
        if is_held and (self.waited == self._wait or self._idle > _STUCK):
            self._has_waited, is_held = True, False
        is_waiting = bool(self._mine) and not mine
        if mine and not is_held:
            self._proceed(self._mine, mine[0])
        elif others and (is_held or is_waiting or self.request.done() or self._idle > _IDLE):
            self.waited += is_held
            self._proceed(self._others, others[0])
        else:
            self._idle += 1

    def help(self) -> None:
        """Let a job proceed, because the event loop waits for it, as in a start."""
        self._run_threads()
        self._proceed(self._others, next(one for one in self._others if one.is_ready()))

    def end(self) -> None:
        """Let all jobs come to their ends; the power is off."""
        run_out(self._mine, self._others)


class _Disk(PlacesDisk):
    """The model of disks, and the working folder. Each call is a point."""

    steps: Steps


def _stopping(name: str) -> Any:
    method = getattr(PlacesDisk, name)

    def call(self: _Disk, where: Any, *rest: Any) -> Any:
        if not self.is_within:
            self.steps.point(name)
        return method(self, where, *rest)

    return call


for _name in (
    *("make_folder", "create", "open_for_append", "open_for_update", "open_for_reading", "link"),
    *("rename", "unlink", "write_synced", "rewrite", "sync_folder", "append", "truncate", "sync"),
    *("write_at", "remove_folder"),
):
    setattr(_Disk, _name, _stopping(_name))


class SteppedStore(FailingStore):
    """The store. Each request is a point."""

    steps: Steps

    def _before(self, operation: str, name: str) -> None:
        self.steps.point(f"store.{operation}")
        super()._before(operation, name)


@contextlib.contextmanager
def stepped(steps: Steps) -> Iterator[None]:
    """Let the brokers that start in the block run in steps."""
    numbers = iter(range(100))

    def disk(*args: Any, **more: Any) -> _Disk:
        made = _Disk.__new__(_Disk)
        made.steps = steps
        made.__init__(*args, **more)  # type: ignore[misc]  # it needs its steps first
        return made

    def rows(*args: Any) -> MetadataStore:
        made = MetadataStore(*args)
        made._database._lock = _Lock(steps)  # type: ignore[assignment]  # noqa: SLF001  # in its place
        return made

    def reach(name: str) -> None:
        if name.startswith("move."):
            steps.point(name)

    def remove_tree(path: Path, **how: Any) -> None:
        assert steps.life is not None
        steps.life.disk.remove_tree(path, **how)

    with (
        silent(),
        mock.patch.multiple(
            placed_logs,
            PlacesDisk=disk,
            MetadataStore=rows,
            ThreadPoolExecutor=lambda _: _Pool(steps, next(numbers)),
        ),
        mock.patch.multiple(durable_ends, ThreadPoolExecutor=lambda *_: _Pool(steps), FLUSH_S=0),
        mock.patch.multiple(
            logs,
            Journal=_Journal,
            Uploads=_Uploads,
            Snapshots=_SnapshotsInJobs,
            Heart=_StoppedHeart,
            INDEXED_BYTES=1,
        ),
        mock.patch.object(upload, "INDEXED_BYTES", 1),
        mock.patch.object(journal, "Future", _Outcome),
        mock.patch.object(uploads, "Future", _Outcome),
        mock.patch.object(in_progress, "Future", _Outcome),
        mock.patch.object(recovery, "ThreadPoolExecutor", Inline),
        mock.patch.object(opening, "ThreadPoolExecutor", Inline),
        mock.patch.multiple(mover, _RETRY_S=0, _PAUSE_S=0),
        mock.patch.object(copier, "_FIRST_S", 60),  # the steps decide when a flush ends
        mock.patch.object(failpoints, "reach", reach),
        mock.patch.object(shutil, "rmtree", remove_tree),
        # The model knows what is durable, and nothing on the machine is used after a power loss.
        mock.patch.multiple(os, fsync=lambda _: None, fdatasync=lambda _: None),
    ):
        yield
