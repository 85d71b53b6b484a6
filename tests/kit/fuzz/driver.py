"""Sends broken requests to an embedded broker, and watches it.

What the broker must do, whatever it gets:

- It responds as Kafka's schema says, or closes the connection, and logs no internal error.
- Another client gets its response meanwhile: no request takes the event loop for a second of CPU
  time. Times are CPU times, so that a busy machine does not change them.
- Its memory stays below a bound.

A client that has logged in as super user asks in between. It also removes what was set before, such
as quotas, so that the broker does not stop to listen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import struct
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self

import psutil
from kio.schema.errors import ErrorCode
from kio.serial.errors import OutOfBoundValue

from kit.fuzz.dictionary import TOPIC, Words
from kit.fuzz.frames import Breaker, Writer, joined, stream
from kit.judges.burden import loop_s, peak_bytes
from kit.judges.quota_requests import alter, describe
from kit.judges.raw_client import RawClient, read_response
from kit.judges.restricted_requests import metadata, part
from kit.servers.embedded import EmbeddedBroker
from logmirror.broker.apis import VERSIONS, Api
from logmirror.broker.security.users import put_user

if TYPE_CHECKING:
    from pathlib import Path

ADMIN: Final = "admin"
PASSWORD: Final = "a-secret-that-no-log-has"
CANARY: Final = "canary"
WAIT_S: Final = 0.01
"""How long a response is waited for; some requests have none, or wait for others."""

PER_CONNECTION: Final = 12
PER_CHECK: Final = 6
_KEPT: Final = 200
_UNLIMITED: Final = {
    "producer_byte_rate": 2.0**40,
    "consumer_byte_rate": 2.0**40,
    "request_percentage": 1e6,
}
_LEARNT: Final = (
    "generation_id",
    "member_epoch",
    "member_id",
    "producer_epoch",
    "producer_id",
    "topic_id",
)
"""Fields of responses that requests have, too."""

_OPEN: Final = (Api.SASL_HANDSHAKE, Api.API_VERSIONS, Api.SASL_AUTHENTICATE)


def broker_to_fuzz(folder: Path) -> EmbeddedBroker:
    """Return a broker, not started, with small limits, ACLs, and a listener with SASL."""
    broker = EmbeddedBroker(
        folder,
        protocols=("PLAINTEXT", "SASL_PLAINTEXT"),
        super_users=[f"User:{ADMIN}"],
        segment_bytes=100_000,
        max_produce_frame_bytes=4 * 1024 * 1024,
        max_partitions=40,
        max_groups=100,
        max_transactional_ids=100,
        failed_authentication_delay_ms=1,
        max_failed_authentication_delay_ms=1,
    )
    put_user(broker.log_dir, ADMIN, PASSWORD)
    return broker


class Canary:
    """The client that must get its responses, and what the broker has spent meanwhile."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker
        self._process = psutil.Process(broker.pid)
        self._client = RawClient(broker.port_of("SASL_PLAINTEXT"), timeout_s=60, client_id=CANARY)
        self._client.ask(Api.SASL_HANDSHAKE, 1, mechanism="PLAIN")
        token = f"\0{ADMIN}\0{PASSWORD}".encode()
        found = self._client.ask(Api.SASL_AUTHENTICATE, 2, auth_bytes=token)
        assert found.error_code == ErrorCode.none
        self._log_size = 0
        self._loop_s = loop_s(self._process)
        self._peak_bytes = peak_bytes(broker.pid)
        self.topic_id = uuid.UUID(int=0)
        self.reset()

    def close(self) -> None:
        """Close its connection."""
        self._client.socket.close()

    def took_s(self) -> float:
        """Return the CPU time of the event loop since the last call; another client is served."""
        self._client.ask(Api.API_VERSIONS, 0)
        before_s, self._loop_s = self._loop_s, loop_s(self._process)
        return self._loop_s - before_s

    def grown_bytes(self) -> int:
        """Return by how much the broker's largest resident size has grown."""
        return peak_bytes(self._broker.pid) - self._peak_bytes

    def logged(self) -> str:
        """Return what the broker has logged since the last call."""
        with self._broker.log.open("rb") as log:
            log.seek(self._log_size)
            found = log.read()
        self._log_size += len(found)
        return found.decode(errors="replace")

    def reset(self) -> None:
        """Remove quotas and ACLs, and permit other clients everything; the topic exists."""
        client = self._client
        _, entries = describe(client)
        mine: list[tuple[str, str | None]] = [("user", ADMIN), ("client-id", CANARY)]
        others = [(who, dict.fromkeys(values)) for who, values in entries if who != mine]
        alter(client, *others, (mine, dict(_UNLIMITED)))
        any_one = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1}
        none = dict.fromkeys(("resource_name_filter", "principal_filter", "host_filter"))
        wanted = part(Api.DELETE_ACLS, 3, "DeleteAclsFilter", **any_one, **none, permission_type=1)
        client.ask(Api.DELETE_ACLS, 3, filters=(wanted,))
        allowed = tuple(
            part(
                Api.CREATE_ACLS,
                3,
                "AclCreation",
                resource_type=kind,
                resource_name="kafka-cluster" if kind == 4 else "*",
                resource_pattern_type=3,
                principal="User:ANONYMOUS",
                host="*",
                operation=2,
                permission_type=3,
            )
            for kind in (2, 3, 4, 5)
        )
        client.ask(Api.CREATE_ACLS, 3, creations=allowed)
        [topic] = client.ask(Api.METADATA, 12, **metadata(TOPIC)).topics
        self.topic_id = topic.topic_id or self.topic_id


