"""The scheduler of a simulation: virtual time, and actors that run one at a time.

Each actor is a thread, so the product's code runs unchanged. A thread runs only while it holds the
baton, and passes it on only in `step` and `sleep_ms`. The seed decides which actor is next; time
advances only when all actors wait. A run therefore depends on its seed alone, and two runs of a
seed have the same `trace`.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from logmirror.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.clock import Chooser

BEGIN_MS: Final = 1_790_000_000_000
"""Wall-clock time at the start of every simulation."""

_TURN: Final = 0.3
"""Probability that another actor is scheduled after a step."""

_KEPT_STEPS: Final = 60
"""Number of steps that are kept in words."""


class KilledError(BaseException):
    """The process was killed. Not an Exception, so that no handler catches it."""


class EndedError(BaseException):
    """The simulation is over; raised in each actor that still runs."""


class Actor:
    """One thread of the simulation. Created by `Schedule.add`."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act
        self.wake_ms = 0
        self.baton = threading.Lock()
        self.baton.acquire()
        self.error: BaseException | None = None


class Schedule(Clock):
    """The actors of one simulation, and their clock.

    Args:
        chooser: Draws the next actor.
        limit_ms: Virtual time after which actors that still run are ended.
        steps_max: Number of steps after which they are ended.

    Attributes:
        ran_out: Whether a limit was reached.
        current: The actor that runs.
        last_steps: The last steps, in words.
        heard: Called with each step in words.
    """

    def __init__(self, chooser: Chooser, *, limit_ms: int, steps_max: int) -> None:
        self._chooser = chooser
        self._limit_ms, self._steps_max = limit_ms, steps_max
        self._ms = self._steps = 0
        self._actors: list[Actor] = []
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._timer_count = 0
        self._trace = hashlib.blake2b(digest_size=16)
        self._done = threading.Lock()
        self._errors: list[BaseException] = []
        self._is_ending = False
        self.ran_out = False
        self.current = Actor("none", lambda: None)
        self.last_steps: deque[str] = deque(maxlen=_KEPT_STEPS)
        self.heard: Callable[[str], None] = lambda _line: None

    # -- what actors and the world call ----------------------------------------------------------

    def now_ms(self) -> int:
        """See `Clock.now_ms`."""
        return BEGIN_MS + self._ms

    def monotonic_ms(self) -> int:
        """See `Clock.monotonic_ms`; 0 at the start of a simulation."""
        return self._ms

    def sleep_ms(self, duration_ms: float) -> None:
        """See `Clock.sleep_ms`; passes the baton on."""
        self.current.wake_ms = self._ms + max(int(duration_ms), 1)
        self._turn()

    def step(self, words: str) -> None:
        """Let another actor run first, perhaps. Called before each access to shared state.

        Args:
            words: The access, for the trace.
        """
        self.note(words)
        self._steps += 1
        if self._chooser.random() < _TURN:
            self._ms += 1
            self._turn()
        elif self._is_ending:
            raise EndedError

    def note(self, words: str) -> None:
        """Add a line to the trace."""
        line = f"{self._ms} {self.current.name} {words}"
        self._trace.update(line.encode() + b"\n")
        self.last_steps.append(line)
        self.heard(line)

    def after(self, duration_ms: int, act: Callable[[], None]) -> None:
        """Schedule a callback, which must neither step nor sleep."""
        self._timer_count += 1
        self._timers.append((self._ms + duration_ms, self._timer_count, act))
        self._timers.sort(key=lambda timer: timer[:2])

    @property
    def trace(self) -> str:
        """Digest of all steps so far."""
        return self._trace.hexdigest()

    # -- running ---------------------------------------------------------------------------------

    def add(self, name: str, act: Callable[[], None]) -> Actor:
        """Add an actor; `run` starts it."""
        actor = Actor(name, act)
        actor.wake_ms = self._ms
        self._actors.append(actor)
        return actor

    def run(self) -> None:
        """Run all actors until each has ended.

        Raises:
            BaseException: The first exception that an actor raised.
        """
        threads = [
            threading.Thread(target=self._live, args=(actor,), daemon=True, name=actor.name)
            for actor in self._actors
        ]
        self._done.acquire()
        for thread in threads:
            thread.start()
        if threads:
            self._next().baton.release()
            self._done.acquire()
        self._done.release()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def extend(self, limit_ms: int) -> None:
        """Prepare another `run`, of at most this duration."""
        self._limit_ms, self._steps = self._ms + limit_ms, 0
        self._is_ending = False

    def _live(self, actor: Actor) -> None:
        actor.baton.acquire()
        try:
            if not self._is_ending:
                actor.act()
        except EndedError:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again by `run`
            self._errors.append(error)
        self._actors.remove(actor)
        if self._actors:
            self._next().baton.release()
        else:
            self._done.release()

    def _turn(self) -> None:
        actor = self.current
        chosen = self._next()
        if chosen is not actor:
            chosen.baton.release()
            actor.baton.acquire()
        if self._is_ending:
            raise EndedError

    def _next(self) -> Actor:
        """Choose the next actor; advance the time while all actors wait."""
        if self._ms > self._limit_ms or self._steps > self._steps_max or self._errors:
            self._is_ending = self.ran_out = True
        if self._is_ending:
            self.current = self._actors[0]
            return self.current
        while True:
            ready = [actor for actor in self._actors if actor.wake_ms <= self._ms]
            if ready:
                break
            wake_ms = min(actor.wake_ms for actor in self._actors)
            if self._timers and self._timers[0][0] <= wake_ms:
                self._ms = max(self._ms, self._timers[0][0])
            else:
                self._ms = wake_ms
            self._fire()
        self._fire()
        self.current = ready[self._chooser.randrange(len(ready))] if len(ready) > 1 else ready[0]
        return self.current

    def _fire(self) -> None:
        while self._timers and self._timers[0][0] <= self._ms:
            self._timers.pop(0)[2]()
