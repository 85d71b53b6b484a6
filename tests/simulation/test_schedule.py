"""Time and turns of a simulation depend on the seed alone.

Method: actors that step and sleep, run with several seeds and twice with each.
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


def test_the_same_seed_takes_the_same_turns_and_another_one_others():
    runs = [played(seed) for seed in (1, 1, 2)]
    assert runs[0][1] == runs[1][1] != runs[2][1]
    assert runs[0][0].trace == runs[1][0].trace != runs[2][0].trace


def test_every_actor_ends_and_time_passes_only_where_everybody_waits():
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


def test_whoever_goes_on_for_ever_is_ended():
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


def test_what_an_actor_raises_is_raised_where_the_run_was_started():
    schedule = Schedule(Chooser(1), limit_ms=1_000, steps_max=100)
    schedule.add("fails", lambda: {}["what is not there"])
    schedule.add("sleeps", lambda: schedule.sleep_ms(100))
    with pytest.raises(KeyError):
        schedule.run()


def test_a_driven_process_has_the_time_and_the_chance_of_the_simulation():
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
