"""The broker's metadata: cluster ID, topics, log start offsets, producer IDs and client quotas.

A change is durable when the call returns. Schema 2 and 3:

    settings(name, value)                   schema, cluster_id, next_producer_id
    topics(name, id, partitions, state)     id: 16 bytes; state: live
    deleted_topics(id, name, partitions)    whose files are not all removed
    topic_configs(topic, name, value)       only values that were set
    log_starts(topic, partition, start)     only partitions with deleted records
    compacted(topic_id, partition, upto)    only partitions that were compacted
    compacted_objects(topic_id, partition, first, next_offset, version)
                                            only in a bucket, see `bucket.replacing`
    moves(topic_id, partition, target, nonce)
                                            see `moves.mover`
    bucket_partitions(topic_id, partition, residence)
                                            see `bucket.residences`
    left_partitions(residence, name, partition)
                                            whose objects are not all removed
    deleted_partitions(topic_id, partition)
                                            whose folder is away, see `topic_removal`
    broker_configs(scope, name, value)      see `dynamic_configs`
    quotas(entity, name, value)             entity: JSON, as `quotas.entities` writes it

A topic that is deleted has a row until its files are removed. A broker that stops in between
resumes the deletion at its next start, and a new topic of that name never inherits a record. Older
versions kept it in `topics`, with the state `deleting`.

Schema 3 is that of a broker with log directories on disks beside a bucket: an earlier version would
take partitions on disks for empty ones. Schema 1 had no log starts. Opening a database of schema 1
upgrades it. Older versions that wrote schema 2 recorded durable ends in a table, `durable_ends`. A
start moves its rows to the file of `log/durable_ends`, and removes the table.
"""

from __future__ import annotations

import base64
import threading
import uuid
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from logmirror.broker.database import Database
from logmirror.broker.place_rows import (
    PLACED_VERSION,
    PLACES_SCHEMA,
    Compacted,
    PlaceRows,
    Residence,
    forget_places,
    insert_residences,
)
from logmirror.clock import new_nonce
from logmirror.errors import UsageError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from logmirror.broker.database import Shipping

