"""Goal: no request makes the broker crash, hang for a second, or use memory without a bound.

Method: the corpus has bytes for each rule of bad input, and every request that once failed; the
broker must do what the file says, and respond as Kafka's schema says. Then random requests of every
API and version, whole and broken, under the watch of `kit.fuzz.driver`.

A file of the corpus: comments, then a line for each piece that is sent, in hexadecimal digits,
where `[00*20]` stands for twenty zeros. `expect` is `open` if a further request has its response,
`closed` if the broker closes the connection, `silent` if neither; `refused` if the login fails.

LOGMIRROR_FUZZ_SEED and LOGMIRROR_FUZZ_FRAMES choose other random requests, and how many.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader

from kit.fuzz.dictionary import Words
from kit.fuzz.driver import Canary, Fuzzer, broker_to_fuzz, checked_response, received
from kit.fuzz.frames import Writer, joined
from kit.judges.raw_client import message_class
from kit.servers.machine import HOST
from kit.tiers import NIGHTLY, sized
from logmirror.broker.apis import VERSIONS, Api

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers.embedded import EmbeddedBroker

CORPUS: Final = sorted((Path(__file__).parent / "corpus").glob("*.txt"))
RULES: Final = {f"C.6.{number}" for number in range(1, 10)}
LAST: Final = struct.pack(">hhih", Api.API_VERSIONS, 0, 99, -1)
MIB: Final = 1024 * 1024
MAX_GROWTH: Final = 256 * MIB
"""What the largest batch takes when it is decompressed and checked, a few times."""

SILENT_S: Final = 0.2


class Sample(NamedTuple):
    """A file of the corpus."""

    rule: str
    expect: str
    listener: str
    pieces: list[bytes]


def _sample(path: Path) -> Sample:
    head = [line[2:].partition(": ") for line in path.read_text().splitlines() if line[0] == "#"]
    body = [line for line in path.read_text().splitlines() if line[0] != "#"]
    facts = {name: value for name, _, value in head[1:]}
    pieces = [
        bytes.fromhex(re.sub(r"\[(..)\*(\d+)\]", lambda run: run[1] * int(run[2]), line))
        for line in body
    ]
    return Sample(head[0][0], facts["expect"], facts.get("listener", "PLAINTEXT"), pieces)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker that must outlive everything."""
    found = broker_to_fuzz(tmp_path_factory.mktemp("fuzz"))
    with found:
        process = found.pid
        yield found
        assert found.pid == process
        assert found.stop() == 0


@pytest.fixture(scope="module")
def canary(broker: EmbeddedBroker) -> Iterator[Canary]:
    found = Canary(broker)
    yield found
    found.close()


def test_the_corpus_has_every_rule():
    assert {_sample(path).rule for path in CORPUS} == RULES


def _requests(pieces: list[bytes]) -> list[bytes]:
    """The whole requests among all that is sent, without their sizes."""
    found, data = [], b"".join(pieces)
    while len(data) >= 4 and 8 <= (size := struct.unpack_from(">i", data)[0]) <= len(data) - 4:
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_request_of_the_corpus_has_the_effect_that_its_file_names(broker, canary, path):
    sample = _sample(path)
    canary.took_s()  # measured from here on
    canary.logged()
    port = broker.port_of(sample.listener)
    with socket.create_connection((HOST, port), 20) as client:
        for piece in sample.pieces:
            client.sendall(piece)
        if sample.expect == "silent":
            client.settimeout(SILENT_S)
            with pytest.raises(TimeoutError):
                client.recv(1)
        elif sample.expect == "closed":
            _until_closed(client)
        elif sample.expect == "refused":
            found = _responses(client, _requests(sample.pieces))[-1]
            assert found.error_code == ErrorCode.sasl_authentication_failed
        else:
            assert sample.expect == "open"
            client.sendall(len(LAST).to_bytes(4) + LAST)
            _responses(client, [*_requests(sample.pieces), LAST])

    assert canary.took_s() < 1
    assert canary.grown_bytes() < MAX_GROWTH
    logged = canary.logged()
    assert "internal error" not in logged
    assert "Traceback" not in logged


def _responses(client: socket.socket, requests: list[bytes]) -> list[Any]:
    """Read the responses to requests; each must be one of its API."""
    return [
        checked_response(request, received(client, int.from_bytes(received(client, 4))))
        for request in requests
    ]


def _until_closed(client: socket.socket) -> None:
    """Read responses until the broker closes the connection."""
    try:
        while client.recv(65_536):
            pass
    except ConnectionResetError:
        return


def test_most_requests_are_whole_before_they_are_broken():
    chance = random.Random(3)
    writer = Writer(chance, Words(chance))
    whole, wrong = 0, []
    for api, (first, last) in VERSIONS.items():
        for version in [version for version in range(first, last + 1) for _ in range(5)]:
            frame = joined(writer.request(api, version, client_id="fuzz"))
            cls = message_class(api, version, "request")
            try:
                _, start = entity_reader(cls.__header_schema__)(frame, 0)
                _, size = entity_reader(cls)(frame, start)
                assert start + size == len(frame)
                whole += 1
            except Exception as error:  # noqa: BLE001  # kio refuses times that do not fit its type
                wrong.append((api, version, repr(error)))

    assert whole > 50 * len(wrong), wrong


@pytest.mark.thinned
@pytest.mark.timeout(7200)
def test_random_requests_of_every_api_do_no_harm(broker):
    frames = int(os.environ.get("LOGMIRROR_FUZZ_FRAMES") or sized(1200, 40_000, 1_000_000))
    seed = int(os.environ.get("LOGMIRROR_FUZZ_SEED") or (secrets.randbits(32) if NIGHTLY else 1))
    with Fuzzer(broker, seed) as fuzzer:
        fuzzer.run(frames)

        assert min(fuzzer.counts["response"], fuzzer.counts["closed"]) > frames / 5
        assert fuzzer.canary.grown_bytes() < MAX_GROWTH
