"""A move from one directory to another, with a request before every single point of it.

A point is a call of the disk, a change of the rows, or a failpoint of moves. Whatever runs stops
before each. The request begins before one of them. Between what it does in memory and its change of
the rows, the others make no step, one, two ..., up to all that they can. So every order of the two
occurs that threads could have. All else is the same in each run: that is checked.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import threading
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from kit.fakes.faulty_disk import PowerLossError
from kit.runs.moving_log import Job, Life, Rows, check, prepare, run, until
from logmirror import failpoints

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOW: Final = (
    "cancelled",
    "redirected",
    "cancelled, power lost",
    "redirected, power lost",
    "redirected and cancelled",
    "cancelled and redirected",
)
_IDLE: Final = 6
"""Turns of the event loop after which a request waits for something else."""

_LOOKED: Final = 1
"""Calls of a request before its first change of the rows: it looks for what is in the way."""

_STUCK: Final = 30
"""The same for everything else: nothing more can run."""


def run_out(*queues: list[Any]) -> None:
    """Let all jobs come to their ends."""
    for jobs in queues:
        while jobs:
            job = jobs.pop()
            while not job.done.done():
                job.proceed()


class Turns(Executor):
    """Runs calls in steps, each up to the next point.

    Args:
        chance: Decides which of several proceeds, until there is a request.
        wait: How many steps of others the request's change of the rows waits for.

    Attributes:
        request: What submits the calls of the request.
        waited: How many it has waited for.
    """

    def __init__(self, chance: random.Random, wait: int) -> None:
        self._chance, self._wait = chance, wait
        self._others: list[Job] = []
        self._mine: list[Job] = []
        self.request: asyncio.Task[None] | None = None
        self.waited = self._ended = self._idle = 0

    def submit(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        job = Job(partial(call, *args, **named))
        is_mine = self.request is not None and asyncio.current_task() is self.request
        (self._mine if is_mine else self._others).append(job)
        return job.done

    def _proceed(self, jobs: list[Job], job: Job) -> None:
        self._idle = 0
        job.proceed()
        if job.done.done():
            jobs.remove(job)
            self._ended += jobs is self._mine

    def step(self) -> None:
        """Let one of the calls proceed, or none."""
        if self.request is None:
            if self._others and self._chance.random() < 0.6:
                self._proceed(self._others, self._chance.choice(self._others))
            return
        is_held = bool(self._mine) and self._ended == _LOOKED and self.waited < self._wait
        if self._mine and (not is_held or self._idle > _STUCK):
            self._proceed(self._mine, self._mine[0])
        elif self._others and (is_held or self.request.done() or self._idle > _IDLE):
            self.waited += is_held
            self._proceed(self._others, self._others[0])
        else:
            self._idle += 1

    def end(self) -> None:
        """Let all calls come to their ends; the power is off."""
        run_out(self._mine, self._others)


class Run:
    """A move of a small partition from `a` to `b`, while records are written.

    Args:
        folder: It is created.
        seed: Of what is written and flushed, and when.
        how: One of `HOW`.
        begin: Before which point the request begins; 0: there is none.
        wait: See `Turns`.

    Attributes:
        names: Of all points.
        wanted: The directory in which the partition must be in the end.
    """

    def __init__(
        self, folder: Path, seed: int, how: str = "", begin: int = 0, wait: int = 0
    ) -> None:
        self.names: list[str] = []
        self.wanted = "b"
        self._folder, self._seed, self._how, self._begin = folder, seed, how, begin
        self.life = Life(prepare(folder / "now"), Rows(), random.Random(seed))
        self.turns = self.life.executor = Turns(random.Random(seed), wait)  # type: ignore[assignment]  # in its place
        self.life.disk.before = lambda _, name: self._point(name)
        self.life.rows.before = partial(self._point, "rows")

    def _point(self, name: str) -> None:
        job = threading.current_thread()
        if isinstance(job, Job):
            job.stop_here()
        if self.life.disk.is_off:
            raise PowerLossError
        self.names.append(name)
        if len(self.names) == self._begin:
            self.life.loop.call_soon_threadsafe(self._request)
            if isinstance(job, Job):
                job.stop_here()

    def _request(self) -> None:
        self.turns.request = asyncio.ensure_future(self._requested())

    async def _requested(self) -> None:
        life = self.life
        async with life.moves.turn:
            for one in self._how.partition(",")[0].split(" and "):
                self.wanted = life.place if one == "cancelled" else "c"
                await life.move(self.wanted)
        life.disk.is_off = "power lost" in self._how

    async def _work(self) -> None:
        life = self.life
        await life.start()
        await life.write(5)
        writing = asyncio.ensure_future(life.write(2))
        async with life.moves.turn:
            await life.move("b")
        await life.quiet()
        await writing
        if self._begin:
            await until(lambda: self.turns.request is not None)
            assert self.turns.request is not None
            await self.turns.request
            await life.quiet()
        await life.commits.flushed(life.log, life.log.log_end)
        await life.moves.close()

    def run(self) -> None:
        """Run it, and judge what it leaves."""
        life, folder = self.life, self._folder
        with mock.patch.object(failpoints, "reach", self._reach):
            is_off = run(life, self._work)
        assert is_off == ("power lost" in self._how)
        if is_off:
            self._restart()
        else:
            check(life)
            assert life.acked == life.log.log_end == 2 * life.appended
        assert self.life.place == self.wanted
        assert [path.name for path in folder.glob("now/*/t/*")] == ["0"]
        assert not life.rows.rows
        shutil.rmtree(folder)

    def _reach(self, name: str) -> None:
        if name.startswith("move."):
            self._point(name)

    def _restart(self) -> None:
        """Start after the power loss, and complete what the request has begun."""
        before, chance = self.life, random.Random(f"{self._seed} {self._how} {self._begin}")
        root, left = self._folder / "now", self._folder / "left"
        mood = chance.choice([0.0, 0.5, 1.0])
        before.disk.after_power_loss(
            left,
            keep=lambda n: chance.randint(0, n) if mood == 0.5 else round(mood * n),
            some=lambda: chance.random() < mood,
        )
        shutil.rmtree(root)
        left.rename(root)
        known = {"appended": before.appended, "acked": before.acked}
        self.life = after = Life(root, before.rows, chance, **known)

        async def again() -> None:
            await after.start()
            check(after)
            await after.quiet()
            check(after)
            await after.moves.close()

        assert not run(after, again)


def undisturbed(folder: Path, seed: int) -> tuple[int, list[str]]:
    """Return the number of the first point of the move, and the names of all points."""
    whole = Run(folder, seed)
    whole.run()
    return whole.names.index("rows", 1) + 1, whole.names  # the first change is that of the start


def requested(folder: Path, seed: int, how: str, waits: int | None = None) -> list[str]:
    """Run a request before each point of a move; returns their names.

    Args:
        folder: For the runs.
        seed: See `Run`.
        how: The same.
        waits: How many of the orders of a point are run, at most; None: all.
    """
    first, names = undisturbed(folder / "all", seed)
    for begin in range(first, len(names) + 1):
        for wait in itertools.islice(itertools.count(), waits):
            one = Run(folder / f"{begin}-{wait}", seed, how, begin, wait)
            one.run()
            assert one.names[:begin] == names[:begin]
            if one.turns.waited < wait:
                break
    return names[first - 1 :]
