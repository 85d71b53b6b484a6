"""Spark's own Kafka connector, on the Spark of the tests, in a process of its own.

with SparkConnector(bootstrap, folder) as spark:
    spark.write("topic", 1000, partitions=2)
    spark.read("topic")
    spark.stream("topic", "copy")
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import traceback
from typing import TYPE_CHECKING, Any, Final, Self

from kit.judges.clients import Row
from kit.servers.class_archives import spark_classes
from kit.servers.machine import temporary_folder
from kit.servers.maven import maven_jars

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

_VERSION: Final = "4.2.0"
"""The newest one that Maven finds; Spark 4.3 runs it too."""

_JARS: Final = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", _VERSION),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", _VERSION),
    ("org.apache.kafka", "kafka-clients", "3.9.2"),
    ("org.apache.commons", "commons-pool2", "2.13.1"),
)
"""What it needs beyond the jars of PySpark; its dependencies list these again."""

_TIMEOUT_S: Final = 240
_PER_TRIGGER: Final = 100
_COLUMNS: Final = (
    *("partition", "offset", "unix_millis(timestamp)", "timestampType"),
    *("key", "value", "headers"),
)


class SparkConnector:
    """A session of Spark; use it in a `with`. Each method fails if Spark fails.

    Args:
        bootstrap: `host:port` of the broker.
        folder: Directory of checkpoints and of Spark's files.
    """

    def __init__(self, bootstrap: str, folder: Path) -> None:
        self._bootstrap, self._folder = bootstrap, folder
        self._serve = _serve
        """What runs in the process."""

    def __enter__(self) -> Self:
        jars = maven_jars(f"spark-sql-kafka-{_VERSION}", _JARS, alone=True)
        java_options = (
            *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            f"-XX:SharedArchiveFile={spark_classes()}",
            f"-Djava.io.tmpdir={temporary_folder()}",  # native libraries are put there
        )
        properties = {
            "spark.jars": ",".join(str(jar) for jar in sorted(jars.glob("*.jar"))),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": " ".join(java_options),
            "spark.local.dir": str(self._folder / "local"),
            "spark.sql.warehouse.dir": str(self._folder / "warehouse"),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, properties, self._bootstrap, str(self._folder))
        self._process = context.Process(target=self._serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()  # so that each process notices the end of the other one
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(_TIMEOUT_S)
        self._process.kill()
        self._process.join()

    def write(self, topic: str, count: int, *, partitions: int) -> None:
        """Write the records 0 to `count - 1` to the partitions in turn, from two tasks.

        The record `n` has the key `kn`, or none for each seventh, the value `vn`, or none for each
        eleventh, and the headers `n: n` and `n: null`.
        """
        self._do("write", topic, count, partitions)

    def read(
        self,
        topic: str,
        *,
        start: Mapping[int, int] | None = None,
        end: Mapping[int, int] | None = None,
    ) -> dict[int, list[Row]]:
        """Return committed records of a topic by partition, in the order of their offsets.

        Args:
            topic: The topic.
            start: `startingOffsets`, of each partition; None: from the earliest.
            end: `endingOffsets`, of each partition, exclusive; None: to the latest.
        """
        limits = {
            option: json.dumps({topic: {str(n): offset for n, offset in offsets.items()}})
            for option, offsets in (("startingOffsets", start), ("endingOffsets", end))
            if offsets is not None
        }
        found: dict[int, list[Row]] = self._do("read", topic, limits)
        return found

    def stream(self, source: str, target: str) -> list[int]:
        """Copy what is there and not yet copied; a checkpoint belongs to each target.

        Returns:
            The number of records of each micro-batch.
        """
        found: list[int] = self._do("stream", source, target)
        return found

    def _do(self, *request: object) -> Any:
        self._connection.send(request)
        assert self._connection.poll(_TIMEOUT_S), f"Spark did not finish {request}"
        found, failure = self._connection.recv()
        assert failure is None, failure
        return found


def _serve(connection: Connection, properties: dict[str, str], bootstrap: str, folder: str) -> None:
    """Do what is requested, and send the result or the failure, until the other end is closed."""
    from pyspark.sql import SparkSession  # noqa: PLC0415  # only this process needs it

    session = SparkSession.builder.master("local[2]").config(map=properties).getOrCreate()
    gateway = session.sparkContext._gateway  # noqa: SLF001  # the only way to the JVM's process
    work = _Work(session, bootstrap, folder)
    with contextlib.suppress(EOFError):
        while True:
            name, *arguments = connection.recv()
            try:
                connection.send((getattr(work, name)(*arguments), None))
            except Exception:  # noqa: BLE001  # whatever it is, the test reports it
                connection.send((None, traceback.format_exc()))
    session.stop()
    gateway.proc.communicate()  # the JVM ends with its standard input


def rows_of(records: DataFrame) -> dict[int, list[Row]]:
    """Return the records of the connector by partition."""
    found: dict[int, list[Row]] = {}
    for partition, *fields, headers in records.selectExpr(*_COLUMNS).collect():
        plain = [bytes(f) if isinstance(f, bytearray) else f for f in fields]
        named = tuple((h.key.encode(), h.value and bytes(h.value)) for h in headers or ())
        found.setdefault(partition, []).append(Row(*plain, named))
    return found


class _Work:
    def __init__(self, session: SparkSession, bootstrap: str, folder: str) -> None:
        self._session, self._folder = session, folder
        self._kafka = {"kafka.bootstrap.servers": bootstrap, "includeHeaders": "true"}

    def _from(self, topic: str) -> dict[str, str]:
        return {
            **self._kafka,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "kafka.isolation.level": "read_committed",
        }

    def write(self, topic: str, count: int, partitions: int) -> None:
        records = self._session.range(0, count, 1, 2).selectExpr(
            "if(id % 7 = 0, null, encode('k' || id, 'utf-8')) as key",
            "if(id % 11 = 0, null, encode('v' || id, 'utf-8')) as value",
            f"cast(id % {partitions} as int) as partition",
            "transform(array(encode(cast(id as string), 'utf-8'), null),"
            " value -> named_struct('key', 'n', 'value', value)) as headers",
        )
        options = {**self._kafka, "topic": topic, "kafka.compression.type": "zstd"}
        records.write.format("kafka").options(**options).save()

    def read(self, topic: str, limits: dict[str, str]) -> dict[int, list[Row]]:
        options = self._from(topic) | limits
        source: DataFrame = self._session.read.format("kafka").options(**options).load()
        return {partition: sorted(rows) for partition, rows in rows_of(source).items()}

    def stream(self, source: str, target: str) -> list[int]:
        options = {**self._from(source), "maxOffsetsPerTrigger": str(_PER_TRIGGER)}
        records = self._session.readStream.format("kafka").options(**options).load()
        query = (
            records.select("partition", "key", "value", "headers")
            .writeStream.format("kafka")
            .options(**self._kafka, topic=target)
            .option("checkpointLocation", f"{self._folder}/{target}")
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(_TIMEOUT_S), query.status
        return [progress.numInputRows for progress in query.recentProgress]
