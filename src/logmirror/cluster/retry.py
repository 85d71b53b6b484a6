"""Retries: which errors, for how long, with which pauses.

Invariants:
1. Reads, and other idempotent operations, are retried after any transient failure.
2. Other writes (`writes=True`) are retried only if they certainly were not carried out: never after
   an `OutcomeUnknownError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from logmirror.clock import Clock, jittered_ms
from logmirror.errors import (
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
    UsageError,
)
from logmirror.wire.messages import CONCURRENT_TRANSACTIONS, CORRUPT_MESSAGE, error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.cluster.properties import ConnectionSettings

MISSING_GRACE_MS: Final = 3_000
"""How long a topic may be missing from metadata before a reader reports that it does not exist. The
metadata of a new broker or a new topic takes time to reach all brokers."""

_BACKOFF_SHIFT_MAX: Final = 20
_CONCURRENT_PAUSE_MS: Final = 1
"""First pause after CONCURRENT_TRANSACTIONS, the usual response within a millisecond of EndTxn."""

_T = TypeVar("_T")


class NotFoundError(UsageError):
    """The topic or partition does not exist in the broker's metadata."""


def is_retriable(error: LogmirrorError) -> bool:
    """Whether the same read may succeed later.

    An error with a Kafka error code (fact `code`) is retriable if it is in Kafka, except
    CORRUPT_MESSAGE, which needs an operator. An error without a code is retriable if it is an
    `UnavailableError`.
    """
    code = error.facts.get("code")
    if isinstance(code, int):
        return code != CORRUPT_MESSAGE and error_of(code).retriable
    return isinstance(error, UnavailableError)


class Retrier:
    """Repeats an attempt until it succeeds, cannot succeed, or the budget is used up.

    Args:
        settings: Pauses and budget.
        clock: Measures and waits.
        before_retry: Called before each retry, to drop metadata that may be out of date.
    """

    def __init__(
        self, settings: ConnectionSettings, clock: Clock, before_retry: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._before_retry = before_retry

    def run(
        self,
        attempt: Callable[[], _T],
        action: str,
        *,
        missing_grace_ms: int = 0,
        writes: bool = False,
        **facts: object,
    ) -> _T:
        """Call `attempt` until it returns.

        Args:
            attempt: May be called any number of times.
            action: The start of error messages, such as "could not fetch".
            missing_grace_ms: How long a `NotFoundError` counts as retriable.
            writes: See invariant 2.
            facts: Added to every error.

        Raises:
            UnavailableError: The budget is used up; its facts are those of the last error.
            OutcomeUnknownError: With `writes`: an attempt may have been carried out.
            LogmirrorError: The first error that is not retriable.
        """
        begun_ms = self._clock.monotonic_ms()
        failures = 0
        while True:
            try:
                return attempt()
            except LogmirrorError as error:
                spent_ms = self._clock.monotonic_ms() - begun_ms
                error.add_facts(**facts)
                pause_ms = self._pause_ms(error, failures)
                budget_ms = self._settings.retry_budget_ms
                if writes and isinstance(error, OutcomeUnknownError):
                    raise
                if isinstance(error, NotFoundError):
                    if spent_ms + pause_ms >= min(missing_grace_ms, budget_ms):
                        raise
                elif not is_retriable(error):
                    raise
                elif spent_ms + pause_ms >= budget_ms:
                    raise self._given_up(error, action, attempts=failures + 1) from error
            failures += 1
            self._clock.sleep_ms(pause_ms)
            self._before_retry()

    def _pause_ms(self, error: LogmirrorError, failures: int) -> float:
        settings = self._settings
        if error.facts.get("code") == CONCURRENT_TRANSACTIONS:
            base_ms, max_ms = _CONCURRENT_PAUSE_MS, settings.retry_backoff_ms
        elif "code" in error.facts or isinstance(error, NotFoundError):
            base_ms, max_ms = settings.retry_backoff_ms, settings.retry_backoff_max_ms
        else:
            base_ms, max_ms = settings.reconnect_backoff_ms, settings.reconnect_backoff_max_ms
        return jittered_ms(min(base_ms << min(failures, _BACKOFF_SHIFT_MAX), max_ms))

    def _given_up(self, error: LogmirrorError, action: str, *, attempts: int) -> UnavailableError:
        budget_ms = self._settings.retry_budget_ms
        return UnavailableError(
            f"{action} within {budget_ms} ms: {error.message}",
            hint=error.hint,
            attempts=attempts,
            **error.facts,
        )
