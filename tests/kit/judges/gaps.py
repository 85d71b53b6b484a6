"""Topics with offset gaps as they arise in practice, and the comparison of their replicas.

Transactions come from librdkafka, compaction from Kafka's log cleaner, trimmed heads from
DeleteRecords. Apache Kafka's console consumer (read_committed) must print the same for source and
replica, offset by offset.
"""

from __future__ import annotations

import contextlib
import random
import re
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
)

from kit.judges.clients import Message, Row, rows_by_librdkafka
from kit.judges.partition_client import PartitionClient
from kit.servers.kafka import ApacheKafka, Listener
from kit.servers.security import PASSWORD, USER
from logmirror.wire.padding import padding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kit.servers.apache import ApacheTools

COMPACTED: Final = {
    "cleanup.policy": "compact,delete",  # DeleteRecords is refused without `delete`
    "segment.ms": 100,
    "min.cleanable.dirty.ratio": 0,  # one marker is less than a hundredth
}
"""Of a topic that the cleaner goes through whenever a segment is closed."""

_TIMEOUT_S: Final = 60
_START_MS: Final = 1_700_000_000_000
_PADDING_RECORDS: Final = 500_000
_CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
_SHOWN: Final = ("timestamp", "partition", "offset", "headers", "key", "value")
_LINE: Final = re.compile(r"\w+:\d+\tPartition:(\d+)\tOffset:(\d+)\t")


# -- content -------------------------------------------------------------------------------------


def plain_messages(
    count: int, *, seed: int, keys: int = 10**9, start_ms: int = _START_MS
) -> list[Message]:
    """Messages that a console can print, with `keys` different keys, some with headers."""
    chooser = random.Random(seed)
    return [
        Message(
            b"key-%d" % chooser.randrange(keys),
            b"%d/%d %b" % (seed, number, b"v" * chooser.choice((0, 10, 200))),
            ((b"trace", b"%d" % number), (b"none", None)) if chooser.random() < 0.3 else (),
            start_ms + number * 10 - chooser.choice((0, 0, 5000)),
        )
        for number in range(count)
    ]


