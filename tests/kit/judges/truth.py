"""Comparison of an archive with its source, by programs that share no code with the product.

The source is read by kcat and by aiokafka, which must agree; Parquet by DuckDB, NDJSON by the
standard library's json, native objects by `kit.judges.native`.
"""

from __future__ import annotations

import base64
import json
import time
from typing import TYPE_CHECKING, Final

import duckdb
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from kit.judges.clients import CREATE_TIME, LOG_APPEND_TIME, Row, rows_by_aiokafka, rows_by_kcat
from kit.judges.native import read_batches
from kit.runs.commands import EXTENSIONS
from logmirror.testing import check_tiles, compare

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from logmirror.testing import Anomaly

_TYPES: Final = {"create_time": CREATE_TIME, "log_append_time": LOG_APPEND_TIME}

_LEADER_S: Final = 90
_NEW_LEADER: Final = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    }
)

# Columns of Spark's Kafka source: https://spark.apache.org/docs/latest/streaming/structured-
# streaming-kafka-integration.html; the timestamp is compared as a number.
_PARQUET_ROWS: Final = """
    SELECT "offset", epoch_ms("timestamp"), timestampType, key, value, headers, topic, "partition"
    FROM read_parquet($file, file_row_number=true) ORDER BY file_row_number
"""


class Source:
    """A topic as independent clients read it."""

    def __init__(self, bootstrap: str, topic: str, *, partitions: Iterable[int] = (0,)) -> None:
        self.bootstrap, self.topic = bootstrap, topic
        self.partitions = tuple(partitions)
        self._rows: dict[int, list[Row]] = {}

    def rows(self, partition: int) -> list[Row]:
        """Return all committed records of a partition, read once by two clients."""
        if partition not in self._rows:
            start = self.bounds(partition)[0]
            rows = rows_by_aiokafka(self.bootstrap, self.topic, partition=partition, start=start)
            seen = rows_by_kcat(self.bootstrap, self.topic, partition=partition)
            # kcat prints neither headers nor the timestamp's type.
            assert [row[:2] + row[3:5] for row in rows] == [row[:2] + row[3:5] for row in seen]
            self._rows[partition] = rows
        return self._rows[partition]

    def bounds(self, partition: int) -> tuple[int, int]:
        """Return the log start offset and the last stable offset.

        A new leader (after a restart, or of a new topic) and the metadata of other brokers may
        disagree about its epoch for a moment: the request is repeated.
        """
        deadline = time.monotonic() + _LEADER_S
        while True:
            try:
                return self._bounds_once(partition)
            except KafkaException as error:
                is_new = error.args[0].code() in _NEW_LEADER
                if not is_new or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _bounds_once(self, partition: int) -> tuple[int, int]:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        where = TopicPartition(self.topic, partition)
        found = []
        for spec in (OffsetSpec.earliest(), OffsetSpec.latest()):
            asked = admin.list_offsets(
                {where: spec}, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=20
            )
            found.append(int(asked[where].result(20).offset))
        return found[0], found[1]

    def anomalies(self, root: Path, form: str, *, name: str = "") -> list[Anomaly]:
        """Return all differences between the archive in `<root>/<name or form>` and the source."""
        return [
            anomaly
            for partition in self.partitions
            for anomaly in self.partition_anomalies(root, form, partition, name=name)
        ]

    def partition_anomalies(
        self, root: Path, form: str, partition: int, *, name: str = ""
    ) -> list[Anomaly]:
        """Return the differences of one partition."""
        folder = root / (name or form) / str(partition)
        start, end = self.bounds(partition)
        tiles = check_tiles(object_names(folder), start, end)
        copy = archive_rows(folder, form, topic=self.topic, partition=partition)
        return [*tiles, *compare(self.rows(partition), copy)]


def object_names(folder: Path) -> list[str]:
    """The names in a partition's folder; none when it does not exist."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def archive_rows(folder: Path, form: str, *, topic: str, partition: int) -> list[Row]:
    """Return the records of the objects in a folder, object by object in the order of names."""
    paths = [folder / name for name in object_names(folder)]
    assert all(path.suffix == f".{EXTENSIONS[form]}" for path in paths), paths
    if form == "native":
        first = int(paths[0].name[:20]) if paths else 0
        return read_batches((path.read_bytes() for path in paths), first=first)
    read = _rows_of_parquet if form == "parquet" else _rows_of_ndjson
    return [row for path in paths for row in read(path, topic, partition)]


def _rows_of_parquet(path: Path, topic: str, partition: int) -> Iterable[Row]:
    for offset, stamp, kind, key, value, headers, *where in (
        duckdb.connect().execute(_PARQUET_ROWS, {"file": str(path)}).fetchall()
    ):
        assert where == [topic, partition], path
        named = tuple((header["key"].encode(), header["value"]) for header in headers)
        yield Row(offset, stamp, kind, _stored(key), _stored(value), named)


def _stored(value: bytes | str | None) -> bytes | None:
    """Columns of text are read as text, which is UTF-8 in the file."""
    return value.encode() if isinstance(value, str) else value


def _rows_of_ndjson(path: Path, topic: str, partition: int) -> Iterable[Row]:
    for line in path.read_bytes().splitlines():
        found = json.loads(line)
        assert (found["topic"], found["partition"]) == (topic, partition), path
        yield Row(
            found["offset"],
            found.get("timestamp_ms", -1),
            _TYPES[found["timestamp_type"]],
            _bytes(found.get("key")),
            _bytes(found.get("value")),
            tuple(
                (header["key"].encode(), _bytes(header.get("value")))
                for header in found.get("headers", ())
            ),
        )


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)
