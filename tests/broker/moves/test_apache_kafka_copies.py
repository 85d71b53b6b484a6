"""Goal: partitions are copied while they are written and read, as in Apache Kafka.

Method: as in `test_apache_kafka`, which checks the page, too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from broker.moves.both_brokers import Side, on_both
from broker.moves.test_moves import contents, lookups
from broker.moves.test_requests import BATCH, fill
from kit.judges import restricted_requests as requests
from kit.judges.clients import rows_by_librdkafka
from kit.judges.partition_client import EARLIEST, LATEST, data_batch
from kit.judges.raw_client import RawClient
from kit.runs.cleaning import set_config
from kit.runs.commands import wait_until
from logmirror.broker.apis import Api

if TYPE_CHECKING:
    from pathlib import Path

    from broker.moves.both_brokers import Seen
    from kit.judges.partition_client import PartitionClient

pytestmark = [
    pytest.mark.gate("brokers of Apache Kafka with several log directories"),
    pytest.mark.jvm,
    pytest.mark.xdist_group("log-dirs-of-apache-kafka"),
]


@pytest.mark.move("E32", "E33", "E36")
@on_both
def test_e32_a_log_start_above_0_is_kept(dirs: Side, topic: str) -> Seen:
    for name, start in (("first", 3), ("inside", 150), ("all", 300)):
        own = f"{topic}-{name}"
        dirs.create(own)
        fill(dirs, own, 3)
        with dirs.partition(own) as partition:
            yield f"{name}: deleted", partition.delete_records(start)
            for target in (dirs.b, dirs.a):
                dirs.move(own, target)
                label = f"{name}, {dirs.name(target)}"
                yield f"{label}: start", partition.list_offset(EARLIEST)
                yield f"{label}: end", partition.list_offset(LATEST)
                yield f"{label}: records", [offset for offset, _ in contents(partition)]
                yield f"{label}: below", partition.fetch(start - 1).error_code
            yield f"{name}: next", partition.produce(BATCH)


@pytest.mark.move("E34", "E35", "E37")
@on_both
def test_e35_records_are_deleted_during_a_move(dirs: Side, topic: str) -> Seen:
    with dirs.held(topic), dirs.partition(topic) as partition:
        code, _ = partition.delete_records(2_450, timeout_ms=300)
        yield "code", code
        yield "start", partition.list_offset(EARLIEST)
        yield "described", dirs.shown(topic)
    dirs.wait_in(topic, dirs.b)
    with dirs.partition(topic) as partition:
        yield "start after the move", partition.list_offset(EARLIEST)
        yield "records", [offset for offset, _ in contents(partition)]
        yield "below", partition.fetch(2_449).error_code


@pytest.mark.move("E31", "E56", "E57")
@on_both
def test_e56_lookups_find_the_same_before_and_after_a_move(dirs: Side, topic: str) -> Seen:
    dirs.create(topic)
    fill(dirs, topic, 20)
    with dirs.partition(topic) as partition:
        later = data_batch(7, timestamp_ms=1_700_000_009_000)
        yield "later", partition.produce(later)
        yield "earlier", partition.produce(data_batch(5, timestamp_ms=1_600_000_000_000))

        def found() -> list[object]:
            epochs = [partition.end_of_epoch(epoch) for epoch in (0, 1, 5)]
            times = [1_600_000_000_003, 1_700_000_009_006, 1_700_000_009_007]
            more = [partition.list_offset(at) for at in times]
            return [*lookups(partition), *epochs, *more, contents(partition)]

        before = found()
        yield "before", before
        for target in (dirs.b, dirs.c, dirs.a):
            dirs.move(topic, target)
            yield f"equal in {dirs.name(target)}", found() == before


@pytest.mark.move("E51", "E54", "E58")
@on_both
def test_e51_clients_without_retries_see_no_error(dirs: Side, topic: str) -> Seen:
    dirs.create(topic)
    fill(dirs, topic, 60)
    errors: list[object] = []
    sent: list[bytes] = []
    rows: list[tuple[int, bytes]] = []
    producer = Producer({"bootstrap.servers": dirs.bootstrap, "acks": "all", "retries": 0})
    settings = {"group.id": topic, "enable.auto.commit": False, "auto.offset.reset": "error"}
    consumer = Consumer({"bootstrap.servers": dirs.bootstrap, **settings})
    consumer.assign([TopicPartition(topic, 0, 6_000)])

    def step() -> None:
        for _ in range(10):
            sent.append(b"%d" % len(sent))
            producer.produce(topic, sent[-1], on_delivery=lambda e, _: e and errors.append(e))
        producer.poll(0.005)
        for message in consumer.consume(500, 0.005):
            if message.error() is None:
                rows.append((message.offset(), message.value()))
            else:
                errors.append(message.error())

    marks: list[int] = []
    with dirs.client() as client, dirs.partition(topic) as partition:
        for target in (dirs.b, dirs.a, dirs.b):
            assert client.move_one(topic, target) == 0

            def is_there(target: Path = target) -> bool:
                step()
                marks.append(partition.fetch(6_000, max_bytes=1).high_watermark)
                return [*client.where(topic)] == [str(target)]

            wait_until(is_there, what=lambda: f"{client.where(topic)}", timeout_s=60)
        yield "not delivered", producer.flush(60)

        def is_read() -> bool:
            step()
            return len(rows) > count

        count = len(sent)
        wait_until(is_read, what=lambda: f"{len(rows)} of {count} records", timeout_s=60)
        producer.flush(60)
    consumer.close()
    yield "errors", [str(one) for one in errors]
    yield "read in order", rows == [(6_000 + n, sent[n]) for n in range(len(rows))]
    yield "the high watermark goes back", marks != sorted(marks)
    stored = [(row.offset, row.value) for row in rows_by_librdkafka(dirs.bootstrap, topic)][6_000:]
    yield "each once", stored == [(6_000 + n, value) for n, value in enumerate(sent)]


@pytest.mark.move("E52", "E53")
@on_both
def test_e53_a_transaction_and_sequences_survive_the_swap(dirs: Side, topic: str) -> Seen:
    dirs.create(topic)
    fill(dirs, topic, 30)
    producers = [
        Producer({"bootstrap.servers": dirs.bootstrap, "transactional.id": f"{topic}-{name}"})
        for name in ("committed", "aborted")
    ]
    for producer in producers:
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(topic, b"before")
        producer.flush(30)

    def batch(sequence: int, epoch: int = 0) -> bytes:
        return data_batch(2, producer_id=10**6, epoch=epoch, sequence=sequence)

    with dirs.partition(topic) as partition:
        yield "sequence 0", partition.produce(batch(0))
        yield "last stable offset", partition.list_offset(LATEST, isolation=1)
        dirs.move(topic, dirs.b)
        yield "the same after the move", partition.list_offset(LATEST, isolation=1)
        yield "a duplicate", partition.produce(batch(0))
        yield "a gap", partition.produce(batch(4))
        yield "the next sequence", partition.produce(batch(2))
        yield "a later epoch", partition.produce(batch(0, 1))
        yield "an older epoch", partition.produce(batch(4, 0))
        for producer in producers:
            producer.produce(topic, b"after")
            producer.flush(30)  # an abort drops what was not sent
        producers[0].commit_transaction(30)
        producers[1].abort_transaction(30)
        for target in (dirs.b, dirs.a):
            dirs.move(topic, target)
            place = dirs.name(target)
            rows = rows_by_librdkafka(dirs.bootstrap, topic, start=3_000)
            yield f"read in {place}", [(row.offset, row.value) for row in rows]
            aborted = partition.fetch(3_000).aborted_transactions
            yield f"aborted in {place}", [one.first_offset for one in aborted]
            known = sorted(one[1:2] + one[4:] for one in partition.producers().values())
            yield f"producers in {place}", known


@pytest.mark.move("E54", "E59")
@on_both
def test_e54_a_long_poll_over_the_swap_returns_the_next_records(dirs: Side, topic: str) -> Seen:
    with dirs.held(topic) as client, dirs.partition(topic) as partition:
        yield "the last records", partition.produce(BATCH)
        with ThreadPoolExecutor(1) as pool:
            polled = pool.submit(partition.fetch, 6_100, max_wait_ms=15_000)
            dirs.limit(None)
            dirs.wait_in(topic, dirs.b)
            with dirs.partition(topic) as other:
                yield "after the move", other.produce(BATCH)
            found = polled.result(20)
        yield "code", found.error_code
        yield "records", len(found.records)
        yield "described", dirs.shown(topic)
        yield "lag", client.where(topic)[str(dirs.b)].lag


@pytest.mark.move("E55")
@on_both
def test_e55_a_fetch_session_continues_over_the_swap(dirs: Side, topic: str) -> Seen:
    codes: set[int] = set()
    known: set[int] = set()

    def fetch(offset: int) -> int:
        """Fetch in the session, if there is one; returns the number of bytes."""
        epoch = epochs[0] if session[0] else 0
        fields = requests.fetch(topic) | {"session_id": session[0], "session_epoch": epoch}
        partition = requests.part(
            Api.FETCH,
            12,
            "FetchPartition",
            partition=0,
            current_leader_epoch=-1,
            fetch_offset=offset,
            last_fetched_epoch=-1,
            log_start_offset=-1,
            partition_max_bytes=1_000_000,
        )
        topics = (requests.part(Api.FETCH, 12, "FetchTopic", topic=topic, partitions=(partition,)),)
        response = client.ask(Api.FETCH, 12, **fields | {"topics": topics, "max_bytes": 1_000_000})
        parts = [part for one in response.responses for part in one.partitions]
        codes.update([int(response.error_code), *(int(part.error_code) for part in parts)])
        session[0], epochs[0] = response.session_id, epoch + 1
        known.add(response.session_id)
        return sum(len(part.records or b"") for part in parts)

    session, epochs = [0], [0]
    with dirs.held(topic), RawClient(dirs.port) as client, dirs.partition(topic) as partition:
        yield "first", fetch(0) > 0
        yield "nothing new", fetch(6_000)
        dirs.limit(None)

        def is_there() -> bool:
            assert fetch(6_000) == 0
            return dirs.shown(topic) == {"b": False}

        wait_until(is_there, what=lambda: f"{dirs.shown(topic)}", timeout_s=60)
        partition.produce(BATCH)
        yield "new records", fetch(6_000)
    yield "codes", codes
    yield "has a session", 0 not in known
    yield "sessions", len(known)


@pytest.mark.move("E34", "E66", "E88")
@on_both
def test_e34_retention_during_a_move(dirs: Side, topic: str) -> Seen:
    """A topic that does not move shows that the retention of both has been checked."""
    large = data_batch(20_000)
    still = f"{topic}-still"
    dirs.create(topic)
    dirs.create(still)
    dirs.limit(1)
    with dirs.partition(topic) as moving, dirs.partition(still) as other, dirs.client() as client:
        for _ in range(13):
            assert moving.produce(large).error == other.produce(large).error == 0
        assert client.move_one(topic, dirs.b) == 0

        def start(partition: PartitionClient) -> int:
            return partition.list_offset(EARLIEST)[2]

        for keep in (3_200_000, 2_200_000, 1_200_000):  # the second pass visits both
            before = start(other)
            for name in (topic, still):
                set_config(dirs.bootstrap, name, "retention.bytes", str(keep))
            wait_until(lambda old=before: start(other) > old, what=lambda: "retention")
        yield "records are deleted", start(moving) > 0
        yield "described", dirs.shown(topic)
        dirs.limit(None)
        dirs.wait_in(topic, dirs.b)
        wait_until(lambda: start(moving) >= start(other), what=lambda: "retention after the move")


@pytest.mark.move("E7", "E30", "E46")
@on_both
def test_e46_a_damaged_batch_in_the_source(dirs: Side, topic: str) -> Seen:
    dirs.create(topic)
    fill(dirs, topic)
    [path, *_] = sorted(dirs.folder(topic, dirs.a).glob(f"{0:020d}*[gs]"))
    sound = path.read_bytes()[len(BATCH) + 200]

    def write(byte: int) -> None:
        with path.open("r+b") as file:
            file.seek(len(BATCH) + 200)
            file.write(bytes([byte]))

    write(sound ^ 1)
    with dirs.client() as client:
        yield "code", client.move_one(topic, dirs.b)
        words = "failed" if dirs.is_ours else "Found invalid messages"
        wait_until(lambda: dirs.has_logged(topic, words), what=lambda: "a report of the damage")
        yield "described", dirs.shown(topic)
        yield "the partition", client.where(topic)[str(dirs.a)]
        before = client.where(topic)[str(dirs.b)]
        with dirs.partition(topic) as partition:
            yield "produced", partition.produce(BATCH)
        later = client.where(topic)[str(dirs.b)]
        yield "more to copy", later.lag - before.lag
        yield "copied since", later.size_bytes - before.size_bytes
        write(sound)
        dirs.create(f"{topic}-other")
        fill(dirs, f"{topic}-other")
        dirs.move(f"{topic}-other", dirs.b)
        if not dirs.is_ours:
            dirs.wait_in(topic, dirs.b)
        yield "continues without a request", dirs.shown(topic) == {"b": False}
        yield "the same target", client.move_one(topic, dirs.b)
    dirs.wait_in(topic, dirs.b)
    with dirs.partition(topic) as partition:
        yield "records", len(contents(partition))


@pytest.mark.move("E43", "E64", "E65")
@on_both
def test_e64_a_topic_changes_while_its_partition_moves(dirs: Side, topic: str) -> Seen:
    empty, more = f"empty-{topic}", f"more-{topic}"
    dirs.create(empty)
    dirs.move(empty, dirs.b)
    dirs.wait_folders(empty, "b")
    with dirs.partition(empty) as partition:
        yield "without records: next", partition.produce(BATCH)

    admin = AdminClient({"bootstrap.servers": dirs.bootstrap})
    with dirs.held(more):
        admin.create_partitions([NewPartitions(more, 2)])[more].result(20)
        wait_until(lambda: dirs.shown(more, 1), what=lambda: "a new partition")
        yield "the new partition", [*dirs.shown(more, 1).values()]
        yield "the moving one", dirs.shown(more)
    dirs.wait_in(more, dirs.b)

    with dirs.held(topic):
        admin.delete_topics([topic])[topic].result(20)
        dirs.wait_folders(topic)
        yield "deleted", dirs.shown(topic)


@pytest.mark.move("E67", "E71", "E85")
@on_both
def test_e71_a_killed_broker_continues_its_move(dirs: Side, topic: str) -> Seen:
    with dirs.held(topic):
        with dirs.partition(topic) as partition:
            before = contents(partition)
        dirs.broker.kill()
        dirs.broker.start()
        wait_until(lambda: len(dirs.shown(topic)) == 2, what=lambda: f"{dirs.shown(topic)}")
        yield "after the start", dirs.shown(topic)
        with dirs.partition(topic) as partition:
            yield "during the move", partition.produce(BATCH)
    dirs.wait_in(topic, dirs.b)
    dirs.wait_folders(topic, "b")
    with dirs.partition(topic) as partition:
        yield "what was there", contents(partition)[: len(before)] == before
        yield "offsets", [offset for offset, _ in contents(partition)]
