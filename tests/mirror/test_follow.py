"""Leases: how long slices wait for what arrives, and what ends that before its time."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

from kit.fakes.scripted import SteppingClock
from kit.runs.commands import wait_until
from logmirror.clock import SYSTEM_CLOCK
from logmirror.mirror import follow
from logmirror.mirror.follow import SHORT_MS, FollowWindow, StopChannel, open_follow_window

LONG = 60_000


@pytest.fixture
def stop_channel():
    with StopChannel() as stop_channel:
        stop_channel.begin()
        yield stop_channel


def window_of(stop_channel):
    return open_follow_window(stop_channel.address, LONG, SYSTEM_CLOCK)


def wait_until_over(*held):
    wait_until(
        lambda: not any(window.left_ms for window in held), what=lambda: "the end of windows"
    )


def wait_for_slots(stop_channel, count):
    """Wait until the channel has this many connections."""
    wait_until(lambda: len(stop_channel._slots) == count, what=lambda: f"{count} slots")  # noqa: SLF001  # no public access


def test_a_window_ends_after_its_duration():
    clock = SteppingClock()
    window = FollowWindow(500, clock)

    clock.sleep_ms(499)
    assert window.left_ms == 1
    clock.sleep_ms(2)
    assert window.left_ms == 0


def test_a_window_is_not_ended_without_a_cause(stop_channel):
    with window_of(stop_channel) as window:
        wait_for_slots(stop_channel, 1)
        time.sleep(0.1)
        assert LONG - 10_000 < window.left_ms <= LONG


def test_the_stop_channel_ends_all_windows_including_later_ones(stop_channel):
    with window_of(stop_channel) as one, window_of(stop_channel) as other:
        wait_for_slots(stop_channel, 2)
        stop_channel.end()
        wait_until_over(one, other)
        with window_of(stop_channel) as late:
            wait_until_over(late)
    stop_channel.begin()  # a signal may come just before a tick begins
    with window_of(stop_channel) as later:
        wait_until_over(later)


def test_a_new_tick_has_new_windows_and_ends_older_ones(stop_channel):
    with window_of(stop_channel) as old:
        wait_for_slots(stop_channel, 1)
        stop_channel.begin()
        wait_until_over(old)
        with window_of(stop_channel) as new:
            wait_for_slots(stop_channel, 1)
            time.sleep(0.05)
            assert new.left_ms


def test_the_end_of_one_slot_ends_the_windows_of_all(stop_channel):
    with window_of(stop_channel) as one:
        with window_of(stop_channel):
            wait_for_slots(stop_channel, 2)
        wait_until_over(one)


def test_the_end_of_a_part_does_not_end_the_whole_window(stop_channel):
    with window_of(stop_channel) as whole:
        wait_for_slots(stop_channel, 1)
        part = whole.part(0)
        assert part.left_ms == 0
        time.sleep(0.05)
        assert whole.left_ms


def test_the_end_of_the_driver_ends_windows():
    with StopChannel() as stop_channel:
        stop_channel.begin()
        window = window_of(stop_channel)
        wait_for_slots(stop_channel, 1)
    with window:
        wait_until_over(window)


def test_without_a_connection_to_the_driver_a_window_is_short(monkeypatch):
    monkeypatch.setattr(follow, "_unreachable", set())
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()  # closed after this

    assert open_follow_window(address, LONG, SYSTEM_CLOCK).left_ms <= SHORT_MS
    assert follow._unreachable == {address}  # noqa: SLF001  # it is not tried again
    assert open_follow_window(None, LONG, SYSTEM_CLOCK).left_ms <= SHORT_MS


def test_a_window_of_zero_length_makes_no_connection(stop_channel):
    with window_of(stop_channel) as other:
        wait_for_slots(stop_channel, 1)
        with open_follow_window(stop_channel.address, 0, SYSTEM_CLOCK) as none:
            assert none.left_ms == 0
        time.sleep(0.05)
        assert other.left_ms


def test_a_signal_handler_may_end_windows(stop_channel):
    before = signal.signal(signal.SIGUSR1, lambda *_: stop_channel.end())
    try:
        with window_of(stop_channel) as window:
            wait_for_slots(stop_channel, 1)
            signal.raise_signal(signal.SIGUSR1)
            wait_until_over(window)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_closed_stop_channel_leaves_no_thread_and_no_listener():
    with StopChannel() as stop_channel:
        pass

    assert not any(thread.name == "follow-windows" for thread in threading.enumerate())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(stop_channel.address)