class Writer:
    """A librdkafka producer for one partition; its writes are in the log when a method returns.

    There must be no other writer of the partition.

    Args:
        bootstrap: Bootstrap servers.
        topic: An existing topic.
        partition: The partition of all records.
        transactional_id: For transactions; without one the producer is only idempotent.
        config: More properties.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        partition: int = 0,
        *,
        transactional_id: str = "",
        config: Mapping[str, object] | None = None,
    ) -> None:
        self._topic, self._partition = topic, partition
        properties: dict[str, object] = {"bootstrap.servers": bootstrap, "linger.ms": 1}
        if transactional_id:
            properties["transactional.id"] = transactional_id
        else:
            properties["enable.idempotence"] = True
        self._producer = Producer({**properties, **(config or {})})
        self._admin = AdminClient({"bootstrap.servers": bootstrap})
        if transactional_id:
            self._producer.init_transactions(_TIMEOUT_S)

    def send(self, messages: Iterable[Message]) -> None:
        """Produce messages; few messages make one batch."""
        refused: list[object] = []
        for key, value, headers, timestamp_ms in messages:
            self._producer.produce(
                self._topic,
                key=key,
                value=value,
                headers=[(name.decode(), content) for name, content in headers],
                timestamp=timestamp_ms,
                partition=self._partition,
                on_delivery=lambda error, _: refused.append(error) if error else None,
            )
        left = self._producer.flush(_TIMEOUT_S)
        assert (left, refused) == (0, [])

    def begin(self) -> None:
        """Begin a transaction."""
        self._producer.begin_transaction()

    def end(self, *, commit: bool) -> None:
        """Commit or abort it; its marker is written when this returns.

        The coordinator responds before that: another producer's records might precede it.
        """
        before = self._log_end()
        if commit:
            self._producer.commit_transaction(_TIMEOUT_S)
        else:
            self._producer.abort_transaction(_TIMEOUT_S)
        deadline = time.monotonic() + _TIMEOUT_S
        while self._log_end() == before:
            assert time.monotonic() < deadline, "the marker does not appear"

    def _log_end(self) -> int:
        where = TopicPartition(self._topic, self._partition)
        (asked,) = self._admin.list_offsets({where: OffsetSpec.latest()}).values()
        return int(asked.result(_TIMEOUT_S).offset)

    def transaction(self, messages: Sequence[Message], *, commit: bool) -> None:
        """One transaction from beginning to end, in some batches."""
        self.begin()
        for start in range(0, len(messages), 20):
            self.send(messages[start : start + 20])
        self.end(commit=commit)


def write_transactions(  # noqa: PLR0913  # each with a default
    bootstrap: str,
    topic: str,
    partition: int = 0,
    *,
    seed: int = 0,
    keys: int = 10**9,
    start_ms: int = _START_MS,
) -> None:
    """Write every kind of transaction: committed, aborted, interleaved, one after the other.

    Ends with a marker.
    """
    name = f"{topic}-{partition}-{seed}"
    config = {"compression.type": "lz4"}
    one = Writer(bootstrap, topic, partition, transactional_id=f"{name}-one", config=config)
    other = Writer(bootstrap, topic, partition, transactional_id=f"{name}-other")
    plain = Writer(bootstrap, topic, partition)
    messages = plain_messages(400, seed=seed, keys=keys, start_ms=start_ms)
    one.transaction(messages[:1], commit=True)
    one.transaction(messages[1:60], commit=True)
    other.transaction(messages[60:130], commit=False)
    one.transaction(messages[130:131], commit=False)
    plain.send(messages[131:150])
    for number, commits in enumerate(((True, True), (True, False), (False, True), (False, False))):
        chunk = messages[150 + 30 * number : 180 + 30 * number]
        one.begin()
        other.begin()
        for start in range(0, len(chunk), 10):
            one.send(chunk[start : start + 4])
            other.send(chunk[start + 4 : start + 8])
            plain.send(chunk[start + 8 : start + 10])
        one.end(commit=commits[0])
        other.end(commit=commits[1])
    plain.send(messages[300:350])
    one.transaction(messages[350:400], commit=True)


@contextlib.contextmanager
def writing_transactions(
    bootstrap: str, topic: str, *, partitions: int, seed: int
) -> Iterator[None]:
    """Write current transactions to all partitions during the block, half of them aborted.

    About 60 offset gaps per second, so that a mirror can follow on any machine.
    """
    writers = [
        Writer(bootstrap, topic, number, transactional_id=f"{topic}-{number}-{which}")
        for number in range(partitions)
        for which in range(2)
    ]
    chooser = random.Random(seed)
    stop = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        number = 0
        while not stop.wait(0.04):
            number += 1
            now_ms = time.time_ns() // 1_000_000
            messages = plain_messages(chooser.choice((1, 2, 7)), seed=number, start_ms=now_ms)
            try:
                writer = writers[number % len(writers)]
                writer.transaction(messages, commit=chooser.random() < 0.5)
            except Exception as error:  # noqa: BLE001  # whatever it is, the test must hear of it
                failures.append(error)
                return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert failures == []


def write_idempotently(bootstrap: str, topic: str, partition: int = 0) -> None:
    """One idempotent producer after the other, with each codec."""
    for number, codec in enumerate(_CODECS):
        config = {"compression.type": codec, "batch.num.messages": 30}
        Writer(bootstrap, topic, partition, config=config).send(plain_messages(100, seed=number))


def write_duplicated_keys(
    bootstrap: str, topic: str, partition: int = 0, *, seed: int = 0, codec: str = "none"
) -> None:
    """Write input for the cleaner: few keys, tombstones, batches that compaction empties."""
    chooser = random.Random(seed)
    config = {"batch.num.messages": 7, "compression.type": codec}
    writer = Writer(bootstrap, topic, partition, config=config)
    for _ in range(3):
        messages = [
            message._replace(value=None) if chooser.random() < 0.1 else message
            for message in plain_messages(60, seed=chooser.randrange(1000), keys=25)
        ]
        messages += plain_messages(5, seed=chooser.randrange(1000))  # some keys that stay
        writer.send(messages)
    writer.send([Message(b"key-7", None, (), _START_MS), Message(b"gone", None, (), _START_MS)])


def take_head(bootstrap: str, topic: str, offsets: int) -> None:
    """Move the log start of partition 0 to a large offset, as after years of retention."""
    batch = padding(_PADDING_RECORDS, timestamp_ms=_START_MS)
    with PartitionClient(bootstrap, topic) as client:
        left = offsets
        while left:
            size = min(left, _PADDING_RECORDS)
            response = client.produce(
                batch if size == _PADDING_RECORDS else padding(size, timestamp_ms=_START_MS)
            )
            assert response.error == 0
            left -= size
        error, _ = client.delete_records(client.log_end)
        assert error == 0


def trim(bootstrap: str, topic: str, partition: int, offset: int) -> None:
    """Delete the records below an offset."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (asked,) = admin.delete_records([TopicPartition(topic, partition, offset)]).values()
    asked.result(_TIMEOUT_S)


