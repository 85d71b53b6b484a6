"""When a bucket counts as away: requests fail at once then, and none is sent for a while.

Method: a real server behind a proxy that responds with errors itself, to requests of a kind.
"""

import threading

import pytest

from kit.fakes.s3_proxy import Fault
from logmirror.errors import UnavailableError
from logmirror.stores import s3_calls
from logmirror.stores.base import AlreadyExistsError
from logmirror.stores.s3 import S3Store

pytestmark = pytest.mark.xdist_group("s3")


def test_a_store_that_is_down_is_asked_once_in_a_while_and_then_goes_on(
    s3_server, bucket, proxy, store, monkeypatch
):
    monkeypatch.setattr(s3_calls, "DEADLINE_MS", 300)
    proxy.spoil(Fault("503", method="PUT", times=1000))
    with pytest.raises(UnavailableError):
        store.create("f/a", b"content")
    asked = proxy.count

    for _ in range(100):
        with pytest.raises(UnavailableError):
            store.create("f/a", b"content")
    assert proxy.count == asked

    monkeypatch.setattr(s3_calls, "DOWN_MS", 0)
    store = S3Store(s3_server.location(bucket, "p", endpoint=proxy.endpoint))
    with pytest.raises(UnavailableError):
        store.create("f/a", b"content")
    asked = proxy.count
    with pytest.raises(UnavailableError):
        store.create("f/a", b"content")
    assert proxy.count == asked + 1
    proxy.spoil()
    store.create("f/a", b"content")
    assert store.read("f/a") == b"content"


def test_a_request_that_fails_while_others_have_responses_stops_none_of_them(
    proxy, store, monkeypatch
):
    monkeypatch.setattr(s3_calls, "DEADLINE_MS", 500)
    store.create("f/read", b"content")
    proxy.spoil(Fault("503", method="PUT", times=1000))
    begun, done, errors = threading.Event(), threading.Event(), []

    def read():
        while not done.is_set():
            try:
                assert store.read("f/read") == b"content"
            except UnavailableError as error:
                errors.append(error)
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert begun.wait(60)
        for _ in range(3):
            with pytest.raises(UnavailableError, match="temporarily"):
                store.create("f/a", b"content")
    finally:
        done.set()
        reader.join(60)
    assert errors == []


@pytest.mark.parametrize(
    ("play", "outcome"),
    [
        (lambda store: store.read("f/missing"), KeyError),
        (lambda store: store.create("f/taken", b"other"), AlreadyExistsError),
    ],
)
def test_a_name_that_is_missing_or_taken_shows_that_the_store_is_there(
    proxy, store, monkeypatch, play, outcome
):
    monkeypatch.setattr(s3_calls, "DEADLINE_MS", 300)
    monkeypatch.setattr(s3_calls, "DOWN_MS", 0)
    store.create("f/taken", b"content")
    proxy.spoil(Fault("503", "GET", times=1000))
    with pytest.raises(UnavailableError):
        store.read("f/taken")
    proxy.spoil()
    with pytest.raises(outcome):
        play(store)
    proxy.spoil(Fault("503", "GET"))
    assert store.read("f/taken") == b"content"  # tried again: a store that is away is not
