"""Driver: the mirrors of one process: starts the lanes, supervises them, and ends them.

Each lane runs in a thread of its own; see `lane`. The calling thread waits for them: it logs what
they wait for, ends all of them when one ends with an error, and does not wait for a stalled lane at
a shutdown.
"""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.errors import LogmirrorError
from logmirror.mirror.flow_table import LoopContext
from logmirror.mirror.health import LaneProgress
from logmirror.mirror.lane import FLUSH_MS, Lane, addresses, lanes_of, seat_count
from logmirror.mirror.observer import Observer
from logmirror.mirror.slots import SlotPool
from logmirror.mirror.stopped import StoppedMirrors
from logmirror.mirror.tick import Engine
from logmirror.mirror.waits import WaitLog
from logmirror.monitoring.metrics import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.mirror.destination import Destination
    from logmirror.mirror.health import MirrorHealth
    from logmirror.mirror.lane import Turn
    from logmirror.mirror.ports import DestinationSpec, Runner
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.mirror.stopped import OnFatal

_LOG = logging.getLogger("logmirror.mirror")

POLL_MS: Final = 250
"""Pause between two polls of an idle lane. Each poll costs one request per broker, whatever the
number of partitions."""

_SUPERVISE_S: Final = 0.1
"""How often the calling thread checks the lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePorts:
    """What one lane uses, and no other thread."""

    client: Callable[[ConnectionSettings], ClusterClient]
    """Opens, or returns the open, client of a source."""

    brief_client: Callable[[ConnectionSettings], ClusterClient]
    """Like `client`, for requests that the loop can do without: each ends within seconds."""

    destination: Callable[[DestinationSpec], Destination]
    """Returns the driver's side of a destination. Called once for each."""