class StoredBatch(NamedTuple):
    """The header fields of a batch in a log."""

    base_offset: int
    last_offset: int
    attributes: int
    producer_id: int
    count: int

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & 0x20)


def stored_batches(bootstrap: str, topic: str) -> list[StoredBatch]:
    """Return the batches of partition 0, from the bytes that the leader serves to a consumer."""
    found: list[StoredBatch] = []
    start, end = log_bounds(bootstrap, topic, 0)
    with PartitionClient(bootstrap, topic) as client:
        while start < end:
            data, at = bytes(client.fetch(start).records or b""), 0
            while at + 61 <= len(data):
                base, size = struct.unpack_from(">qi", data, at)
                attributes, delta = struct.unpack_from(">hi", data, at + 21)
                (producer_id,) = struct.unpack_from(">q", data, at + 43)
                (count,) = struct.unpack_from(">i", data, at + 57)
                if at + 12 + size <= len(data) and base + delta >= start:
                    found.append(StoredBatch(base, base + delta, attributes, producer_id, count))
                    start = base + delta + 1
                at += 12 + size
    return found


# -- a destination that grants no more than it must ------------------------------------------------

CREDENTIALS: Final = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "PLAIN",
    "sasl.username": USER,
    "sasl.password": PASSWORD,
}
"""Of the mirror's user at `secured_kafka`."""


def secured_kafka(version: str, folder: Path) -> ApacheKafka:
    """Start a broker with an authorizer. The mirror's user connects to the listener SASL.

    Clients of the plain listener have all permissions.
    """
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    config = {
        "sasl.enabled.mechanisms": "PLAIN",
        "plain.sasl.jaas.config": f'{module} required user_{USER}="{PASSWORD}";',
    }
    return ApacheKafka(
        version,
        folder,
        config={
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        },
        listeners=[Listener(name="SASL", protocol="SASL_PLAINTEXT", config=config)],
    )


def allow_copies(broker: ApacheKafka, topics: Iterable[str]) -> None:
    """Grant the mirror's user the required permissions of docs/mirror-a-cluster.md only."""
    operations = ("READ", "WRITE", "DESCRIBE_CONFIGS", "CREATE", "ALTER", "DELETE")
    literal, prefixed = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
    wanted = [
        (ResourceType.TOPIC, topic, literal, AclOperation[name])
        for topic in topics
        for name in operations
    ]
    wanted.append((ResourceType.TRANSACTIONAL_ID, "logmirror-", prefixed, AclOperation.WRITE))
    bindings = [
        AclBinding(kind, name, pattern, f"User:{USER}", "*", operation, AclPermissionType.ALLOW)
        for kind, name, pattern, operation in wanted
    ]
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_acls(bindings).values():
        future.result(_TIMEOUT_S)


