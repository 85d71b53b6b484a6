"""Trying again: which errors, how long, with what pauses.

Invariants:
1. What reads, and what can be repeated without doing it twice, is tried again after any failure
   that may pass.
2. What writes otherwise (`writes=True`) is tried again only when it certainly was not done: never
   after an `OutcomeUnknownError`.
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
"""How long a topic may be missing from metadata before a reader of it believes that it is gone. A
broker that has just started, and a topic that was just made, are not known everywhere at once."""

_DOUBLINGS_MAX: Final = 20
_CONCURRENT_PAUSE_MS: Final = 1
"""First pause after CONCURRENT_TRANSACTIONS, the usual answer for a millisecond after EndTxn."""

_T = TypeVar("_T")


class NotFoundError(UsageError):
    """The topic or partition does not exist, as far as the broker that was asked knows."""


def is_retriable(error: LogmirrorError) -> bool:
    """Whether the same read may succeed a little later.

    An error with a Kafka code (fact `code`) is as retriable as Kafka says, but for a batch that the
    broker itself finds corrupt: that is for people. One without a code is if it is unavailable.
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
        before_retry: Called before each further attempt, to forget what may be out of date.
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
            action: Fits before " within": "could not fetch".
            missing_grace_ms: How long a `NotFoundError` counts as retriable.
            writes: See invariant 2.
            facts: Added to every error.

        Raises:
            UnavailableError: The budget is used up; facts tell the last cause.
            OutcomeUnknownError: An attempt may have been done, or not; with `writes` only.
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
        return jittered_ms(min(base_ms << min(failures, _DOUBLINGS_MAX), max_ms))

    def _given_up(self, error: LogmirrorError, action: str, *, attempts: int) -> UnavailableError:
        budget_ms = self._settings.retry_budget_ms
        return UnavailableError(
            f"{action} within {budget_ms} ms: {error.message}",
            hint=error.hint,
            attempts=attempts,
            **error.facts,
        )
