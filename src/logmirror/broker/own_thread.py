"""Runs a call that a disk may keep for good in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")


def in_own_thread(call: Callable[[], _Result], name: str) -> asyncio.Future[_Result]:
    """Begin a call that blocks, and return its outcome. Called on the event loop.

    Args:
        call: It may never end. A stop of the process does not wait for it.
        name: For the thread.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_Result] = loop.create_future()

    def run() -> None:
        end: Callable[[], None]
        try:
            end = functools.partial(outcome.set_result, call())
        except Exception as error:  # noqa: BLE001  # it is the outcome
            end = functools.partial(outcome.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(end)

    threading.Thread(target=run, name=f"logmirror-{name}", daemon=True).start()
    return outcome
