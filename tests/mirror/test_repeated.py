"""Log lines that repeat: one for each cause and minute, with a count."""

import logging

from kit.fakes.scripted import Log, ScriptedClient, SteppingClock, archive_spec, batches, service
from logmirror.errors import UnavailableError
from logmirror.mirror.repeated import INTERVAL_MS, Repeated
from logmirror.testing import MemoryStore


def test_one_line_for_each_cause_and_interval_counts_the_others():
    clock = SteppingClock()
    repeated = Repeated(clock)
    assert [repeated.admit("down") for _ in range(4)] == [0, None, None, None]
    assert repeated.admit("full") == 0
    clock.ms += INTERVAL_MS
    assert repeated.admit("down") == 3
    assert repeated.admit("down") is None


def test_a_store_that_is_down_is_one_line_a_minute_for_all_partitions(caplog):
    clock = SteppingClock()

    def down(operation, _name):
        if operation == "stage" and clock.ms < 130_000:
            raise UnavailableError("the store does not respond")

    logs = [Log(batches(0, 5)) for _ in range(50)]
    store, spec = MemoryStore(before=down), archive_spec(max_time_ms=100)
    with (
        caplog.at_level(logging.WARNING, logger="logmirror.mirror"),
        service(ScriptedClient(logs), store, spec=spec, clock=clock) as (made, _),
    ):

        def on_sleep():
            if clock.ms > 200_000:
                made.stop()

        clock.on_sleep = on_sleep
        made.run()
    waits = [r.facts for r in caplog.records if r.getMessage().startswith("flow waits")]
    assert 2 <= len(waits) <= 4
    assert waits[0]["repeated"] == 0
    assert waits[1]["repeated"] > 50
