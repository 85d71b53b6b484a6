"""Goal: deleted records never come back, the remaining log is whole, and producer state is kept.

Method: records are deleted from a log that loses power before each of its system calls in turn.
After recovery the log begins at its log start, holds every acknowledged record after it, and has
its producer state. Then a real broker is killed right after its response, and before files are
removed.
"""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kit.fakes.faulty_disk import FaultyDisk, PowerLossError
from kit.judges.clients import rows_by_librdkafka
from kit.judges.partition_client import EARLIEST, Appended, PartitionClient, data_batch
from kit.runs.small_logs import PRODUCER, append_batch, flush, open_log, read
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic, delete_topic
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.partition_transactions import Marker
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog

OUT_OF_ORDER = 45
INVALID_PRODUCER_EPOCH = 47


def _append(log: PartitionLog, number: int) -> None:
    batch = data_batch(2, producer_id=PRODUCER, sequence=number * 2)
    assert append_batch(log, batch) == number * 2


def _remove(disk: Disk, log: PartitionLog) -> None:
    for segment in log.take_deleted():
        disk.unlink(segment.path)


def _offsets(log: PartitionLog) -> list[int]:
    return [record.offset for record in read(log)]


def _last_sequence(log: PartitionLog) -> int:
    return dict(log.producers.items())[PRODUCER].last_sequence


def _workload(disk: Disk, folder: Path, starts: list[int], acked: list[int]) -> None:
    """Append and delete in turn; `starts` gets the log start offsets, as in the database."""
    log = open_log(folder, disk)
    for number in range(30):
        _append(log, number)
        if number % 3 == 2:
            flush(log)
            acked[0] = log.high_watermark
        if number % 7 == 6:
            starts[0] = log.high_watermark - number % 4
            log.advance_start(starts[0])
            _remove(disk, log)


def test_segments_below_the_log_start_are_removed_and_the_rest_is_whole(tmp_path):
    disk, folder = Disk(), tmp_path / "t" / "0"
    starts, acked = [0], [0]
    _workload(disk, folder, starts, acked)

    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".batches")
    assert starts[0] > 40
    assert all(int(name[21:41]) >= starts[0] for name in names)
    again = open_log(folder, log_start=starts[0])
    assert _offsets(again) == list(range(starts[0], 60))
    assert _last_sequence(again) == 59


def test_power_loss_before_any_call_restores_no_deleted_record_and_loses_none(tmp_path):
    whole = FaultyDisk()
    _workload(whole, tmp_path / "whole" / "0", [0], [0])
    assert "unlink" in whole.calls
    for until in range(len(whole.calls)):
        chance = random.Random(until)
        disk = FaultyDisk(power_until=until)
        folder = tmp_path / f"before-{until}" / "0"
        starts, acked = [0], [0]
        with pytest.raises(PowerLossError):
            _workload(disk, folder, starts, acked)
        left = tmp_path / f"after-{until}" / "0"
        disk.after_power_loss(
            folder,
            left,
            keep=lambda size, chance=chance: chance.randint(0, size),
            some=lambda chance=chance: chance.random() < 0.5,
        )

        log = open_log(left, log_start=starts[0])

        assert log.log_start == starts[0]
        assert _offsets(log) == list(range(starts[0], log.log_end))
        assert log.log_end >= acked[0]
        if log.log_end:
            assert _last_sequence(log) == log.log_end - 1
        again = open_log(left, log_start=starts[0])
        assert (again.log_start, again.log_end) == (log.log_start, log.log_end)


def test_files_of_deleted_records_that_a_crash_left_go_at_the_start(tmp_path):
    folder = tmp_path / "t" / "0"
    log = open_log(folder)
    for number in range(20):
        _append(log, number)
    flush(log)
    sealed = sorted(folder.glob("*.batches"))
    assert len(sealed) > 4
    sealed[1].unlink()  # of several that were to go, the file system forgot one

    with pytest.raises(CorruptionError):
        open_log(folder)
    again = open_log(folder, log_start=30)

    assert _offsets(again) == list(range(30, 40))
    assert not sealed[0].exists()
    assert _last_sequence(again) == 39


def test_producers_are_known_although_all_they_wrote_is_deleted(tmp_path):
    folder = tmp_path / "t" / "0"
    log = open_log(folder)
    for number in range(20):
        _append(log, number)
    log.append_marker(Marker(99, 3, is_commit=True, coordinator_epoch=5), 1000)
    flush(log)
    log.advance_start(log.high_watermark)
    _remove(Disk(), log)
    assert not list(folder.glob("*.batches"))
    before = list(log.producers.items())

    for _ in range(2):
        again = open_log(folder, log_start=41)
        assert list(again.producers.items()) == before
        assert _offsets(again) == []


def _forgets_nothing_when_all_is_deleted(folder: Path, log: PartitionLog, end: int) -> bool:
    log.advance_start(end)
    _remove(Disk(), log)
    assert not list(folder.glob("*.batches"))
    return _last_sequence(open_log(folder, log_start=end)) == end - 1


def test_producers_of_segments_that_recovery_sealed_are_known_without_them(tmp_path):
    folder = tmp_path / "t" / "0"
    log = open_log(folder)
    for number in range(20):
        _append(log, number)  # nothing is flushed, so nothing is sealed before the "crash"
    assert len(list(folder.glob(".*.open"))) > 4
    last = max(folder.glob(".*.open"))
    last.write_bytes(b"")  # so that the remaining segment has no producer state
    end = int(last.name[1:21])

    log = open_log(folder)

    assert len(list(folder.glob("*.batches"))) > 4
    assert _forgets_nothing_when_all_is_deleted(folder, log, end)


