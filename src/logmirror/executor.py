"""The composition root of an executor, and the process from which Spark forks its Python workers.

Spark starts this module by name (`spark.python.daemon.module`) and forks a worker for each slot.
What slices need is loaded and compiled here, once, so a worker starts in milliseconds and shares
the memory, where it would otherwise take two CPU-seconds, again after every crash of one. The
driver names `execute` and never imports it.
"""

from __future__ import annotations

import functools
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.daemon import manager

from logmirror.cluster.client import ClusterClient
from logmirror.mirror.kafka_source import FetchBuffer, KafkaSource
from logmirror.mirror.transfer import Transfer
from logmirror.stores.filesystem import FilesystemStore
from logmirror.wire.columns import SCHEMA
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.encode import encode_batches
from logmirror.wire.scan import BatchScanner

if TYPE_CHECKING:
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.mirror.ports import SliceResult, Work


@functools.cache
def _client(settings: ConnectionSettings, _process: int) -> ClusterClient:
    return ClusterClient(settings)


@functools.cache
def _tools(_process: int) -> tuple[FetchBuffer, BatchScanner, RecordDecoder]:
    return FetchBuffer(), BatchScanner(), RecordDecoder()


def execute(work: Work) -> SliceResult:
    """Carry one piece of work out in this process. Never raises a LogmirrorError.

    Connections, buffers and decoders stay for the next one.
    """
    process = os.getpid()  # a forked worker must not share its parent's sockets
    buffer, scanner, decoder = _tools(process)
    source = KafkaSource(
        _client(work.source, process),
        work.slice.flow.source,
        topic_id=work.slice.topic_id,
        buffer=buffer,
        scanner=scanner,
    )
    store = FilesystemStore(Path(work.archive.root), writer_id=work.writer_id)
    return Transfer(work, source, store, decoder).run()


def warm_up() -> None:
    """Load and compile in this process what the first slice would otherwise wait for."""
    _, scanner, decoder = _tools(os.getpid())
    stamps = pa.array([0], pa.timestamp("ms", "UTC"))
    columns = [pa.array([b"k"], pa.binary()), pa.array([b"v"], pa.binary())]
    columns += [pa.array(["t"]), pa.array([0], pa.int32()), pa.array([0]), stamps]
    columns += [pa.array([0], pa.int32()), pa.array([[]], SCHEMA.field("headers").type)]
    batch = encode_batches(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    batches = scanner.scan(batch, len(batch))
    for rows in decoder.decode(batch, batches, first=0, end=1):
        rows.to_arrow("t", 0)


def main() -> None:
    """Load, then serve Spark until it hangs up."""
    warm_up()
    gc.collect()
    gc.freeze()  # what is loaded stays shared: a worker's collector must not touch its pages
    manager()


if __name__ == "__main__":
    main()
