"""Goal: a changed bit in the broker's files stops what it changed, and nothing is served or lost.

Method: a real broker is stopped or killed, a bit is flipped in one of its files, and it starts
again. Independent clients read; a mirror copies from it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.partition_client import EARLIEST, Appended, PartitionClient, data_batch
from kit.runs.commands import mirror
from kit.runs.inline_run import config_text
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.broker.log.file_names import open_path
from logmirror.torture.processes import MirrorProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CORRUPT_MESSAGE = 2
STORAGE = 56
COUNT = 20
BATCH = len(data_batch(10))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(tmp_path / "broker")
    with broker:
        yield broker


def _fill(broker: EmbeddedBroker, topic: str, partitions: int = 2, **config: str) -> Path:
    """Write 200 records to partition 0; returns its open segment."""
    create_topic(broker.bootstrap, topic, partitions, config)
    with PartitionClient(broker.bootstrap, topic) as partition:
        for number in range(COUNT):
            assert partition.produce(data_batch(10)) == Appended(0, number * 10)
    return open_path(broker.log_dir / topic / "0", 0)


def _flip(path: Path, position: int) -> bytes:
    """Flip a bit; returns the file's new content."""
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    return bytes(data)


_MORE = pytest.mark.gate("more places of one fault")


@pytest.mark.statement("T12", "C10")
@pytest.mark.parametrize(
    ("end", "number"),
    [
        ("stop", COUNT - 1),
        ("kill", 3),
        ("kill", COUNT - 1),
        pytest.param("stop", 3, marks=_MORE),
    ],
)
def test_a_flipped_bit_takes_its_partition_offline_and_keeps_every_byte(
    broker, topic_name, end, number
):
    path = _fill(broker, topic_name)
    produce(broker.bootstrap, topic_name, [Message(value=b"x")] * 10, partition=1)
    if end == "stop":
        assert broker.stop() == 0
    else:
        broker.kill()  # directly after the last response
    whole = path.read_bytes()
    damaged = _flip(path, number * BATCH + 100)
    for _ in range(2):
        broker.start()

        with PartitionClient(broker.bootstrap, topic_name) as partition:
            assert partition.produce(data_batch(1)).error == STORAGE
            assert partition.fetch(0).error_code == STORAGE
            assert partition.list_offset(EARLIEST)[0] == STORAGE
        assert len(list(rows_by_librdkafka(broker.bootstrap, topic_name, partition=1))) == 10
        metadata = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=10)
        leaders = {n: p.leader for n, p in metadata.topics[topic_name].partitions.items()}
        assert leaders == {0: -1, 1: 1}
        assert broker.stop() == 0
        assert path.read_bytes() == damaged
    log = broker.log.read_text()
    assert f"path='{path}' position={number * BATCH} offset={number * 10}" in log
    assert f"--accept-data-loss {topic_name}-0" in log

    path.write_bytes(whole)
    broker.start()
    assert len(list(rows_by_librdkafka(broker.bootstrap, topic_name))) == COUNT * 10
    assert produce(broker.bootstrap, topic_name, [Message(value=b"x")]) == [COUNT * 10]


@pytest.mark.statement("N8")
@pytest.mark.parametrize("place", [0, 20, 61, BATCH - 1])
def test_no_offset_that_was_acknowledged_before_kill_9_is_given_out_twice(
    broker, topic_name, place
):
    """The last acknowledged batch is damaged, with nothing intact behind it."""
    path = _fill(broker, topic_name, 1)
    broker.kill()
    before = _flip(path, (COUNT - 1) * BATCH + place)
    broker.start()

    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.produce(data_batch(1)).error == STORAGE
    assert path.read_bytes() == before
    facts = f"position={(COUNT - 1) * BATCH} offset={(COUNT - 1) * 10} durable_end={COUNT * 10}"
    assert facts in broker.log.read_text()
    broker.kill()
    accepting = EmbeddedBroker(broker.folder, accept_data_loss=[f"{topic_name}-0"])
    with accepting, PartitionClient(accepting.bootstrap, topic_name) as partition:
        appended = partition.produce(data_batch(1))
        assert isinstance(appended, Appended)
        assert appended.base_offset >= COUNT * 10


