"""Several writers of offset gaps: one fills a gap; pending writes of the other come too late.

Two running writers, one that was paused, one that is silent, and a client that writes an extra
marker; against both releases of Apache Kafka.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kit.fakes.dropping import Dropping
from kit.judges.clients import rows_by_librdkafka
from kit.judges.copies import wait_for_end
from kit.judges.gaps import COMPACTED, Writer, log_bounds, look, look_at_all, plain_messages
from kit.judges.partition_client import PartitionClient
from kit.runs.cleaning import clean, start_cleaning, stop_cleaning
from kit.runs.commands import BrokerCommand, write_config
from kit.runs.inline_run import InlineRun, mirror_to_cluster, run_now
from kit.runs.stopping_run import StoppingRun
from kit.servers.apache import VERSIONS
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.errors import PositionError, PositionMovedError
from logmirror.model import TimestampType, TopicPartition
from logmirror.to_kafka import gap_leases
from logmirror.to_kafka.gap_writer import GapWriter
from logmirror.to_kafka.idempotence import producer_id
from logmirror.wire.records import Record, encode_reference

pytestmark = [pytest.mark.xdist_group("e2e-holes"), pytest.mark.timeout(600)]

PRODUCER_FENCED = 90
KINDS = (*VERSIONS, BrokerCommand.version)
PRODUCER = producer_id("t", 0, None)
NAME = {"producer": PRODUCER}


@pytest.fixture(scope="module")
def brokers(request):
    names = ("kafka_392", "kafka_431", "cli_broker")
    return dict(zip(KINDS, map(request.getfixturevalue, names), strict=True))


@pytest.fixture
def client(brokers, kind):
    with ClusterClient(connection_settings(brokers[kind].bootstrap, {})) as client:
        yield client


def end_of(client, partition):
    return client.log_ends([partition])[partition].end_offset


@pytest.mark.parametrize("kind", KINDS)
def test_markers_of_a_paused_writer_are_refused(brokers, client, kind, topic_name, monkeypatch):
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    paused, other = GapWriter(client), GapWriter(client)
    verified_ms = SYSTEM_CLOCK.monotonic_ms() - 2000
    for writer in (paused, other):  # the pause comes behind the last look, and owners behind it
        monkeypatch.setattr(
            writer, "_confirm_end", lambda _partition, _first, verified_ms, _: verified_ms
        )
        monkeypatch.setattr(writer._leases, "acquire", lambda *_: gap_leases._UNOFFERED)  # noqa: SLF001  # the second of two guards is what is tested
    other.fill(partition, 0, 2, **NAME, verified_ms=verified_ms + 1500)

    with pytest.raises(PositionMovedError) as caught:
        paused.fill(partition, 0, 2, **NAME, verified_ms=verified_ms)

    assert caught.value.facts["error"] == "TRANSACTION_COORDINATOR_FENCED"
    assert end_of(client, partition) == 2
    # A clock that is behind fences others only briefly: the next try goes beyond what was seen.
    paused.fill(partition, 2, 5, **NAME, verified_ms=verified_ms)
    assert end_of(client, partition) == 5


@pytest.mark.parametrize("kind", VERSIONS[-1:])
def test_the_second_of_two_running_writers_finds_the_gap_filled(brokers, client, kind, topic_name):
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    verified_ms = SYSTEM_CLOCK.monotonic_ms() - 50
    one, other = GapWriter(client), GapWriter(client)
    one.fill(partition, 0, 2, **NAME, verified_ms=verified_ms)
    held = other.fill(partition, 0, 2, **NAME, verified_ms=verified_ms)
    assert (held.end, held.hold.is_own) == (0, False), "the driver reads the log end after a wait"
    one.release()

    with pytest.raises(PositionMovedError) as caught:
        other.fill(partition, 0, 2, **NAME, verified_ms=verified_ms)

    assert (caught.value.facts["expected"], caught.value.facts["found"]) == (0, 2)
    assert end_of(client, partition) == 2


ROUNDS = 8


def fill_with_waits(client, writer, partition, first, end):
    """As the driver does: wait, read the log end, and try again if it has not moved."""
    hold = None
    while (
        filled := writer.fill(partition, first, end, **NAME, verified_ms=0, hold=hold)
    ).hold is not None:
        hold = filled.hold
        time.sleep(hold.wait_ms / 1000)
        if end_of(client, partition) != first:
            raise PositionMovedError("as the driver finds it")


@pytest.mark.parametrize("kind", VERSIONS)
def test_one_of_two_concurrent_writers_fills_a_gap(brokers, kind, topic_name, monkeypatch):
    monkeypatch.setattr(gap_leases, "SEND_DEADLINE_MS", 500)
    monkeypatch.setattr(gap_leases, "QUIESCE_MS", 2000)
    monkeypatch.setattr(gap_leases, "LEASE_TIMEOUT_MS", 3000)
    settings = connection_settings(brokers[kind].bootstrap, {})
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    together, moved = threading.Barrier(2), []

    def fill_all():
        with ClusterClient(settings) as client:
            writer = GapWriter(client)
            for number in range(ROUNDS):
                together.wait()
                try:
                    fill_with_waits(client, writer, partition, 3 * number, 3 * number + 3)
                except PositionMovedError:
                    moved.append(number)
                writer.release()
                together.wait()
                assert end_of(client, partition) == 3 * number + 3

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(fill_all) for _ in range(2)]:
            one.result()
    assert sorted(moved) == list(range(ROUNDS))


@pytest.mark.parametrize("kind", VERSIONS)
def test_the_gaps_of_a_silent_owner_are_taken_over_after_two_waits(
    brokers, client, kind, topic_name, monkeypatch
):
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    silent, other, third = (GapWriter(client) for _ in range(3))
    silent.fill(partition, 0, 2, **NAME, verified_ms=0)

    begun_s = time.monotonic()
    first = other.fill(partition, 2, 4, **NAME, verified_ms=0)
    again = other.fill(partition, 2, 4, **NAME, verified_ms=0)
    second = third.fill(partition, 2, 4, **NAME, verified_ms=0, hold=first.hold)
    assert time.monotonic() - begun_s < gap_leases.LEASE_TIMEOUT_MS / 1000, "the caller waits"
    assert (first.end, first.hold.wait_ms) == (2, gap_leases.LEASE_TIMEOUT_MS)
    assert again == first, "without the hold, the wait begins again"
    assert (second.end, second.hold.wait_ms) == (2, gap_leases.QUIESCE_MS)
    assert (first.hold.is_own, second.hold.is_own) == (False, True)
    third.release()
    assert end_of(client, partition) == 2

    assert other.fill(partition, 2, 4, **NAME, verified_ms=0, hold=second.hold).end == 4
    other.release()
    assert third.fill(partition, 4, 6, **NAME, verified_ms=0).end == 6, "it was released"

    monkeypatch.setattr(gap_leases, "_CONFIRM_EVERY_MS", 0)
    with pytest.raises(PositionMovedError) as caught:
        silent.fill(partition, 6, 8, **NAME, verified_ms=SYSTEM_CLOCK.monotonic_ms())
    assert "transactional_id" in caught.value.facts
    silent.release()
    third.fill(partition, 6, 8, **NAME, verified_ms=0)
    assert end_of(client, partition) == 8


def test_only_the_flow_whose_lease_a_dead_process_holds_waits_for_it(brokers, tmp_path):
    """Neither the other partition of its lane nor a stop waits."""
    source, destination, topic = brokers["4.3.1"], brokers["3.9.2"], "lease-of-the-dead"
    source.create_topic(topic, partitions=2)
    transactional = Writer(source.bootstrap, topic, transactional_id=topic)
    for number in range(2):
        transactional.begin()
        transactional.send(plain_messages(5, seed=number))
        transactional.end(commit=True)
    mirror = mirror_to_cluster(topic, source.bootstrap, destination.bootstrap)
    config = write_config(tmp_path / "config.json", mirror)
    with StoppingRun(config, "hole.marked", 1, folder=tmp_path) as dead:
        dead.wait_until_stopped()
        dead.signal(signal.SIGKILL)
    stands = log_bounds(destination.bootstrap, topic, 0)
    assert stands == (0, 6), "the marker behind the first transaction; the lease is held"

    with InlineRun(config, folder=tmp_path) as waiting:
        for number in range(1, 4):
            Writer(source.bootstrap, topic, 1).send(plain_messages(10, seed=number))
            wait_for_end(destination.bootstrap, topic, 10 * number, partition=1)
        assert "may still write into the next offset gap" in waiting.text
        waiting.signal(signal.SIGTERM)
        assert waiting.wait() == 0, waiting.text
    stood = log_bounds(destination.bootstrap, topic, 0)
    assert stood == (0, 11), "the records before the next marker; nothing waited for the lease"

    finished = run_now(config)
    assert finished.returncode == 0, finished.stdout
    truth, found = look_at_all(
        functools.partial(look, broker.tools, broker.bootstrap, topic, 2)
        for broker in (source, destination)
    )
    assert found == truth


@pytest.mark.parametrize("kind", VERSIONS)
def test_two_writers_of_empty_transactions_fence_each_other(
    brokers, client, kind, topic_name, monkeypatch
):
    monkeypatch.setattr(client.admin, "may_write_markers", lambda: False)
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    one, other = GapWriter(client), GapWriter(client)
    one.fill(partition, 0, 2, **NAME, verified_ms=0)
    other.fill(partition, 2, 4, **NAME, verified_ms=0)

    with pytest.raises(PositionMovedError):
        one.fill(partition, 4, 6, **NAME, verified_ms=0)

    assert end_of(client, partition) == 4
    one.fill(partition, 4, 6, **NAME, verified_ms=0)
    assert end_of(client, partition) == 6


@pytest.mark.parametrize("kind", VERSIONS)
def test_a_late_add_partitions_request_begins_no_transaction_after_the_gap(
    brokers, client, kind, topic_name, monkeypatch
):
    """It would be left open, and end with a marker in the place of a record."""
    monkeypatch.setattr(client.admin, "may_write_markers", lambda: False)
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    dropping = Dropping(monkeypatch)
    dropping.names = ["AddPartitionsToTxnRequest"]
    GapWriter(client).fill(partition, 0, 4, **NAME, verified_ms=0)
    assert end_of(client, partition) == 4

    (topic,) = dropping.arrives_late(high=3).results_by_topic_v3_and_below

    assert topic.results_by_partition[0].partition_error_code == PRODUCER_FENCED
    GapWriter(client).fill(
        partition, 4, 5, **NAME, verified_ms=0
    )  # takes the ids, ends what is open
    assert end_of(client, partition) == 5


@pytest.fixture(params=["markers", "transactions"])
def writer(request, client, monkeypatch):
    """A writer of gaps that may write markers, or may not."""
    monkeypatch.setattr(client.admin, "may_write_markers", lambda: request.param == "markers")
    return GapWriter(client)


@pytest.mark.parametrize("kind", VERSIONS)
def test_an_extra_marker_is_found_before_anything_else_is_written(
    brokers, writer, kind, topic_name
):
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    writer.fill(partition, 0, 1, **NAME, verified_ms=0)
    with PartitionClient(brokers[kind].bootstrap, topic_name) as raw:
        assert raw.write_markers((4711, 0)) == {4711: 0}

    later_ms = SYSTEM_CLOCK.monotonic_ms() + 1000  # not looked again
    with pytest.raises(PositionError) as caught:
        writer.fill(partition, 1, 2, **NAME, verified_ms=later_ms)

    facts = caught.value.facts
    assert (facts["reason"], facts["expected"], facts["found"]) == ("HoleTooLong", 2, 3)


# One reads a gap, the other a batch: the source was cleaned between two readings


def one_batch(partition, count, *, epoch, sequence):
    """As a mirror sends it."""
    now_ms = SYSTEM_CLOCK.now_ms()
    rows = [Record(n, now_ms, TimestampType.CREATE_TIME, b"k", b"%d" % n, ()) for n in range(count)]
    fields = {"producer_epoch": epoch, "base_sequence": sequence, "last_offset": count - 1}
    return memoryview(encode_reference(rows, base_offset=0, producer_id=PRODUCER, **fields))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_in_flight_before_a_fence_are_refused_after_it(brokers, client, kind, topic_name):
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)

    def write(count, *, epoch, sequence):
        with client.pipeline() as pipeline:
            pipeline.send(
                [(partition, one_batch(partition, count, epoch=epoch, sequence=sequence))]
            )
            (response,) = pipeline.collect(block=True)
        return response.error_code, response.base_offset

    assert write(5, epoch=0, sequence=0) == (0, 0)
    writer = GapWriter(client)
    assert not writer.fill(partition, 5, 8, **NAME, verified_ms=0).fenced
    assert write(2, epoch=0, sequence=5) == (0, 8), "most gaps leave the data's sequence alone"

    assert writer.fill(partition, 10, 13, **NAME, verified_ms=0, new_epoch=1)[:2] == (13, True)

    assert write(7, epoch=0, sequence=7)[0] == 47
    assert end_of(client, partition) == 13
    state = client.producer_states({partition: PRODUCER})[partition]
    assert (state.producer_epoch, state.last_sequence) == (1, -1)
    assert state.last_timestamp_ms > SYSTEM_CLOCK.now_ms() - 60_000
    assert write(7, epoch=1, sequence=7)[0] == 45
    assert write(7, epoch=1, sequence=0) == (0, 13)
    assert write(2, epoch=1, sequence=7) == (0, 20)
    with pytest.raises(PositionMovedError):
        writer.fill(partition, 22, 23, **NAME, verified_ms=0, new_epoch=0)
    rows = list(rows_by_librdkafka(brokers[kind].bootstrap, topic_name))
    assert [row.offset for row in rows] == [*range(5), 8, 9, *range(13, 22)]


@pytest.mark.gate("waits for the cleaner")
def test_a_pending_batch_whose_records_were_compacted_meanwhile_is_refused(brokers, tmp_path):
    """One stops with it; another fills its place, and stops before it has written behind it."""
    source, destination, topic = brokers["4.3.1"], brokers["3.9.2"], "cleaned-meanwhile"
    source.create_topic(topic, config=COMPACTED)
    stop_cleaning(source, topic)
    now_ms = SYSTEM_CLOCK.now_ms()
    writer = Writer(source.bootstrap, topic, config={"linger.ms": 200})
    writer.send(plain_messages(5, seed=1, start_ms=now_ms))
    writer.send(plain_messages(5, seed=2, start_ms=now_ms))
    writer.send(plain_messages(20, seed=3, keys=1, start_ms=now_ms))
    writer.send(plain_messages(7, seed=4, keys=1, start_ms=now_ms))
    mirror = mirror_to_cluster(topic, source.bootstrap, destination.bootstrap, max_batch_bytes=0)
    config = write_config(tmp_path / "config.json", mirror)

    with StoppingRun(config, "produce.prepared", 3, folder=tmp_path) as late:
        late.wait_until_stopped()
        assert log_bounds(destination.bootstrap, topic, 0) == (0, 10), "the third is in its hand"
        start_cleaning(source, topic)
        clean(source, topic, 1)
        stop_cleaning(source, topic)
        with StoppingRun(config, "hole.filled", 1, folder=tmp_path) as other:
            other.wait_until_stopped()
            end = log_bounds(destination.bootstrap, topic, 0)[1]
            assert end > 30, "its place is taken"
            late.signal(signal.SIGCONT)
            time.sleep(2)  # it is refused, then checks and continues after the gap
            source_end = log_bounds(source.bootstrap, topic, 0)[1]
            assert log_bounds(destination.bootstrap, topic, 0)[1] in range(end, source_end + 1)
            other.signal(signal.SIGCONT)
            wait_for_end(destination.bootstrap, topic, source_end)
            for run in (late, other):
                run.signal(signal.SIGTERM)
                assert run.wait() == 0, run.text

    truth, found = look_at_all(
        functools.partial(look, broker.tools, broker.bootstrap, topic, 1)
        for broker in (source, destination)
    )
    assert found == truth
