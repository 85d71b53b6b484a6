"""Goal: links that do not respond end together, within one time limit.

Method: rounds that wait, and a clock that moves only while a thread is waited for.
"""

from __future__ import annotations

import contextlib
import threading

from kit.fakes.scripted import SteppingClock
from kit.runs.commands import wait_until
from logmirror.cluster.properties import connection_settings
from logmirror.groups.link_spec import LinkSpec
from logmirror.groups.rounds import JOIN_MS
from logmirror.groups.service import GroupService
from logmirror.monitoring.metrics import Recorder


def spec(number: int) -> LinkSpec:
    return LinkSpec(
        source=connection_settings("localhost:1", {}),
        source_alias="primary",
        target=connection_settings("localhost:2", {}),
        destination=f"standby-{number}",
        replicas=(),
        include=(".*",),
        exclude=(),
        interval_ms=100,
        commits=False,
    )


def test_all_links_that_do_not_respond_share_one_time_limit(monkeypatch):
    clock, release, begun, waited = SteppingClock(), threading.Event(), [], []

    @contextlib.contextmanager
    def stalled(one):
        begun.append(one)
        release.wait(60)
        yield None

    def join(_thread, timeout):
        waited.append(timeout)
        clock.sleep_ms(int(timeout * 1_000))

    service = GroupService([spec(number) for number in range(3)], stalled, clock, Recorder())
    try:
        with service.running():
            wait_until(lambda: len(begun) == 3, what=lambda: "three links", timeout_s=60)
            service.stop()
            clock.sleep_ms(4_000)  # the mirrors end meanwhile
            monkeypatch.setattr(threading.Thread, "join", join)
        monkeypatch.undo()
    finally:
        release.set()

    assert waited == [(JOIN_MS - 4_000) / 1_000, 0, 0]
