"""The load of a torture: a thread that produces to the source, and a reader of topics."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, Final, Self

from logmirror.clock import SYSTEM_CLOCK, Chooser
from logmirror.cluster.client import EARLIEST, LATEST, ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import LogmirrorError, PositionError, UnavailableError
from logmirror.model import TimestampType, TopicPartition
from logmirror.simulation.reading import read_batches
from logmirror.testing.checker import Row
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logmirror.cluster.produce import ProducePipeline

_EVERY_MS: Final = 50
_AFTER_ERROR_MS: Final = 200
_PAUSE_S: Final = 120
_TRANSACTIONS: Final = 0.1
_COMMITTED: Final = 0.6
"""Shares of the writes that are transactions, and of the transactions that commit."""

_BETWEEN: Final = 0.5
"""Share of the batches of a transaction that are followed by one of no transaction."""

_TRANSACTIONAL_ID: Final = "feeder"
_VIEW_BYTES: Final = 1 << 20
_KEYS: Final = (None, b"", b"a", b"b")
_HEADERS: Final = ((), ((b"h", None),), ((b"h", b""), (b"h", b"1")), ((b"a", b"\xff"),))
_NUMBER: Final = b"n"
"""Header with the number of a record without a value; other values begin with it."""


class RecordMaker:
    """Makes records, each of which `number_of` identifies.

    Args:
        seed: Determines the records.
        first: The number of the first one.
    """

    def __init__(self, seed: str, first: int = 1) -> None:
        self._chooser = Chooser(seed)
        self._next = first

    def batch(self, size_max: int = 8) -> list[Record]:
        """Return 1 to `size_max` records with the offsets 0, 1, ..."""
        now_ms, chooser = SYSTEM_CLOCK.now_ms(), self._chooser
        records = []
        for offset in range(chooser.randint(1, size_max)):
            number = self._next
            self._next += 1
            value = b"%d:%b" % (number, b"x" * chooser.randrange(200))
            headers: tuple[tuple[bytes, bytes | None], ...] = chooser.choice(_HEADERS)
            is_tombstone = number % 17 == 0
            if is_tombstone:
                headers = (*headers, (_NUMBER, b"%d" % number))
            records.append(
                Record(
                    offset,
                    now_ms,
                    TimestampType.CREATE_TIME,
                    chooser.choice(_KEYS),
                    None if is_tombstone else value,
                    headers,
                )
            )
        return records


def number_of(row: Row) -> int:
    """Return the number of a record of a `RecordMaker`; -1 if it is of another producer."""
    found = next((value for name, value in row.headers if name == _NUMBER), row.value)
    digits = (found or b"").partition(b":")[0]
    return int(digits) if digits.isdigit() else -1


def placed(records: Sequence[Record], base_offset: int) -> dict[int, Row]:
    """Return records as rows, by the offsets that they have in a log."""
    return {
        base_offset + record.offset: Row(*record)._replace(offset=base_offset + record.offset)
        for record in records
    }


class Feeder:
    """Produces until the block ends; each record is unique.

    Args:
        bootstrap: Address of the source broker, without a proxy.
        topic: Created on entry.
        partitions: Its number of partitions.
        seed: Determines the records.

    Attributes:
        transacts: Whether some writes to the first partition are transactions.
        acknowledged: The acknowledged records, by partition and offset: those in no transaction,
            and those of transactions whose commit was acknowledged.
        aborted: The records of transactions whose abort was acknowledged, in the same form.
    """

    def __init__(self, bootstrap: str, topic: str, partitions: int, seed: int) -> None:
        self._settings = connection_settings(bootstrap)
        self._partitions = [TopicPartition(topic, number) for number in range(partitions)]
        self._chooser = Chooser(f"feeder {seed}")
        self._maker = RecordMaker(f"records {seed}")
        self._may_run, self._is_idle, self._stop = (threading.Event() for _ in range(3))
        self._may_run.set()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self.transacts = False
        self.acknowledged: dict[int, dict[int, Row]] = {n: {} for n in range(partitions)}
        self.aborted: dict[int, dict[int, Row]] = {n: {} for n in range(partitions)}

    def __enter__(self) -> Self:
        with ClusterClient(self._settings) as client:
            client.admin.create_topic(
                self._partitions[0].topic, partition_count=len(self._partitions)
            )
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:
            self._stop.set()  # the thread may wait for a broker that does not respond
        else:
            self.stop()

    def stop(self) -> None:
        """Stop producing, and leave no transaction open."""
        self._stop.set()
        self._may_run.set()
        self._thread.join()

    def pause(self) -> None:
        """Stop until `resume`; returns when nothing is in flight and no transaction is open.

        Raises:
            UnavailableError: The source did not respond in time.
        """
        self._is_idle.clear()
        self._may_run.clear()
        if not self._is_idle.wait(_PAUSE_S):
            raise UnavailableError("the source did not respond to the producer of the torture")

    def resume(self) -> None:
        """Continue after `pause`."""
        self._may_run.set()

    @property
    def count(self) -> int:
        """Number of acknowledged records."""
        return sum(len(rows) for rows in self.acknowledged.values())

    def _feed(self) -> None:
        with ClusterClient(self._settings) as client, _Writes(client) as writes:
            while not self._stop.is_set():
                if not self._may_run.is_set():
                    if writes.leave_no_transaction():
                        self._is_idle.set()
                        self._may_run.wait()
                    continue
                pause_ms = _EVERY_MS
                try:
                    if self.transacts and self._chooser.random() < _TRANSACTIONS:
                        self._transact(writes)
                    else:
                        self._write(self._chooser.choice(self._partitions), writes)
                except LogmirrorError:
                    pause_ms = _AFTER_ERROR_MS
                SYSTEM_CLOCK.sleep_ms(pause_ms)
            writes.leave_no_transaction()

    def _transact(self, writes: _Writes) -> None:
        """Write some batches in one transaction, with others between them, and end it."""
        where, is_committed = self._partitions[0], self._chooser.random() < _COMMITTED
        written = []
        with writes.transaction(where, commit=is_committed) as append:
            for _ in range(self._chooser.randint(1, 4)):
                records = self._maker.batch()
                written.append((append(records), records))
                if self._chooser.random() < _BETWEEN:
                    self._write(where, writes)
        for base, records in written:
            self._keep(self.acknowledged if is_committed else self.aborted, where, base, records)

    def _write(self, where: TopicPartition, writes: _Writes) -> None:
        records = self._maker.batch()
        self._keep(self.acknowledged, where, writes.append(where, records), records)

    @staticmethod
    def _keep(
        kept: dict[int, dict[int, Row]], where: TopicPartition, base: int, records: list[Record]
    ) -> None:
        kept[where.partition] |= placed(records, base)


class _Writes:
    """One producer without transactions, and one with. After an error it can be used again."""

    def __init__(self, client: ClusterClient) -> None:
        self._plain = client.pipeline()
        self._transactional = client.pipeline(transactional_id=_TRANSACTIONAL_ID)
        self._producer = client.transactional_producer(_TRANSACTIONAL_ID)
        self._may_be_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._plain.close()
        self._transactional.close()

    def append(self, where: TopicPartition, records: list[Record]) -> int:
        """Write one batch outside transactions; returns its base offset."""
        return _append(self._plain, where, encode_reference(records))

    @contextlib.contextmanager
    def transaction(
        self, where: TopicPartition, *, commit: bool
    ) -> Iterator[Callable[[list[Record]], int]]:
        """Yield a function that appends a batch, and end the transaction after the block."""
        self._may_be_open = True
        identity = self._producer.init()
        self._producer.add_partitions([where])
        sequence = itertools.count()

        def append(records: list[Record]) -> int:
            first, *_ = [next(sequence) for _ in records]
            batch = encode_reference(
                records,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                base_sequence=first,
                transactional=True,
            )
            return _append(self._transactional, where, batch)

        yield append
        self._producer.end(commit=commit)
        self._may_be_open = False

    def leave_no_transaction(self) -> bool:
        """Abort the transaction that an error may have left open; False if that failed."""
        with contextlib.suppress(LogmirrorError):
            if self._may_be_open:
                self._producer.init()
            self._may_be_open = False
        return not self._may_be_open


def _append(pipeline: ProducePipeline, where: TopicPartition, batch: bytes) -> int:
    pipeline.send([(where, memoryview(bytearray(batch)))])
    (response,) = pipeline.collect(block=True)
    if response.error is not None:
        raise response.error
    return response.base_offset


def write_until(  # noqa: PLR0913, PLR0917  # where to, how far, and what
    bootstrap: str, topic: str, partition: int, end: int, maker: RecordMaker, size_max: int
) -> dict[int, Row]:
    """Write batches until the log is longer than `end`.

    Args:
        bootstrap: Address of the broker.
        topic: The topic.
        partition: The partition.
        end: The offset to write, and a little more.
        maker: Makes the records.
        size_max: The largest number of records of a batch.

    Returns:
        The written records, by offset.

    Raises:
        LogmirrorError: A batch was not acknowledged.
    """
    where = TopicPartition(topic, partition)
    written: dict[int, Row] = {}
    with ClusterClient(connection_settings(bootstrap)) as client, client.pipeline() as pipeline:
        while max(written, default=-1) < end:
            records = maker.batch(size_max)
            written |= placed(records, _append(pipeline, where, encode_reference(records)))
    return written


def read_topic(bootstrap: str, topic: str, partition: int) -> list[Row]:
    """Return all committed records of a partition, decoded without the compiled kernels.

    Returns an empty list for a topic that does not exist: no mirror has created it yet.
    """
    with ClusterClient(connection_settings(bootstrap)) as client:
        try:
            return read_batches(_batches(client, TopicPartition(topic, partition)))
        except NotFoundError:
            return []


def end_of(bootstrap: str, topic: str, partition: int) -> int:
    """Return the last stable offset of a partition; 0 for a topic that does not exist."""
    where = TopicPartition(topic, partition)
    with ClusterClient(connection_settings(bootstrap)) as client:
        try:
            return client.list_offsets([where], LATEST)[where]
        except NotFoundError:
            return 0


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
