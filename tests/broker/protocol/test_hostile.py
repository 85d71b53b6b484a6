"""Goal: malformed input ends the client's own connection and affects no other.

Method: one broker gets every kind of malformed frame, header, request and batch, and misbehaving
clients. After each, the same process responds to another connection, and its memory stays small.
"""

from __future__ import annotations

import contextlib
import random
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from kio.schema.errors import ErrorCode

from kit.judges.raw_client import (
    RawClient,
    build,
    message_class,
    nested,
    read_response,
    request_frame,
)
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from logmirror.broker.apis import Api
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker with small limits, which outlives every test."""
    broker = EmbeddedBroker(
        tmp_path_factory.mktemp("guarded"),
        max_connections=20,
        max_other_frame_bytes=100_000,
        max_produce_frame_bytes=4 * MIB,
        max_buffered_bytes=16 * MIB,
        frame_timeout_ms=1500,
        idle_timeout_ms=4000,
        send_timeout_ms=2000,
        max_partitions=50,
    )
    with broker:
        process = broker.pid
        with RawClient(broker.port) as client:  # before another test uses up what may be created
            client.send_frame(_metadata_frame())
            client.receive_frame()
        yield broker
        assert broker.pid == process
        assert "internal error" not in broker.log.read_text()


def _is_well(broker: EmbeddedBroker) -> bool:
    with RawClient(broker.port) as client:
        return bool(_versions(client).api_keys)


def _versions(client: RawClient) -> Any:
    return client.ask(Api.API_VERSIONS, 0)


def _metadata_frame(version: int = 9) -> bytes:
    topic = build(
        nested(3, version, "request", "MetadataRequestTopic"), name="hostile", topic_id=None
    )
    request = build(
        message_class(3, version, "request"),
        topics=(topic,),
        allow_auto_topic_creation=True,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    return request_frame(3, version, request)


HEADER = struct.pack(">hhih", 3, 1, 7, -1)
BROKEN = {
    "size negative": b"\xff\xff\xff\xff",
    "size 0": b"\0\0\0\0",
    "size below a header": struct.pack(">i", 7) + b"1234567",
    "size over the limit": struct.pack(">ihhi", 100_001, 3, 9, 1),
    "produce over its limit": struct.pack(">ihhi", 4 * MIB + 1, 0, 9, 1),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "unknown key": struct.pack(">ihhih", 10, 999, 0, 7, -1),
    "negative key": struct.pack(">ihhih", 10, -1, 0, 7, -1),
    "version too high": struct.pack(">ihhih", 10, 3, 99, 7, -1),
    "version negative": struct.pack(">ihhih", 10, 3, -1, 7, -1),
    "produce v2": struct.pack(">ihhih", 10, 0, 2, 7, -1),
    "client id lies": struct.pack(">ihhih", 10, 3, 1, 7, 1000),
    "client id not utf-8": struct.pack(">ihhih", 12, 3, 1, 7, 2) + b"\xff\xfe",
    "array of 2^31 - 1": struct.pack(">i", 14) + HEADER + struct.pack(">i", 2**31 - 1),
    "array of -2": struct.pack(">i", 14) + HEADER + struct.pack(">i", -2),
    "name is null": struct.pack(">i", 16) + HEADER + struct.pack(">ih", 1, -1),
    "name too long": struct.pack(">i", 16) + HEADER + struct.pack(">ih", 1, 32767),
    "sasl without sasl": struct.pack(">ihhih", 10, 17, 1, 7, -1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_frame_ends_its_connection_only(limited, name):
    with RawClient(limited.port) as client:
        _versions(client)
        client.socket.sendall(BROKEN[name])
        assert client.is_closed()

    assert _is_well(limited)


@pytest.mark.parametrize("version", [1, 9, 12])
def test_a_request_cut_off_at_any_byte_ends_its_connection_only(limited, version):
    frame = _metadata_frame(version)
    for size in range(8, len(frame)):
        with RawClient(limited.port) as client:
            client.send_frame(frame[:size])
            assert client.is_closed(), size

    assert _is_well(limited)


def test_random_bytes_in_a_frame_never_do_more_than_end_the_connection(limited):
    chance = random.Random(5)
    keys = [key for key in Api if key not in (Api.CREATE_TOPICS, Api.DELETE_TOPICS)]
    for _ in range(300):
        with RawClient(limited.port) as client:
            head = struct.pack(">hhih", chance.choice(keys), chance.randint(0, 12), 1, -1)
            client.send_frame(head + chance.randbytes(chance.randint(0, 60)))
            try:
                client.socket.settimeout(0.02)
                client.receive_frame()
            except (EOFError, TimeoutError):
                pass

    assert _is_well(limited)


def _produce_frame(batch: bytes | None, *, acks: int = -1, repeat: int = 1) -> bytes:
    data = build(nested(0, 9, "request", "PartitionProduceData"), index=0, records=batch)
    topic = build(
        nested(0, 9, "request", "TopicProduceData"), name="hostile", partition_data=(data,) * repeat
    )
    request = build(
        message_class(0, 9, "request"),
        transactional_id=None,
        acks=acks,
        timeout=timedelta(seconds=10),
        topic_data=(topic,),
    )
    return request_frame(0, 9, request)


GOOD = encode_reference([Record(n, 1, 0, None, b"v", ()) for n in range(3)])


def _ask_produce(client: RawClient, frame: bytes) -> list[int]:
    client.send_frame(frame)
    _, response = read_response(0, 9, client.receive_frame())
    return [int(p.error_code) for p in response.responses[0].partition_responses]


def test_a_refused_batch_keeps_the_connection_and_stores_nothing(limited):
    with RawClient(limited.port) as client:
        client.send_frame(_metadata_frame())
        client.receive_frame()
        before = _log_end(client)
        for batch, code in (
            (None, ErrorCode.invalid_record),
            (b"", ErrorCode.invalid_record),
            (GOOD + GOOD, ErrorCode.invalid_record),
            (GOOD[:-1], ErrorCode.corrupt_message),
            (GOOD[:-1] + b"\xff", ErrorCode.corrupt_message),
            (b"\xff" * 100, ErrorCode.invalid_record),
        ):
            assert _ask_produce(client, _produce_frame(batch)) == [code]
        for acks in (2, -2, 32767):
            assert _ask_produce(client, _produce_frame(GOOD, acks=acks)) == [
                ErrorCode.invalid_required_acks
            ]

        assert _log_end(client) == before


@pytest.mark.statement("T10")
def test_the_same_partition_twice_in_a_request_is_two_batches(limited):
    with RawClient(limited.port) as client:
        client.send_frame(_metadata_frame())
        client.receive_frame()
        before = _log_end(client)

        assert _ask_produce(client, _produce_frame(GOOD, repeat=50)) == [0] * 50

        assert _log_end(client) == before + 150


def _log_end(client: RawClient) -> int:
    partition = build(
        nested(2, 7, "request", "ListOffsetsPartition"), partition_index=0, timestamp=-1
    )
    topic = build(
        nested(2, 7, "request", "ListOffsetsTopic"), name="hostile", partitions=(partition,)
    )
    response = client.ask(2, 7, replica_id=-1, isolation_level=0, topics=(topic,))
    return int(response.topics[0].partitions[0].offset)


@pytest.mark.statement("T18")
def test_an_announced_size_and_silence_reserve_nothing_and_end(limited):
    _is_well(limited)
    resident = psutil.Process(limited.pid).memory_info().rss
    clients = [RawClient(limited.port) for _ in range(10)]
    for client in clients:
        client.socket.sendall(struct.pack(">ihhi", 4 * MIB, 0, 9, 1))
    time.sleep(0.3)

    assert psutil.Process(limited.pid).memory_info().rss - resident < 4 * MIB
    # 1.5 s, and a second for each MiB that arrived: not for what was announced.
    assert _is_well(limited)
    for client in clients:
        assert client.is_closed()
        client.socket.close()


def test_the_largest_incomplete_request_is_ended_not_the_one_that_came_last(limited):
    clients = [RawClient(limited.port) for _ in range(3)]
    for client in clients:  # together 12.2 MiB of 16 MiB
        client.socket.sendall(struct.pack(">ihhi", 4 * MIB, 0, 9, 1) + bytes(4 * MIB - 100))
    with RawClient(limited.port) as last:
        size = 4 * MIB - 100_000
        head = struct.pack(">ihhih", size, 0, 9, 7, -1)
        last.socket.sendall(head + bytes(size - 100))
        wait_until(
            lambda: (
                "incomplete requests of all connections exceed the limit" in limited.log.read_text()
            ),
            what=limited.log.read_text,
            timeout_s=30,
        )
        last.socket.sendall(bytes(100 - 10))  # zeros are a Produce of no topic with acks=0

        assert _versions(last).api_keys

    for client in clients:
        client.socket.close()


def _drip(client: RawClient, *, until: float) -> None:
    while time.monotonic() < until:
        client.socket.sendall(b"\0")
        time.sleep(0.05)


def test_a_request_that_arrives_a_byte_at_a_time_is_ended(limited):
    with RawClient(limited.port) as client:
        began = time.monotonic()
        client.socket.sendall(struct.pack(">i", 2000))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            _drip(client, until=began + 20)

        assert 1 < time.monotonic() - began < 19
    assert "request arrives too slowly" in limited.log.read_text()


def test_a_connection_that_asks_nothing_is_ended(limited):
    with RawClient(limited.port) as client:
        _versions(client)
        assert client.is_closed()

    assert "closed: idle" in limited.log.read_text()


def test_a_connection_that_never_sends_a_request_is_ended(limited):
    with RawClient(limited.port) as client:
        assert client.is_closed()

    assert "closed: no request" in limited.log.read_text()


def test_bytes_of_unfinished_requests_have_a_limit_for_all_together(limited):
    clients = [RawClient(limited.port) for _ in range(8)]
    ended = 0
    for client in clients:
        try:
            client.socket.sendall(struct.pack(">ihhi", 4 * MIB, 0, 9, 1) + bytes(3 * MIB))
        except (BrokenPipeError, ConnectionResetError):
            ended += 1

    wait_until(
        lambda: (
            "incomplete requests of all connections exceed the limit" in limited.log.read_text()
        ),
        what=limited.log.read_text,
        timeout_s=30,
    )
    assert _is_well(limited)
    for client in clients:
        client.socket.close()


def test_a_connection_too_many_is_closed_at_once(limited):
    clients = [RawClient(limited.port) for _ in range(20)]
    for client in clients:
        _versions(client)

    with RawClient(limited.port) as one_more:
        assert one_more.is_closed()
    _versions(clients[0])

    for client in clients:
        client.socket.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            assert _is_well(limited)
        except EOFError:
            time.sleep(0.05)
        else:
            return
    pytest.fail("connections that went away still count")


def test_a_client_that_never_reads_is_ended_and_costs_little_memory(limited):
    big = encode_reference([Record(0, 1, 0, None, random.Random(1).randbytes(900_000), ())])
    with RawClient(limited.port) as client:
        client.send_frame(_metadata_frame())
        client.receive_frame()
        start = _log_end(client)
        for _ in range(30):
            assert _ask_produce(client, _produce_frame(big)) == [0]
    resident = psutil.Process(limited.pid).memory_info().rss
    with RawClient(limited.port) as deaf:
        for _ in range(5):
            deaf.send_frame(_fetch_frame(start))
        deadline = time.monotonic() + 15
        while "client does not read its responses" not in limited.log.read_text():
            assert time.monotonic() < deadline
            assert psutil.Process(limited.pid).memory_info().rss - resident < 12 * MIB
            time.sleep(0.1)

    assert _is_well(limited)


def _fetch_frame(offset: int, **fields: Any) -> bytes:
    partition = build(
        nested(1, 11, "request", "FetchPartition"),
        partition=0,
        current_leader_epoch=-1,
        fetch_offset=offset,
        log_start_offset=-1,
        partition_max_bytes=2**31 - 1,
    )
    topic = build(nested(1, 11, "request", "FetchTopic"), topic="hostile", partitions=(partition,))
    request = build(
        message_class(1, 11, "request"),
        replica_id=-1,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=(topic,) * fields.get("repeat", 1),
        forgotten_topics_data=(),
        rack_id="",
        max_wait=timedelta(milliseconds=fields.get("max_wait_ms", 0)),
        min_bytes=fields.get("min_bytes", 0),
        max_bytes=2**31 - 1,
    )
    return request_frame(1, 11, request)


def test_requests_that_come_all_at_once_are_responded_in_order(limited):
    frame = _metadata_frame(1)
    one = struct.pack(">i", len(frame)) + frame
    count = 5000
    with RawClient(limited.port) as client:
        sent = b"".join(one[:8] + struct.pack(">i", n) + one[12:] for n in range(count))
        client.socket.setblocking(False)  # the broker may stop reading until we read
        found: list[int] = []
        buffer = b""
        deadline = time.monotonic() + 60
        while len(found) < count:
            assert time.monotonic() < deadline
            with contextlib.suppress(BlockingIOError):
                sent = sent[client.socket.send(sent[:65536]) :] if sent else sent
            try:
                buffer += client.socket.recv(1 << 20)
            except BlockingIOError:
                continue
            while len(buffer) >= 8:
                size = int.from_bytes(buffer[:4])
                if len(buffer) < 4 + size:
                    break
                found.append(int.from_bytes(buffer[4:8]))
                buffer = buffer[4 + size :]

    assert found == list(range(count))


def test_a_long_poll_of_a_client_that_went_away_holds_nothing(limited):
    with RawClient(limited.port) as client:
        client.send_frame(_metadata_frame())
        client.receive_frame()
        end = _log_end(client)
    for _ in range(40):  # twice as many as connections are allowed
        with RawClient(limited.port) as client:
            client.send_frame(_fetch_frame(end, max_wait_ms=2**31 - 1, min_bytes=2**31 - 1))
        time.sleep(0.01)

    assert _is_well(limited)


def test_a_fetch_of_one_partition_a_thousand_times_has_one_limit(limited):
    with RawClient(limited.port) as client:
        client.send_frame(_metadata_frame())
        client.receive_frame()
        client.send_frame(_fetch_frame(0, repeat=500))

        frame = client.receive_frame()

    assert len(frame) < 56 * MIB


def test_auto_creation_ends_somewhere(limited):
    with RawClient(limited.port) as client:
        codes = set()
        for number in range(60):
            topic = build(nested(3, 9, "request", "MetadataRequestTopic"), name=f"many-{number}")
            response = client.ask(
                3,
                9,
                topics=(topic,),
                allow_auto_topic_creation=True,
                include_cluster_authorized_operations=False,
                include_topic_authorized_operations=False,
            )
            codes.add(response.topics[0].error_code)

    assert codes == {ErrorCode.none, ErrorCode.policy_violation}
    assert _is_well(limited)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../up", "a b", "x" * 250, "\u00fc", "a\0b", "%2e"]
)
def test_a_name_that_no_topic_may_have_is_refused_and_makes_no_file(limited, name: str):
    before = sorted(path.name for path in limited.log_dir.iterdir())
    with RawClient(limited.port) as client:
        topic = build(nested(3, 9, "request", "MetadataRequestTopic"), name=name)
        response = client.ask(
            3,
            9,
            topics=(topic,),
            allow_auto_topic_creation=True,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )

    assert response.topics[0].error_code == ErrorCode.invalid_topic_exception
    assert sorted(path.name for path in limited.log_dir.iterdir()) == before


def test_a_broker_that_is_asked_to_stop_does_so_with_clients_connected(tmp_path: Path):
    broker = EmbeddedBroker(tmp_path / "stopping")
    with broker, RawClient(broker.port) as idle, RawClient(broker.port) as polling:
        _versions(idle)
        polling.send_frame(_metadata_frame())
        polling.receive_frame()
        polling.send_frame(_fetch_frame(0, max_wait_ms=60_000, min_bytes=1))
        began = time.monotonic()

        assert broker.stop() == 0

        assert time.monotonic() - began < 19
        assert idle.is_closed()
