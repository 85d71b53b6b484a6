"""Following several partitions: a source that responds late once is asked again soon."""

import itertools
from types import SimpleNamespace

from kit.fakes.scripted import SteppingClock
from logmirror.mirror.follow import LISTEN_MS, FollowWindow
from logmirror.model import TopicPartition
from logmirror.to_kafka.following import Following

WINDOW_MS = 10_000
LATE_MS = 8_000


def partition_slice(number):
    flow = SimpleNamespace(source=TopicPartition("t", number))
    work = SimpleNamespace(window_ms=WINDOW_MS, slice=SimpleNamespace(flow=flow))
    return SimpleNamespace(work=work, known_end=5, next_offset=5, limit=5, error=None)


def test_one_late_response_does_not_make_the_next_request_late():
    clock, asked = SteppingClock(), []

    class Source:
        def list_offsets(self, partitions, _at):
            asked.append(clock.ms)
            clock.ms += LATE_MS if len(asked) == 1 else 1
            return dict.fromkeys(partitions, 5 if len(asked) < 3 else 6)

    window = FollowWindow(WINDOW_MS, clock)
    following = Following(Source(), window, clock, write=lambda *_: None)
    assert following.wait([partition_slice(0), partition_slice(1)])
    assert asked == [0, LATE_MS + 10, LATE_MS + 10 + 1 + 10]


def test_a_slow_source_is_asked_less_often_until_a_response_is_fast():
    clock, asked = SteppingClock(), []

    class Source:
        def list_offsets(self, partitions, _at):
            asked.append(clock.ms)
            clock.ms += 20 if len(asked) < 12 else 1
            return dict.fromkeys(partitions, 5 if len(asked) < 14 else 6)

    window = FollowWindow(WINDOW_MS, clock)
    following = Following(Source(), window, clock, write=lambda *_: None)
    assert following.wait([partition_slice(0), partition_slice(1)])
    between = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert between == [20 + 10] * 7 + [20 + 200] * 4 + [1 + 10] * 2


def test_a_source_far_away_is_asked_as_often_as_its_window_is_checked():
    clock, asked = SteppingClock(), []

    class Source:
        def list_offsets(self, partitions, _at):
            asked.append(clock.ms)
            clock.ms += 100
            return dict.fromkeys(partitions, 5 if len(asked) < 10 else 6)

    window = FollowWindow(WINDOW_MS, clock)
    following = Following(Source(), window, clock, write=lambda *_: None)
    assert following.wait([partition_slice(0), partition_slice(1)])
    assert asked[-1] - asked[-2] == 100 + LISTEN_MS


def test_a_pause_ends_with_the_window():
    clock = SteppingClock()

    class Source:
        def list_offsets(self, partitions, _at):
            clock.ms += 100
            return dict.fromkeys(partitions, 5)

    window = FollowWindow(105, clock)
    following = Following(Source(), window, clock, write=lambda *_: None)
    assert not following.wait([partition_slice(0), partition_slice(1)])
    assert clock.ms == 105
