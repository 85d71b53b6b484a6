"""When a standby takes over, on a store in memory and with time as a value."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from logmirror.broker.bucket.chain_writer import ChainWriter
from logmirror.broker.bucket.heartbeats import HEARTBEATS, Heart, Heartbeat, newest, parse
from logmirror.broker.bucket.standby import Observation, Standby, Step, Watch
from logmirror.errors import FencedError, UnavailableError
from logmirror.stopping import StopRequest
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_MS = 9_000


class Looks:
    """A watch, and checks that take no time."""

    def __init__(self) -> None:
        self.watch = Watch(TIMEOUT_MS)
        self.now_ms = 0

    def after(
        self, ms: int, beat: Heartbeat | None, end: int | None = 7, *, took_ms: int = 0
    ) -> Step:
        began_ms = self.now_ms + ms
        self.now_ms = began_ms + took_ms
        step = self.watch.saw(Observation(beat, end, began_ms, self.now_ms))
        if step is Step.PROBE:
            self.watch.wrote(self.now_ms)
        return step


def test_an_owner_is_gone_after_the_timeout_in_which_this_machine_could_write():
    looks, beat = Looks(), Heartbeat(1, 5)
    steps = [looks.after(0, beat), *(looks.after(1_500, beat) for _ in range(6))]
    assert steps == [*[Step.WAIT] * 2, Step.PROBE, *[Step.WAIT] * 3, Step.TAKE_OVER]


@pytest.mark.parametrize("sign", ["heartbeat", "chain"])
def test_an_owner_that_shows_life_is_not_suspected(sign):
    looks = Looks()
    for number in range(100):
        beat = Heartbeat(1, number if sign == "heartbeat" else 0)
        assert looks.after(4_000, beat, 0 if sign == "heartbeat" else number) is Step.WAIT


def test_time_without_a_look_does_not_count():
    looks, beat = Looks(), Heartbeat(1, 5)
    for _ in range(20):
        assert looks.after(4_000, beat) is Step.WAIT
        looks.watch.failed()


def test_the_duration_of_a_slow_look_does_not_count():
    looks, beat = Looks(), Heartbeat(1, 5)
    assert looks.after(0, beat, took_ms=60_000) is Step.WAIT
    assert looks.after(1_000, beat, took_ms=60_000) is Step.WAIT


def test_an_owner_is_not_suspected_until_this_machine_could_write_for_half_of_the_timeout():
    looks, beat = Looks(), Heartbeat(1, 5)
    looks.after(0, beat)
    began_ms = 60_000
    assert looks.watch.saw(Observation(beat, 7, began_ms, began_ms)) is Step.PROBE
    looks.watch.wrote(began_ms)
    looks.now_ms = began_ms
    assert looks.after(TIMEOUT_MS // 2 - 1, beat) is Step.WAIT
    assert looks.after(1, beat) is Step.TAKE_OVER


def test_an_owner_that_stopped_is_gone_unless_the_chain_has_moved_since():
    assert Looks().after(0, Heartbeat(1, 5, stopped_at=7), end=7) is Step.TAKE_OVER
    assert Looks().after(0, Heartbeat(1, 5, stopped_at=7), end=8) is Step.WAIT


def test_names_of_heartbeats_are_read_back_and_sorted_by_epoch():
    beats = [Heartbeat(1, 900), Heartbeat(1, 901, 7), Heartbeat(2, 1), Heartbeat(10, 1)]
    assert [parse(beat.name) for beat in beats] == beats
    assert sorted(beats) == beats
    assert sorted(beat.name for beat in beats) == [beat.name for beat in beats]
    for name in ("", "x", "1-1", beats[0].name + ".stopped", beats[0].name + "-1", "-" * 41):
        assert parse(name) is None


def wait_until(is_true: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_heart_keeps_one_object_and_removes_those_of_earlier_owners():
    store = MemoryStore()
    for beat in (Heartbeat(1, 1), Heartbeat(1, 2, 7)):
        store.create(f"{HEARTBEATS}/{beat.name}", b"")
    heart = Heart(store, 2, interval_ms=1)
    heart.start()
    wait_until(lambda: (newest(store) or Heartbeat(0, 0)).number > 20)
    heart.say_stopped(9, 10)
    found = newest(store)
    assert found is not None
    assert (found.epoch, found.stopped_at) == (2, 9)
    wait_until(lambda: len(store.objects) == 1)


def test_a_heartbeat_that_hangs_does_not_stop_the_next_ones():
    hangs = threading.Event()

    def before(operation: str, name: str) -> None:
        if operation == "create" and name.endswith(f"{2:020d}"):
            hangs.wait()

    store = MemoryStore(before=before)
    heart = Heart(store, 1, interval_ms=1)
    heart.start()
    try:
        wait_until(lambda: (newest(store) or Heartbeat(0, 0)).number > 20)
    finally:
        heart.stop()
        hangs.set()


def test_a_heart_survives_a_bucket_that_is_away():
    fails = [True]

    def before(_operation: str, _name: str) -> None:
        if fails[0]:
            raise UnavailableError("away")

    store = MemoryStore(before=before)
    heart = Heart(store, 1, interval_ms=1)
    heart.start()
    time.sleep(0.05)
    fails[0] = False
    wait_until(lambda: newest(store))
    heart.stop()


def test_a_takeover_behind_another_number_takes_nothing_over():
    store = MemoryStore()
    first = ChainWriter(store, b"1" * 8)
    first.take_over(-1)
    for behind in (-1, 5):
        with pytest.raises(FencedError):
            ChainWriter(store, b"2" * 8).take_over(behind)
    first.check()
    ChainWriter(store, b"3" * 8).take_over(0)
    with pytest.raises(FencedError):
        first.check()


def test_of_two_takeovers_behind_one_number_the_second_fails():
    store = MemoryStore()
    others: list[ChainWriter] = []

    def before(operation: str, name: str) -> None:
        if operation == "create" and name.endswith(f"{1:020d}") and not others:
            others.append(ChainWriter(store, b"2" * 8))
            others[0].take_over(0)

    ChainWriter(store, b"1" * 8).take_over()
    store.before = before
    with pytest.raises(FencedError):
        ChainWriter(store, b"3" * 8).take_over(0)
    others[0].check()


def test_a_takeover_that_fails_is_waited_for_again():
    store = MemoryStore()
    owner = ChainWriter(store, b"1" * 8)
    owner.take_over()
    Heart(store, owner.epoch).say_stopped(0, 10)
    tried: list[int] = []

    def open_logs(behind: int) -> Any:
        tried.append(behind)
        if len(tried) < 3:
            raise (FencedError, UnavailableError)[len(tried) - 1]("no")
        return "logs"

    assert Standby(store, TIMEOUT_MS, StopRequest()).take_over(open_logs) == "logs"
    assert tried == [0, 0, 0]
