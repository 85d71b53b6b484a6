"""Standard clients that produce to a broker and read from it without logmirror's code.

Three independent readers return `Row`s: librdkafka through confluent-kafka, aiokafka in pure
Python, and kcat, a C program (its headers are not exact, so its rows have none).
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import aiokafka
from confluent_kafka import (
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)

from kit.servers.machine import program

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

CREATE_TIME: Final = 0
LOG_APPEND_TIME: Final = 1

_TIMEOUT_S: Final = 60
_NO_HEADERS: Final[tuple[tuple[bytes, bytes | None], ...]] = ()


class Row(NamedTuple):
    """One record as a reader returns it: its offset and every field that must not change."""

    offset: int
    timestamp_ms: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[bytes, bytes | None], ...] = _NO_HEADERS


class Message(NamedTuple):
    """One record to produce; without a timestamp it gets the producer's clock."""

    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[bytes, bytes | None], ...] = _NO_HEADERS
    timestamp_ms: int = 0


def odd_messages(count: int, *, seed: int, start_ms: int = 1_700_000_000_000) -> list[Message]:
    """Return messages that are hard to copy: nulls, empty values, repeated headers, any bytes.

    Timestamps step back now and then. The same seed gives the same messages.
    """
    chooser = random.Random(seed)
    keys = (None, b"", b"key", "Schl\u00fcssel".encode())

    def some_bytes() -> bytes | None:
        size = chooser.choice((-1, 0, 1, 7, 100, 1000))
        return None if size < 0 else chooser.randbytes(size)

    def headers() -> tuple[tuple[bytes, bytes | None], ...]:
        names = (b"", b"trace", b"trace", "\u03b1\u03b2".encode())
        return tuple(
            (chooser.choice(names), some_bytes()) for _ in range(chooser.choice((0, 0, 1, 4)))
        )

    return [
        Message(
            chooser.choice((*keys, some_bytes())),
            some_bytes(),
            headers(),
            start_ms + number * 10 - chooser.choice((0, 0, 5000)),
        )
        for number in range(count)
    ]


def produce(
    bootstrap: str,
    topic: str,
    messages: Iterable[Message],
    *,
    partition: int = 0,
    config: Mapping[str, object] | None = None,
) -> list[int]:
    """Produce messages with librdkafka, wait for every acknowledgement, return their offsets.

    Args:
        bootstrap: Bootstrap servers.
        topic: An existing topic.
        messages: The messages, in the order of their offsets.
        partition: The partition of all messages.
        config: Producer properties over the defaults (idempotent, `acks=all`).
    """
    producer = Producer(
        {"bootstrap.servers": bootstrap, "enable.idempotence": True, **(config or {})}
    )
    return _send_all(producer, topic, partition, messages)


def produce_transactions(
    bootstrap: str,
    topic: str,
    transactions: Iterable[tuple[Sequence[Message], bool]],
    *,
    partition: int = 0,
    transactional_id: str,
) -> None:
    """Write transactions one after the other: the messages of each, then commit (True) or abort.

    Returns when the last marker is in the log. EndTxn responds before that, when the coordinator
    has logged the decision; InitProducerId for the same transactional ID responds after it.
    """
    settings: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "transactional.id": transactional_id,
    }
    producer = Producer(settings)
    producer.init_transactions(_TIMEOUT_S)
    for messages, commit in transactions:
        producer.begin_transaction()
        _send_all(producer, topic, partition, messages)
        if commit:
            producer.commit_transaction(_TIMEOUT_S)
        else:
            producer.abort_transaction(_TIMEOUT_S)
    Producer(settings).init_transactions(_TIMEOUT_S)


def _send_all(
    producer: Producer, topic: str, partition: int, messages: Iterable[Message]
) -> list[int]:
    offsets: list[int] = []
    failures: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Any) -> None:
        if error is not None:
            failures.append(error)
        else:
            offsets.append(message.offset())

    for key, value, headers, timestamp_ms in messages:
        arguments: dict[str, Any] = {"partition": partition, "timestamp": timestamp_ms}
        arguments["on_delivery"] = delivered
        named: Any = [(name.decode(), content) for name, content in headers]
        while True:
            try:
                producer.produce(topic, value=value, key=key, headers=named, **arguments)
            except BufferError:
                producer.poll(0.1)
            else:
                break
        producer.poll(0)
    left = producer.flush(_TIMEOUT_S)
    if left or failures:
        message = f"{left} messages were not sent, refused: {failures[:3]}"
        raise RuntimeError(message)
    return offsets


