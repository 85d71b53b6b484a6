"""The producers of `placed_logs`: one of plain batches, and one of transactions."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.runs.placed_known import (
    ABORT,
    BATCH,
    COMMIT,
    COORDINATOR_EPOCH,
    PLAIN,
    TRANSACTIONAL,
    Entry,
    Known,
)
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.partition_transactions import Marker
from logmirror.broker.log.reading import StorageError
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from kit.fakes.places import Power
    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.partition_log import PartitionLog

_KEYS = (None, b"a", b"b", b"c")


@dataclass
class Writer:
    """Appends to a partition, at any pace.

    Attributes:
        number: The partition.
        log: Its log.
        known: What is known of it.
        commits: Flushes it.
        power: Of this life.
        chance: Decides.
        may_fail: Whether a disk that it needs has failed.
    """

    number: int
    log: PartitionLog
    known: Known
    commits: GroupCommit
    power: Power
    chance: random.Random
    may_fail: Callable[[], bool] = lambda: False

    async def write(self, count: int) -> None:
        """Append batches of both producers, and markers; ends if the topic is deleted."""
        for _ in range(count):
            if self.log.failure is not None:
                return
            try:
                self._write_some()
            except StorageError:
                if not self.may_fail():
                    raise
            await asyncio.sleep(self.chance.choice([0, 0, 0, 0.001, 0.003]))

    def _write_some(self) -> None:
        kind = self.chance.random()
        if kind < 0.65:
            self.append(PLAIN)
        elif kind < 0.85 or not self.is_in_transaction:
            self.append(TRANSACTIONAL)
        else:
            self.end_transaction()

    @property
    def is_in_transaction(self) -> bool:
        """Whether the second producer has a transaction."""
        return self.log.producers.transactions.start_of(TRANSACTIONAL) is not None

    def append(self, producer: int) -> None:
        """Append a batch."""
        sequence = self.known.next_sequence(producer)
        name = b"%d %d %d" % (self.known.generation, self.number, producer)
        entries = [
            Entry(producer, one, self.chance.choice(_KEYS), b"%s %d" % (name, one) + b"." * 40)
            for one in range(sequence, sequence + BATCH)
        ]
        records = [Record(n, 1_000 + n, 0, one.key, one.value, ()) for n, one in enumerate(entries)]
        fields = {"producer_id": producer, "producer_epoch": 0, "base_sequence": sequence}
        is_transactional = producer == TRANSACTIONAL
        encoded = encode_reference(records, transactional=is_transactional, **fields)
        batch = memoryview(bytearray(encoded))
        with self._noted(entries):
            self.log.append(batch, check_batch(batch, max_bytes=10_000))
        self._follow(entries)

    def end_transaction(self) -> None:
        """Append a marker."""
        is_commit = self.chance.random() < 0.5
        entries = [Entry(TRANSACTIONAL, -1, None, COMMIT if is_commit else ABORT)]
        with self._noted(entries):
            marker = Marker(TRANSACTIONAL, 0, is_commit, COORDINATOR_EPOCH)
            self.log.append_marker(marker, 1_000)
        self._follow(entries)

    @contextlib.contextmanager
    def _noted(self, entries: list[Entry]) -> Iterator[None]:
        """Note what may be there: the power may fail within the append; a disk changes nothing."""
        known, places = self.known, dict(enumerate(entries, self.log.log_end))
        for offset, entry in places.items():
            known.appended.setdefault(offset, set()).add(entry)
        try:
            yield
        except StorageError:
            for offset, entry in places.items():
                known.appended[offset].remove(entry)
                if not known.appended[offset]:
                    del known.appended[offset]
                if not entry.is_marker:
                    known.sequences[entry.producer] -= 1
            raise

    def _follow(self, entries: list[Entry]) -> None:
        """Note what is acknowledged, when it is."""
        log, end = self.log, self.log.log_end

        def done(failure: object) -> None:
            if failure is None and not self.power.is_off:
                self.known.acked |= dict(enumerate(entries, end - len(entries)))

        log.when_durable(end, done)
        self.commits.schedule(log)
