"""A move into or out of a bucket, with a request before and after every single call of it.

What runs, and what a point is: `stepped_bucket`. A run begins with what a broker has left that has
stopped, so all runs of a seed are the same up to their requests: that is checked. Between what a
request does in memory and its change of the database, the others make no step, one, two ...
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import shutil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kit.fakes.places import Power, make_disks
from kit.runs.placed_known import PARTITIONS, PLAIN, TRANSACTIONAL, KnownTopic
from kit.runs.placed_logs import Life, place_of, vars_of
from kit.runs.stepped_bucket import SteppedStore, Steps, stepped

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path

    from kit.runs.placed_writer import Writer

WAYS: Final = {"into": ("a", "w"), "out": ("w", "a")}
"""From where to where."""

OTHER: Final = "b"
"""Where a redirected move leads."""

DELETING: Final = (
    "records deleted",
    "topic deleted",
    "records deleted, power lost",
    "topic deleted, power lost",
)
"""Other requests."""

ALL: Final = 1_000_000
"""The order in which others make all steps that they can first."""

_STILL: Final = 20
"""Turns of the event loop without a job, after which nothing begins one any more."""

_TURNS: Final = 100_000
"""Turns of the event loop; a run has some thousands."""


class State(NamedTuple):
    """What a broker has left that has stopped."""

    root: Path
    objects: dict[str, bytes]
    known: KnownTopic


class _Broker:
    """A life in steps.

    Args:
        state: It begins with it. The disks and what is known are used, the objects are copied.
        seed: Of what is written, and of the order of the jobs.
        begin: See `Steps`.
        wait: The same.
    """

    def __init__(self, state: State, seed: object, begin: int = 0, wait: int = 0) -> None:
        self.chance, self.power = random.Random(f"{seed}"), Power(0)
        self.steps = Steps(random.Random(f"order {seed}"), self.power, begin, wait)
        self.store = SteppedStore.__new__(SteppedStore)
        self.store.steps = self.steps
        self.store.__init__(self.chance)  # type: ignore[misc]  # it needs its steps first
        self.store.objects = dict(state.objects)
        self.known = state.known
        self.life = Life(state.root, self.store, state.known, self.chance, self.power)
        self.steps.life = self.life

    @property
    def place(self) -> str:
        """Where partition 0 is."""
        return place_of(self.life.topic.logs[0])

    async def start(self) -> None:
        """Start, without clocks."""
        self.steps.loop = asyncio.get_running_loop()
        await self.life.start()
        commits: Any = self.life.commits
        commits._interval_ms = 0  # noqa: SLF001  # from now on: the steps decide
        commits._ticker.cancel()  # noqa: SLF001  # the same

    def write(self) -> None:
        """Append a batch of one of the producers, or a marker."""
        writer: Writer = self.life.writer(0)
        if writer.log.failure is not None:
            return
        if self.chance.random() < 0.5:
            writer.append(PLAIN)
        elif writer.is_in_transaction and self.chance.random() < 0.5:
            writer.end_transaction()
        else:
            writer.append(TRANSACTIONAL)

    async def turns(self, is_over: Callable[[], bool]) -> None:
        """Let everything proceed until a condition is true."""
        for _ in range(_TURNS):
            if is_over():
                return
            await asyncio.sleep(0)
        moves = self.life.topics.moves
        raise AssertionError([vars_of(move) for move in moves.all] if moves is not None else [])

    async def quiet(self) -> None:
        """Wait until no move is in progress."""
        moves = self.life.topics.moves
        assert moves is not None
        await self.turns(lambda: not moves.all)

    async def at_rest(self) -> None:
        """Wait until nothing is done any more."""
        still = itertools.count()

        def is_over() -> bool:
            nonlocal still
            if not self.steps.is_idle:
                still = itertools.count()
            return next(still) > _STILL

        await self.turns(is_over)

    async def end(self) -> None:
        """Write once more, judge what is there, and that nothing else is left; stop."""
        life = self.life
        self.write()
        await self.flushed()
        await self.at_rest()
        for number, log in enumerate(life.topic.logs):
            life.judge(number, log, is_last=True)
        life.problems += [f"left is {one}" for one in self._left()]
        await life.stop()
        await self.at_rest()

    async def flushed(self) -> None:
        """Wait until everything is acknowledged."""
        for log in self.life.topic.logs:
            await self.life.commits.flushed(log, log.log_end)

    def _left(self) -> list[str]:
        """Return what is where no partition is."""
        life = self.life
        here = {log.folder for log in life.topic.logs}
        copies = [str(path) for path in life.root.glob("w/t/*") if path not in here]
        assert life.bucket is not None
        kept = {life.bucket.folder_of(log) for log in life.bucket.logs}
        indexes = {
            name.rpartition("/")[0].partition("/indexes/")[2]
            for name in life.store.objects
            if "/indexes/" in name
        }
        staged = [f"staged {one}" for one in life.store.staged]
        return [*life._left(), *copies, *(indexes - kept), *staged]  # noqa: SLF001  # the same judge

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Run until the end, or until the power is lost; returns whether that happened."""
        life, steps, power = self.life, self.steps, self.power

        async def main() -> None:
            def unexpected(_: object, context: dict[str, Any]) -> None:
                if not power.is_off:
                    life.problems.append(f"{context['message']}: {context.get('exception')!r}")

            asyncio.get_running_loop().set_exception_handler(unexpected)
            task = asyncio.ensure_future(work())
            while not task.done() and not power.is_off:
                steps.step()
                await asyncio.sleep(0)
            await self._abandon()
            try:
                await task
            except BaseException:
                if not power.is_off:
                    raise

        try:
            with stepped(steps):
                asyncio.run(main())
        finally:
            life.close()
        assert not life.problems, life.problems
        return power.is_off

    async def _abandon(self) -> None:
        """Cancel everything that is in progress."""
        if hasattr(self.life, "topics") and self.life.topics.moves is not None:
            self.life.topics.moves.stop()  # so that asyncio cancels no step that has not begun
        if self.power.is_off:
            self.steps.end()
        for _ in range(3):
            await asyncio.sleep(0)
        for one in asyncio.all_tasks() - {asyncio.current_task()}:
            one.cancel()

    def left(self, mood: float, chance: random.Random) -> State:
        """Leave on the disks and in the bucket what a stop, or a power loss, leaves.

        Args:
            mood: How much of what was not flushed is left.
            chance: Decides that, if it is neither 0 nor 1.
        """
        root, left = self.life.root, self.life.root.with_name("left")
        self.life.disk.after_power_loss(
            left,
            keep=lambda n: chance.randint(0, n) if mood == 0.5 else round(mood * n),
            some=lambda: chance.random() < mood,
        )
        shutil.rmtree(root)
        left.rename(root)
        return State(root, self.store.objects, self.known)


