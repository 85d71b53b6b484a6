"""Runs changes of durable state one after the other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

_Result = TypeVar("_Result")


class Changes:
    """Changes that are stored first and applied then. Runs on the event loop.

    Each runs to its end even if its client disconnects, so that memory and database agree, and in
    the order in which they came, for the same reason.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, change: Coroutine[None, None, _Result]) -> _Result:
        """Run a change after those before it; returns its result."""
        task = asyncio.ensure_future(self._next(change))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _next(self, change: Coroutine[None, None, _Result]) -> _Result:
        async with self._turn:
            return await change