def _wait_for_topic(consumer: Consumer, topic: str) -> None:
    """A consumer that is assigned a topic that does not exist waits for it without an end."""
    for _ in range(5):
        error = consumer.list_topics(topic, _TIMEOUT_S).topics[topic].error
        if error is None:
            return
        time.sleep(0.2)
    raise KafkaException(error)


def rows_by_librdkafka(
    bootstrap: str,
    topic: str,
    *,
    partition: int = 0,
    start: int = 0,
    config: Mapping[str, object] | None = None,
) -> Iterator[Row]:
    """Yield what librdkafka reads from `start` to the end of the partition (read_committed).

    Raises:
        KafkaException: Among others: the topic does not exist, after a second.
    """
    statistics: list[str] = []
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "check.crcs": True,
            "statistics.interval.ms": 10_000,
            "stats_cb": statistics.append,
            **(config or {}),
        }
    )
    try:
        _wait_for_topic(consumer, topic)
        consumer.assign([TopicPartition(topic, partition, start)])
        while True:
            message = consumer.poll(_TIMEOUT_S)
            if message is None:
                raise TimeoutError(f"librdkafka was given nothing; its state: {statistics[-1:]}")
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # its public name
                    return
                raise KafkaException(error)
            kind, timestamp_ms = message.timestamp()
            yield Row(
                message.offset(),
                timestamp_ms,
                LOG_APPEND_TIME if kind == TIMESTAMP_LOG_APPEND_TIME else CREATE_TIME,
                message.key(),
                message.value(),
                tuple((name.encode(), value) for name, value in message.headers() or ()),
            )
    finally:
        consumer.close()


def rows_by_aiokafka(
    bootstrap: str, topic: str, *, partition: int = 0, start: int = 0
) -> list[Row]:
    """Return what aiokafka reads from `start` to the end of the partition (read_committed)."""
    return asyncio.run(_rows_by_aiokafka(bootstrap, topic, partition, start))


async def _rows_by_aiokafka(bootstrap: str, topic: str, partition: int, start: int) -> list[Row]:
    where = aiokafka.TopicPartition(topic, partition)
    consumer = aiokafka.AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        enable_auto_commit=False,
        auto_offset_reset="none",
        isolation_level="read_committed",
    )
    await consumer.start()
    try:
        consumer.assign([where])
        consumer.seek(where, start)
        end = (await consumer.end_offsets([where]))[where]
        rows: list[Row] = []
        deadline = time.monotonic() + _TIMEOUT_S
        while await consumer.position(where) < end:
            if time.monotonic() > deadline:
                message = f"aiokafka is at {await consumer.position(where)} of {end}"
                raise TimeoutError(message)
            for record in (await consumer.getmany(where, timeout_ms=200)).get(where, []):
                headers = tuple((name.encode(), value) for name, value in record.headers)
                rows.append(
                    Row(
                        record.offset,
                        record.timestamp,
                        record.timestamp_type,
                        record.key,
                        record.value,
                        headers,
                    )
                )
        return rows
    finally:
        await consumer.stop()


def kcat(*arguments: str, stdin: bytes = b"", timeout_s: float = 60) -> bytes:
    """Run kcat and return its output; fails with its error message."""
    result = subprocess.run(
        [program("kcat"), *arguments],
        input=stdin,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
    if result.returncode:
        complaint = result.stderr.decode(errors="replace")
        message = f"kcat {' '.join(arguments)} exited with {result.returncode}:\n{complaint}"
        raise RuntimeError(message)
    return result.stdout


def rows_by_kcat(
    bootstrap: str, topic: str, *, partition: int = 0, start: int | str = "beginning"
) -> list[Row]:
    """Return what kcat reads from `start` to the end of the partition, without headers."""
    where = ("-t", topic, "-p", str(partition), "-o", str(start))
    # Numbers up to a comma each, sizes among them (-1 is null), then the bytes of that size.
    layout = ("-f", "%o,%T,%K,%S,%k%s")
    committed = ("-X", "isolation.level=read_committed", "-X", "check.crcs=true")
    data = kcat("-C", "-q", "-e", "-b", bootstrap, *where, *committed, *layout)
    rows: list[Row] = []
    position = 0
    while position < len(data):
        numbers: list[int] = []
        for _ in range(4):
            comma = data.index(b",", position)
            numbers.append(int(data[position:comma]))
            position = comma + 1
        offset, timestamp_ms, key_size, value_size = numbers
        key, position = _take(data, position, key_size)
        value, position = _take(data, position, value_size)
        rows.append(Row(offset, timestamp_ms, CREATE_TIME, key, value))
    return rows


def _take(data: bytes, position: int, size: int) -> tuple[bytes | None, int]:
    """Return `size` bytes, or nothing for a size of -1, and where they end."""
    if size < 0:
        return None, position
    return data[position : position + size], position + size
