"""Leases: how long slices wait for what arrives, and what ends that before its time."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

from kit.commands import wait_until
from kit.scripted import SteppingClock
from logmirror.clock import SYSTEM_CLOCK
from logmirror.mirror import follow
from logmirror.mirror.follow import SHORT_MS, Lease, LeaseDesk, open_lease

LONG = 60_000


@pytest.fixture
def desk():
    with LeaseDesk() as desk:
        desk.begin()
        yield desk


def lease_of(desk):
    return open_lease(desk.address, LONG, SYSTEM_CLOCK)


def wait_until_over(*held):
    wait_until(lambda: not any(lease.left_ms for lease in held), what=lambda: "an end of leases")


def settle(desk, count):
    """Wait until the desk has seen so many slots."""
    wait_until(lambda: len(desk._slots) == count, what=lambda: f"{count} slots")  # noqa: SLF001  # only its thread knows


def test_a_lease_is_over_when_its_time_is():
    clock = SteppingClock()
    lease = Lease(500, clock)

    clock.sleep_ms(499)
    assert lease.left_ms == 1
    clock.sleep_ms(2)
    assert lease.left_ms == 0


def test_nothing_ends_a_lease_that_goes_on(desk):
    with lease_of(desk) as lease:
        settle(desk, 1)
        time.sleep(0.1)
        assert LONG - 10_000 < lease.left_ms <= LONG


def test_the_desk_ends_all_leases_those_opened_later_too(desk):
    with lease_of(desk) as one, lease_of(desk) as other:
        settle(desk, 2)
        desk.end()
        wait_until_over(one, other)
        with lease_of(desk) as late:
            wait_until_over(late)
    desk.begin()  # a signal may come just before a tick begins
    with lease_of(desk) as later:
        wait_until_over(later)


def test_a_new_tick_has_leases_again_and_ends_older_ones(desk):
    with lease_of(desk) as old:
        settle(desk, 1)
        desk.begin()
        wait_until_over(old)
        with lease_of(desk) as new:
            settle(desk, 1)
            time.sleep(0.05)
            assert new.left_ms


def test_the_end_of_one_slot_ends_the_leases_of_all(desk):
    with lease_of(desk) as one:
        with lease_of(desk):
            settle(desk, 2)
        wait_until_over(one)


def test_a_part_of_a_lease_leaves_the_whole_alone(desk):
    with lease_of(desk) as whole:
        settle(desk, 1)
        part = whole.part(0)
        assert part.left_ms == 0
        time.sleep(0.05)
        assert whole.left_ms


def test_a_driver_that_is_gone_ends_leases():
    with LeaseDesk() as desk:
        desk.begin()
        lease = lease_of(desk)
        settle(desk, 1)
    with lease:
        wait_until_over(lease)


def test_without_a_way_to_the_driver_a_lease_is_short(monkeypatch):
    monkeypatch.setattr(follow, "_unreachable", set())
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()  # nobody listens there after this

    assert open_lease(address, LONG, SYSTEM_CLOCK).left_ms <= SHORT_MS
    assert follow._unreachable == {address}  # noqa: SLF001  # it is not asked again
    assert open_lease(None, LONG, SYSTEM_CLOCK).left_ms <= SHORT_MS


def test_who_has_nothing_to_wait_for_asks_nobody(desk):
    with lease_of(desk) as other:
        settle(desk, 1)
        with open_lease(desk.address, 0, SYSTEM_CLOCK) as none:
            assert none.left_ms == 0
        time.sleep(0.05)
        assert other.left_ms


def test_a_signal_handler_may_end_leases(desk):
    before = signal.signal(signal.SIGUSR1, lambda *_: desk.end())
    try:
        with lease_of(desk) as lease:
            settle(desk, 1)
            signal.raise_signal(signal.SIGUSR1)
            wait_until_over(lease)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_closed_desk_leaves_no_thread_and_no_listener():
    with LeaseDesk() as desk:
        pass

    assert not any(thread.name == "leases" for thread in threading.enumerate())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(desk.address)
