"""Time, randomness and identifiers. The only source of these, so that tests can control them."""

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
"""A seeded random number generator. Not for secrets."""


class Clock:
    """The machine's clocks. Tests subclass it to stop time or make it jump."""

    def now_ms(self) -> int:
        """Return milliseconds since 1970. May step backwards when the machine's clock is set."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Return milliseconds that never step backwards, from an arbitrary zero. For deadlines.

        Time during suspend counts, if the operating system has such a clock: what was known before
        the suspend is old afterwards.
        """
        return time.clock_gettime_ns(_MONOTONIC) // 1_000_000

    def sleep_ms(self, duration_ms: float) -> None:
        """Sleep. Returns at once if the duration is not positive."""
        if duration_ms > 0:
            time.sleep(duration_ms / 1000)


class _SystemClock(Clock):
    """The machine's clocks, or the clock that replaces them in a simulation."""

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
"""The clock of production code that is not passed another one."""


@contextlib.contextmanager
def driven(clock: Clock, chooser: Chooser) -> Iterator[None]:
    """Replace time and randomness of this process by those of a simulation until the block ends.

    Args:
        clock: Replaces `SYSTEM_CLOCK`.
        chooser: Source of jitter and identifiers.
    """
    _system.driver, _system.chooser = clock, chooser
    try:
        yield
    finally:
        _system.driver = _system.chooser = None


def jittered_ms(base_ms: float) -> float:
    """Return a random duration in base_ms/2 .. base_ms, so that clients do not retry in step."""
    return base_ms * (_system.chooser or random).uniform(0.5, 1.0)


def new_writer_id() -> str:
    """Return a globally unique ID for one writing process: host, process ID, 64 random bits.

    Contains letters, digits, dots and dashes only, so it is valid in a file name.
    """
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40] or "host"
    return f"{host}.{os.getpid()}.{secrets.token_hex(8)}"


def new_nonce() -> str:
    """Return 64 random bits as 16 hexadecimal digits."""
    if _system.chooser:
        return f"{_system.chooser.getrandbits(64):016x}"
    return secrets.token_hex(8)
