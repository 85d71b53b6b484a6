"""A stream of Spark's Kafka connector that runs: what each of its micro-batches has.

with SparkStream(bootstrap, folder) as stream:
    stream.begin("topic")
    stream.wait_for(100)
    stream.batches
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Self

from kit.judges.spark_connector import SparkConnector, rows_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kit.judges.clients import Row

_TIMEOUT_S: Final = 240


class SparkStream(SparkConnector):
    """A session of Spark with one stream; see `SparkConnector`."""

    def __enter__(self) -> Self:
        self.batches: list[dict[int, list[Row]]] = []
        """The committed records of each micro-batch by partition, in the order of the batches."""

        self._serve = _serve
        return super().__enter__()

    def begin(self, topic: str) -> None:
        """Begin to read a topic from its start, or behind what was read with the same folder."""
        self._connection.send(topic)

    def wait_for(self, count: int) -> None:
        """Wait until so many records were read in all.

        Raises:
            RuntimeError: The stream has failed.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while sum(len(rows) for batch in self.batches for rows in batch.values()) < count:
            left_s = deadline - time.monotonic()
            assert self._connection.poll(max(left_s, 0)), f"Spark did not read {count} records"
            found = self._connection.recv()
            if isinstance(found, str):
                raise RuntimeError(found)  # noqa: TRY004  # it is what the stream reports
            self.batches.append(found)


def _serve(connection: Connection, properties: dict[str, Any], bootstrap: str, folder: str) -> None:
    """Send what each micro-batch has, until the other end is closed."""
    from pyspark.sql import SparkSession  # noqa: PLC0415  # only this process needs it

    session = SparkSession.builder.master("local[2]").config(map=properties).getOrCreate()
    gateway: Any = session.sparkContext._gateway  # noqa: SLF001  # the only way to the JVM's process
    options = {
        "kafka.bootstrap.servers": bootstrap,
        "includeHeaders": "true",
        "subscribe": connection.recv(),
        "startingOffsets": "earliest",
        "kafka.isolation.level": "read_committed",
    }
    query = (
        session.readStream.format("kafka")
        .options(**options)
        .load()
        .writeStream.foreachBatch(lambda batch, _: connection.send(rows_of(batch)))
        .option("checkpointLocation", f"{folder}/checkpoint")
        .start()
    )
    while not connection.poll(0.1):  # the end of the connection is an event too
        if (failure := query.exception()) is not None:
            connection.send(str(failure))
            break
    query.stop()
    session.stop()
    gateway.proc.communicate()  # the JVM ends with its standard input