def prepared(folder: Path, seed: int, place: str) -> State:
    """Return a topic whose partition 0 is in a place, with two sealed segments and an open one."""
    first = _Broker(State(make_disks(folder / "begin"), {}, KnownTopic()), f"prepared {seed}")

    async def work() -> None:
        await first.start()
        await first.life.move(0, place)
        await first.quiet()
        for number in range(9):
            first.write()
            if number in {2, 5}:
                first.life.topic.logs[0].roll()
        await first.flushed()
        assert first.place == place
        await first.end()

    assert not first.run(work)
    return first.left(1.0, random.Random(seed))


class Run:
    """A move, while records are written.

    Args:
        state: It is copied.
        folder: For the disks. It is created, and removed.
        seed: See `_Broker`.
        way: One of `WAYS`.
        how: One of `enumerated_requests.HOW` or `DELETING`, or empty: there is no request.
        begin: See `Steps`.
        wait: The same.

    Attributes:
        span: The numbers of the points from the request for the move to its end.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # what a run is
        self,
        state: State,
        folder: Path,
        seed: int,
        way: str,
        how: str = "",
        begin: int = 0,
        wait: int = 0,
    ) -> None:
        self._folder, self._seed, self._how, self._begin = folder, seed, how, begin
        root = shutil.copytree(state.root, folder / "now")
        begun = State(root, state.objects, copy.deepcopy(state.known))
        self.broker = _Broker(begun, seed, begin, wait)
        self.steps = self.broker.steps
        self.steps.ask = self._ask
        self._source, self._wanted = WAYS[way]
        self._target = self._wanted
        self._is_acked = False
        """The move."""

        self.span = range(0)

    def _ask(self) -> None:
        self.steps.request = asyncio.ensure_future(self._requested())

    async def _requested(self) -> None:
        life = self.broker.life
        for one in self._how.partition(",")[0].split(" and "):
            if one == "records deleted":
                await self._delete_records()
            elif one == "topic deleted":
                life.known.is_deleting = True
                await life.topics.delete(life.topic)
                life.known.deleted()
            else:
                self._wanted = self.broker.place if one == "cancelled" else OTHER
                await life.move(0, self._wanted)
        if "power lost" in self._how:
            self.broker.power.is_off = True
        elif self._how == "topic deleted":
            await life.create()

    async def _delete_records(self) -> None:
        life = self.broker.life
        log, known = life.topic.logs[0], life.known.partitions[0]
        start = known.deleting = log.high_watermark - 1
        await life.topics.delete_records(life.topic, {0: start})
        known.deleted = start

    async def _move(self) -> None:
        await self.broker.life.move(0, self._target)
        self._is_acked = True

    async def _work(self) -> None:
        broker, steps = self.broker, self.steps
        await broker.start()
        assert broker.place == self._source
        broker.write()
        await broker.flushed()
        await broker.at_rest()
        begin = len(steps.names) + 1
        moving = asyncio.ensure_future(self._move())
        for pause in (5, 25, 25):
            for _ in range(pause):
                await asyncio.sleep(0)
            broker.write()
        await moving
        await broker.quiet()
        await broker.at_rest()
        self.span = range(begin, len(steps.names) + 1)
        if self._begin:
            await broker.turns(lambda: steps.request is not None)
            assert steps.request is not None
            await broker.turns(steps.request.done)
            steps.request.result()
            await broker.quiet()
        await broker.end()

    def run(self) -> None:
        """Run it, and judge what it leaves; start once more, and judge that."""
        is_off = self.broker.run(self._work)
        assert is_off == ("power lost" in self._how)
        if not is_off:
            self._judge_place(self.broker)
        chance = random.Random(f"{self._seed} {self._how} {self._begin}")
        mood = chance.choice([0.0, 0.5, 1.0]) if is_off else 1.0
        later = _Broker(self.broker.left(mood, chance), self._seed)

        async def again() -> None:
            await later.start()
            await later.quiet()
            await later.end()

        assert not later.run(again)
        self._judge_place(later)
        shutil.rmtree(self._folder)

    def _judge_place(self, broker: _Broker) -> None:
        if self._how == "records deleted, power lost" and not self._is_acked:
            assert broker.place in {self._source, self._target}
        elif "topic" not in self._how:
            assert broker.place == self._wanted
        assert len(broker.life.topic.logs) == PARTITIONS


def requested(  # noqa: PLR0913  # what the runs are
    folder: Path,
    seed: int,
    way: str,
    how: str,
    *,
    every: int = 1,
    orders: Sequence[int] | None = None,
) -> list[str]:
    """Run a request before each point of a move; returns the names of all points.

    Args:
        folder: For the runs.
        seed: See `Run`.
        way: The same.
        how: The same.
        every: Only before each n-th point.
        orders: Of these `wait` of `Run`, each point has one, in turn; None: each has all there are.
    """
    state = prepared(folder, seed, WAYS[way][0])
    whole = Run(state, folder / "whole", seed, way)
    whole.run()
    names = whole.steps.names
    for number, begin in enumerate(whole.span[seed % every :: every]):
        mine = itertools.count() if orders is None else [orders[number % len(orders)]]
        for wait in mine:
            one = Run(state, folder / f"{begin}-{wait}", seed, way, how, begin, wait)
            one.run()
            assert one.steps.names[:begin] == names[:begin], "all runs are the same up to it"
            if one.steps.waited < wait:
                break
    return [names[begin - 1] for begin in whole.span]
