"""Retriable operations are retried, within the budget.

Method: a clock that moves only in `sleep_ms`; attempts that fail as scripted.
"""

from dataclasses import replace

import pytest

from logmirror.clock import Clock
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.retry import NotFoundError, Retrier, is_retriable
from logmirror.errors import (
    CorruptionError,
    OutcomeUnknownError,
    PositionError,
    UnavailableError,
    UsageError,
)
from logmirror.wire.messages import ERRORS, api_error

SETTINGS = replace(
    connection_settings("h:1"),
    retry_backoff_ms=100,
    retry_backoff_max_ms=1000,
    reconnect_backoff_ms=200,
    reconnect_backoff_max_ms=3000,
    retry_budget_ms=60_000,
)


class SleepingClock(Clock):
    def __init__(self):
        self.now = 5000.0
        self.pauses = []

    def monotonic_ms(self):
        return int(self.now)

    def sleep_ms(self, duration_ms):
        self.pauses.append(duration_ms)
        self.now += duration_ms


@pytest.fixture
def clock():
    return SleepingClock()


def run(clock, *errors, grace=0, settings=SETTINGS, forgotten=None, writes=False):
    """Fail with each error in turn, then succeed; the last error repeats if it is `...`."""
    script = list(errors)

    def attempt():
        if not script:
            return "done"
        error = script[0] if script[-1] is ... else script.pop(0)
        raise error

    forgotten = [] if forgotten is None else forgotten
    retrier = Retrier(settings, clock, lambda: forgotten.append(len(clock.pauses)))
    return retrier.run(attempt, "could not read", missing_grace_ms=grace, writes=writes, topic="t")


def busy():
    return api_error(5, action="could not read")


def lost():
    return UnavailableError("the broker closed the connection")


def test_pauses_grow_are_jittered_and_end_at_their_maximum(clock):
    assert run(clock, *[busy() for _ in range(8)]) == "done"
    bounds = [100, 200, 400, 800, 1000, 1000, 1000, 1000]
    assert all(b / 2 <= p <= b for p, b in zip(clock.pauses, bounds, strict=True))


def test_a_lost_connection_has_pauses_of_its_own(clock):
    assert run(clock, lost(), lost()) == "done"
    assert all(b / 2 <= p <= b for p, b in zip(clock.pauses, [200, 400], strict=True))


def test_what_is_known_is_forgotten_before_each_new_attempt(clock):
    forgotten = []
    run(clock, busy(), lost(), forgotten=forgotten)
    assert forgotten == [1, 2]


def test_the_budget_ends_in_unavailable_with_the_last_cause(clock):
    with pytest.raises(UnavailableError) as caught:
        run(clock, busy(), ...)
    assert 58_000 <= clock.now - 5000 <= 60_000
    assert caught.value.facts["error"] == "LEADER_NOT_AVAILABLE"
    assert caught.value.facts["topic"] == "t"
    assert caught.value.facts["attempts"] == len(clock.pauses) + 1
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "error",
    [
        UsageError("refused"),
        CorruptionError("bytes"),
        PositionError("gone"),
        api_error(29, action="x"),
        api_error(2, action="x"),
    ],
    ids=str,
)
def test_what_cannot_succeed_is_not_tried_again(clock, error):
    with pytest.raises(type(error)) as caught:
        run(clock, error, ...)
    assert clock.pauses == []
    assert caught.value.facts["topic"] == "t"


def test_a_missing_topic_is_waited_for_only_as_long_as_said(clock):
    with pytest.raises(NotFoundError):
        run(clock, NotFoundError("no topic"))
    assert clock.pauses == []
    assert run(clock, NotFoundError("no topic"), grace=3000) == "done"
    clock.now, clock.pauses = 5000.0, []
    with pytest.raises(NotFoundError):
        run(clock, NotFoundError("no topic"), ..., grace=3000)
    assert 2000 <= clock.now - 5000 <= 3000


def test_a_kafka_error_is_as_retriable_as_kafka_says():
    for code, known in ERRORS.items():
        expected = known.retriable and known.name != "CORRUPT_MESSAGE"
        assert is_retriable(api_error(code, action="x")) is expected


@pytest.mark.mirror_v3("KAF-03")
def test_a_write_that_may_have_been_done_is_never_tried_again(clock):
    unknown = [OutcomeUnknownError("lost"), api_error(7, action="x"), api_error(20, action="x")]
    for error in unknown:
        with pytest.raises(OutcomeUnknownError) as caught:
            run(clock, error, writes=True)
        assert caught.value.facts["topic"] == "t"
    assert clock.pauses == []
    assert run(clock, api_error(7, action="x")) == "done", "a read is"


def test_a_write_that_was_not_done_is_tried_again(clock):
    assert run(clock, lost(), busy(), api_error(41, action="x"), writes=True) == "done"
    assert len(clock.pauses) == 3


def test_a_transaction_that_is_just_ending_is_waited_for_in_small_steps(clock):
    assert run(clock, *[api_error(51, action="x") for _ in range(10)]) == "done"
    bounds = [1, 2, 4, 8, 16, 32, 64, 100, 100, 100]
    assert all(b / 2 <= p <= b for p, b in zip(clock.pauses, bounds, strict=True))
