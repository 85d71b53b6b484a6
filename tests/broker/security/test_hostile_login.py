"""Goal: what is sent before authentication ends its own connection at most, and at once.

Method: a broker with SASL and TLS listeners gets broken frames, requests out of order, every SASL
token that is not one, floods and silence. After each, another client logs in, within a second; the
broker's memory stays small, and its log holds no secret.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from typing import TYPE_CHECKING, Final

import psutil
import pytest

from kit.judges.raw_client import RawClient, build, message_class, request_frame
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.machine import HOST
from kit.servers.security import make_certificates
from kit.tiers import sized
from logmirror.broker.apis import VERSIONS, Api
from logmirror.broker.security.users import put_user

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB: Final = 1024 * 1024
PASSWORD: Final = "a-secret-that-no-log-has"
LIMIT: Final = 16 * 1024


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    folder = tmp_path_factory.mktemp("login")
    certificates = make_certificates(folder / "certificates")
    broker = EmbeddedBroker(
        folder,
        protocols=("SASL_PLAINTEXT", "SASL_SSL"),
        tls_certificate=str(certificates.broker),
        authentication_timeout_ms=1500,
        failed_authentication_delay_ms=1,
        max_failed_authentication_delay_ms=10,
        max_connections=60,
        max_connections_per_address=50,
    )
    put_user(broker.log_dir, "alice", PASSWORD)
    with broker:
        assert _is_well(broker)
        before = psutil.Process(broker.pid).memory_info().rss
        yield broker
        assert psutil.Process(broker.pid).memory_info().rss < before + 64 * MIB
        text = broker.log.read_text()
        assert broker.stop() == 0
    assert "internal error" not in text
    assert "Traceback" not in text
    assert PASSWORD not in text


def _is_well(broker: EmbeddedBroker) -> bool:
    """Whether a user logs in and is served, within seconds: the machine may be busy."""
    began = time.monotonic()
    with RawClient(broker.port) as client:
        client.ask(Api.SASL_HANDSHAKE, 1, mechanism="PLAIN")
        token = f"\0alice\0{PASSWORD}".encode()
        found = client.ask(Api.SASL_AUTHENTICATE, 2, auth_bytes=token)
        request = {"include_cluster_authorized_operations": False}
        has_brokers = bool(client.ask(Api.DESCRIBE_CLUSTER, 0, **request).brokers)
    assert time.monotonic() - began < 10
    return int(found.error_code) == 0 and has_brokers


def _handshake(mechanism: str = "PLAIN", version: int = 1) -> bytes:
    ask = message_class(Api.SASL_HANDSHAKE, version, "request")
    return request_frame(17, version, build(ask, mechanism=mechanism))


def _token(token: bytes, version: int = 2) -> bytes:
    ask = message_class(Api.SASL_AUTHENTICATE, version, "request")
    return request_frame(36, version, build(ask, auth_bytes=token))


def _sized(frame: bytes) -> bytes:
    return struct.pack(">i", len(frame)) + frame


HEADER: Final = struct.pack(">hhih", 17, 1, 7, -1)
BROKEN: Final = {
    "size negative": b"\xff\xff\xff\xff",
    "size over the limit": struct.pack(">ihhi", LIMIT + 1, 17, 1, 1),
    "produce of the size that others may send": struct.pack(">ihhi", MIB, 0, 9, 1),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "unknown key": _sized(struct.pack(">hhih", 999, 0, 7, -1)),
    "handshake without a mechanism": _sized(HEADER),
    "handshake with null": _sized(HEADER + b"\xff\xff"),
    "handshake that lies": _sized(HEADER + b"\x7f\xffPLAIN"),
    "handshake of an unknown version": _sized(struct.pack(">hhih", 17, 9, 7, -1)),
    "token before the handshake": _sized(_token(b"\0alice\0x")),
    "two handshakes": _sized(_handshake()) * 2,
    "token that lies": _sized(_handshake())
    + _sized(struct.pack(">hhihi", 36, 0, 7, -1, 2**31 - 1)),
    "token of negative size": _sized(_handshake())
    + _sized(struct.pack(">hhihi", 36, 0, 7, -1, -2)),
    "raw token over the limit": _sized(_handshake(version=0)) + struct.pack(">i", LIMIT + 1),
    "raw token of negative size": _sized(_handshake(version=0)) + b"\xff\xff\xff\xff",
    "raw empty token": _sized(_handshake(version=0)) + b"\0\0\0\0",
    "versions again and again": _sized(struct.pack(">hhih", 18, 0, 7, -1)) * 17,
}


def _ends(broker: EmbeddedBroker, sent: bytes, *, within_s: float = 1.5) -> bool:
    """Send bytes; whether the broker closes the connection, whatever it sends before."""
    with RawClient(broker.port) as client:
        client.socket.settimeout(within_s)
        with contextlib.suppress(ConnectionError):
            client.socket.sendall(sent)
            while True:
                try:
                    if not client.socket.recv(65536):
                        return True
                except TimeoutError:
                    return False
    return True


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_beginning_ends_its_connection_only(broker, name):
    assert _ends(broker, BROKEN[name], within_s=1)
    assert _is_well(broker)


@pytest.mark.parametrize("api", [api for api in VERSIONS if api not in (17, 18, 36)])
def test_no_other_request_has_a_response_before_authentication(broker, api):
    first, last = VERSIONS[api]
    for version in {first, last}:
        with RawClient(broker.port) as client:
            client.socket.settimeout(1)
            client.send_frame(struct.pack(">hhih", api, version, 7, -1) + bytes(40))
            assert client.is_closed()


TOKENS: Final = {
    "PLAIN": [b"", b"\0", b"\0\0", b"\0alice\0", b"bob\0alice\0x", b"\0" * 9, b"\xff\0a\0b"],
    "SCRAM-SHA-256": [
        b"",
        b"n,,n=alice,r=",
        b"p=tls-unique,,n=alice,r=abc",
        b"n,a=bob,n=alice,r=abc",
        b"n,,n=al=2Dice,r=abc",
        b"n,,n=" + b"a" * 4000 + b",r=abc",
        b"n,,n=alice,r=" + b"!" * 8000 + b"\0",
        b"n,,n=alice,r=abc" + b",x=y" * 3000 + b"\0",
        b"\xff\xfe",
    ],
}


@pytest.mark.parametrize("mechanism", TOKENS)
def test_a_token_that_is_none_is_an_error_at_once(broker, mechanism):
    for token in TOKENS[mechanism]:
        with RawClient(broker.port) as client:
            client.send_frame(_handshake(mechanism))
            client.receive_frame()
            began = time.monotonic()
            found = client.ask(Api.SASL_AUTHENTICATE, 2, auth_bytes=token)
            assert (int(found.error_code), found.error_message) == (58, "authentication failed")
            assert time.monotonic() - began < 10
    assert _is_well(broker)


@pytest.mark.thinned
def test_random_tokens_and_frames_never_do_more_than_end_the_connection(broker):
    chance = random.Random(7)
    final = b"c=biws,r=abc,p=AAAA"
    for _ in range(sized(60, 150, 2000)):
        with RawClient(broker.port) as client, contextlib.suppress(EOFError, TimeoutError, OSError):
            client.socket.settimeout(0.05)
            version = chance.randint(0, 1)
            client.send_frame(_handshake("SCRAM-SHA-256", version))
            client.receive_frame()
            for token in (b"n,,n=alice,r=abc", final):
                changed = bytearray(token)
                for _ in range(chance.randint(0, 4)):
                    at = chance.randrange(len(changed))
                    changed[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 3))
                client.send_frame(_token(bytes(changed)) if version else bytes(changed))
                client.receive_frame()
    assert _is_well(broker)


def test_a_handshake_cut_off_at_any_byte_does_not_open_the_door(broker):
    whole = _sized(_handshake()) + _sized(_token(b"\0alice\0wrong"))
    for size in range(0, len(whole), 5):
        with RawClient(broker.port) as client:
            client.socket.sendall(whole[:size])
            client.socket.shutdown(socket.SHUT_WR)
            client.socket.settimeout(1.2)
            with contextlib.suppress(ConnectionError):
                while client.socket.recv(4096):
                    pass
    assert _is_well(broker)


def test_requests_behind_a_wrong_password_are_not_handled(broker):
    """They arrive with it, before the broker has decided."""
    versions = _sized(struct.pack(">hhih", 18, 0, 99, -1))
    with RawClient(broker.port) as client:
        sent = _sized(_handshake()) + _sized(_token(b"\0alice\0wrong")) + versions * 5
        client.socket.sendall(sent)
        client.receive_frame()
        assert struct.unpack(">h", client.receive_frame()[5:7])[0] == 58
        assert client.is_closed()
    assert _is_well(broker)


@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_silent_connections_are_closed_and_leave_room_for_users(broker, protocol):
    """Half of all connections may wait for a login; others of the address are turned away."""
    idle = []
    try:
        address = HOST, broker.port_of(protocol)
        idle += [socket.create_connection(address, 5) for _ in range(45)]
        wait_until(
            lambda: sum(map(_is_closed_now, idle)) >= 45 - 30,
            what=lambda: "too many connections are open",
            timeout_s=5,
        )
        wait_until(
            lambda: all(map(_is_closed_now, idle)),
            what=lambda: "connections stay open",
            timeout_s=30,
        )
    finally:
        for one in idle:
            one.close()
    assert _is_well(broker)


def _is_closed_now(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_one_address_has_its_share_of_connections(tmp_path):
    with EmbeddedBroker(tmp_path / "broker", max_connections_per_address=3) as broker:
        clients = [RawClient(broker.port) for _ in range(3)]
        assert all(client.ask(Api.API_VERSIONS, 0).api_keys for client in clients)
        with RawClient(broker.port) as fourth:
            assert fourth.is_closed()
        clients.pop().socket.close()
        time.sleep(0.2)
        with RawClient(broker.port) as another:
            assert another.ask(Api.API_VERSIONS, 0).api_keys
        for client in clients:
            client.socket.close()


def test_failures_of_one_address_take_longer_each_time(tmp_path):
    broker = EmbeddedBroker(
        tmp_path / "broker",
        protocols=("SASL_PLAINTEXT",),
        failed_authentication_delay_ms=50,
        max_failed_authentication_delay_ms=400,
    )
    put_user(broker.log_dir, "alice", PASSWORD)
    with broker:
        took = []
        for _ in range(5):
            with RawClient(broker.port) as client:
                client.ask(Api.SASL_HANDSHAKE, 1, mechanism="PLAIN")
                began = time.monotonic()
                client.ask(Api.SASL_AUTHENTICATE, 2, auth_bytes=b"\0alice\0wrong")
                took.append(time.monotonic() - began)
        assert _is_well(broker)  # who knows the password does not wait
    for found, least in zip(took, (0.05, 0.1, 0.2, 0.4, 0.4), strict=True):
        assert found >= least
    assert took[-1] < 10
