"""Bounds how long the stop of a broker waits for its bucket.

After `GIVE_UP_S`, nothing waits for the bucket any more. A request that is in progress then cannot
be interrupted, so the process ends after `END_S` whatever its threads do. Nothing acknowledged is
lost by that which a crash would not lose.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from typing import TYPE_CHECKING, Final

from logmirror.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_LOG: Final = logging.getLogger(__name__)
GIVE_UP_S: Final = 4.0
END_S: Final = 8.0


def not_stored(partitions: int) -> UnavailableError:
    """Return the error of a stop without the bucket."""
    return UnavailableError(
        "the broker has stopped, and its bucket cannot be written",
        hint="records that were acknowledged are in the bucket, unless flush-on-ack is off; "
        "those that were not may be missing",
        partitions=partitions,
    )


class StopDeadline:
    """The two timers of a stop.

    Args:
        give_up: Called after `GIVE_UP_S`.
        folder: The working folder, which is removed in the end.
    """

    def __init__(self, give_up: Callable[[], None], folder: Path) -> None:
        self._folder = folder
        self._timers = threading.Timer(GIVE_UP_S, give_up), threading.Timer(END_S, self._end)

    def begin(self) -> None:
        """Begin the stop."""
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def cancel(self) -> None:
        """The stop is over."""
        for timer in self._timers:
            timer.cancel()

    def _end(self) -> None:
        error = not_stored(0)
        _LOG.error("a request to the bucket does not end: %s; %s", error.message, error.hint)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(UnavailableError.exit_code)
