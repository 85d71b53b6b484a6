"""Goal: producer states of all partitions have one limit, and the oldest write is dropped first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.judges.partition_client import data_batch
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.log.producer_limit import ProducerLimit
from logmirror.broker.log.producer_state import ProducerState, SequencedBatch
from logmirror.broker.log.segment_cache import SegmentCache

if TYPE_CHECKING:
    import pytest


def _store(state: ProducerState, producer_id: int, sequence: int = 0) -> None:
    state.stored(producer_id, 0, SequencedBatch(sequence, sequence, 0, 0, 0))


def _ids(state: ProducerState) -> list[int]:
    return [producer_id for producer_id, _ in state.items()]


def _two(max_producers: int) -> tuple[ProducerLimit, ProducerState, ProducerState]:
    limit, first, second = ProducerLimit(max_producers), ProducerState(), ProducerState()
    first.share(limit)
    second.share(limit)
    return limit, first, second


def test_the_producer_with_the_oldest_write_is_dropped_in_whatever_partition():
    _, first, second = _two(3)
    _store(first, 1)
    _store(second, 1)
    _store(first, 2)
    _store(first, 1, 1)

    _store(second, 9)

    assert _ids(first) == [2, 1]
    assert _ids(second) == [9]


def test_recovered_producers_count():
    recovered = ProducerState()
    for producer_id in range(5):
        _store(recovered, producer_id)

    limit = ProducerLimit(3)
    recovered.share(limit)

    assert _ids(recovered) == [2, 3, 4]
    assert len(limit) == 3


def test_a_deleted_topic_makes_room():
    limit, first, second = _two(2)
    _store(first, 1)
    _store(second, 2)

    first.clear()
    _store(second, 3)

    assert _ids(second) == [2, 3]
    assert len(limit) == 2


def test_the_limit_of_a_partition_makes_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("logmirror.broker.log.producer_state.MAX_PRODUCERS", 2)
    limit, first, second = _two(10)
    for producer_id in range(5):
        _store(first, producer_id)
    _store(second, 7)

    assert _ids(first) == [3, 4]
    assert len(limit) == 3


def test_a_segment_is_sealed_only_once_it_is_as_large_as_its_producers_snapshot(tmp_path):
    disk, producers = Disk(), 50
    log = PartitionLog(
        tmp_path / "t" / "0", disk=disk, cache=SegmentCache(disk), segment_bytes=1024
    )
    written = 0
    for number in range(20 * producers):
        producer_id, sequence = number % producers, number // producers
        batch = memoryview(
            bytearray(data_batch(1, producer_id=producer_id, epoch=0, sequence=sequence))
        )
        log.append(batch, check_batch(batch, max_bytes=10**6))
        written += len(batch)
    job = log.begin_sync()
    assert job is not None

    assert len(job.seals) > 2
    assert sum(len(seal.snapshot) for seal in job.seals) <= written