_NO_RESIDENCES: Final[Mapping[int, bytes]] = MappingProxyType({})
_SCHEMA_VERSION: Final = "2"
_OLDER_VERSIONS: Final = ("1",)
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS topics (
    name TEXT PRIMARY KEY, id BLOB NOT NULL UNIQUE, partitions INTEGER NOT NULL, state TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deleted_topics (
    id BLOB PRIMARY KEY, name TEXT NOT NULL, partitions INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS topic_configs (
    topic TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (topic, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log_starts (
    topic TEXT NOT NULL, partition INTEGER NOT NULL, start INTEGER NOT NULL,
    PRIMARY KEY (topic, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS compacted (
    topic_id BLOB NOT NULL, partition INTEGER NOT NULL, upto INTEGER NOT NULL,
    PRIMARY KEY (topic_id, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS compacted_objects (
    topic_id BLOB NOT NULL, partition INTEGER NOT NULL, first INTEGER NOT NULL,
    next_offset INTEGER NOT NULL, version TEXT NOT NULL, PRIMARY KEY (topic_id, partition, first)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS broker_configs (
    scope TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (scope, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS quotas (
    entity TEXT NOT NULL, name TEXT NOT NULL, value REAL NOT NULL, PRIMARY KEY (entity, name)
) WITHOUT ROWID;
"""
_FIND_TOPIC: Final = "SELECT id FROM topics WHERE name = ?"
_FIND_TABLE: Final = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name ="
PRODUCER_ID_BLOCK: Final = 1000
"""IDs are reserved in blocks, so that most allocations do not wait for the disk. A restart loses
the rest of a block; there are 2^63 IDs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRow:
    """A topic as it is stored."""

    name: str
    topic_id: uuid.UUID
    partition_count: int
    configs: Mapping[str, str]
    log_starts: Mapping[int, int] = field(default_factory=dict)
    """Log start offset by partition. A partition without an entry starts at 0."""

    compacted: Mapping[int, Sequence[Compacted]] = field(default_factory=dict)
    """Compacted objects by partition, in order."""

    residences: Mapping[int, bytes] = field(default_factory=dict)
    """The IDs of the residences of partitions in a bucket, if others may be on disks."""

    def residence(self, partition: int) -> Residence:
        """Return the residence of a partition that is in a bucket."""
        found = self.residences.get(partition, self.topic_id.bytes)
        return Residence(found, self.name, partition)


def new_uuid() -> uuid.UUID:
    """Return 128 random bits that Kafka's tools accept as a topic or cluster ID.

    Its base64 form never begins with a dash, which a command line would read as an option.
    """
    while True:
        found = uuid.UUID(hex=new_nonce() + new_nonce())
        if found.int > 1 and not short_form(found).startswith("-"):
            return found


def short_form(value: uuid.UUID) -> str:
    """Return an ID in Kafka's text form: 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(value.bytes).rstrip(b"=").decode()


class MetadataStore(PlaceRows):
    """The broker's database. Safe to call from several threads; each call is one transaction."""

    def __init__(self, path: Path, shipping: Shipping | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._next_producer_id = self._producer_ids_end = 0
        self._database = Database(path, _SCHEMA + PLACES_SCHEMA, shipping=shipping)
        self._database.setting("next_producer_id", "1")
        self.cluster_id = self._database.setting("cluster_id", short_form(new_uuid()))
        version = self._database.setting("schema", _SCHEMA_VERSION)
        if version in _OLDER_VERSIONS:
            with self._database.transaction() as database:
                _update_setting(database, "schema", _SCHEMA_VERSION)
        elif version not in {_SCHEMA_VERSION, PLACED_VERSION}:
            raise UsageError(
                "the log directory was written by another version of logmirror",
                hint="use that version, or another directory",
                path=str(path),
                expected=_SCHEMA_VERSION,
                found=version,
            )
        with self._database.transaction() as database:
            older = "SELECT name FROM topics WHERE state != 'live'"
            for (name,) in database.execute(older).fetchall():
                _delete_topic(database, name)

    def snapshot(self) -> None:
        """Ship the whole database."""
        self._database.snapshot()

    def watch(self, when_failed: Callable[[Exception, Path], None]) -> None:
        """Report errors of the disk to a function; see `Database.when_failed`."""
        self._database.when_failed = when_failed

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def topics(self) -> list[TopicRow]:
        """Return the topics, by name."""
        with self._database.transaction() as database:
            configs: dict[str, dict[str, str]] = {}
            for topic, name, value in database.execute("SELECT * FROM topic_configs"):
                configs.setdefault(topic, {})[name] = value
            starts: dict[str, dict[int, int]] = {}
            for topic, partition, start in database.execute("SELECT * FROM log_starts"):
                starts.setdefault(topic, {})[partition] = start
            objects: dict[bytes, dict[int, list[Compacted]]] = {}
            in_order = "SELECT * FROM compacted_objects ORDER BY topic_id, partition, first"
            for topic_id, partition, *found in database.execute(in_order):
                of_topic = objects.setdefault(topic_id, {})
                of_topic.setdefault(partition, []).append(Compacted(*found))
            residences: dict[bytes, dict[int, bytes]] = {}
            for topic_id, partition, one in database.execute("SELECT * FROM bucket_partitions"):
                residences.setdefault(topic_id, {})[partition] = one
            select = "SELECT name, id, partitions FROM topics ORDER BY name"
            return [
                TopicRow(
                    name=name,
                    topic_id=uuid.UUID(bytes=topic_id),
                    partition_count=partition_count,
                    configs=configs.get(name, {}),
                    log_starts=starts.get(name, {}),
                    compacted=objects.get(topic_id, {}),
                    residences=residences.get(topic_id, {}),
                )
                for name, topic_id, partition_count in database.execute(select)
            ]

    def create_topic(self, row: TopicRow) -> None:
        """Store a new topic. The caller checks that the name is free."""
        with self._database.transaction() as database:
            values = (row.name, row.topic_id.bytes, row.partition_count)
            database.execute("INSERT INTO topics VALUES (?, ?, ?, 'live')", values)
            _insert_configs(database, row.name, row.configs)
            insert_residences(database, row.topic_id.bytes, row.residences)

    def set_partition_count(
        self, topic: str, partition_count: int, residences: Mapping[int, bytes] = _NO_RESIDENCES
    ) -> None:
        """Store a topic's new partition count, and which of the new partitions are in a bucket."""
        with self._database.transaction() as database:
            update = "UPDATE topics SET partitions = ? WHERE name = ?"
            database.execute(update, (partition_count, topic))
            for (topic_id,) in database.execute(_FIND_TOPIC, (topic,)).fetchall():
                insert_residences(database, topic_id, residences)

    def set_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        """Replace a topic's settings."""
        with self._database.transaction() as database:
            database.execute("DELETE FROM topic_configs WHERE topic = ?", (topic,))
            _insert_configs(database, topic, configs)

    def set_log_starts(self, topic: str, starts: Mapping[int, int]) -> None:
        """Store new log start offsets, by partition, before records are deleted."""
        with self._database.transaction() as database:
            database.executemany(
                "INSERT OR REPLACE INTO log_starts VALUES (?, ?, ?)",
                [(topic, partition, start) for partition, start in starts.items()],
            )

    def older_durable_ends(self) -> dict[tuple[bytes, int], tuple[int, int]]:
        """Return the durable ends that an older version recorded: offset and `written_from`.

        By topic ID and partition.
        """
        with self._database.transaction() as database:
            if not database.execute(f"{_FIND_TABLE} 'durable_ends'").fetchone():
                return {}
            rows = database.execute("SELECT * FROM durable_ends")
            return {(topic_id, number): (end, start) for topic_id, number, end, start in rows}

    def drop_older_durable_ends(self) -> None:
        """Remove these, once they are durable elsewhere."""
        with self._database.transaction() as database:
            database.execute("DROP TABLE IF EXISTS durable_ends")

    def compacted(self) -> dict[tuple[bytes, int], int]:
        """Return the offset up to which partitions are compacted, by topic ID and partition."""
        with self._database.transaction() as database:
            rows = database.execute("SELECT * FROM compacted").fetchall()
        return {(topic_id, partition): upto for topic_id, partition, upto in rows}

    def set_compacted(self, topic_id: bytes, partition: int, upto: int) -> None:
        """Store up to which offset a partition is compacted, when its files are durable."""
        with self._database.transaction() as database:
            database.execute(
                "INSERT OR REPLACE INTO compacted SELECT ?1, ?2, ?3 "
                "WHERE EXISTS (SELECT 1 FROM topics WHERE id = ?1)",
                (topic_id, partition, upto),
            )

    def add_compacted(
        self, topic_id: bytes, partition: int, new: Compacted, log_start: int
    ) -> None:
        """Store that an object replaces those with its offsets; forget those before a log start."""
        key = topic_id, partition
        with self._database.transaction() as database:
            database.execute(
                "DELETE FROM compacted_objects WHERE topic_id = ? AND partition = ? "
                "AND (next_offset <= ? OR (first < ? AND next_offset > ?))",
                (*key, log_start, new.next, new.first),
            )
            database.execute(
                "INSERT INTO compacted_objects SELECT ?1, ?2, ?3, ?4, ?5 "
                "WHERE EXISTS (SELECT 1 FROM topics WHERE id = ?1)",
                (*key, *new),
            )

    def set_compacted_objects(
        self, topic_id: bytes, partition: int, found: Collection[Compacted]
    ) -> None:
        """Store which compacted objects of a partition count."""
        with self._database.transaction() as database:
            delete = "DELETE FROM compacted_objects WHERE topic_id = ? AND partition = ?"
            database.execute(delete, (topic_id, partition))
            database.executemany(
                "INSERT INTO compacted_objects VALUES (?, ?, ?, ?, ?)",
                [(topic_id, partition, *one) for one in found],
            )

    def broker_configs(self) -> dict[tuple[str, str], str]:
        """Return the broker's settings that were changed while it ran, by scope and name."""
        with self._database.transaction() as database:
            rows = database.execute("SELECT * FROM broker_configs").fetchall()
        return {(scope, name): value for scope, name, value in rows}

    def change_broker_configs(self, changes: Mapping[tuple[str, str], str | None]) -> None:
        """Store such settings, and remove those with value None; all or none of them."""
        with self._database.transaction() as database:
            database.executemany(
                "DELETE FROM broker_configs WHERE scope = ? AND name = ?", changes.keys()
            )
            database.executemany(
                "INSERT INTO broker_configs VALUES (?, ?, ?)",
                [(*key, value) for key, value in changes.items() if value is not None],
            )

    def begin_deletion(self, name: str) -> None:
        """Delete a topic; its name is free. Its files must be removed next."""
        with self._database.transaction() as database:
            _delete_topic(database, name)

    def deleting(self) -> list[TopicRow]:
        """Return the topics whose deletion is not complete."""
        with self._database.transaction() as database:
            rows = database.execute("SELECT name, id, partitions FROM deleted_topics ORDER BY id")
            return [
                TopicRow(
                    name=name, topic_id=uuid.UUID(bytes=topic_id), partition_count=count, configs={}
                )
                for name, topic_id, count in rows
            ]

    def end_deletion(self, topic_id: uuid.UUID) -> None:
        """Forget a deleted topic, once its files are removed."""
        with self._database.transaction() as database:
            database.execute("DELETE FROM deleted_topics WHERE id = ?", (topic_id.bytes,))

    def quotas(self) -> list[tuple[str, str, float]]:
        """Return entity, name and value of all client quotas."""
        with self._database.transaction() as database:
            return database.execute("SELECT * FROM quotas").fetchall()

    def change_quotas(self, changes: Collection[tuple[str, str, float | None]]) -> None:
        """Store client quotas, and remove those with value None; all or none of them."""
        with self._database.transaction() as database:
            database.executemany(
                "DELETE FROM quotas WHERE entity = ? AND name = ?",
                [change[:2] for change in changes],
            )
            database.executemany(
                "INSERT INTO quotas VALUES (?, ?, ?)",
                [change for change in changes if change[2] is not None],
            )

    def next_producer_id(self) -> int:
        """Return a producer ID that was never allocated before, not even before a crash."""
        with self._lock:
            if self._next_producer_id < self._producer_ids_end:
                self._next_producer_id += 1
                return self._next_producer_id - 1
        with self._database.transaction() as database:
            select = "SELECT value FROM settings WHERE name = 'next_producer_id'"
            start = int(database.execute(select).fetchone()[0])
            _update_setting(database, "next_producer_id", str(start + PRODUCER_ID_BLOCK))
        with self._lock:
            self._next_producer_id, self._producer_ids_end = start + 1, start + PRODUCER_ID_BLOCK
        return start


def _insert_configs(database: sqlite3.Connection, topic: str, configs: Mapping[str, str]) -> None:
    insert = "INSERT INTO topic_configs VALUES (?, ?, ?)"
    database.executemany(insert, [(topic, name, value) for name, value in configs.items()])


def _update_setting(database: sqlite3.Connection, name: str, value: str) -> None:
    database.execute("UPDATE settings SET value = ? WHERE name = ?", (value, name))


def _delete_topic(database: sqlite3.Connection, name: str) -> None:
    forget_places(database, name)
    select = "SELECT id FROM topics WHERE name = ?"
    for table in ("compacted", "compacted_objects"):
        delete = f"DELETE FROM {table} WHERE topic_id IN ({select})"  # noqa: S608  # constants
        database.execute(delete, (name,))
    move = "INSERT INTO deleted_topics SELECT id, name, partitions FROM topics WHERE name = ?"
    for statement in (
        move,
        "DELETE FROM topic_configs WHERE topic = ?",
        "DELETE FROM log_starts WHERE topic = ?",
        "DELETE FROM topics WHERE name = ?",
    ):
        database.execute(statement, (name,))
