"""The load of a torture: a thread that produces to the source, and a reader of topics."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final, Self

from logmirror.clock import SYSTEM_CLOCK, Chooser
from logmirror.cluster.client import EARLIEST, ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import LogmirrorError, PositionError
from logmirror.model import TimestampType, TopicPartition
from logmirror.simulation.reading import read_batches
from logmirror.testing.checker import Row
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

_EVERY_MS: Final = 50
_AFTER_ERROR_MS: Final = 200
_VIEW_BYTES: Final = 1 << 20
_KEYS: Final = (None, b"", b"a", b"b")
_HEADERS: Final = ((), ((b"h", None),), ((b"h", b""), (b"h", b"1")), ((b"a", b"\xff"),))


class Feeder:
    """Produces until the block ends; each record is unique.

    Args:
        bootstrap: Address of the source broker, without a proxy.
        topic: Created on entry.
        partitions: Its number of partitions.
        seed: Determines the records.

    Attributes:
        acknowledged: The acknowledged records, by partition and offset.
    """

    def __init__(self, bootstrap: str, topic: str, partitions: int, seed: int) -> None:
        self._settings = connection_settings(bootstrap)
        self._partitions = [TopicPartition(topic, number) for number in range(partitions)]
        self._chooser = Chooser(f"feeder {seed}")
        self._number = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self.acknowledged: dict[int, dict[int, Row]] = {n: {} for n in range(partitions)}

    def __enter__(self) -> Self:
        with ClusterClient(self._settings) as client:
            client.admin.create_topic(
                self._partitions[0].topic, partition_count=len(self._partitions)
            )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop producing."""
        self._stop.set()
        self._thread.join()

    @property
    def count(self) -> int:
        """Number of acknowledged records."""
        return sum(len(rows) for rows in self.acknowledged.values())

    def _feed(self) -> None:
        with ClusterClient(self._settings) as client, client.pipeline() as pipeline:
            while not self._stop.is_set():
                where = self._chooser.choice(self._partitions)
                records = self._records()
                batch = memoryview(bytearray(encode_reference(records)))
                pause_ms = _EVERY_MS
                with contextlib.suppress(LogmirrorError):
                    pipeline.send([(where, batch)])
                    for response in pipeline.collect(block=True):
                        if response.error is None:
                            self._keep(where, response.base_offset, records)
                        else:
                            pause_ms = _AFTER_ERROR_MS
                SYSTEM_CLOCK.sleep_ms(pause_ms)

    def _keep(self, where: TopicPartition, base: int, records: list[Record]) -> None:
        kept = self.acknowledged[where.partition]
        for record in records:
            kept[base + record.offset] = Row(*record)._replace(offset=base + record.offset)

    def _records(self) -> list[Record]:
        now_ms, chooser = SYSTEM_CLOCK.now_ms(), self._chooser
        records = []
        for offset in range(chooser.randint(1, 8)):
            self._number += 1
            value = b"%d:%b" % (self._number, b"x" * chooser.randrange(200))
            records.append(
                Record(
                    offset,
                    now_ms,
                    TimestampType.CREATE_TIME,
                    chooser.choice(_KEYS),
                    None if self._number % 17 == 0 else value,
                    chooser.choice(_HEADERS),
                )
            )
        return records


def read_topic(bootstrap: str, topic: str, partition: int) -> list[Row]:
    """Return all committed records of a partition, decoded without the compiled kernels.

    Returns an empty list for a topic that does not exist: no mirror has created it yet.
    """
    with ClusterClient(connection_settings(bootstrap)) as client:
        try:
            return read_batches(_batches(client, TopicPartition(topic, partition)))
        except NotFoundError:
            return []


def _batches(client: ClusterClient, where: TopicPartition) -> Iterator[bytes]:
    view = memoryview(bytearray(_VIEW_BYTES))
    (offset,) = client.list_offsets([where], EARLIEST).values()
    while True:
        with contextlib.suppress(PositionError):
            response = client.fetch(where, offset, view, topic_id=None, max_wait_ms=0)
            data = _whole(bytes(view[: response.size]))
            if data:
                yield data
                offset = _next_offset(data)
                continue
        return


def _whole(data: bytes) -> bytes:
    """Return the complete batches of a fetch response."""
    at = 0
    while len(data) - at >= 12 and len(data) - at >= (size := _size(data, at)):  # noqa: PLR2004  # base offset and length
        at += size
    return data[:at]


def _size(data: bytes, at: int) -> int:
    return 12 + int.from_bytes(data[at + 8 : at + 12], "big")


def _next_offset(data: bytes) -> int:
    at = last = 0
    while at < len(data):
        base, delta = data[at : at + 8], data[at + 23 : at + 27]
        last = int.from_bytes(base, "big") + int.from_bytes(delta, "big")
        at += _size(data, at)
    return last + 1
