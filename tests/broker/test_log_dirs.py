"""Several log directories: where partitions go, where they are found, and what is refused.

Method: the program runs as its user starts it; clients create topics and write records.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import KafkaConsumer, TopicPartition

from logmirror.broker.log.file_names import open_path
from logmirror.broker.log_dirs.placement import LogDirs, ends_path
from logmirror.errors import CorruptionError, UnavailableError
from logmirror.testing import broker

TIMEOUT_S = 20


def start(first, *more, **options):
    return broker(log_dir=first, arguments=[f"--log-dir={path}" for path in more], **options)


def write(kafka, topic, partitions):
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for partition in range(partitions):
        producer.produce(topic, str(partition).encode(), partition=partition)
    assert producer.flush(TIMEOUT_S) == 0


def read(kafka, topic, count):
    consumer = KafkaConsumer(
        topic, bootstrap_servers=kafka.bootstrap_servers, auto_offset_reset="earliest"
    )
    try:
        return [record.value for record in itertools.islice(consumer, count)]
    finally:
        consumer.close()


def folders(*paths):
    return [sorted(str(f.relative_to(path)) for f in path.glob("[a-z]*/[0-9]")) for path in paths]


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
@pytest.mark.parametrize("names", [[], [open_path(Path(), 0).name]])
def test_a_folder_without_records_does_not_count(tmp_path, order, names):
    """A partition was empty, its directory was away for a start, and it got another folder."""
    dirs = [tmp_path / "a", tmp_path / "b"]
    with start(*dirs, topics={"t": 1}) as kafka:
        write(kafka, "t", 1)
    (with_records,) = tmp_path.glob("[ab]/t/0")
    (other,) = {tmp_path / "a", tmp_path / "b"} - {with_records.parent.parent}
    (other / "t" / "0").mkdir(parents=True)
    for name in names:
        (other / "t" / "0" / name).touch()
    with start(*dirs[order]) as kafka:
        assert read(kafka, "t", 1) == [b"0"]
        write(kafka, "t", 1)
        assert read(kafka, "t", 2) == [b"0", b"0"]
    assert [path.name for path in (other / "t" / "0").iterdir()] == names


def test_partitions_are_spread_and_found_again_in_any_order_of_the_directories(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    with start(a, b, topics={"orders": 3}) as kafka:
        write(kafka, "orders", 3)
    assert folders(a, b) == [["orders/0", "orders/2"], ["orders/1"]]

    with start(b, a) as kafka:
        assert sorted(read(kafka, "orders", 3)) == [b"0", b"1", b"2"]
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.create_topics([NewTopic("payments", 1)])["payments"].result(TIMEOUT_S)
        write(kafka, "payments", 1)
        assert folders(a, b)[1] == ["orders/1", "payments/0"]
        admin.delete_topics(["orders"])["orders"].result(TIMEOUT_S)
        assert folders(a, b) == [[], ["payments/0"]]


def test_directories_of_two_brokers_are_not_mixed(tmp_path):
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for path in (a, b):
        with start(path):
            pass
    with pytest.raises(UnavailableError, match="belong to two brokers"), start(a, b):
        pass
    with start(a, c):
        pass
    (c / ".logmirror" / "cluster-id").write_text("")  # as after a crash
    with start(a, c):
        pass
    with pytest.raises(UnavailableError, match="belongs to another broker"), start(b, c):
        pass
    with (
        pytest.raises(UnavailableError, match="without the one that has the broker's database"),
        start(c),
    ):
        pass


def test_a_directory_that_is_given_twice_is_refused(tmp_path):
    for second in (tmp_path / "a", tmp_path / "a" / "b"):
        refused = pytest.raises(UnavailableError, match="given twice, or is in another one")
        with refused, start(tmp_path / "a", second):
            pass


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_deleted_topic_does_not_come_back_with_the_directory_that_was_away(tmp_path, is_lost):
    """Its name is refused until the directory is back, or a new one has an empty folder."""
    a, b, away = tmp_path / "a", tmp_path / "b", tmp_path / "away"

    def create(kafka):
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.create_topics([NewTopic("orders", 2)])["orders"].result(TIMEOUT_S)

    with start(a, b, topics={"orders": 2}) as kafka:
        write(kafka, "orders", 2)
    assert folders(a, b) == [["orders/0"], ["orders/1"]]
    b.rename(away)
    with start(a) as kafka:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.delete_topics(["orders"])["orders"].result(TIMEOUT_S)
        with pytest.raises(Exception, match="files of a deleted topic of this name are left"):
            create(kafka)
    with (
        start(a) as kafka,
        pytest.raises(Exception, match="files of a deleted topic of this name are left"),
    ):
        create(kafka)
    if is_lost:
        (b / "orders" / "1").mkdir(parents=True)
    else:
        away.rename(b)

    with start(a, b) as kafka:
        assert folders(a, b) == [[], []]
        create(kafka)
        write(kafka, "orders", 2)
        consumer = KafkaConsumer("orders", bootstrap_servers=kafka.bootstrap_servers)
        ends = consumer.end_offsets([TopicPartition("orders", partition) for partition in range(2)])
        consumer.close()
        assert [*ends.values()] == [1, 1]


def test_a_new_partition_goes_to_the_directory_with_the_fewest(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    (b / "old" / "0").mkdir(parents=True)
    dirs = LogDirs([a, b])
    assert dirs.find("old", 0) == b / "old" / "0"
    placed = [dirs.place("new", number) for number in range(3)]
    assert [path.parents[1].name for path in placed] == ["a", "a", "b"]
    dirs.remove(placed[:2])
    assert dirs.place("new", 3).parents[1] == a
    (a / "old" / "0").mkdir(parents=True)
    (a / "old" / "0" / ".mark.move").touch()
    (b / "old" / "0" / "records").touch()
    assert dirs.find("old", 0) == b / "old" / "0"
    (a / "old" / "0" / "records").touch()
    with pytest.raises(CorruptionError):
        dirs.find("old", 0)


def test_the_durable_ends_are_found_in_any_order_of_the_directories(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for path in (a, b):
        (path / ".logmirror").mkdir(parents=True)
    assert ends_path([b, a]) == b / ".logmirror" / "durable-ends"
    (a / ".logmirror" / "durable-ends").touch()
    assert ends_path([b, a]) == ends_path([a, b]) == a / ".logmirror" / "durable-ends"
    (b / ".logmirror" / "durable-ends").touch()  # an earlier version made a second one
    (a / ".logmirror" / "broker.sqlite").touch()
    assert ends_path([b, a]) == ends_path([a, b]) == a / ".logmirror" / "durable-ends"
