"""Says that a session waits for its executors.

Spark itself waits for ever and says so only in its own log: a cluster without a free core, or one
whose executors fail one after the other, looks like one that starts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Final

from logmirror.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOG = logging.getLogger("logmirror.engine")

EVERY_S: Final = 10.0
"""Interval of the log lines while no task has run, in seconds."""

HINT: Final = (
    "on a cluster, see its page and the logs of its executors: it may have no free cores or "
    "memory, or its executors end at their start"
)


@contextlib.contextmanager
def reported(master: str) -> Iterator[None]:
    """Within the block, which runs the first tasks, log every `EVERY_S` seconds that it waits."""
    is_over = threading.Event()
    begun_ms = SYSTEM_CLOCK.monotonic_ms()

    def report() -> None:
        while not is_over.wait(EVERY_S):
            waited_s = round((SYSTEM_CLOCK.monotonic_ms() - begun_ms) / 1000)
            facts = {"master": master, "waited_s": waited_s, "hint": HINT}
            line = "waiting: Spark has not finished the first tasks yet"
            _LOG.warning(line, extra={"facts": facts})

    reporter = threading.Thread(target=report, name="first-tasks", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        is_over.set()
