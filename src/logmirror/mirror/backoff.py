"""Driver: which errors are retried, and after how long."""

from __future__ import annotations

from typing import Final

from logmirror.clock import jittered_ms
from logmirror.errors import OutcomeUnknownError, UnavailableError

RETRIABLE: Final = (UnavailableError, OutcomeUnknownError)
"""Errors that a flow retries. Any other error stops the flow's mirror."""

BACKOFF_MS: Final = (1_000, 60_000)
"""Back-off after the first failure, and the longest one. Each is drawn from 50 % to 100 % of it."""


def backoff_ms(failures: int) -> int:
    """Return how long to wait after this many consecutive failures, in milliseconds.

    Args:
        failures: At least 1. The time grows by a factor of 2, up to the limit of `BACKOFF_MS`.
    """
    first_ms, longest_ms = BACKOFF_MS
    return int(jittered_ms(min(first_ms * 2 ** (failures - 1), longest_ms)))