class Fuzzer:
    """Random requests to one broker.

    Args:
        broker: It runs.
        seed: Of everything that is drawn; the broker's responses have a part in it, too.

    Attributes:
        sent: The connections so far: the local port, and the bytes of each request.
        counts: How often a request had a response, ended its connection, or neither.
    """

    def __init__(self, broker: EmbeddedBroker, seed: int) -> None:
        self._broker = broker
        self._seed = seed
        self._chance = random.Random(seed)
        self._words = Words(self._chance)
        self._writer = Writer(self._chance, self._words)
        self._breaker = Breaker(self._chance)
        self.canary = Canary(broker)
        self.sent: deque[tuple[int, list[bytes]]] = deque(maxlen=_KEPT)
        self.counts = {"response": 0, "closed": 0, "none": 0}
        self._words.remember("topic_id", self.canary.topic_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.canary.close()

    def connection(self) -> None:
        """Send requests on one new connection until it is closed or has had enough."""
        is_sasl = self._chance.random() < 0.1
        port = self._broker.port_of("SASL_PLAINTEXT" if is_sasl else "PLAINTEXT")
        with socket.create_connection(("127.0.0.1", port), 20) as client:
            sent: list[bytes] = []
            self.sent.append((client.getsockname()[1], sent))
            is_in_step = True
            for _ in range(self._chance.randint(1, PER_CONNECTION)):
                frame = self._frame(is_sasl=is_sasl)
                data = stream(frame, self._chance)
                sent.append(data)
                outcome = self._exchange(client, frame, data, is_in_step=is_in_step)
                is_in_step &= outcome == "response"
                self.counts[outcome] += 1
                if outcome == "closed":
                    return

    def _frame(self, *, is_sasl: bool) -> bytes:
        api_key = self._chance.choice(_OPEN if is_sasl else tuple(VERSIONS))
        version = self._chance.randint(*VERSIONS[api_key])
        client_id = "x" if self._chance.random() < 0.02 else "fuzz"
        tokens = self._writer.request(api_key, version, client_id=client_id)
        return joined(tokens) if self._chance.random() < 0.4 else self._breaker.broken(tokens)

    def _exchange(
        self, client: socket.socket, frame: bytes, data: bytes, *, is_in_step: bool
    ) -> str:
        """Send a request; returns what came of it.

        A response must be one of its API, unless an earlier request may still get its own.
        """
        client.settimeout(20)
        try:
            client.sendall(data)
            client.settimeout(WAIT_S)
            size = struct.unpack(">i", received(client, 4))[0]
            client.settimeout(20)
            response = received(client, size)
            if is_in_step:
                self._learn(frame, response)
        except TimeoutError:
            return "none"
        except (ConnectionError, EOFError):
            return "closed"
        return "response"

    def _learn(self, frame: bytes, response: bytes) -> None:
        """Check a response's bytes, and remember the IDs in it."""
        try:
            found = checked_response(frame, response)
        except Exception as error:
            why = f"response {response.hex()} to {frame.hex()}: {error!r}"
            raise AssertionError(self._report(why)) from error
        for name, value in _fields(found):
            if name in _LEARNT:
                self._words.remember(name, value)

    def run(self, frames: int) -> None:
        """Send about so many requests; an error has those that may have caused it.

        Raises:
            AssertionError: The broker did what it must not do.
        """
        until = sum(self.counts.values()) + frames
        connections = 0
        while sum(self.counts.values()) < until:
            self.connection()
            connections += 1
            if connections % PER_CHECK == 0:
                self.check()
            if connections % (5 * PER_CHECK) == 0:
                self.canary.reset()
                self._words.remember("topic_id", self.canary.topic_id)
        self.check()

    def check(self) -> None:
        """Check what the broker has done since the last check.

        Raises:
            AssertionError: The broker did what it must not do.
        """
        took_s = self.canary.took_s()
        assert took_s < 1, self._report(f"the event loop was busy for {took_s} s")
        logged = self.canary.logged()
        for word in ("internal error", "Traceback", PASSWORD):
            assert word not in logged, self._report(logged)

    def _report(self, why: str) -> str:
        """Write the last connections to a file; returns the reason and the file's path."""
        listed = self._broker.folder / "last-requests.txt"
        with listed.open("w") as out:
            for port, sent in self.sent:
                out.write(f"port {port}\n" + "".join(f"{data.hex()}\n" for data in sent))
        return (
            f"{why}\nseed {self._seed}; the last requests by port, as hexadecimal digits: {listed}"
        )


def checked_response(frame: bytes, response: bytes) -> Any:
    """Return the response to a request; None if kio cannot read it.

    Raises:
        Exception: It is not one that Kafka's schema allows.
    """
    api_key, version = struct.unpack_from(">hh", frame)
    assert response[:4] == frame[4:8], "correlation ID"
    first, last = VERSIONS.get(api_key, (0, -1))
    if not first <= version <= last:
        assert api_key == Api.API_VERSIONS, "only ApiVersions has a response then"
        version = 0
    try:
        return read_response(api_key, version, response)[1]
    except OutOfBoundValue:
        return None  # kio has no time before 1970, where -1 stands for none


def received(client: socket.socket, size: int) -> bytes:
    """Return the next bytes of a connection.

    Raises:
        EOFError: The broker has closed it.
    """
    data = bytearray()
    while len(data) < size:
        piece = client.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _fields(message: Any) -> list[tuple[str, object]]:
    """Return the names and values of all fields within a message."""
    if isinstance(message, tuple):
        return [pair for entry in message for pair in _fields(entry)]
    if not dataclasses.is_dataclass(message):
        return []
    found: list[tuple[str, object]] = []
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        found.append((field.name, value))
        with contextlib.suppress(RecursionError):
            found += _fields(value)
    return found
