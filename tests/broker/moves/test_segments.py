"""Goal: a partition keeps its offsets and its settings, whatever its segments are like.

Method: a real broker. The names of tests are those of the statements of moves.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, NONE, fill
from kit.judges.partition_client import EARLIEST, Appended, data_batch
from kit.runs.cleaning import set_config
from kit.runs.commands import wait_until
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.segment import Segment
from logmirror.broker.moves.upload import SegmentUpload
from logmirror.errors import UsageError
from logmirror.stores.filesystem import FilesystemStore
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from kit.judges.partition_client import PartitionClient


def sealed(place: Path) -> dict[str, int]:
    """The names and sizes of the sealed segments of `t` in a directory."""
    return {path.name: path.stat().st_size for path in (place / "t" / "0").glob("[0-9]*.batches")}


@pytest.mark.gate("a thousand segments")
@pytest.mark.move("E44")
def test_e44_a_thousand_segments_need_few_open_files(dirs):
    dirs.create("t", segment_bytes="1024")
    fill(dirs, "t", 1_000)
    assert len(sealed(dirs.a)) >= 999
    files = Path(f"/proc/{dirs.broker.pid}/fd")
    with dirs.client() as client:
        before, found = len(list(files.iterdir())), list[int]()
        assert client.move_one("t", dirs.b) == NONE
        copied = set[int]()
        while [*client.where("t")] != [str(dirs.b)]:
            found.append(len(list(files.iterdir())))
            copied.add(client.where("t")[str(dirs.b)].size_bytes // (100 * len(BATCH)))
    assert len(copied) >= 5, "counted at few steps of the move"
    assert max(found) < before + 40
    assert len(sealed(dirs.b)) >= 999
    with dirs.partition("t") as partition:
        assert partition.list_offset(EARLIEST)[2] == 0
        assert partition.produce(BATCH) == Appended(0, 100_000)


@pytest.mark.move("E39")
def test_e39_a_gap_at_the_end_of_a_compacted_partition_stays(dirs):
    """Records of an aborted transaction, which compaction has removed."""
    dirs.create("t", cleanup_policy="compact", min_cleanable_dirty_ratio="0", segment_ms="300")
    at = {"bootstrap.servers": dirs.bootstrap}
    plain, aborted = Producer(at), Producer({**at, "transactional.id": "t"})
    for number in range(100):
        plain.produce("t", key=b"%d" % number, value=bytes(100))
    assert plain.flush(30) == 0
    aborted.init_transactions(30)
    aborted.begin_transaction()
    for number in range(100):
        aborted.produce("t", key=b"%d" % number, value=b"aborted")
    aborted.flush(30)
    aborted.abort_transaction(30)
    with dirs.partition("t") as partition:
        end = partition.log_end
        wait_until(
            lambda: b"aborted" not in {value for _, value in contents(partition)},
            what=lambda: f"compaction: {contents(partition)[-3:]}",
            timeout_s=60,
        )
        before = contents(partition)
        assert (before[-1][0], end) == (99, 201), "a gap of 100 records and the marker"
        for target in (dirs.b, dirs.a):
            dirs.move("t", target)
            assert partition.log_end == end
            assert contents(partition) == before
        dirs.broker.kill()
        dirs.broker.start()
    with dirs.partition("t") as partition:
        assert partition.log_end == end
        keyed = encode_reference([Record(0, 1_700_000_000_000, 0, b"k", b"v", ())])
        assert partition.produce(keyed) == Appended(0, end)


@pytest.mark.move("E66")
def test_e66_a_segment_size_that_changes_during_a_move_applies_to_both_sides(dirs):
    dirs.create("t", segment_bytes="60000")
    fill(dirs, "t")
    dirs.limit(1)

    def write(partition: PartitionClient, begin: int) -> None:
        for number in range(begin, begin + 20):
            assert partition.produce(BATCH) == Appended(0, 100 * number)

    with dirs.client() as client, dirs.partition("t") as partition:
        assert client.move_one("t", dirs.b) == NONE
        large = sealed(dirs.a)
        assert min(large.values()) > 20 * len(BATCH)
        most = 4 * len(BATCH)
        set_config(dirs.bootstrap, "t", "segment.bytes", str(most))
        write(partition, 60)
        small = {name: size for name, size in sealed(dirs.a).items() if name not in large}
        assert len([size for size in small.values() if size <= most]) >= 4
        assert client.where("t")[str(dirs.b)].is_future
        dirs.limit(None)
        dirs.wait_in("t", dirs.b)
        assert sealed(dirs.b).items() >= {**large, **small}.items()
        write(partition, 80)
        assert [offset for offset, _ in contents(partition)] == [*range(10_000)]
    after = {name: size for name, size in sealed(dirs.b).items() if name not in {**large, **small}}
    assert max(after.values()) <= most
    assert len(after) >= 4


@pytest.mark.move("E63")
def test_e63_a_response_that_is_being_sent_outlives_the_old_files(dirs):
    dirs.create("t", segment_bytes="1000000")
    producer = Producer({"bootstrap.servers": dirs.bootstrap, "batch.size": 100_000})
    for number in range(20):
        producer.produce("t", random.Random(number).randbytes(900_000))
        assert producer.flush(60) == 0
    with dirs.partition("t") as slow, dirs.partition("t") as other:
        expected = other.fetch(0).records
        assert len(expected) > 18_000_000  # more than the sockets take
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        receive = slow.receive_frame

        def move_first() -> bytes:
            dirs.move("t", dirs.b)
            dirs.wait_clean("t", "b/0")
            assert not list((dirs.a / "t").glob("0*"))
            return receive()

        slow.receive_frame = move_first
        assert slow.fetch(0).records == expected


def test_a_segment_with_offset_gaps_does_not_go_to_a_bucket(tmp_path):
    store = FilesystemStore(tmp_path / "store", writer_id="w")
    first = data_batch(5)
    second = b"\0" * 7 + b"\7" + first[8:]  # from offset 7; the checksum does not cover that

    def upload(content: bytes, last: int) -> SegmentUpload:
        segment = Segment(tmp_path, 0, last, len(content), is_exact=False)
        segment.path.write_bytes(content)
        return SegmentUpload(store, Disk(), segment, "t@x/0", "")

    with pytest.raises(UsageError, match="offset gaps"):
        upload(first + second, 12)
    with pytest.raises(UsageError, match="offset gaps"):
        upload(first, 6)
    found = upload(first, 5)  # not known after a power loss: it is read
    assert found.append(len(first), 1) == len(first)
