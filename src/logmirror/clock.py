"""The one door for time, randomness and identifiers, so that tests can drive them."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Linux stops the usual monotonic clock while it is suspended; other systems have one name for both.
_MONOTONIC: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

Chooser = random.Random
"""Draws what is drawn, the same for the same seed; guards no secret."""


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


class _SystemClock(Clock):
    """The machine's clocks, or the clock that drives this process instead."""

    driver: Clock | None = None
    chooser: Chooser | None = None

    def now_ms(self) -> int:
        return self.driver.now_ms() if self.driver else super().now_ms()

    def monotonic_ms(self) -> int:
        return self.driver.monotonic_ms() if self.driver else super().monotonic_ms()

    def sleep_ms(self, duration_ms: float) -> None:
        if self.driver:
            self.driver.sleep_ms(duration_ms)
        else:
            super().sleep_ms(duration_ms)


_system: Final = _SystemClock()

SYSTEM_CLOCK: Final[Clock] = _system
"""The clock of production code that was given none."""


@contextlib.contextmanager
def driven(clock: Clock, chooser: Chooser) -> Iterator[None]:
    """Let a simulation be time and chance of this process until the block ends.

    Args:
        clock: Stands in for `SYSTEM_CLOCK`.
        chooser: What pauses and identifiers are drawn from.
    """
    _system.driver, _system.chooser = clock, chooser
    try:
        yield
    finally:
        _system.driver = _system.chooser = None


def jittered_ms(base_ms: float) -> float:
    """A duration in base_ms/2 .. base_ms, so that many waiters do not return at one moment."""
    return base_ms * (_system.chooser or random).uniform(0.5, 1.0)


def new_writer_id() -> str:
    """A name for one writing process, unique among all: host, process id, 64 random bits.

    Only letters, digits, dots and dashes, so it may stand in a file name.
    """
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40] or "host"
    return f"{host}.{os.getpid()}.{secrets.token_hex(8)}"


def new_nonce() -> str:
    """64 random bits as 16 hexadecimal digits."""
    if _system.chooser:
        return f"{_system.chooser.getrandbits(64):016x}"
    return secrets.token_hex(8)
