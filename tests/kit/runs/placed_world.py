"""Worlds of `placed_logs`: several lives of a broker, one after the other."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any
from unittest import mock

from kit.fakes.places import FailingStore, Power, make_disks
from kit.runs.placed_faults import Failing
from kit.runs.placed_known import KnownTopic
from kit.runs.placed_logs import LIMIT_S, Life, UndecidedError
from logmirror.broker import dir_failures
from logmirror.broker.bucket import uploads
from logmirror.broker.moves import mover, turns

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.fakes.tree_disk import Doubtful


class World:
    """Several lives, one after the other.

    Args:
        seed: Decides.
        folder: For the disks.
        lives: How many.
        fault_rate: How often a disk fails, of the lives before the last.
        pause_rate: How often a call of a disk or the store waits a moment, in half of the worlds.

    Attributes:
        is_undecided: It ended at a start that waits for the user.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        lives: int = 4,
        fault_rate: float = 0.0,
        pause_rate: float = 0.0,
    ) -> None:
        self.chance = random.Random(seed)
        self.folder, self._lives, self._fault_rate = folder, lives, fault_rate
        self._pause_rate = self.chance.choice([0.0, pause_rate])
        self.store = FailingStore(self.chance)
        self.known = KnownTopic()
        self.ended: list[str] = []
        self.lives: list[Life] = []
        self._doubtful: Doubtful = {}
        self.is_undecided = False

    def total(self, name: str) -> int:
        """Return the sum of a count of all lives."""
        return sum(getattr(life, name) for life in self.lives)

    def run(self) -> list[str]:
        """Return what is wrong."""
        root = make_disks(self.folder / "now")
        at_once = {"_STEPS": self.chance.choice([1, 2]), "_ACTIVE": self.chance.choice([1, 8])}
        with (
            mock.patch.multiple(mover, _RETRY_S=0, _PAUSE_S=0.005),
            mock.patch.multiple(turns, **at_once),
            mock.patch.object(dir_failures, "PAUSE_S", 0.001),
            mock.patch.object(uploads, "_FIRST_PAUSE_MS", 1),
            mock.patch.object(uploads, "_LONGEST_PAUSE_MS", 5),
            mock.patch.object(threading, "excepthook"),
            mock.patch.object(shutil, "rmtree", self._remove),
        ):
            for number in range(1, self._lives + 1):
                is_last = number == self._lives
                lost_at = (
                    0
                    if is_last
                    else self.chance.choice([0, *(self.chance.randint(1, 300) for _ in range(3))])
                )
                power = Power(lost_at, self._pause_rate)
                life = Life(root, self.store, self.known, self.chance, power)
                if not is_last:
                    life.failing = Failing(life, self.chance, self._fault_rate)
                life.doubtful = self._doubtful
                self.lives.append(life)
                self.store.rate = 0.0
                try:
                    is_off = _run(life, life.end if is_last else life.live)
                except UndecidedError:
                    self.is_undecided = True
                    shutil.rmtree(self.folder)
                    return []
                except Exception as error:  # noqa: BLE001  # what a life does not expect
                    is_off, life.problems = False, [*life.problems, repr(error)]
                if life.problems:
                    return [f"life {number} {self.ended}: {one}" for one in life.problems]
                self._end(life, root, is_off=is_off)
        shutil.rmtree(self.folder)
        return []

    def _remove(self, path: Path, **how: Any) -> None:
        self.lives[-1].disk.remove_tree(path, **how)

    def _end(self, life: Life, root: Path, *, is_off: bool) -> None:
        """Leave what the next life finds on the disks."""
        mood = self.chance.choice([0.0, 0.5, 1.0])
        how = "lost" if is_off else "stopped"
        self.ended.append(f"{how} {life.power.count} {mood} {life.failing.fault!r}")
        self.store.staged.clear()
        left = self.folder / "next"
        self._doubtful = life.disk.after_power_loss(
            left,
            is_cached=mood == 1.0,
            keep=lambda n: self.chance.randint(0, n) if mood == 0.5 else round(mood * n),
            some=lambda: self.chance.random() < mood,
        )
        shutil.rmtree(root)
        left.rename(root)


async def _abandon(life: Life) -> None:
    """Cancel everything that is in progress."""
    if hasattr(life, "topics") and life.topics.moves is not None:
        life.topics.moves.stop()  # so that no step is begun, and cancelled before
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
        deadline_s = time.monotonic() + LIMIT_S
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
