"""Reports of progress: their values while a mirror runs, and what a failing callback does."""

import logging

from kit.fakes.scripted import Log, ScriptedClient, SteppingClock, archive_spec, batches, service
from logmirror.mirror.observer import Observer
from logmirror.monitoring.metrics import Recorder
from logmirror.testing import MemoryStore


def run(on_progress, log, **limits):
    clock = SteppingClock()
    observer = Observer(["m"], Recorder(), clock, on_progress=on_progress)
    client = ScriptedClient([log])
    spec = archive_spec(**limits)
    with service(client, MemoryStore(), spec=spec, clock=clock, observer=observer) as (made, _):
        made.run(until_now=True)


def test_the_last_report_has_all_records_and_nothing_remains():
    reports = []
    run(reports.append, Log(batches(0, 120)))

    (mirror,) = reports[-1].mirrors
    assert (mirror.mirror, mirror.records, mirror.remaining, mirror.waiting) == ("m", 120, 0, 0)
    assert mirror.written_bytes > 0


def test_a_callback_that_raises_is_logged_once_and_not_called_again(caplog):
    calls = []

    def fail(report):
        calls.append(report)
        raise RuntimeError("no display")

    with caplog.at_level(logging.ERROR, logger="logmirror"):
        run(fail, Log(batches(0, 120)), max_offsets=10)

    assert len(calls) == 1
    assert [r.getMessage() for r in caplog.records] == [
        "the callback for progress failed; it is not called any more"
    ]
