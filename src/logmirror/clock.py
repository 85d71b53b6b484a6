"""The one door for time, randomness and identifiers, so that tests can drive them."""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from typing import Final

# Linux stops the usual monotonic clock while it is suspended; other systems have one name for both.
_MONOTONIC: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock:
    """The machine's clocks. Subclass it in a test to make time stand still or jump."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch; may step backwards when the machine's clock is set."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Milliseconds that never step backwards; the zero is arbitrary. Use it for deadlines.

        They go on while the machine sleeps, where the system has such a clock: what was known
        before the sleep is old afterwards.
        """
        return time.clock_gettime_ns(_MONOTONIC) // 1_000_000

    def sleep_ms(self, duration_ms: float) -> None:
        """Wait; returns at once for a duration that is not positive."""
        if duration_ms > 0:
            time.sleep(duration_ms / 1000)


SYSTEM_CLOCK = Clock()
"""The clock of production code that was given none."""


def jittered_ms(base_ms: float) -> float:
    """A duration in base_ms/2 .. base_ms, so that many waiters do not return at one moment."""
    return base_ms * random.uniform(0.5, 1.0)  # noqa: S311  # spreads load, guards no secret


def new_writer_id() -> str:
    """A name for one writing process, unique among all: host, process id, 64 random bits.

    Only letters, digits, dots and dashes, so it may stand in a file name.
    """
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40] or "host"
    return f"{host}.{os.getpid()}.{secrets.token_hex(8)}"


def new_nonce() -> str:
    """64 random bits as 16 hexadecimal digits."""
    return secrets.token_hex(8)