def test_producers_of_segments_without_a_snapshot_are_known_without_them(tmp_path):
    folder = tmp_path / "t" / "0"
    log = open_log(folder)
    for number in range(20):
        _append(log, number)
    flush(log)
    last = max(folder.glob(".*.open"))
    last.write_bytes(b"")
    end = int(last.name[1:21])
    for snapshot in folder.glob(".*.producers"):
        snapshot.unlink()  # as where the segments came from an archive

    assert _forgets_nothing_when_all_is_deleted(folder, open_log(folder), end)


def test_a_segment_that_is_being_sealed_is_not_removed_before(tmp_path):
    folder = tmp_path / "t" / "0"
    log = open_log(folder)
    _append(log, 0)
    flush(log)
    for number in range(1, 4):
        _append(log, number)
        if len(list(folder.glob(".*.open"))) == 2:
            break
        flush(log)
    assert len(list(folder.glob(".*.open"))) == 2
    log.advance_start(log.high_watermark)

    assert log.take_deleted() == []
    flush(log)
    assert [segment.next_offset for segment in log.take_deleted()] == [log.log_start]
    assert _offsets(log) == list(range(log.log_start, log.log_end))


def test_a_log_that_ends_before_its_start_is_not_opened(tmp_path):
    folder = tmp_path / "t" / "0"
    log = open_log(folder)
    _append(log, 0)
    flush(log)

    assert open_log(folder, log_start=2).log_end == 2
    with pytest.raises(CorruptionError) as raised:
        open_log(folder, log_start=3)

    assert (raised.value.facts["durable_end"], raised.value.facts["offset"]) == (3, 2)


def test_a_file_that_cannot_be_removed_has_no_effect(tmp_path, caplog):
    class Stuck(Disk):
        def unlink(self, path: Path) -> None:
            if path.suffix == ".batches":
                raise PermissionError(path)
            super().unlink(path)

    async def act() -> None:
        with ThreadPoolExecutor(1) as executor:
            disk = Stuck()
            commits = GroupCommit(lambda _: executor, disk)
            log = open_log(tmp_path / "t" / "0", disk)
            for number in range(20):
                _append(log, number)
            flush(log)
            log.advance_start(30)
            commits.remove_deleted(log)
            await commits.wait_removed(log)
            assert _offsets(log) == list(range(30, 40))

    asyncio.run(act())

    assert "deleted segments could not be removed" in caplog.text
    assert _offsets(open_log(tmp_path / "t" / "0", log_start=30)) == list(range(30, 40))
    assert not list((tmp_path / "t" / "0").glob("*0000000000-*.batches"))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(tmp_path / "broker", segment_bytes=2000)
    with broker:
        yield broker


@pytest.mark.gate("repeated kills")
def test_killed_right_after_the_response_the_log_start_is_kept(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    sent = start = 0
    for round_number in range(5):
        with PartitionClient(broker.bootstrap, topic_name) as partition:
            for _ in range(20):
                batch = data_batch(10, producer_id=PRODUCER, sequence=sent)
                assert partition.produce(batch) == Appended(0, sent)
                sent += 10
            start = sent if round_number == 3 else sent - 35
            assert partition.delete_records(start) == (0, start)
        broker.kill()
        broker.start()

        with PartitionClient(broker.bootstrap, topic_name) as partition:
            assert partition.list_offset(EARLIEST)[2] == start
            assert partition.log_end == sent
            assert partition.producers()[PRODUCER].last_sequence == sent - 1
            repeated = data_batch(10, producer_id=PRODUCER, sequence=sent - 10)
            assert partition.produce(repeated) == Appended(0, sent - 10)
            ahead = data_batch(10, producer_id=PRODUCER, sequence=sent + 10)
            assert partition.produce(ahead).error == OUT_OF_ORDER
    rows = list(rows_by_librdkafka(broker.bootstrap, topic_name, start=start))
    assert [row.offset for row in rows] == list(range(start, sent))
    names = {path.name for path in (broker.log_dir / topic_name / "0").glob("*.batches")}
    assert all(int(name[21:41]) >= start for name in names)


def test_a_marker_fences_also_after_a_kill(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    with PartitionClient(broker.bootstrap, topic_name) as partition:
        partition.produce(data_batch(10, producer_id=PRODUCER, sequence=0))
        partition.write_markers((PRODUCER, 1), coordinator_epoch=6)
        before = partition.producers()
    broker.kill()
    broker.start()

    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.producers() == before
        old = data_batch(10, producer_id=PRODUCER, sequence=10)
        assert partition.produce(old).error == INVALID_PRODUCER_EPOCH
        new = data_batch(10, producer_id=PRODUCER, sequence=0, epoch=1)
        assert partition.produce(new) == Appended(0, 11)


def test_a_recreated_topic_begins_at_zero(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    with PartitionClient(broker.bootstrap, topic_name) as partition:
        partition.produce(data_batch(10))
        partition.delete_records(7)
    delete_topic(broker.bootstrap, topic_name)
    create_topic(broker.bootstrap, topic_name, 1, {})
    broker.kill()
    broker.start()

    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.list_offset(EARLIEST)[2] == 0
        assert partition.produce(data_batch(1)) == Appended(0, 0)
