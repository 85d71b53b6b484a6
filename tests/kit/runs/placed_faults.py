"""What a life of `placed_logs` must do while a disk fails, and after it.

- A partition is offline only if its own place has failed, or if its durable end could not be
  written. All others take appends, and acknowledge them.
- A dead disk on which something was written takes its log directory offline, with all partitions
  there. Nothing else does: not one without space, and no other directory.
- A move fails only if one of its two places has failed. The partition stays where it is. When the
  disk works again, a move that is requested again succeeds.

What must be there at the next start, when all disks work, is as ever.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from kit.fakes.disk_faults import DiskFault, Kind
from kit.runs.placed_known import PLAIN
from logmirror.broker.moves.move import MoveState
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from kit.runs.placed_logs import Life
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.moves.move import Move

ENDS_PLACE: Final = "a"
"""Where the durable ends of the partitions on disks are."""

_LIMIT_S: Final = 20.0


class Failing:
    """What fails in a life.

    Args:
        life: The life.
        chance: Decides.
        rate: How often anything does.
    """

    def __init__(self, life: Life, chance: random.Random, rate: float) -> None:
        self._life = life
        self.fault = DiskFault.drawn(chance) if chance.random() < rate else None
        self.is_early = chance.random() < 0.2
        """The disk fails in the start already: some partitions are offline, or there is no start.
        Only what the next start finds is judged then."""

        self.is_over = False
        """Moves do not fail any more."""

    @property
    def has_failed(self) -> bool:
        """Whether a call has."""
        return self.fault is not None and bool(self.fault.failed)

    @property
    def has_failed_early(self) -> bool:
        """Whether a call has, and the start may have failed."""
        return self.is_early and self.has_failed

    def concerns(self, log: PartitionLog) -> bool:
        """Whether a call has failed which a partition needs where it is."""
        if self.fault is None or not self.fault.failed:
            return False
        place = _place(log.folder)
        ends = self.fault.place == ENDS_PLACE and "write_at" in self.fault.failed
        return place == self.fault.place or (ends and place != "w")

    def may_end(self, move: Move) -> bool:
        """Whether a move may have failed."""
        if self.fault is None or not self.fault.failed:
            return False
        is_target = move.target.name == self.fault.place
        return self.concerns(move.log) or (is_target and not self.is_over)

    async def judge(self) -> None:
        """Judge what a fault has done, and let the disk work again, unless it is dead."""
        life, fault = self._life, self.fault
        if fault is None or not fault.failed or life.power.is_off or life.is_over:
            return
        fault.heal()
        await self._probed()
        if not life.failures.fatal.done():
            for number in range(len(life.topic.logs)):
                await self._judge_partition(number)
            await self._probed()
        self._judge_dirs()
        if not life.failures.fatal.done() and not life.power.is_off:
            await self._move_again()

    async def _probed(self) -> None:
        """Wait until no directory is in doubt."""
        failures, deadline_s = self._life.failures, time.monotonic() + _LIMIT_S
        await asyncio.sleep(0)
        while failures._probing and not failures.fatal.done():  # noqa: SLF001  # no other way to wait
            assert time.monotonic() < deadline_s, "a probe does not end"
            await asyncio.sleep(0.001)

    def _says(self, problem: str) -> None:
        if not self._life.power.is_off:
            self._life.problems.append(f"with {self.fault!r}: {problem}")

    async def _judge_partition(self, number: int) -> None:
        """A partition takes appends, unless its place has failed."""
        life, fault = self._life, self.fault
        assert fault is not None
        log = life.topic.logs[number]
        where = f"partition {number} at {_place(log.folder)}"
        if log.failure is not None:
            if not self.concerns(log):
                self._says(f"{where} is offline: {log.failure!r}")
            return
        is_dead = fault.kind is Kind.DEAD and _place(log.folder) == fault.place
        try:
            life.writer(number).append(PLAIN)
            await asyncio.wait_for(life.commits.flushed(log, log.log_end), _LIMIT_S)
        except (LogmirrorError, TimeoutError) as error:
            if not is_dead and not self.concerns(log):
                self._says(f"{where} takes no records: {error!r}")
            return
        if is_dead and fault.place != "w":
            self._says(f"{where} takes records")

    def _judge_dirs(self) -> None:
        """The directory of a dead disk is offline, and no other."""
        life, fault = self._life, self.fault
        assert fault is not None
        offline = {path.name for path in life.topics.dirs.offline}
        if offline - {fault.place} or (offline and fault.kind is Kind.FULL):
            self._says(f"offline are {offline}")
        logs = [log for log in life.topic.logs if _place(log.folder) == fault.place]
        if fault.place in offline:
            if left := [str(log.folder) for log in logs if log.failure is None]:
                self._says(f"{left} are online")
        elif fault.kind is Kind.DEAD and fault.place != "w" and logs:
            self._says("no directory is offline")
        if life.failures.fatal.done() != (ENDS_PLACE in offline):
            self._says(f"offline are {offline}, but the broker ends: {life.failures.fatal}")

    async def _move_again(self) -> None:
        """Request the moves again that have failed; they succeed."""
        life, fault = self._life, self.fault
        assert fault is not None
        moves = life.topics.moves
        assert moves is not None
        await life.quiet()
        if fault.kind is Kind.DEAD or life.topics.dirs.offline:
            return
        self.is_over = True
        failed = [one for one in moves.all if one.state is MoveState.FAILED]
        wanted = [one for one in failed if one.log.failure is None]
        async with moves.turn:
            refused = await moves.change([(one.key, one.log, one.target) for one in wanted])
        online = [str(log.folder) for log in refused if log.failure is None]
        if online and not life.power.is_off:
            self._says(f"refused are {online}")
        await life.quiet()
        life.again += len(wanted)
        for one in wanted:
            if not self.concerns(one.log) and one.log.folder.parent.parent != one.target:
                self._says(f"{one.log.folder} is not in {one.target}")


def _place(folder: Path) -> str:
    return folder.parent.parent.name
