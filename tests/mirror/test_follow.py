"""Follow windows and the stop channel: what ends a window early, and how progress is reported."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest

from kit.fakes.scripted import SteppingClock
from kit.runs.commands import wait_until
from logmirror import progress
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import UnavailableError
from logmirror.mirror import follow
from logmirror.mirror.follow import SHORT_MS, FollowWindow, JobAddress, SlotLink
from logmirror.mirror.ports import (
    FlowId,
    GapSummary,
    Job,
    KafkaSpec,
    Receipt,
    Slice,
    SliceResult,
    Work,
)
from logmirror.mirror.stop_channel import StopChannel
from logmirror.model import OffsetRange, Trigger

LONG = 60_000


@pytest.fixture
def channel():
    with StopChannel() as channel:
        yield channel


@pytest.fixture
def job(channel):
    with channel.job(Job()) as job:
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
    with channel.job(Job()) as next_job, window_of(next_job) as later:  # a signal may precede a job
        wait_until_over(later)


def test_the_end_of_a_job_ends_its_windows_and_no_others(channel, job):
    with window_of(job) as kept:
        with contextlib.ExitStack() as stack:
            with channel.job(Job()) as ending:
                window = stack.enter_context(window_of(ending))
                wait_for_slots(channel, 2)
            wait_until_over(window)
        wait_for_slots(channel, 1)
        assert kept.left_ms


def test_the_end_of_one_slot_ends_the_windows_of_its_job_and_no_others(channel, job):
    with channel.job(Job()) as other_job, window_of(other_job) as of_other_job:
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
        with StopChannel() as channel, channel.job(Job()) as job:
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
    with channel.job(Job(on_progress=lambda: beats.append(1))) as job, SlotLink(job, clock):
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
    with StopChannel() as channel, channel.job(Job()) as job:
        pass

    assert not any(thread.name == "stop-channel" for thread in threading.enumerate())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((job.host, job.port))


# -- one job after the other -----------------------------------------------------------------------


def work_of(partition, first=0):
    flow = FlowId(mirror="m", destination="d", topic="t", partition=partition)
    part = Slice(flow=flow, topic_id=None, compacted=False, first=first, end=first, tail=None)
    spec = KafkaSpec(cluster="cluster", topic="t")
    return Work(slice=part, source="s", destination=spec, writer_id="w", estimated_bytes=1)


def result_of(work, next_offset, error=None):
    return SliceResult(slice=work.slice, receipts=(), next_offset=next_offset, error=error)


class Task(threading.Thread):
    """A task that waits for its predecessor, and what it then copies."""

    def __init__(self, address, *works):
        super().__init__(daemon=True)
        self._address, self._works = address, works
        self.begins_at, self.epochs = None, []
        self.start()

    def run(self):
        with SlotLink(self._address, SYSTEM_CLOCK) as link:
            works = link.take_over(self._works)
            self.epochs = [w.slice.leader_epoch for w in works]
            self.begins_at = {w.slice.flow.partition: (w.slice.first, w.slice.end) for w in works}
            self.in_flight_max = [w.in_flight_max for w in works]


@contextlib.contextmanager
def many_files():
    """So many open files that `select` refuses the next one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("files", [contextlib.nullcontext, many_files])
def test_a_job_begins_where_all_tasks_of_its_predecessor_have_ended(channel, files):
    one, other = work_of(0), work_of(1)
    first = Job()
    with files(), channel.job(first, 2) as before, channel.job(Job(after=first), 1) as after:
        with SlotLink(before, SYSTEM_CLOCK) as link:
            task = Task(after, one, other)
            wait_for_slots(channel, 2)
            link.hand_over([result_of(one, 70)])
        time.sleep(0.05)
        assert task.begins_at is None, "another task of the predecessor still runs"
        with SlotLink(before, SYSTEM_CLOCK) as link:
            link.hand_over([result_of(other, 5)])
        task.join(10)

    assert task.begins_at == {0: (70, 70), 1: (5, 5)}


@pytest.mark.parametrize(
    ("next_offset", "epoch"), [(70, 4), (60, -1), (7, 3)], ids=["copied", "unknown", "nothing new"]
)
def test_a_job_knows_the_leader_epoch_of_what_its_predecessor_copied(channel, next_offset, epoch):
    """Else a fetch would name an older epoch, which ends below its offset."""
    work, first = work_of(0, first=7), Job()
    work = replace(work, slice=replace(work.slice, leader_epoch=3))
    receipt = Receipt(
        covered=OffsetRange(first=7, last=69),
        record_count=63,
        payload_bytes=1,
        object_bytes=1,
        digest="",
        trigger=Trigger.EXPLICIT,
        gaps=GapSummary(),
        elapsed_ms=1,
        leader_epoch=4,
    )
    result = replace(result_of(work, next_offset), receipts=(receipt,))
    with channel.job(first, 1) as before, channel.job(Job(after=first), 1) as after:
        with SlotLink(before, SYSTEM_CLOCK) as link:
            task = Task(after, work)
            wait_for_slots(channel, 2)
            link.hand_over([result])
        task.join(10)

    assert (task.begins_at[0][0], task.epochs) == (next_offset, [epoch])


@pytest.mark.parametrize("ending", ["error", "dies", "nothing connects"])
def test_a_job_whose_predecessor_failed_does_nothing(channel, ending):
    work, first = work_of(0), Job()
    with channel.job(Job(after=first), 1) as after:
        with channel.job(first, 1) as before:
            task = Task(after, work)
            wait_for_slots(channel, 1)
            if ending != "nothing connects":
                with SlotLink(before, SYSTEM_CLOCK) as link:
                    wait_for_slots(channel, 2)
                    if ending == "error":
                        link.hand_over([result_of(work, 70, UnavailableError("down"))])
        task.join(10)

    assert task.begins_at == {}


def test_a_task_that_ended_with_its_job_is_followed_all_the_same(channel):
    """The positions count even if the next job's task connects when the first job has ended."""
    work, first, second = work_of(0), Job(), None
    with channel.job(first, 1) as before:
        second = Job(after=first)
        with SlotLink(before, SYSTEM_CLOCK) as link:
            wait_for_slots(channel, 1)
            link.hand_over([result_of(work, 70)])
    with channel.job(second, 1) as after:
        task = Task(after, replace(work, in_flight_max=64))
        task.join(10)

    assert task.begins_at == {0: (70, 70)}
    assert task.in_flight_max == [1], "the predecessor may have filled a gap since"


def test_a_job_without_a_predecessor_begins_at_once():
    work = work_of(0, first=7)
    with SlotLink(None, SYSTEM_CLOCK) as link:
        assert list(link.take_over([work])) == [work]
