"""Follow windows and the stop channel: what ends a window early, and how progress is reported."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time

import pytest

from kit.fakes.scripted import SteppingClock
from kit.runs.commands import wait_until
from logmirror import progress
from logmirror.clock import SYSTEM_CLOCK
from logmirror.mirror import follow
from logmirror.mirror.follow import SHORT_MS, FollowWindow, JobAddress, SlotLink
from logmirror.mirror.stop_channel import StopChannel

LONG = 60_000


@pytest.fixture
def channel():
    with StopChannel() as channel:
        yield channel


@pytest.fixture
def job(channel):
    with channel.job() as job:
        yield job


@contextlib.contextmanager
def window_of(job):
    with SlotLink(job, SYSTEM_CLOCK) as link:
        yield link.window(LONG)


def wait_until_over(*held):
    wait_until(
        lambda: not any(window.left_ms for window in held), what=lambda: "the end of windows"
    )


def wait_for_slots(channel, count):
    """Wait until the channel has this many connections."""
    wait_until(lambda: channel.slot_count == count, what=lambda: f"{count} slots")


def test_a_window_ends_after_its_duration():
    clock = SteppingClock()
    window = FollowWindow(500, clock)

    clock.sleep_ms(499)
    assert window.left_ms == 1
    clock.sleep_ms(2)
    assert window.left_ms == 0


def test_a_window_is_not_ended_without_a_cause(channel, job):
    with window_of(job) as window:
        wait_for_slots(channel, 1)
        time.sleep(0.1)
        assert LONG - 10_000 < window.left_ms <= LONG


def test_the_stop_channel_ends_all_windows_including_later_ones(channel, job):
    with window_of(job) as one, window_of(job) as other:
        wait_for_slots(channel, 2)
        channel.end()
        wait_until_over(one, other)
        with window_of(job) as late:
            wait_until_over(late)
    with channel.job() as next_job, window_of(next_job) as later:  # a signal may precede a job
        wait_until_over(later)


def test_the_end_of_a_job_ends_its_windows_and_no_others(channel, job):
    with window_of(job) as kept:
        with contextlib.ExitStack() as stack:
            with channel.job() as ending:
                window = stack.enter_context(window_of(ending))
                wait_for_slots(channel, 2)
            wait_until_over(window)
        wait_for_slots(channel, 1)
        assert kept.left_ms


def test_the_end_of_one_slot_ends_the_windows_of_its_job_and_no_others(channel, job):
    with channel.job() as other_job, window_of(other_job) as of_other_job:
        with window_of(job) as one:
            with window_of(job):
                wait_for_slots(channel, 3)
            wait_until_over(one)
        time.sleep(0.05)
        assert of_other_job.left_ms


def test_the_end_of_a_part_does_not_end_the_whole_window(channel, job):
    with window_of(job) as whole:
        wait_for_slots(channel, 1)
        part = whole.part(0)
        assert part.left_ms == 0
        time.sleep(0.05)
        assert whole.left_ms


def test_the_end_of_the_driver_ends_windows():
    with contextlib.ExitStack() as stack:
        with StopChannel() as channel, channel.job() as job:
            window = stack.enter_context(window_of(job))
            wait_for_slots(channel, 1)
        wait_until_over(window)


def test_without_a_connection_to_the_driver_a_window_is_short(monkeypatch):
    monkeypatch.setattr(follow, "_unreachable", set())
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()  # closed after this

    with window_of(JobAddress(host, port, b"t" * 16)) as window:
        assert window.left_ms <= SHORT_MS
    assert follow._unreachable == {(host, port)}  # noqa: SLF001  # it is not tried again
    with window_of(None) as window:
        assert window.left_ms <= SHORT_MS


def test_a_connection_without_the_token_of_a_running_job_is_closed_and_ends_nothing(channel, job):
    with window_of(job) as window:
        wait_for_slots(channel, 1)
        for sent in (b"x" * 16, b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((job.host, job.port), timeout=5) as other:
                other.sendall(sent)
                with contextlib.suppress(ConnectionResetError):
                    assert other.recv(1) == b""
        with socket.create_connection((job.host, job.port)):
            pass  # says nothing and leaves
        time.sleep(0.05)
        assert window.left_ms


def test_progress_of_a_slot_reaches_the_driver_at_a_limited_rate(channel):
    beats = []
    clock = SteppingClock()
    with channel.job(lambda: beats.append(1)) as job, SlotLink(job, clock):
        wait_for_slots(channel, 1)
        for _ in range(1000):
            progress.moved()
        wait_until(lambda: len(beats) == 1, what=lambda: "a beat")
        clock.ms += 1000
        progress.moved()
        wait_until(lambda: len(beats) == 2, what=lambda: "a second beat")
    progress.moved()
    assert len(beats) == 2, "after the task, nothing is reported"


def test_a_signal_handler_may_end_windows(channel, job):
    before = signal.signal(signal.SIGUSR1, lambda *_: channel.end())
    try:
        with window_of(job) as window:
            wait_for_slots(channel, 1)
            signal.raise_signal(signal.SIGUSR1)
            wait_until_over(window)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_closed_stop_channel_leaves_no_thread_and_no_listener():
    with StopChannel() as channel, channel.job() as job:
        pass

    assert not any(thread.name == "stop-channel" for thread in threading.enumerate())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((job.host, job.port))