@contextlib.contextmanager
def allowed_on_cluster(broker: ApacheKafka, operation: str) -> Iterator[None]:
    """Grant the mirror's user an operation on the cluster during the block."""
    where = (ResourceType.BROKER, "kafka-cluster", ResourcePatternType.LITERAL)
    who = (f"User:{USER}", "*", AclOperation[operation], AclPermissionType.ALLOW)
    admin, binding = AdminClient({"bootstrap.servers": broker.bootstrap}), AclBinding(*where, *who)
    admin.create_acls([binding])[binding].result(_TIMEOUT_S)
    try:
        yield
    finally:
        given = AclBindingFilter(*where, *who)
        admin.delete_acls([given])[given].result(_TIMEOUT_S)


# -- verdict -------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What other programs read from a topic."""

    printed: dict[int, list[str]]
    """By partition the lines of Apache Kafka's console consumer, in the order of offsets; of the
    first partition alone where a consumer cannot have a group."""

    rows: dict[int, list[Row]]
    """By partition what librdkafka reads (read_committed)."""

    bounds: dict[int, tuple[int, int]]
    """By partition where its log begins, and its last stable offset."""


def log_bounds(bootstrap: str, topic: str, partition: int) -> tuple[int, int]:
    """Return the log start offset and the last stable offset, by librdkafka."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    where = TopicPartition(topic, partition)
    found = []
    for spec in (OffsetSpec.earliest(), OffsetSpec.latest()):
        asked = admin.list_offsets(
            {where: spec}, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=20
        )
        found.append(int(asked[where].result(20).offset))
    return found[0], found[1]


def look(
    tools: ApacheTools, bootstrap: str, topic: str, partitions: int, *, has_groups: bool = True
) -> Seen:
    """Return the console consumer's output (read_committed) of a topic, and the topic's ends.

    Without a group it reads partition 0 only.
    """
    bounds = {number: log_bounds(bootstrap, topic, number) for number in range(partitions)}
    rows = {
        number: list(rows_by_librdkafka(bootstrap, topic, partition=number, start=start))
        for number, (start, _) in bounds.items()
    }
    wanted = rows if has_groups else {0: rows[0]}
    # It ends by itself only after a number of records.
    count = sum(map(len, wanted.values()))
    assert count, "a topic in which nothing is to be seen proves nothing"
    which = ("--from-beginning",) if has_groups else ("--partition", "0", "--offset", "earliest")
    option = "--property" if tools.major < 4 else "--formatter-property"  # KIP-1147
    result = tools.run(
        "kafka-console-consumer",
        *("--bootstrap-server", bootstrap, "--topic", topic, *which),
        *("--isolation-level", "read_committed", "--max-messages", str(count)),
        *(word for what in _SHOWN for word in (option, f"print.{what}=true")),
        timeout_s=120,
    )
    printed: dict[int, list[tuple[int, str]]] = {number: [] for number in wanted}
    for line in result.stdout.splitlines():
        match = _LINE.match(line)
        assert match, (line, result.stderr[-2000:])
        printed[int(match[1])].append((int(match[2]), line))
    lines = {number: [line for _, line in sorted(found)] for number, found in printed.items()}
    assert {n: len(found) for n, found in lines.items()} == {n: len(r) for n, r in wanted.items()}
    return Seen(lines, rows, bounds)


def look_at_all(looks: Iterable[Callable[[], Seen]]) -> list[Seen]:
    """Return `look` of several topics, concurrently: a console consumer mostly waits."""
    with ThreadPoolExecutor(4) as pool:
        return [job.result() for job in [pool.submit(one) for one in looks]]
