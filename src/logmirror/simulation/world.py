"""The state of one simulation: its processes, its source, and its faults."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Final, TypeVar

from logmirror.errors import LogmirrorError, OutcomeUnknownError
from logmirror.simulation.faults import Directive
from logmirror.simulation.schedule import KilledError
from logmirror.testing.checker import History
from logmirror.wire.messages import NOT_LEADER_OR_FOLLOWER, api_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.clock import Chooser
    from logmirror.simulation.schedule import Actor, Schedule
    from logmirror.simulation.source import Application

PAUSE_MS: Final = 20_000
SOURCE_DOWN_MS: Final = 4_000
DOWN_MS: Final = 15_000
_T = TypeVar("_T")
_R = TypeVar("_R")

LATE_MS: Final = (30, 400, 2_000)
"""Delays of a late write: short enough that later writes come before it."""

EVERYTHING: Final = 1 << 30


class Process:
    """A driver, or an executor that runs slices for it.

    Args:
        world: The simulation.
        name: A unique name.
        parent: The driver of an executor; the executor dies with it.
    """

    def __init__(self, world: World, name: str, parent: Process | None = None) -> None:
        self.world, self.name, self._parent = world, name, parent
        self.began_ms = world.schedule.monotonic_ms()
        self.descriptors: set[int] = set()
        self.pause_ms = 0
        self._is_killed = False
        self.stop: Callable[[], None] = lambda: None
        """Requests a shutdown, as SIGTERM does."""

    @property
    def is_dead(self) -> bool:
        """Whether it was killed, or its driver was."""
        return self._is_killed or (self._parent is not None and self._parent.is_dead)

    @property
    def is_executor(self) -> bool:
        """Whether it runs slices for a driver."""
        return self._parent is not None

    @property
    def driver(self) -> Process:
        """The process that runs the loop: itself, or its parent."""
        return self._parent or self

    def kill(self) -> None:
        """Kill the process."""
        self._is_killed = True

    def touch(self, words: str) -> None:
        """Let others run before an access to shared state; raises `KilledError` if it is dead."""
        if self.is_dead:
            raise KilledError
        self.world.schedule.step(f"{self.name} {words}")
        driver = self.driver
        if driver.pause_ms:
            pause_ms, driver.pause_ms = driver.pause_ms, 0
            self.world.schedule.sleep_ms(pause_ms)
        if self.is_dead:
            raise KilledError

    def close(self) -> None:
        """End the process, and close its file descriptors."""
        self.kill()
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.descriptors.clear()


class World:
    """The shared state of one simulation, without the product's.

    Args:
        schedule: The scheduler.
        chooser: Draws the random choices.
        application: The source.
        directive: The fault that happens at a failpoint; None: only drawn faults.

    Attributes:
        refusals: Number of next writes that are refused.
        losses: Number of next writes whose response is lost.
        lates: Number of next writes that get no response and are performed later.
        io_errors: Number of next flushes that fail.
        fired: Number of times that the directed fault has happened.
        happened: Names of all faults that have happened, in order.
        has_epochs: Whether the source has leader epochs.
        power_lost: Applies a power loss to the destination.
        durable_end: Returns the end of the replica, without what a fault could still undo.
    """

    def __init__(
        self,
        schedule: Schedule,
        chooser: Chooser,
        application: Application,
        directive: Directive | None,
    ) -> None:
        self.schedule, self.chooser, self.application = schedule, chooser, application
        self._directive, self._count = directive, 0
        self.history = History()
        self.refusals = self.losses = self.lates = self.io_errors = 0
        self._source_down_ms = self._down_ms = -1
        self.is_healed = False
        self.second_wanted = False
        self.has_epochs = True
        self.fired = 0
        self.happened: list[str] = []
        self.points: set[str] = set()
        self.power_lost: Callable[[], None] = lambda: None
        self.durable_end: Callable[[], int] = lambda: 0
        self._running: dict[Actor, list[Process]] = {}

    # -- processes -------------------------------------------------------------------------------

    def enter(self, process: Process) -> None:
        """Let the current actor act as this process."""
        self._running.setdefault(self.schedule.current, []).append(process)

    def leave(self) -> None:
        """End the process of the current actor, which acts as the one before it."""
        self._running[self.schedule.current].pop().close()

    def _processes(self) -> list[Process]:
        return [process for running in self._running.values() for process in running]

    # -- faults ----------------------------------------------------------------------------------

    def plans(self, fault: str) -> bool:
        """Whether a fault is planned for a failpoint."""
        return self._directive is not None and self._directive.fault == fault

    def reached(self, point: str) -> None:
        """Handle a failpoint that a process has reached."""
        running = self._running.get(self.schedule.current)
        if not running or self.is_healed:
            return
        process = running[-1]
        process.touch(point)
        self.points.add(point)
        directive = self._directive
        if directive is None or directive.point != point:
            return
        self._count += 1
        if self._count == directive.nth:
            self.fired += 1
            if directive.fault == "kill-twice":
                self._directive = Directive(point, "kill", directive.nth + 1)
            self.inject(directive.fault, process)
            if process.is_dead:
                raise KilledError

    def inject(self, fault: str, process: Process | None = None) -> None:
        """Inject a fault into a process; None: into a random one."""
        if self.is_healed:
            return
        drivers = [each for each in self._processes() if not each.is_executor]
        if process is None and drivers:
            process = drivers[self.chooser.randrange(len(drivers))]
        self.happened.append(fault)
        self.schedule.note(f"fault {fault}")
        if process is not None and fault in _PROCESS_FAULTS:
            _PROCESS_FAULTS[fault](self, process)
        elif fault in _WORLD_FAULTS:
            _WORLD_FAULTS[fault](self)

    def _pause(self, process: Process) -> None:
        process.driver.pause_ms = PAUSE_MS
        self.second_wanted = True

    def _stop(self, process: Process) -> None:
        process.driver.stop()

    def _lose_executor(self, process: Process) -> None:
        executors = [each for each in self._processes() if each.is_executor]
        if process.is_executor:
            process.kill()
        elif executors:
            executors[0].kill()

    def _lose_power(self) -> None:
        for process in self._processes():
            process.kill()
        self.power_lost()

    def _take_source_down(self) -> None:
        self._source_down_ms = self.schedule.monotonic_ms() + SOURCE_DOWN_MS

    def _take_destination_down(self) -> None:
        self._down_ms = self.schedule.monotonic_ms() + DOWN_MS

    def _change_source(self) -> None:
        application = self.application
        if self.has_epochs:
            application.change_leader()
        application.act()
        application.clean()
        application.delete_before(self.durable_end())
        application.act()

    def _regrow_source(self) -> None:
        """Without leader epochs a running process cannot see it: then all are restarted."""
        self.application.regrow(self.durable_end(), has_epochs=self.has_epochs)
        if not self.has_epochs:
            for process in self._processes():
                process.kill()

    def _refuse(self) -> None:
        self.refusals += 1

    def _lose_response(self) -> None:
        self.losses += 1

    def _be_late(self) -> None:
        self.lates += 1

    def _fail_flush(self) -> None:
        self.io_errors += 1

    def heal(self) -> None:
        """End all faults."""
        self.is_healed = True
        self.refusals = self.losses = self.lates = self.io_errors = 0
        self._source_down_ms = self._down_ms = -1
        for process in self._processes():
            process.driver.stop()

    @property
    def source_is_down(self) -> bool:
        """Whether the source does not respond."""
        return self.schedule.monotonic_ms() < self._source_down_ms

    @property
    def is_down(self) -> bool:
        """Whether the destination does not respond."""
        return self.schedule.monotonic_ms() < self._down_ms

    def take(self, kind: str) -> bool:
        """Return whether the next write has a fault of this kind (`refusals`, ...); use it up."""
        waiting: int = getattr(self, kind)
        if waiting:
            setattr(self, kind, waiting - 1)
        return waiting > 0

    def raise_if_full(self) -> None:
        """Raise ENOSPC if the next write is refused."""
        if self.take("refusals"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def raise_if_io_error(self) -> None:
        """Raise EIO if the next flush fails."""
        if self.take("io_errors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def report_position(self, process: Process, position: int) -> None:
        """Record a position that a process has reported."""
        self.history.reported(
            process.driver.name,
            position,
            at_ms=self.schedule.monotonic_ms(),
            began_ms=process.driver.began_ms,
            durable=self.durable_end(),
        )


def _kill(_world: World, process: Process) -> None:
    process.driver.kill()


_PROCESS_FAULTS: Final[dict[str, Callable[[World, Process], None]]] = {
    "kill": _kill,
    "kill-twice": _kill,
    "two-writers": _kill,
    "pause": World._pause,  # noqa: SLF001  # a table of the class
    "stop": World._stop,  # noqa: SLF001  # the same
    "executor-lost": World._lose_executor,  # noqa: SLF001  # the same
}
_WORLD_FAULTS: Final[dict[str, Callable[[World], None]]] = {
    "power": World._lose_power,  # noqa: SLF001  # the same
    "source-down": World._take_source_down,  # noqa: SLF001  # the same
    "source-changes": World._change_source,  # noqa: SLF001  # the same
    "recreated": lambda world: world.application.recreate(),
    "regrown": World._regrow_source,  # noqa: SLF001  # the same
    "refused": World._refuse,  # noqa: SLF001  # the same
    "lost-answer": World._lose_response,  # noqa: SLF001  # the same
    "late": World._be_late,  # noqa: SLF001  # the same
    "down": World._take_destination_down,  # noqa: SLF001  # the same
    "io-error": World._fail_flush,  # noqa: SLF001  # the same
}


def write_under_faults(
    process: Process,
    write: Callable[[], _T],
    responded: Callable[[_T], _R],
    failed: Callable[[LogmirrorError], _R],
) -> _R:
    """Perform a write, subject to the pending faults.

    Args:
        process: The process that writes.
        write: Performs the write.
        responded: Makes the result of a response.
        failed: Makes the result of an error.
    """
    world = process.world
    if world.take("refusals"):
        return failed(api_error(NOT_LEADER_OR_FOLLOWER, action="could not write"))
    if world.take("lates"):
        world.schedule.after(world.chooser.choice(LATE_MS), lambda: _write_late(write))
        return failed(OutcomeUnknownError("no response to a write"))
    response = write()
    if world.take("losses"):
        return failed(OutcomeUnknownError("no response to a write"))
    return responded(response)


def _write_late(write: Callable[[], object]) -> None:
    """Perform a write whose sender has given up."""
    write()
