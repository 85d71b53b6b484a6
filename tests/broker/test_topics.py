"""Goal: topics survive restarts and crashes, deleted ones never come back, and only supported
settings are accepted.

Method: tests of the database and the topic list, with a crash in the middle of a deletion; then
CreateTopics requests.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
import sqlite3
import struct
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from kio.schema.errors import ErrorCode

from kit.judges.clients import Message, produce
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.metadata import PRODUCER_ID_BLOCK, MetadataStore, TopicRow
from logmirror.broker.options import BrokerOptions
from logmirror.broker.topic import RefusedTopicError
from logmirror.broker.topic_configs import RefusedConfigError, TopicConfigs
from logmirror.broker.topics import Topics
from logmirror.errors import CorruptionError, UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


def _row(name: str, **configs: str) -> TopicRow:
    return TopicRow(name=name, topic_id=uuid.uuid4(), partition_count=3, configs=configs)


def test_a_topic_is_as_it_was_stored(tmp_path):
    store = MetadataStore(tmp_path / "db")
    row = _row("orders", **{"segment.bytes": "9999"})
    store.create_topic(row)
    cluster_id = store.cluster_id
    store.close()

    again = MetadataStore(tmp_path / "db")

    assert again.topics() == [row]
    assert again.cluster_id == cluster_id
    again.close()


def test_no_producer_id_is_given_out_twice_even_without_a_clean_end(tmp_path):
    given = []
    for count in (1, PRODUCER_ID_BLOCK + 1, 5):
        store = MetadataStore(tmp_path / "db")
        given += [store.next_producer_id() for _ in range(count)]
        store.close()

    assert len(set(given)) == len(given)
    assert given == sorted(given)


def test_a_database_of_another_version_is_refused(tmp_path):
    MetadataStore(tmp_path / "db").close()
    database = sqlite3.connect(tmp_path / "db")
    database.execute("UPDATE settings SET value = '4' WHERE name = 'schema'")
    database.commit()
    database.close()

    with pytest.raises(UsageError) as raised:
        MetadataStore(tmp_path / "db")

    assert (raised.value.facts["expected"], raised.value.facts["found"]) == ("2", "4")


def test_a_database_from_before_log_starts_is_taken_over(tmp_path):
    store = MetadataStore(tmp_path / "db")
    row = _row("orders")
    store.create_topic(row)
    cluster_id = store.cluster_id
    store.close()
    database = sqlite3.connect(tmp_path / "db")
    database.execute("DROP TABLE log_starts")
    database.execute("UPDATE settings SET value = '1' WHERE name = 'schema'")
    database.commit()
    database.close()

    for _ in range(2):
        again = MetadataStore(tmp_path / "db")
        assert (again.topics(), again.cluster_id) == ([row], cluster_id)
        again.close()
    database = sqlite3.connect(tmp_path / "db")
    [version] = database.execute("SELECT value FROM settings WHERE name = 'schema'").fetchone()
    assert version == "2"
    database.close()


def test_what_is_changed_about_a_topic_is_as_it_was_changed(tmp_path):
    store = MetadataStore(tmp_path / "db")
    for name in ("orders", "other"):
        store.create_topic(_row(name, **{"segment.bytes": "9999"}))
    store.set_partition_count("orders", 7)
    store.set_configs("orders", {"max.message.bytes": "5"})
    store.set_log_starts("orders", {0: 10, 2: 2**40})
    store.set_log_starts("orders", {0: 11})
    store.close()

    again = MetadataStore(tmp_path / "db")

    orders, other = again.topics()
    assert (orders.partition_count, other.partition_count) == (7, 3)
    assert (orders.configs, other.configs) == (
        {"max.message.bytes": "5"},
        {"segment.bytes": "9999"},
    )
    assert (orders.log_starts, other.log_starts) == ({0: 11, 2: 2**40}, {})
    again.begin_deletion("orders")
    again.create_topic(_row("orders"))
    assert again.topics()[0].log_starts == {}
    again.close()


def test_a_damaged_database_is_refused(tmp_path):
    (tmp_path / "db").write_bytes(b"this is no database" * 100)

    with pytest.raises(CorruptionError):
        MetadataStore(tmp_path / "db")


def _with_topics(
    root: Path, act: Callable[[Topics, MetadataStore], Awaitable[None]], **options: int
) -> None:
    async def run() -> None:
        store = MetadataStore(root / "db")
        try:
            with ThreadPoolExecutor(1) as executor:
                disk = Disk()
                topics = Topics(
                    BrokerOptions(log_dir=root, **options),
                    store,
                    executor,
                    disk,
                    SegmentCache(disk),
                    GroupCommit(lambda _: executor, disk),
                )
                topics.load()
                await act(topics, store)
        finally:
            store.close()

    asyncio.run(run())


def test_a_deletion_that_was_interrupted_is_finished_at_the_next_start(tmp_path):
    async def begin(topics: Topics, store: MetadataStore) -> None:
        await topics.create("orders", 2, {})
        (tmp_path / "orders" / "0").mkdir(parents=True)
        (tmp_path / "orders" / "0" / "record").write_bytes(b"old")
        store.begin_deletion("orders")

    async def look(topics: Topics, store: MetadataStore) -> None:
        assert topics.by_name == {}
        assert store.deleting() == []
        assert not (tmp_path / "orders").exists()
        assert await topics.create("orders", 1, {}) is not None

    _with_topics(tmp_path, begin)
    _with_topics(tmp_path, look)


def test_a_folder_that_belongs_to_no_topic_is_not_taken_over(tmp_path):
    (tmp_path / "orders").mkdir()

    async def act(topics: Topics, store: MetadataStore) -> None:
        with pytest.raises(RefusedTopicError) as raised:
            await topics.create("orders", 1, {})
        assert raised.value.code == ErrorCode.invalid_topic_exception
        assert store.topics() == []

    _with_topics(tmp_path, act)


@pytest.mark.parametrize(
    ("count", "code"),
    [
        (0, ErrorCode.invalid_partitions),
        (-2, ErrorCode.invalid_partitions),
        (10_001, ErrorCode.invalid_partitions),
        (101, ErrorCode.policy_violation),
    ],
)
def test_a_number_of_partitions_that_cannot_be_is_refused(tmp_path, count, code):
    async def act(topics: Topics, store: MetadataStore) -> None:
        with pytest.raises(RefusedTopicError) as raised:
            await topics.create("orders", count, {})
        assert raised.value.code == code
        assert store.topics() == []

    _with_topics(tmp_path, act, max_partitions=100)


def test_a_dry_run_makes_nothing(tmp_path):
    async def act(topics: Topics, store: MetadataStore) -> None:
        assert await topics.create("orders", 1, {}, dry_run=True) is None
        assert store.topics() == []
        assert topics.by_name == {}

    _with_topics(tmp_path, act)


def test_of_concurrent_creations_of_a_topic_one_succeeds(tmp_path):
    async def act(topics: Topics, store: MetadataStore) -> None:
        found = await asyncio.gather(
            *(topics.create("orders", 1, {}) for _ in range(20)), return_exceptions=True
        )
        refused = [error for error in found if isinstance(error, RefusedTopicError)]
        assert [error.code for error in refused] == [ErrorCode.topic_already_exists] * 19
        assert len(store.topics()) == 1

    _with_topics(tmp_path, act)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention.ms", "-2"),
        ("retention.ms", "9223372036854775808"),
        ("retention.bytes", "1.5"),
        ("segment.ms", "0"),
        ("cleanup.policy", "compacted"),
        ("cleanup.policy", "delete,delete"),
        ("min.cleanable.dirty.ratio", "1.1"),
        ("min.compaction.lag.ms", "-1"),
        ("compression.type", "zstd"),
        ("message.timestamp.type", "logappendtime"),
        ("min.insync.replicas", "2"),
        ("segment.bytes", "100"),
        ("segment.bytes", "-1"),
        ("segment.bytes", "ten"),
        ("segment.bytes", "9" * 5000),
        ("segment.bytes", "2147483648"),
        ("max.message.bytes", ""),
        ("made.up", "1"),
    ],
)
def test_a_setting_that_would_not_be_honoured_is_refused(tmp_path, name, value):
    with pytest.raises(RefusedConfigError, match=name):
        TopicConfigs({name: value}, BrokerOptions(log_dir=tmp_path))


def test_settings_with_their_fixed_value_are_accepted(tmp_path):
    configs = TopicConfigs(
        {"retention.ms": "-1", "cleanup.policy": "delete", "segment.bytes": "1024"},
        BrokerOptions(log_dir=tmp_path),
    )

    assert configs.segment_bytes == 1024
    shown = {entry.name: (entry.value, entry.source.name) for entry in configs.entries()}
    assert shown["segment.bytes"] == ("1024", "TOPIC")
    assert shown["max.message.bytes"] == ("1048588", "DEFAULT")


def test_an_empty_list_has_no_items(tmp_path):
    throttled = "leader.replication.throttled.replicas"
    for values, items in (({}, []), ({throttled: "0:1,1:1"}, ["0:1", "1:1"])):
        configs = TopicConfigs(values, BrokerOptions(log_dir=tmp_path))
        assert configs.list_value(throttled) == items


def test_a_client_that_disconnects_during_auto_creation_leaves_a_whole_topic(embedded, topic_name):
    """The database and the memory of the broker must not differ on what there is."""
    names = [f"{topic_name}-{n}" for n in range(20)]
    for name in names:
        text = name.encode()
        # Metadata v4: one topic, which may be created.
        body = struct.pack(">hhihih", 3, 4, 1, -1, 1, len(text)) + text + b"\x01"
        with socket.create_connection(("127.0.0.1", embedded.port)) as connection:
            connection.sendall(struct.pack(">i", len(body)) + body)

    for name in names:
        assert produce(embedded.bootstrap, name, [Message(value=b"x")]) == [0]


@pytest.mark.parametrize("how", ["created", "increased"])
def test_a_partition_that_is_created_while_its_directory_fails_is_offline(
    tmp_path, monkeypatch, how
):
    async def act(topics: Topics, store: MetadataStore) -> None:
        failure = UnavailableError("log directory failed")
        method = "create_topic" if how == "created" else "set_partition_count"
        if how == "increased":
            await topics.create("t", 1, {})
        original = getattr(store, method)

        def fail(*arguments: object) -> None:
            original(*arguments)
            topics.dirs.offline[tmp_path] = failure

        monkeypatch.setattr(store, method, fail)
        if how == "created":
            await topics.create("t", 1, {})
        else:
            await topics.add_partitions(topics.by_name["t"], 2, dry_run=False)
        assert str(topics.by_name["t"].logs[-1].failure) == str(failure)
        with pytest.raises(RefusedTopicError) as raised:
            await topics.create("u", 1, {})
        assert int(raised.value.code) == int(ErrorCode.invalid_replication_factor)

    _with_topics(tmp_path, act)


def test_no_topic_takes_the_name_of_a_deleted_one_whose_files_are_left(tmp_path, monkeypatch):
    reported: list[Exception] = []

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    async def delete(topics: Topics, _: MetadataStore) -> None:
        topics.watch(lambda error, *_: reported.append(error))
        await topics.create("t", 1, {})
        (tmp_path / "t" / "0").mkdir(parents=True)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", refuse)
            with pytest.raises(OSError, match="Input/output error"):
                await topics.delete(topics.by_name["t"])
        assert [error.errno for error in reported] == [errno.EIO]
        (tmp_path / "t").rename(tmp_path / "away")
        with pytest.raises(RefusedTopicError):
            await topics.create("t", 1, {})

    async def create(topics: Topics, _: MetadataStore) -> None:
        await topics.create("t", 1, {})

    _with_topics(tmp_path, delete)
    _with_topics(tmp_path, create)
