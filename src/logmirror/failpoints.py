"""Named places where a test can end the process as `kill -9` would.

    LOGMIRROR_CRASH_AT=claim.created#2      die when this process reaches the point the second time

The points stand between the steps whose order makes a copy exactly-once, so a test that walks all
of `POINTS` has died once in every gap between them. Without the variable a point costs one dict
look-up. A process that dies here dies by SIGKILL: no `finally`, no flush, no exit handler runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE: Final = "LOGMIRROR_CRASH_AT"

POINTS: Final = (
    "plan.positions",  # driver: positions read, nothing dispatched
    "plan.dispatch",  # driver: slices fixed, about to run
    "fetch.answered",  # executor: batches received, nothing staged
    "stage.opened",  # executor: temporary object exists, empty
    "stage.written",  # executor: some bytes in it, not durable
    "stage.finished",  # executor: staged object durable, not claimed
    "claim.created",  # executor: claim durable, object not published
    "publish.linked",  # executor: object visible, nobody told
    "publish.done",  # executor: staged name removed, receipt not sent
    "head.filled",  # executor: filler stands for offsets that the source no longer has
    "head.deleted",  # executor: and is deleted again
    "hole.begin",  # executor: nothing on its way, no marker asked for
    "hole.joined",  # executor: the partition is in a transaction to which nothing is written
    "hole.marked",  # executor: a marker was asked for, perhaps not written yet
    "hole.filled",  # executor: the destination's log ends where the hole does
    "produce.prepared",  # executor: batches ready, nothing sent
    "produce.sent",  # executor: on their way, no answer
    "produce.answered",  # executor: acknowledged, nobody told
    "translate.owned",  # driver: the flow is said to be ours, nothing is copied
    "translate.taken",  # executor: older copiers are fenced, progress is read
    "translate.joined",  # executor: a transaction has begun, nothing is sent
    "translate.sent",  # executor: its records are on their way
    "translate.noted",  # executor: progress is written beside them, nothing is decided
    "translate.committed",  # executor: the transaction is committed, nobody told
    "compact.staged",  # compact: merged object durable, nothing says so
    "compact.recorded",  # compact: its record is there, it is not
    "compact.published",  # compact: it stands beside its parts
    "compact.proven",  # compact: it was read back, nothing is deleted
    "compact.deleted",  # compact: one more of its parts is deleted
    "commit.received",  # driver: receipts here, not checked
    "commit.done",  # driver: verified position advanced
)

_reached: dict[str, int] = {}
_listeners: list[Callable[[str], None]] = []


def reach(point: str) -> None:
    """Die here if the environment says so."""
    for listener in _listeners:
        listener(point)
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    name, _, nth = wanted.partition("#")
    if name != point:
        return
    _reached[point] = _reached.get(point, 0) + 1
    if _reached[point] == int(nth or 1):
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Tell a simulation of every point that is reached, until the block ends.

    Args:
        listener: Takes the point's name. What it raises ends whoever has reached it.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
