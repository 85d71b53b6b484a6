"""Every request to an S3 API ends: a server that is slower than the floor rate is unavailable.

Method: a server on a socket that never exceeds the timeout of one operation, and would take hours
for one response. The limits are scaled down; the rest is the product's code and botocore's. Times
are asserted as generous totals.
"""

import gc
import threading
import time
from dataclasses import replace

import pytest

from kit.fakes.slow_s3 import Pace, SlowS3
from logmirror.errors import LogmirrorError, OutcomeUnknownError, UnavailableError
from logmirror.locations import S3Identity
from logmirror.stores import s3_calls, s3_transport
from logmirror.stores.s3 import S3Store

DRIP = 10
"""Bytes per second: one byte every 100 ms, within every timeout of one operation."""

SCALED_S = 15
"""Far more than the scaled limits allow, far less than a server that drips would take."""


@pytest.fixture(autouse=True)
def _scaled(monkeypatch):
    """A tenth of the product's limits."""
    monkeypatch.setattr(s3_calls, "DEADLINE_MS", 1000)
    monkeypatch.setattr(s3_calls, "GRACE_MS", 1000)
    monkeypatch.setattr(s3_calls, "_COMPLETION_GRACE_MS", 1000)
    monkeypatch.setattr(s3_calls, "_READ_TIMEOUT_S", 1)


def send_object(store):
    store.create("f/a", b"x" * (20 << 20))


def send_parts(store):
    staged = store.stage("x")
    staged.write(b"x" * (20 << 20))
    staged.finish("f/a", travels=True)


REQUESTS = {
    "list": lambda store: list(store.names("f")),
    "list-tail": lambda store: store.tail("f"),
    "get": lambda store: store.read("f/a"),
    "open": lambda store: store.open("f/a").read(),
    "put": lambda store: store.create("f/a", b"x"),
    "delete": lambda store: store.delete("f/a"),
    "sweep": lambda store: store.sweep(["f"], bool),
    "probe": lambda store: store.prove_create_only(),
}


def fails(store, play):
    began = time.monotonic()
    with pytest.raises((UnavailableError, OutcomeUnknownError)) as caught:
        play(store)
    assert time.monotonic() - began < SCALED_S
    return caught.value


WITH_BODY = ["list", "get", "sweep"]
RESPONSES = [
    *(("head", name) for name in REQUESTS),
    *((where, name) for where in ("body", "error") for name in WITH_BODY),
]


@pytest.mark.parametrize(("where", "request_name"), RESPONSES)
def test_a_response_that_drips_ends_the_request(request_name, where):
    pace = Pace(head_bytes_s=DRIP) if where == "head" else Pace(response_bytes_s=DRIP)
    status = "503 Slow Down" if where == "error" else "200 OK"
    with SlowS3(pace, b"<" * 1000, status) as server:
        error = fails(S3Store(server.location()), REQUESTS[request_name])

    if request_name != "probe":
        assert error.facts["reason"].startswith("too slow: ")


def test_an_early_response_that_drips_ends_the_request():
    """`100 Continue`, for which botocore waits before it sends a body."""
    with SlowS3(Pace(early_bytes_s=DRIP)) as server:
        assert "too slow" in fails(S3Store(server.location()), send_object).facts["reason"]


@pytest.mark.parametrize("play", [send_object, send_parts])
@pytest.mark.parametrize("rate", [0, 2000])
def test_a_server_that_stops_reading_or_reads_too_slowly_ends_the_request(play, rate):
    body = b"<R><UploadId>u</UploadId></R>"
    with SlowS3(Pace(request_bytes_s=rate, piece_bytes=200), body) as server:
        fails(S3Store(server.location()), play)


def test_a_request_for_a_role_that_drips_ends():
    with SlowS3(Pace(head_bytes_s=DRIP)) as server:
        writer = S3Identity(
            access_key_id="k",
            secret_access_key="s",
            role_arn="arn:aws:iam::123456789012:role/archiver",
            sts_endpoint=server.endpoint,
        )
        store = S3Store(replace(server.location(), write=writer))
        fails(store, lambda store: store.create("f/a", b"x"))


def test_a_slow_server_above_the_floor_rate_is_waited_for(monkeypatch):
    """Longer than the grace time, in both directions."""
    monkeypatch.setattr(s3_transport, "FLOOR_BYTES_S", 100_000)
    data = bytes(range(256)) * 4000
    pace = Pace(response_bytes_s=400_000, request_bytes_s=400_000, piece_bytes=20_000)
    with SlowS3(pace, data) as server:
        store = S3Store(server.location())
        began = time.monotonic()
        assert store.read("f/a") == data
        store.create("f/a", data)
        assert time.monotonic() - began > 2.5


def test_connections_are_used_again():
    """Also those of a store that was too slow for a while."""
    with SlowS3(Pace(), b"content") as server:
        store = S3Store(server.location())
        for _ in range(20):
            assert store.read("f/a") == b"content"
            store.create("f/a", b"x" * 100_000)
        assert (server.requests, server.connections) == (40, 1)

        server.pace = Pace(response_bytes_s=DRIP / 2)
        fails(store, lambda store: store.read("f/a"))
        server.pace = Pace()
        time.sleep(s3_calls.DOWN_MS / 1000)
        for _ in range(20):
            assert store.read("f/a") == b"content"
        assert server.connections <= 4


def test_the_limit_of_one_request_does_not_last():
    """A connection from the pool has the limit of the request that it serves."""
    with SlowS3(Pace(), b"content") as server:
        store = S3Store(server.location())
        assert store.read("f/a") == b"content"
        time.sleep(1.5)  # longer than the grace time
        assert store.read("f/a") == b"content"
        assert server.connections == 1


def test_a_response_larger_than_what_was_asked_for_is_refused(monkeypatch):
    monkeypatch.setattr(s3_calls, "_READ_BYTES_MAX", 1 << 20)
    with SlowS3(Pace(), b"x" * (4 << 20)) as server:
        error = fails(S3Store(server.location()), lambda store: store.read("f/a"))
    assert error.facts["reason"] == "a response of more than 1048576 bytes"


def test_nothing_is_left_open():
    before = set(threading.enumerate())
    with SlowS3(Pace(response_bytes_s=DRIP), b"<" * 1000) as server:
        store = S3Store(server.location())
        with pytest.raises(LogmirrorError):
            store.read("f/a")
        del store
        gc.collect()
    deadline = time.monotonic() + SCALED_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()
