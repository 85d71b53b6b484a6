"""The broker's metadata: cluster ID, topics, log start offsets and allocated producer IDs.

SQLite in WAL mode with synchronous=FULL: a change is durable when the call returns. Schema 2:

    settings(name, value)                   schema, cluster_id, next_producer_id
    topics(name, id, partitions, state)     id: 16 bytes; state: live | deleting
    topic_configs(topic, name, value)       only values that were set
    log_starts(topic, partition, start)     only partitions with deleted records
    compacted(topic_id, partition, upto)    only partitions that were compacted

A topic in deletion keeps its row until its files are removed. A broker that stops in between
resumes the deletion at its next start, and a new topic of that name never inherits a record.

Schema 1 had no log starts. Opening a database of schema 1 upgrades it. Older versions that wrote
schema 2 recorded durable ends in a table, `durable_ends`. A start moves its rows to the file of
`log/durable_ends`, and removes the table.
"""

from __future__ import annotations

import base64
import sqlite3
import threading
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror.clock import new_nonce
from logmirror.errors import CorruptionError, UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_SCHEMA_VERSION: Final = "2"
_OLDER_VERSIONS: Final = ("1",)
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS topics (
    name TEXT PRIMARY KEY, id BLOB NOT NULL UNIQUE, partitions INTEGER NOT NULL, state TEXT NOT NULL
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
"""
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


class MetadataStore:
    """The broker's database. Safe to call from several threads; each call is one transaction."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._path = path
        self._next_producer_id = self._producer_ids_end = 0
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        with self._transaction(begin=False):
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
        with self._transaction():
            for statement in _SCHEMA.split(";"):
                self._database.execute(statement)
            self.cluster_id = self._setting("cluster_id", short_form(new_uuid()))
            version = self._setting("schema", _SCHEMA_VERSION)
            if version in _OLDER_VERSIONS:
                self._update_setting("schema", _SCHEMA_VERSION)
                version = _SCHEMA_VERSION
        if version != _SCHEMA_VERSION:
            raise UsageError(
                "the log directory was written by another version of logmirror",
                hint="use that version, or another directory",
                path=str(path),
                expected=_SCHEMA_VERSION,
                found=version,
            )

    @contextmanager
    def _transaction(self, *, begin: bool = True) -> Iterator[None]:
        with self._lock:
            try:
                if begin:
                    self._database.execute("BEGIN IMMEDIATE")
                yield
                if begin:
                    self._database.execute("COMMIT")
            except sqlite3.Error as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise translated(error, self._path) from error

    def _setting(self, name: str, default: str) -> str:
        """Return a setting; stores `default` first if it is not set. Runs in a transaction."""
        insert = "INSERT INTO settings VALUES (?, ?) ON CONFLICT DO NOTHING"
        self._database.execute(insert, (name, default))
        select = "SELECT value FROM settings WHERE name = ?"
        return str(self._database.execute(select, (name,)).fetchone()[0])

    def _update_setting(self, name: str, value: str) -> None:
        self._database.execute("UPDATE settings SET value = ? WHERE name = ?", (value, name))

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    def topics(self) -> list[TopicRow]:
        """Return the live topics, by name."""
        return self._rows("live")

    def deleting(self) -> list[TopicRow]:
        """Return the topics whose deletion is not complete."""
        return self._rows("deleting")

    def _rows(self, state: str) -> list[TopicRow]:
        with self._transaction():
            configs: dict[str, dict[str, str]] = {}
            for topic, name, value in self._database.execute("SELECT * FROM topic_configs"):
                configs.setdefault(topic, {})[name] = value
            starts: dict[str, dict[int, int]] = {}
            for topic, partition, start in self._database.execute("SELECT * FROM log_starts"):
                starts.setdefault(topic, {})[partition] = start
            select = "SELECT name, id, partitions FROM topics WHERE state = ? ORDER BY name"
            return [
                TopicRow(
                    name=name,
                    topic_id=uuid.UUID(bytes=topic_id),
                    partition_count=partition_count,
                    configs=configs.get(name, {}),
                    log_starts=starts.get(name, {}),
                )
                for name, topic_id, partition_count in self._database.execute(select, (state,))
            ]

    def create_topic(self, row: TopicRow) -> None:
        """Store a new topic. The caller checks that the name is free."""
        with self._transaction():
            values = (row.name, row.topic_id.bytes, row.partition_count)
            self._database.execute("INSERT INTO topics VALUES (?, ?, ?, 'live')", values)
            self._insert_configs(row.name, row.configs)

    def _insert_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        insert = "INSERT INTO topic_configs VALUES (?, ?, ?)"
        rows = [(topic, name, value) for name, value in configs.items()]
        self._database.executemany(insert, rows)

    def set_partition_count(self, topic: str, partition_count: int) -> None:
        """Store a topic's new partition count."""
        with self._transaction():
            update = "UPDATE topics SET partitions = ? WHERE name = ?"
            self._database.execute(update, (partition_count, topic))

    def set_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        """Replace a topic's settings."""
        with self._transaction():
            self._database.execute("DELETE FROM topic_configs WHERE topic = ?", (topic,))
            self._insert_configs(topic, configs)

    def set_log_starts(self, topic: str, starts: Mapping[int, int]) -> None:
        """Store new log start offsets, by partition, before records are deleted."""
        with self._transaction():
            self._database.executemany(
                "INSERT OR REPLACE INTO log_starts VALUES (?, ?, ?)",
                [(topic, partition, start) for partition, start in starts.items()],
            )

    def older_durable_ends(self) -> dict[tuple[bytes, int], tuple[int, int]]:
        """Return the durable ends that an older version recorded: offset and `written_from`.

        By topic ID and partition.
        """
        with self._transaction():
            if not self._database.execute(f"{_FIND_TABLE} 'durable_ends'").fetchone():
                return {}
            rows = self._database.execute("SELECT * FROM durable_ends")
            return {(topic_id, number): (end, start) for topic_id, number, end, start in rows}

    def drop_older_durable_ends(self) -> None:
        """Remove these, once they are durable elsewhere."""
        with self._transaction():
            self._database.execute("DROP TABLE IF EXISTS durable_ends")

    def compacted(self) -> dict[tuple[bytes, int], int]:
        """Return the offset up to which partitions are compacted, by topic ID and partition."""
        with self._transaction():
            rows = self._database.execute("SELECT * FROM compacted").fetchall()
        return {(topic_id, partition): upto for topic_id, partition, upto in rows}

    def set_compacted(self, topic_id: bytes, partition: int, upto: int) -> None:
        """Store up to which offset a partition is compacted, when its files are durable."""
        with self._transaction():
            self._database.execute(
                "INSERT OR REPLACE INTO compacted SELECT ?1, ?2, ?3 "
                "WHERE EXISTS (SELECT 1 FROM topics WHERE id = ?1)",
                (topic_id, partition, upto),
            )

    def begin_deletion(self, name: str) -> None:
        """Mark a topic as deleted. Its files must be removed next."""
        with self._transaction():
            self._database.execute("UPDATE topics SET state = 'deleting' WHERE name = ?", (name,))

    def end_deletion(self, name: str) -> None:
        """Remove a deleted topic's rows, once its files are removed."""
        with self._transaction():
            self._database.execute("DELETE FROM topic_configs WHERE topic = ?", (name,))
            self._database.execute("DELETE FROM log_starts WHERE topic = ?", (name,))
            select = "SELECT id FROM topics WHERE name = ?"
            delete = f"DELETE FROM compacted WHERE topic_id IN ({select})"  # noqa: S608  # two constants
            self._database.execute(delete, (name,))
            self._database.execute("DELETE FROM topics WHERE name = ?", (name,))

    def next_producer_id(self) -> int:
        """Return a producer ID that was never allocated before, not even before a crash."""
        with self._lock:
            if self._next_producer_id < self._producer_ids_end:
                self._next_producer_id += 1
                return self._next_producer_id - 1
        with self._transaction():
            start = int(self._setting("next_producer_id", "1"))
            self._update_setting("next_producer_id", str(start + PRODUCER_ID_BLOCK))
        with self._lock:
            self._next_producer_id, self._producer_ids_end = start + 1, start + PRODUCER_ID_BLOCK
        return start


def translated(error: sqlite3.Error, path: Path) -> UnavailableError | CorruptionError:
    """Translate sqlite3's errors."""
    if isinstance(error, sqlite3.DatabaseError) and "not a database" in str(error):
        return CorruptionError("the broker's database is damaged", path=str(path), cause=str(error))
    if "malformed" in str(error):
        return CorruptionError("the broker's database is damaged", path=str(path), cause=str(error))
    return UnavailableError("the broker's database is not usable", path=str(path), cause=str(error))