class Service:
    """The mirrors of one process.

    Args:
        mirrors: What to copy, and where to.
        ports: Returns new ports for a lane.
        runner: Where slices run.
        writer_id: The ID of this process as a writer; unique among all processes.
        clock: Time.
        on_fatal: Whether a stopped mirror ends the process (`exit`) or not (`isolate`).
        memory_bytes: The memory of all slots together, in bytes; None: `SLOT_BYTES` each.
        observer: Receives all events; None: a new one without readers.
        in_turns: Run the lanes in turns in the calling thread instead of in threads. For
            simulations and tests, which control time.
    """

    def __init__(  # noqa: PLR0913  # the composition root passes each port once
        self,
        mirrors: Sequence[MirrorSpec],
        *,
        ports: Callable[[], LanePorts],
        runner: Runner,
        writer_id: str,
        clock: Clock,
        on_fatal: OnFatal = "exit",
        memory_bytes: int | None = None,
        observer: Observer | None = None,
        in_turns: bool = False,
    ) -> None:
        self._mirrors, self._ports, self._runner, self._clock = mirrors, ports, runner, clock
        self._observer = observer or Observer([m.name for m in mirrors], Recorder(), clock)
        self._writer_id, self._memory_bytes = writer_id, memory_bytes
        self._in_turns = in_turns
        self._stopped = StoppedMirrors(on_fatal, [mirror.name for mirror in mirrors])
        self._stopping_since_ms: int | None = None
        self._has_started = False
        self._is_ending = False
        """A lane has ended with an error: the others end at their next commit boundary."""

    def health(self) -> list[MirrorHealth]:
        """Return the health of each mirror. Safe from any thread."""
        return self._observer.board.mirrors()

    def stop(self) -> None:
        """Make `run` flush what was polled, and return. Safe from a signal handler."""
        if self._stopping_since_ms is None:
            self._stopping_since_ms = self._clock.monotonic_ms()
        self._runner.end_follow_windows()

    def run(self, *, until_now: bool = False) -> None:
        """Replicate until `stop` is called.

        Args:
            until_now: Replicate up to the ends that the sources had at the start, then return.

        Raises:
            LogmirrorError: A mirror stopped. The kind of the first error is the process's exit
                code.
        """
        groups = lanes_of(self._mirrors, shares_reads=until_now)
        engine = Engine(
            runner=self._runner,
            slots=SlotPool(seat_count(groups)),
            writer_id=self._writer_id,
            memory_bytes=self._memory_bytes,
            in_threads=not self._in_turns,
        )
        lanes = [self._lane(mirrors, engine) for mirrors in groups.values()]
        self._observer.board.lanes_begin([lane.progress for lane in lanes])
        run_lanes = self._run_in_turns if self._in_turns else self._run_in_threads
        try:
            run_lanes(lanes, until_now=until_now)
        finally:
            self._observer.beat([s for lane in lanes for s in lane.states()], is_last=True)
        self._stopped.raise_first()

    def _lane(self, mirrors: Sequence[MirrorSpec], engine: Engine) -> Lane:
        ports = self._ports()
        context = LoopContext(
            client=ports.client,
            brief_client=ports.brief_client,
            destinations={
                (mirror.name, name): ports.destination(spec)
                for mirror in mirrors
                for name, spec in mirror.destinations
            },
            observer=self._observer,
            clock=self._clock,
        )
        served = [(m.name, [name for name, _ in m.destinations]) for m in mirrors]
        progress = LaneProgress(served, self._clock, functools.partial(addresses, mirrors))
        return Lane(mirrors, context, self._stopped, engine, progress)

    def _run_in_turns(self, lanes: Sequence[Lane], *, until_now: bool) -> None:
        active = list(lanes)
        while active:
            turns: dict[Lane, Turn] = {}
            error: LogmirrorError | None = None
            for lane in active:  # each gets to its commit boundary
                try:
                    turns[lane] = lane.turn(
                        until_now=until_now, stopping_since_ms=self._stopping_since_ms
                    )
                except LogmirrorError as failed:
                    error = error or failed
            if error is not None:
                raise error
            self._observer.beat([state for lane in lanes for state in lane.states()])
            self._check_start(lanes)
            active = [lane for lane in active if turns[lane] != "done"]
            if active and all(turn != "ran" for turn in turns.values()):
                self._clock.sleep_ms(POLL_MS)

    def _run_in_threads(self, lanes: Sequence[Lane], *, until_now: bool) -> None:
        errors: list[BaseException] = []
        is_over = threading.Event()

        def run(lane: Lane) -> None:
            try:
                self._run_lane(lane, until_now=until_now)
            except BaseException as error:  # noqa: BLE001  # the calling thread raises it
                errors.append(error)
            finally:
                lane.progress.is_over = True
                is_over.set()

        threads = [
            threading.Thread(target=run, args=(lane,), name=f"lane-{number}", daemon=True)
            for number, lane in enumerate(lanes)
        ]
        for thread in threads:
            thread.start()
        self._supervise(lanes, threads, errors, is_over)
        if errors:
            raise errors[0]

    def _run_lane(self, lane: Lane, *, until_now: bool) -> None:
        while not self._is_ending:
            turn = lane.turn(until_now=until_now, stopping_since_ms=self._stopping_since_ms)
            if turn == "done":
                return
            if turn == "idle":
                self._clock.sleep_ms(POLL_MS)

    def _supervise(
        self,
        lanes: Sequence[Lane],
        threads: Sequence[threading.Thread],
        errors: list[BaseException],
        is_over: threading.Event,
    ) -> None:
        """Wait for the lanes. At a shutdown, wait for those that make progress only."""
        waits = WaitLog(self._clock)
        ending_since_ms: int | None = None
        while any(thread.is_alive() for thread in threads):
            is_over.wait(_SUPERVISE_S)
            is_over.clear()
            self._observer.beat([state for lane in lanes for state in lane.states()])
            waits.log([lane.progress for lane in lanes])
            try:
                self._check_start(lanes)
            except LogmirrorError as error:
                errors.append(error)
            if errors and not self._is_ending:
                self._is_ending = True
                self._runner.end_follow_windows()
            if ending_since_ms is None:
                ending_since_ms = self._clock.monotonic_ms() if errors else self._stopping_since_ms
            if ending_since_ms is not None and self._all_stalled(lanes, ending_since_ms):
                self._log_abandoned(lanes)
                return

    def _all_stalled(self, lanes: Sequence[Lane], since_ms: int) -> bool:
        """Whether the shutdown has lasted `FLUSH_MS`, and no lane has made progress for as long."""
        ending_ms = self._clock.monotonic_ms() - since_ms
        alive = [lane.progress for lane in lanes if not lane.progress.is_over]
        return ending_ms >= FLUSH_MS and all(each.silent_ms >= FLUSH_MS for each in alive)

    @staticmethod
    def _log_abandoned(lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            if not lane.progress.is_over:
                facts: dict[str, object] = {"mirror": lane.progress.mirrors[0][0]}
                facts["mirrors"] = len(lane.progress.mirrors)
                facts["step"] = lane.progress.waits_for
                _LOG.warning(
                    "shutdown: a stalled destination or source was not waited for; its records "
                    "remain at the source",
                    extra={"facts": facts},
                )

    def _check_start(self, lanes: Sequence[Lane]) -> None:
        """Raise if each lane has tried to open its flows, and none could open any.

        Raises:
            LogmirrorError: The first lane's error.
        """
        if self._has_started or not all(lane.has_begun for lane in lanes):
            return
        self._has_started = True
        if any(lane.has_opened for lane in lanes):
            return
        for lane in lanes:
            for unopened in list(lane.table.unopened.values()):
                raise unopened.error
