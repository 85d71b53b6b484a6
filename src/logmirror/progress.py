"""Progress of the work in this thread, for what supervises it.

The data path calls `moved` when bytes were received, written or acknowledged. A call costs an
attribute lookup; the listener limits how often it reports.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_of_thread = threading.local()


def report_to(listener: Callable[[], None] | None) -> None:
    """Call `listener` at each progress of this thread. None: no listener."""
    _of_thread.listener = listener


def moved() -> None:
    """Report that data has moved in this thread."""
    listener = getattr(_of_thread, "listener", None)
    if listener is not None:
        listener()
