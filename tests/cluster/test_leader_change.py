"""Writing continues across leader changes, and the response to each batch stays true.

Method: three brokers of Apache Kafka, both releases, replication factor 3, min.insync.replicas 2. A
leader is killed while requests are in flight; later two of three are down. A writer that reads the
log end after every failure, as a mirror does, must end with each record once, in order.
"""

import time
from dataclasses import replace

import pytest

from kit.judges.clients import rows_by_librdkafka
from kit.servers.apache import RELEASES
from kit.servers.cluster import KafkaCluster
from logmirror.cluster.client import LATEST, ClusterClient
from logmirror.cluster.groups import GroupOffset
from logmirror.cluster.properties import connection_settings
from logmirror.errors import OutcomeUnknownError, UnavailableError
from logmirror.model import TimestampType, TopicPartition
from logmirror.wire.records import Record, encode_reference

pytestmark = [pytest.mark.jvm, pytest.mark.xdist_group("leader-change")]  # each cluster starts once

PRODUCER = 0x6C6D << 48 | 9


@pytest.fixture(scope="module", params=RELEASES)
def cluster(request, tmp_path_factory):
    with KafkaCluster(request.param, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    settings = replace(
        connection_settings(cluster.bootstrap),
        socket_timeout_ms=3000,
        connect_timeout_ms=2000,
        request_timeout_ms=2000,
        retry_budget_ms=60_000,
    )
    with ClusterClient(settings) as client:
        yield client


def batch(first, count=10):
    now_ms = int(time.time() * 1000)
    rows = [
        Record(n, now_ms, TimestampType.CREATE_TIME, None, b"%d" % (first + n), ())
        for n in range(count)
    ]
    producer = {"producer_id": PRODUCER, "producer_epoch": 0, "base_sequence": first}
    return memoryview(encode_reference(rows, base_offset=0, last_offset=count - 1, **producer))


def collect_all(pipeline):
    responses = []
    while pipeline.in_flight():
        responses += pipeline.collect(block=True)
    return responses


def ends_of(client, partitions):
    found = client.log_ends(partitions)
    return {partition: found[partition].end_offset for partition in partitions}


def send_three(pipeline, ends, partitions):
    for _ in range(3):
        pipeline.send([(partition, batch(ends[partition])) for partition in partitions])
        for partition in partitions:
            ends[partition] += 10


@pytest.mark.gate("a cluster of three brokers")
def test_records_arrive_once_and_in_order_over_a_killed_leader(cluster, client, topic_name):
    cluster.create_topic(topic_name, 3)
    partitions = [TopicPartition(topic_name, n) for n in range(3)]
    producer = client.transactional_producer(topic_name)
    producer.init()
    producer.commit_offsets(topic_name, {partitions[0]: GroupOffset(1, -1, "")})
    killed, failures = cluster.leader(topic_name), []
    ends = ends_of(client, partitions)
    with client.pipeline() as pipeline:
        for round_number in range(40):
            send_three(pipeline, ends, partitions)
            if round_number == 3:
                cluster.kill_node(killed)
            responses = collect_all(pipeline)
            failed = [response.error for response in responses if response.error is not None]
            if failed:
                failures += failed
                time.sleep(0.3)
                ends = ends_of(client, partitions)
            elif round_number > 10 and failures:
                break
    assert failures
    assert {type(error) for error in failures} <= {OutcomeUnknownError, UnavailableError}
    assert client.log_ends(partitions)[partitions[0]].leader_epoch > 0
    cluster.start_node(killed)
    for partition in partitions:
        rows = rows_by_librdkafka(cluster.bootstrap, topic_name, partition=partition.partition)
        assert [row.value for row in rows] == [b"%d" % n for n in range(ends[partition])]
        assert ends[partition] >= 120
    producer.end(commit=True)
    assert client.groups.offsets(topic_name, partitions[:1])[partitions[0]].offset == 1


@pytest.mark.gate("a cluster of three brokers")
def test_what_was_appended_and_not_acknowledged_is_in_the_log_s_end(cluster, client, topic_name):
    cluster.create_topic(topic_name)
    cluster.wait_until_in_sync(topic_name)
    partition = TopicPartition(topic_name, 0)
    leader = cluster.leader(topic_name)
    others = [node for node in cluster.brokers if node != leader]
    with client.pipeline() as pipeline:
        pipeline.send([(partition, batch(0))])
        assert [response.error for response in collect_all(pipeline)] == [None]
        for node in others:
            cluster.pause_node(node)
        try:
            pipeline.send([(partition, batch(10))])
            (response,) = collect_all(pipeline)
            assert type(response.error) is OutcomeUnknownError
            assert response.error_code in (7, 20)
            latest = client.list_offsets([partition], LATEST, read_committed=False)
            assert (latest[partition], client.log_ends([partition])[partition].end_offset) == (
                10,
                20,
            )
            assert client.producer_states({partition: PRODUCER})[partition].last_sequence == 19
        finally:
            for node in others:
                cluster.resume_node(node)
        cluster.wait_until_in_sync(topic_name)
        pipeline.send([(partition, batch(10))])  # the same bounds: a duplicate, or the first
        (response,) = collect_all(pipeline)
        assert (response.error, response.base_offset) == (None, 10)
    assert client.log_ends([partition])[partition].end_offset == 20
