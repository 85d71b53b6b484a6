"""Which moves take the next steps: all in turn, so that none waits for another one's end.

begun -> backlog -> in turn (few, so that few files are open) -> a step -> in turn ... -> ended
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from logmirror.broker.moves.move import Move

_ACTIVE: Final = 8
"""Moves in turn, so that few files are open; the others have not begun."""

_STEPS: Final = 2
"""Steps that run at once."""


class Turns:
    """The order of the steps. Runs on the event loop.

    Args:
        step: Takes one step of a move. Raises nothing.
    """

    def __init__(self, step: Callable[[Move], Coroutine[Any, Any, None]]) -> None:
        self._step = step
        self._backlog: deque[Move] = deque()
        self._active: set[Move] = set()
        self._waiting: deque[Move] = deque()
        self._steps: dict[Move, asyncio.Task[None]] = {}
        self._is_stopping = False

    @property
    def steps(self) -> set[asyncio.Task[None]]:
        """The steps in progress."""
        return set(self._steps.values())

    def step_of(self, move: Move) -> asyncio.Task[None] | None:
        """Return the step of a move that is in progress."""
        return self._steps.get(move)

    def add(self, move: Move) -> None:
        """Take steps of a move from now on, as long as it is active; see `go_on`."""
        self._backlog.append(move)

    def stop(self) -> None:
        """Begin no more steps."""
        self._is_stopping = True

    def go_on(self) -> None:
        """Begin the next steps."""
        while len(self._steps) < _STEPS and not self._is_stopping:
            while self._backlog and len(self._active) < _ACTIVE:
                move = self._backlog.popleft()
                self._active.add(move)
                self._waiting.append(move)
            if not self._waiting:
                return
            move = self._waiting.popleft()
            if not move.is_active:
                self._active.discard(move)
            else:
                self._steps[move] = step = asyncio.ensure_future(self._step(move))
                step.add_done_callback(functools.partial(self._stepped, move))

    def _stepped(self, move: Move, _: asyncio.Task[None]) -> None:
        del self._steps[move]
        self._waiting.append(move)
        self.go_on()
