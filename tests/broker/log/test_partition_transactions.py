"""Goal: a reader of committed records gets them all, and none of an open or aborted transaction.

Method: random histories of several producers on a real log with small segments. A reader follows
Kafka's rules for clients; a model knows each transaction's outcome. The log is opened again from
its files, with and without the snapshot, and must know the same.
"""

from __future__ import annotations

import os
import random
import zlib
from typing import TYPE_CHECKING

import pytest

from kit.runs.small_logs import append_batch, flush, open_log
from logmirror.broker.log.partition_transactions import Marker, PartitionTransactions
from logmirror.broker.log.producer_state import ProducerState, RefusedSequenceError
from logmirror.broker.log.reading import ColdSegmentError
from logmirror.errors import CorruptionError
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.records import Record, decode_reference, encode_marker, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logmirror.broker.log.durable_ends import DurableEnd
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import FileRange


def _open(folder: Path, durable: DurableEnd | None = None) -> PartitionLog:
    return open_log(folder, segment_bytes=700, durable=durable)


class History:
    """What producers did, and what a reader of committed records must get."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.log = _open(folder)
        self.chance = random.Random(seed)
        self.sequences: dict[int, int] = {}
        self.open: dict[int, list[int]] = {}
        self.hidden: set[int] = set()
        self.aborted: list[tuple[int, int, int]] = []

    def write(self, producer_id: int, *, transactional: bool = True, count: int = 2) -> int:
        """Append a batch."""
        first = self.sequences.get(producer_id, 0)
        records = [Record(n, 1000, 0, None, b"%d" % producer_id, ()) for n in range(count)]
        batch = encode_reference(
            records,
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=first,
            transactional=transactional,
        )
        offset = append_batch(self.log, batch)
        self.sequences[producer_id] = first + count
        if transactional:
            self.open.setdefault(producer_id, []).extend(range(offset, offset + count))
        return offset

    def end(self, producer_id: int, *, is_commit: bool) -> int:
        """Append a marker."""
        offset = self.log.append_marker(Marker(producer_id, 0, is_commit, 0), 1000)
        self.hidden.add(offset)
        offsets = self.open.pop(producer_id, None)
        if offsets and not is_commit:
            self.hidden.update(offsets)
            self.aborted.append((producer_id, offsets[0], offset))
        return offset

    def random_step(self) -> None:
        """Do anything."""
        producer_id = self.chance.randrange(4)
        if producer_id == 0:
            self.write(0, transactional=False)
        elif self.chance.random() < 0.6:
            self.write(producer_id)
        else:
            self.end(producer_id, is_commit=self.chance.random() < 0.5)
        if self.chance.random() < 0.5:
            flush(self.log)

    def visible(self) -> list[int]:
        """Return the offsets of the committed records below the last stable offset."""
        end = min((offsets[0] for offsets in self.open.values()), default=self.log.log_end)
        return [offset for offset in range(end) if offset not in self.hidden]


def _batches(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield producer ID, attributes and bytes of each batch."""
    at = 0
    while at < len(data):
        size = 12 + int.from_bytes(data[at + 8 : at + 12])
        batch = data[at : at + size]
        yield int.from_bytes(batch[43:51], signed=True), batch[22], batch
        at += size


def _committed(log: PartitionLog, max_bytes: int) -> list[int]:
    """Read all committed records, as a consumer does, one response after the other."""
    found: list[int] = []
    offset = log.log_start
    while offset < log.last_stable_offset:
        try:
            ranges, listed = log.read_committed(offset, max_bytes, at_least_one=True)
        except ColdSegmentError as cold:
            log._cache.loaded(cold.segment)  # noqa: SLF001  # what the fetch handler does
            continue
        aborted = sorted(listed, key=lambda one: one.first_offset)
        skipped: set[int] = set()
        for producer_id, attributes, batch in _batches(_bytes(ranges)):
            last = int.from_bytes(batch[:8]) + int.from_bytes(batch[23:27])
            while aborted and aborted[0].first_offset <= last:
                skipped.add(aborted.pop(0).producer_id)
            if attributes & 32:
                skipped.discard(producer_id)
            elif not (attributes & 16 and producer_id in skipped):
                records = decode_reference(batch)
                found += [record.offset for record in records if record.offset >= offset]
            offset = last + 1
    return found


def _bytes(ranges: list[FileRange]) -> bytes:
    assert ranges, "no progress"
    return b"".join(os.pread(r.file.fd, r.size_bytes, r.position) for r in ranges)


@pytest.mark.parametrize("seed", range(12))
def test_a_reader_gets_what_was_committed_and_a_restart_changes_nothing(tmp_path, seed):
    folder = tmp_path / "t" / "0"
    history = History(folder, seed)
    stable = 0
    for _ in range(60):
        history.random_step()
        assert stable <= history.log.last_stable_offset <= history.log.high_watermark
        stable = history.log.last_stable_offset
    flush(history.log)
    state = history.log.producers.to_bytes(0)
    assert len(list(folder.glob("*.batches"))) > 3

    for max_bytes in (1, 400, 10**6):
        assert _committed(history.log, max_bytes) == history.visible()
    assert _committed(_open(folder), 400) == history.visible()
    durable = history.log.durable_end() if seed % 2 else None
    for snapshot in folder.glob(".*.producers"):
        snapshot.unlink()
    again = _open(folder, durable)
    assert again.producers.to_bytes(0) == state
    assert _committed(again, 400) == history.visible()


