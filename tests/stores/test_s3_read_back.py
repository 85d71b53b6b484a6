"""On a store that replaces, `require-atomic-create: false` still lets only one writer win.

Method: a real server behind a proxy that makes its writes replace, or refuses their condition;
concurrent writers, each with its own store; a writer that is delayed between its check and its
write. The log reports the degraded fencing.
"""

import contextlib
import logging
import threading
from dataclasses import replace

import pytest

from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import OutcomeUnknownError, UsageError
from logmirror.stores import s3_read_back
from logmirror.stores.base import AlreadyExistsError
from logmirror.stores.opening import begin_writing, open_store
from logmirror.stores.s3 import S3Store
from logmirror.stores.s3_read_back import ReadBackStore

pytestmark = pytest.mark.xdist_group("s3")


@pytest.fixture
def location(s3_server, proxy):
    proxy.forget_condition = True
    there = s3_server.location(s3_server.new_bucket(), "p", endpoint=proxy.endpoint)
    return replace(there, require_atomic_create=False)


def begin(location):
    with contextlib.ExitStack() as stack:
        return begin_writing(location, "w", stack)


def test_a_store_that_replaces_is_refused_unless_that_is_accepted(location, caplog):
    with pytest.raises(UsageError, match="replaces") as caught:
        begin(replace(location, require_atomic_create=True))
    assert "require-atomic-create" in caught.value.hint

    with caplog.at_level(logging.WARNING):
        store = begin(location)

    assert isinstance(store, ReadBackStore)
    assert [record.getMessage()[:17] for record in caplog.records] == ["degraded fencing:"]


def test_a_store_without_the_condition_can_be_accepted_too(location, proxy, monkeypatch):
    monkeypatch.setattr(s3_read_back, "QUIESCE_MS", 300)
    monkeypatch.setattr(s3_read_back, "PROMPT_MS", 60_000)  # the machine may be busy
    proxy.forget_condition, proxy.refuse_condition = False, True
    with pytest.raises(UsageError) as caught:
        begin(replace(location, require_atomic_create=True))
    assert "does not support" in caught.value.facts["reason"]

    store = begin(location)

    store.create("f/a", b"first")
    with pytest.raises(AlreadyExistsError):
        store.create("f/a", b"second")
    staged = store.stage("x")
    staged.write(b"second")
    token = staged.finish("f/a", travels=True)
    with pytest.raises(AlreadyExistsError):
        store.publish(token, "f/a")
    assert store.read("f/a") == b"first"


def test_what_is_accepted_without_need_is_said(s3_server, caplog):
    location = replace(s3_server.location(s3_server.new_bucket()), require_atomic_create=False)
    with caplog.at_level(logging.WARNING):
        begin(location)
    (record,) = caplog.records
    assert "without need" in record.getMessage()


def test_of_many_who_create_a_claim_at_once_one_wins_and_its_bytes_stay(location):
    """The plain store lets more than one writer win; this is what reading back prevents."""
    together = threading.Barrier(6)

    def create(name, number, results):
        store = open_store(location, "w")
        list(store.names("f"))  # connected
        together.wait()
        # On a busy machine one may be too late to be sure; it does not count itself the winner.
        with contextlib.suppress(AlreadyExistsError, OutcomeUnknownError):
            store.create(name, b"%d" % number * 100)
            results.append(number)

    for attempt in range(10):
        name, results = f"f/{attempt}", []
        threads = [threading.Thread(target=create, args=(name, n, results)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) <= 1
        if results:
            assert S3Store(location).read(name) == b"%d" % results[0] * 100
            return
    pytest.fail("no writer ever won")


def test_a_writer_that_was_held_up_before_its_write_does_not_count_itself_the_winner(location):
    class Sleepy(ReadBackStore):
        def _write_new(self, operation, **arguments):
            SYSTEM_CLOCK.sleep_ms(600)
            return super()._write_new(operation, **arguments)

    with pytest.raises(OutcomeUnknownError, match="so long"):
        Sleepy(location, clock=SYSTEM_CLOCK).create("f/a", b"late")
