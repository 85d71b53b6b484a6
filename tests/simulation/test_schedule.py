"""Time and order of a simulation depend on its seed alone.

Method: actors that step and sleep, with several seeds, and twice with the same.
"""

import pytest

from logmirror.clock import SYSTEM_CLOCK, Chooser, driven, jittered_ms, new_nonce
from logmirror.simulation.schedule import Schedule


def played(seed, *, actors=3, limit_ms=10_000, steps_max=10_000):
    schedule = Schedule(Chooser(seed), limit_ms=limit_ms, steps_max=steps_max)
    seen = []

    def act(name):
        for number in range(4):
            schedule.step(f"step {number}")
            seen.append((name, number, schedule.monotonic_ms()))
            schedule.sleep_ms(10 * number)

    for name in range(actors):
        schedule.add(f"actor {name}", lambda name=name: act(name))
    schedule.run()
    return schedule, seen


def test_the_same_seed_repeats_the_order_and_another_seed_changes_it():
    runs = [played(seed) for seed in (1, 1, 2)]
    assert runs[0][1] == runs[1][1] != runs[2][1]
    assert runs[0][0].trace == runs[1][0].trace != runs[2][0].trace


def test_time_advances_only_while_all_actors_wait():
    schedule, seen = played(7)
    assert sorted((name, number) for name, number, _ in seen) == [
        (name, number) for name in range(3) for number in range(4)
    ]
    assert [at for *_, at in seen] == sorted(at for *_, at in seen)
    assert 60 <= schedule.monotonic_ms() < 100
    assert not schedule.ran_out


def test_a_timer_fires_at_its_time():
    schedule = Schedule(Chooser(1), limit_ms=1_000, steps_max=100)
    fired = []
    schedule.add("waits", lambda: schedule.sleep_ms(500))
    schedule.after(200, lambda: fired.append(schedule.monotonic_ms()))
    schedule.run()
    assert fired == [200]


def test_an_actor_without_end_is_ended_at_the_limit():
    schedule = Schedule(Chooser(1), limit_ms=1_000, steps_max=100)

    def turn():
        while True:
            schedule.step("round")

    def sleep():
        while True:
            schedule.sleep_ms(400)

    schedule.add("turns", turn)
    schedule.add("sleeps", sleep)
    schedule.run()
    assert schedule.ran_out


def test_an_exception_of_an_actor_is_raised_by_run():
    schedule = Schedule(Chooser(1), limit_ms=1_000, steps_max=100)
    schedule.add("fails", lambda: {}["missing"])
    schedule.add("sleeps", lambda: schedule.sleep_ms(100))
    with pytest.raises(KeyError):
        schedule.run()


def test_clock_and_random_numbers_come_from_the_simulation():
    schedule = Schedule(Chooser(1), limit_ms=1_000, steps_max=100)
    before_ms = SYSTEM_CLOCK.now_ms()
    drawn = []
    for _ in range(2):
        with driven(schedule, Chooser(5)):
            assert SYSTEM_CLOCK.monotonic_ms() == 0
            assert SYSTEM_CLOCK.now_ms() < before_ms
            drawn.append((new_nonce(), jittered_ms(1000)))
    assert drawn[0] == drawn[1]
    assert SYSTEM_CLOCK.now_ms() >= before_ms
    assert new_nonce() != new_nonce()
