"""A peer that drips: each step of a connection ends at one total deadline.

Method: loopback peers that send, or read, a byte at a time, far within any timeout of one read. See
`test_connection` for responses, and `test_token_endpoint` for tokens.
"""

import contextlib
import socket
import ssl
import threading
import time
from dataclasses import replace
from typing import ClassVar

import pytest
from kafka.protocol.sasl import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

from kit.fakes.scripted_broker import (
    API_VERSIONS,
    FETCH,
    ScriptedBroker,
    Topic,
    World,
    trickle,
)
from kit.servers.security import make_certificates
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster import fetch_receiver
from logmirror.cluster.connection import Connection
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.transport import Transport
from logmirror.errors import UnavailableError
from logmirror.wire.fetch import FetchRequest

SASL_HANDSHAKE, SASL_AUTHENTICATE = 17, 36
TOPIC_ID = bytes(range(16))
DEADLINE_MS = 500


class SaslBroker(ScriptedBroker):
    """A scripted broker with SASL PLAIN, which accepts any password."""

    request_classes: ClassVar = {
        **ScriptedBroker.request_classes,
        SASL_HANDSHAKE: SaslHandshakeRequest,
        SASL_AUTHENTICATE: SaslAuthenticateRequest,
    }

    def _response(self, key, version, request):
        if key == SASL_HANDSHAKE:
            return SaslHandshakeResponse(version=version, error_code=0, mechanisms=["PLAIN"])
        if key == SASL_AUTHENTICATE:
            return SaslAuthenticateResponse(
                version=version,
                error_code=0,
                error_message=None,
                auth_bytes=b"",
                session_lifetime_ms=0,
            )
        return super()._response(key, version, request)


@pytest.fixture
def broker():
    world = World({"t": Topic(TOPIC_ID, [(1, 5)], [bytes(200_000)])})
    versions = {SASL_HANDSHAKE: (0, 1), SASL_AUTHENTICATE: (0, 2)}
    broker = SaslBroker(world, versions=versions)
    yield broker
    broker.close()


def connect(broker):
    plain = {"sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": "p"}
    settings = connection_settings(broker.address, {"security.protocol": "SASL_PLAINTEXT", **plain})
    limits = {"connect_timeout_ms": DEADLINE_MS, "socket_timeout_ms": DEADLINE_MS}
    return Connection("127.0.0.1", broker.port, replace(settings, **limits))


@pytest.mark.parametrize("api", [API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE])
def test_a_handshake_that_drips_ends_at_the_connections_deadline(broker, api):
    connect(broker).close()
    stop = threading.Event()
    broker.once(api, trickle(0.1, stop))
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="in time"):
        connect(broker)
    stop.set()
    assert time.monotonic() - begun < 15


def test_records_slower_than_the_floor_rate_end_at_the_deadline(broker, monkeypatch):
    """200 kB have 200 ms more than a small response at 1000 bytes/ms; the peer needs 20 s."""
    monkeypatch.setattr(fetch_receiver, "_SLOWEST_BYTES_PER_MS", 1000)
    stop = threading.Event()

    def slowly(connection, _request, response):
        for at in range(0, len(response), 1000):
            connection.sendall(response[at : at + 1000])
            if stop.wait(0.1):
                return

    broker.once(FETCH, slowly)
    connection = connect(broker)
    request = FetchRequest("t", TOPIC_ID, 0, 5, 10, 1 << 20, 0, 1, read_committed=True)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="in time"):
        connection.fetch(request, memoryview(bytearray(1 << 20)))
    stop.set()
    assert time.monotonic() - begun < 12


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def peer():
    """Start a listener that carries out a function with one connection; return its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def start(script):
        def serve():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    script(connection)

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()
        return listener.getsockname()[1]

    yield start
    listener.close()
    for thread in threads:
        thread.join(10)


def transport(port, certificates, *, within_ms=DEADLINE_MS):
    tls = {"security.protocol": "SSL", "ssl.ca.location": str(certificates.authority)}
    return Transport(
        "127.0.0.1",
        port,
        connection_settings("h:1", tls),
        clock=SYSTEM_CLOCK,
        tls=None,
        deadline_ms=SYSTEM_CLOCK.monotonic_ms() + within_ms,
    )


def test_a_tls_handshake_that_drips_ends_at_the_deadline(peer, certificates):
    def drip(connection):
        connection.sendall(b"\x16\x03\x03\x40\x00")  # a handshake record of 16 KiB
        while True:
            connection.sendall(b"\x00")
            time.sleep(0.05)

    begun = time.monotonic()
    with pytest.raises(UnavailableError):
        transport(peer(drip), certificates)
    assert time.monotonic() - begun < 15


def test_a_request_that_a_peer_reads_slowly_over_tls_ends_at_the_deadline(peer, certificates):
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificates.broker)
    done = threading.Event()

    def read_slowly(connection):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with server.wrap_socket(connection, server_side=True) as secured:
            while not done.wait(0.05):
                secured.recv(16_384)

    sender = transport(peer(read_slowly), certificates, within_ms=30_000)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="in time"):
        sender.send(bytes(100_000_000), SYSTEM_CLOCK.monotonic_ms() + DEADLINE_MS)
    done.set()
    sender.close()
    assert time.monotonic() - begun < 20


def test_a_host_name_lookup_that_hangs_ends_at_the_deadline(monkeypatch):
    done, lookup = threading.Event(), socket.getaddrinfo

    def hang(host, *rest):
        if rest[-1] == socket.AI_NUMERICHOST:
            return lookup(host, *rest)
        assert done.wait(30)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    settings = replace(connection_settings("h:1"), connect_timeout_ms=DEADLINE_MS)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="resolved"):
        Connection("broker.example", 9092, settings)
    done.set()
    assert time.monotonic() - begun < 20