def test_the_last_stable_offset_moves_when_the_marker_is_durable(tmp_path):
    history = History(tmp_path / "t" / "0")
    history.write(0, transactional=False)
    history.write(1)
    flush(history.log)
    assert (history.log.last_stable_offset, history.log.high_watermark) == (2, 4)

    history.end(1, is_commit=True)
    history.write(2)
    assert history.log.last_stable_offset == 2
    flush(history.log)

    assert (history.log.last_stable_offset, history.log.high_watermark) == (5, 7)


def test_a_marker_without_a_transaction_takes_an_offset_and_ends_nothing(tmp_path):
    history = History(tmp_path / "t" / "0")
    history.write(1)
    history.end(2, is_commit=False)
    history.end(3, is_commit=True)
    flush(history.log)

    assert history.log.last_stable_offset == 0
    assert history.log.producers.transactions.aborted_between(0, 10) == []


def test_a_plain_batch_of_a_producer_with_a_transaction_is_refused(tmp_path):
    history = History(tmp_path / "t" / "0")
    history.write(1)
    state = history.log.producers

    with pytest.raises(RefusedSequenceError, match="INVALID_TXN_STATE"):
        state.find_duplicate(1, 0, 2, 1)
    assert state.find_duplicate(1, 0, 2, 1, is_transactional=True) is None
    history.end(1, is_commit=True)
    assert state.find_duplicate(1, 0, 2, 1) is None


def test_aborted_transactions_are_forgotten_with_their_records(tmp_path):
    history = History(tmp_path / "t" / "0")
    for _ in range(10):
        history.write(1)
        history.end(1, is_commit=False)
    flush(history.log)
    transactions = history.log.producers.transactions
    assert len(transactions.aborted_between(0, 30)) == 10

    history.log.advance_start(14)

    assert [one.last_offset for one in transactions.aborted_between(0, 30)] == [
        14,
        17,
        20,
        23,
        26,
        29,
    ]
    assert _committed(history.log, 10**6) == []


def test_a_response_lists_only_what_overlaps_it(tmp_path):
    history = History(tmp_path / "t" / "0")
    for _ in range(500):
        history.write(1)
        history.end(1, is_commit=False)
    flush(history.log)

    _, few = history.log.read_committed(history.log.log_end - 3, 100, at_least_one=True)
    assert len(few) == 1
    while True:
        try:
            _, some = history.log.read_committed(0, 400, at_least_one=True)
            break
        except ColdSegmentError as cold:
            history.log._cache.loaded(cold.segment)  # noqa: SLF001  # what the fetch handler does
    assert 1 < len(some) < 20


def test_a_snapshot_without_transactions_is_read(tmp_path):
    state = ProducerState()
    whole = state.to_bytes(7)
    empty = PartitionTransactions().to_bytes()
    older = _with_magic(whole[: len(whole) - len(empty)], b"LMP2")

    assert ProducerState.from_bytes(older, 7).to_bytes(7) == whole
    with pytest.raises(CorruptionError, match="another size"):
        ProducerState.from_bytes(_with_magic(whole + b"\0", b"LMP3"), 7)


def _with_magic(snapshot: bytes, magic: bytes) -> bytes:
    return magic + zlib.crc32(snapshot[8:]).to_bytes(4) + snapshot[8:]


def test_a_transaction_outlives_the_loss_of_the_recorded_end(tmp_path):
    """A power loss before the end of a new log is durable: its segments are no archive's."""
    history = History(tmp_path / "t" / "0")
    history.write(1)
    for _ in range(20):
        history.write(0, transactional=False)
    flush(history.log)
    state = history.log.producers.to_bytes(0)

    first = _open(history.log.folder)
    second = _open(history.log.folder, first.durable_end())

    assert len(second.segments) > 2
    assert [log.last_stable_offset for log in (first, second)] == [0, 0]
    assert second.producers.to_bytes(0) == state


def test_transactions_of_an_archive_end_with_it(tmp_path, caplog):
    folder = tmp_path / "t" / "0"
    folder.mkdir(parents=True)
    fields = {"producer_epoch": 0, "base_sequence": 0, "transactional": True}
    parts = [
        encode_reference([Record(0, 1, 0, None, b"aborted", ())], producer_id=1, **fields),
        encode_reference([Record(1, 1, 0, None, b"open", ())], producer_id=2, **fields),
        encode_marker(MarkerType.ABORT, offset=2, producer_id=1, producer_epoch=0),
    ]
    (folder / f"{0:020d}-{2:020d}.batches").write_bytes(b"".join(parts))

    log = _open(folder)

    assert log.last_stable_offset == log.high_watermark == 3
    assert _committed(log, 10**6) == [1]
    assert "the archive ends inside 1 transactions" in caplog.text