def test_accepted_loss_is_refused_to_readers_and_its_offsets_are_not_used_again(
    broker, topic_name, tmp_path
):
    path = _fill(broker, topic_name)
    assert broker.stop() == 0
    _flip(path, 3 * BATCH + 100)
    with pytest.raises(RuntimeError, match="no such partition"):
        EmbeddedBroker(broker.folder, accept_data_loss=["other-0"]).start()
    accepting = EmbeddedBroker(broker.folder, accept_data_loss=[f"{topic_name}-0"])

    with accepting, PartitionClient(accepting.bootstrap, topic_name) as partition:
        assert partition.produce(data_batch(10)) == Appended(0, COUNT * 10)
    broker.start()

    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert [partition.fetch(offset).error_code for offset in (0, 29, 30, 39, 40)] == [
            *(0, 0),
            *(CORRUPT_MESSAGE, CORRUPT_MESSAGE, 0),
        ]
        assert partition.produce(data_batch(10)) == Appended(0, COUNT * 10 + 10)
    rows = list(rows_by_librdkafka(broker.bootstrap, topic_name, start=40))
    assert [row.offset for row in rows] == list(range(40, COUNT * 10 + 20))
    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.delete_records(40) == (0, 40)
    assert list(rows_by_librdkafka(broker.bootstrap, topic_name, start=40)) == rows


def test_a_lost_file_can_be_replaced_by_an_empty_one(broker, topic_name):
    """The steps of docs/errors.md for a sealed segment that is gone."""
    _fill(broker, topic_name, **{"segment.bytes": "2000"})
    assert broker.stop() == 0
    lost = sorted((broker.log_dir / topic_name / "0").glob("*.batches"))[1]
    first, last = int(lost.name[:20]), int(lost.name[21:41])
    lost.unlink()
    broker.start()
    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.fetch(0).error_code == STORAGE
    assert broker.stop() == 0
    assert f"expected={first}" in broker.log.read_text()

    lost.touch()
    broker.start()

    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.fetch(first - 1).error_code == 0
        assert partition.fetch(first).error_code == CORRUPT_MESSAGE
        assert partition.fetch(last).error_code == CORRUPT_MESSAGE
        assert partition.fetch(last + 1).error_code == 0
        assert partition.produce(data_batch(10)) == Appended(0, COUNT * 10)


@pytest.mark.statement("T12", "C10")
def test_a_sealed_segment_is_served_up_to_its_damage_and_behind_it(broker, topic_name):
    _fill(broker, topic_name, **{"segment.bytes": "2000"})
    assert broker.stop() == 0
    path = sorted((broker.log_dir / topic_name / "0").glob("*.batches"))[1]
    first = int(path.name[:20])
    _flip(path, BATCH + 100)
    broker.start()
    bad = range(first + 10, first + 20)

    with PartitionClient(broker.bootstrap, topic_name) as partition:
        codes = {o: partition.fetch(o).error_code for o in range(COUNT * 10)}
        assert codes == {o: CORRUPT_MESSAGE if o in bad else 0 for o in codes}
        assert partition.list_offset(1_700_000_000_000 + 10**6)[0] == STORAGE
    seen = []
    with pytest.raises(KafkaException, match="Invalid message"):
        seen += list(rows_by_librdkafka(broker.bootstrap, topic_name))
    rows = list(rows_by_librdkafka(broker.bootstrap, topic_name, start=bad[-1] + 1))
    assert [row.offset for row in rows] == list(range(bad[-1] + 1, COUNT * 10))
    assert f"{path}: damaged at byte {BATCH}: offsets {bad[0]} to {bad[-1]}" in (
        broker.log.read_text()
    )


def test_a_mirror_stops_at_damage_in_its_source_and_copies_nothing_that_changed(
    broker, topic_name, tmp_path
):
    _fill(broker, topic_name, 1, **{"segment.bytes": "2000"})
    assert broker.stop() == 0
    path = sorted((broker.log_dir / topic_name / "0").glob("*.batches"))[1]
    first = int(path.name[:20])
    _flip(path, BATCH + 100)
    broker.start()
    root = tmp_path / "archive"
    config = tmp_path / "config.json"
    config.write_text(
        config_text(mirror(topic_name, broker.bootstrap, root, form="ndjson", name="copy"))
    )

    with MirrorProcess(config, tmp_path / "mirror.log", "--until-now") as process:
        code = process.end(60_000)

    assert code == 65, process.log.read_text()
    assert "CORRUPT_MESSAGE" in process.log.read_text()
    lines = [
        json.loads(line)
        for name in sorted((root / "copy" / "0").glob("*.ndjson"))
        for line in name.read_text().splitlines()
    ]
    assert [line["offset"] for line in lines] == list(range(len(lines)))
    assert len(lines) <= first + 10


def test_a_sealed_segment_that_cannot_be_read_is_an_error_of_its_partition_only(broker, topic_name):
    _fill(broker, topic_name, **{"segment.bytes": "2000"})
    assert broker.stop() == 0
    broker.start()
    path = sorted((broker.log_dir / topic_name / "0").glob("*.batches"))[1]
    path.unlink()

    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.fetch(int(path.name[:20])).error_code == STORAGE
        assert partition.fetch(0).error_code == 0
        assert partition.fetch(COUNT * 10 - 1).error_code == 0
