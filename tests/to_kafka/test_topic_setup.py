"""The destination topic is set up, or the reason against it is reported; nothing else is changed.

Method: real clusters of both Apache Kafka releases and the embedded broker, each as source and as
destination; librdkafka reads the result, and writes to it as a mirror would.
"""

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from kit.judges.clients import LOG_APPEND_TIME, Message, odd_messages, produce, rows_by_librdkafka
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import UsageError
from logmirror.to_kafka.topic_setup import UnfitTopicError, check_topic, sync_topic

WEEK_MS = 7 * 86_400_000
FOREVER = str(2**63 - 1)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    with EmbeddedBroker(tmp_path_factory.mktemp("embedded")) as broker:
        yield broker


def in_group_of(*names):
    """Clusters, in the process that has those of Apache Kafka."""
    brokers = sorted({*names} - {"embedded"})
    return pytest.param(names, marks=pytest.mark.xdist_group("+".join(brokers)))


@pytest.fixture(
    params=[
        in_group_of("kafka_392", "kafka_431"),
        in_group_of("kafka_431", "kafka_392"),
        in_group_of("kafka_431", "embedded"),
        in_group_of("embedded", "kafka_392"),
    ],
    ids="-to-".join,
)
def clusters(request):
    """Addresses of two clusters."""
    return [request.getfixturevalue(name).bootstrap for name in request.param]


@pytest.fixture
def upgrade(kafka_392, kafka_431):
    """Addresses: from the older release of Apache Kafka to the newer one."""
    return [kafka_392.bootstrap, kafka_431.bootstrap]


@pytest.fixture
def connect():
    """Opens clients by address."""
    opened = {}

    def client(bootstrap):
        if bootstrap not in opened:
            opened[bootstrap] = ClusterClient(connection_settings(bootstrap))
        return opened[bootstrap]

    yield client
    for one in opened.values():
        one.close()


def make(bootstrap, topic, partitions=1, **configs):
    create_topic(
        bootstrap, topic, partitions, {k.replace("_", "."): str(v) for k, v in configs.items()}
    )


def topic_configs(bootstrap, topic):
    """A topic's settings as librdkafka reads them: those that were set, and all."""
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    admin = AdminClient({"bootstrap.servers": bootstrap})  # gone, it cancels what it was asked
    entries = admin.describe_configs([resource])[resource].result(30)
    values = {name: entry.value for name, entry in entries.items()}
    own = {name: entry.value for name, entry in entries.items() if entry.source == 1}
    return own, values


def partition_count(bootstrap, topic):
    listed = AdminClient({"bootstrap.servers": bootstrap}).list_topics(topic, timeout=30)
    return len(listed.topics[topic].partitions)


def topics(bootstrap):
    return set(AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=30).topics)


def severities(findings):
    return [(finding.severity, finding.setting) for finding in findings]


def test_a_topic_is_made_with_the_partitions_of_the_source(clusters, connect, topic_name):
    origin, target = clusters
    make(origin, topic_name, 3)
    report = sync_topic(
        connect(origin), topic_name, connect(target), "copy-" + topic_name, mode="create"
    )
    assert report.created
    assert not [finding for finding in report.findings if finding.severity == "error"]
    assert partition_count(target, "copy-" + topic_name) == 3
    _, values = topic_configs(target, "copy-" + topic_name)
    assert values["cleanup.policy"] == "delete"
    assert values["compression.type"] == "producer"
    assert values["message.timestamp.type"] == "CreateTime"
    # Ready: the leader of each partition takes records at once.
    for partition in range(3):
        produce(target, "copy-" + topic_name, odd_messages(1, seed=1), partition=partition)


def test_a_second_look_finds_nothing_to_do(clusters, connect, topic_name):
    origin, target = clusters
    make(origin, topic_name, 2)
    pair = connect(origin), topic_name, connect(target), topic_name
    assert sync_topic(*pair, mode="create").created
    before = topic_configs(target, topic_name)
    for mode in ("create", "validate", "off"):
        report = sync_topic(*pair, mode=mode)
        assert (report.created, report.partitions_added) == (False, 0)
        assert not [finding for finding in report.findings if finding.severity != "note"]
    assert topic_configs(target, topic_name) == before


def test_limits_of_the_source_are_kept_and_widened(upgrade, connect, topic_name):
    origin, target = upgrade
    make(
        origin,
        topic_name,
        retention_ms=WEEK_MS,
        segment_ms=3_600_000,
        retention_bytes=10_000_000,
        segment_bytes=1_000_000,
        max_message_bytes=5_000_000,
        min_insync_replicas=1,
        compression_type="zstd",
    )
    sync_topic(connect(origin), topic_name, connect(target), topic_name, mode="create")
    own, _ = topic_configs(target, topic_name)
    assert own == {
        "cleanup.policy": "delete",
        "compression.type": "producer",
        "max.message.bytes": "5000000",
        "message.timestamp.after.max.ms": FOREVER,
        "message.timestamp.before.max.ms": FOREVER,
        "message.timestamp.type": "CreateTime",
        "retention.bytes": "11000000",
        "retention.ms": str(WEEK_MS + 3_600_000),
    }


def test_a_copy_of_a_compacted_topic_keeps_everything(upgrade, connect, topic_name):
    origin, target = upgrade
    make(origin, topic_name, cleanup_policy="compact", retention_ms=WEEK_MS)
    sync_topic(connect(origin), topic_name, connect(target), topic_name, mode="create")
    own, _ = topic_configs(target, topic_name)
    assert (own["cleanup.policy"], own["retention.ms"], own["retention.bytes"]) == (
        "delete",
        "-1",
        "-1",
    )


def test_records_of_any_time_are_taken(clusters, connect, topic_name):
    origin, target = clusters
    make(origin, topic_name, retention_ms=-1)
    sync_topic(connect(origin), topic_name, connect(target), topic_name, mode="create")
    times = [1, 86_400_000, 4_102_444_800_000]  # 1970, and the year 2100
    produce(target, topic_name, [Message(b"k", b"v", timestamp_ms=at) for at in times])
    rows = rows_by_librdkafka(target, topic_name)
    assert [row.timestamp_ms for row in rows] == times


def test_a_destination_may_be_made_to_stamp(clusters, connect, topic_name):
    origin, target = clusters
    make(origin, topic_name)
    pair = connect(origin), topic_name, connect(target), topic_name
    report = sync_topic(*pair, mode="create", timestamp_mode="destination")
    assert report.created
    produce(target, topic_name, [Message(b"k", b"v", timestamp_ms=1)])
    (row,) = rows_by_librdkafka(target, topic_name)
    assert row.timestamp_type == LOG_APPEND_TIME
    with pytest.raises(UnfitTopicError) as caught:
        sync_topic(*pair, mode="validate", timestamp_mode="source")
    assert severities(caught.value.findings)[0] == ("error", "message.timestamp.type")


def test_partitions_that_the_source_gets_are_added(clusters, connect, topic_name):
    origin, target = clusters
    make(origin, topic_name, 2)
    pair = connect(origin), topic_name, connect(target), topic_name
    sync_topic(*pair, mode="create")
    make_more(origin, topic_name, 5)
    assert severities(check_topic(*pair, mode="create"))[-1] == ("note", "partitions")
    with pytest.raises(UnfitTopicError):
        sync_topic(*pair, mode="validate")
    assert partition_count(target, topic_name) == 2

    report = sync_topic(*pair, mode="create")
    assert (report.created, report.partitions_added) == (False, 3)
    assert partition_count(target, topic_name) == 5
    produce(target, topic_name, odd_messages(1, seed=1), partition=4)


def make_more(bootstrap, topic, count):
    """Raise a topic's partitions, and wait until leaders respond."""
    with ClusterClient(connection_settings(bootstrap)) as client:
        client.admin.create_partitions(topic, count)
        while len(client.topic(topic).partitions) < count:
            pass


def test_a_topic_grows_no_further_than_the_partitions_that_are_copied(upgrade, connect, topic_name):
    origin, target = upgrade
    make(origin, topic_name, 6)
    make(target, topic_name, 1)
    pair = connect(origin), topic_name, connect(target), topic_name
    report = sync_topic(*pair, mode="create", partitions=[0, 2])
    assert report.partitions_added == 2
    assert ("warning", "partitions") in severities(report.findings)
    assert sync_topic(*pair, mode="validate", partitions=[0, 2]).partitions_added == 0


def test_a_topic_that_would_break_the_copy_is_refused_and_left_alone(upgrade, connect, topic_name):
    origin, target = upgrade
    make(origin, topic_name, 2, max_message_bytes=5_000_000)
    make(
        target,
        topic_name,
        1,
        cleanup_policy="compact,delete",
        retention_ms=1000,
        max_message_bytes=1000,
        message_timestamp_before_max_ms=1000,
        compression_type="gzip",
        unclean_leader_election_enable="true",
    )
    before = topic_configs(target, topic_name)
    pair = connect(origin), topic_name, connect(target), topic_name
    expected = [
        ("error", "partitions"),
        ("error", "cleanup.policy"),
        ("error", "retention.ms"),
        ("error", "max.message.bytes"),
        ("error", "message.timestamp.before.max.ms"),
        ("warning", "message.timestamp.after.max.ms"),
        ("warning", "unclean.leader.election.enable"),
        ("note", "compression.type"),
    ]
    with pytest.raises(UnfitTopicError) as caught:
        sync_topic(*pair, mode="validate")
    assert severities(caught.value.findings) == expected
    assert caught.value.facts["topic"] == topic_name
    assert severities(check_topic(*pair, mode="validate")) == expected
    for finding in caught.value.findings:
        assert str(finding) in str(caught.value)
    assert caught.value.exit_code == 2
    # What was found is what happens: this cluster refuses what the source may have.
    with pytest.raises(Exception, match=r"(?i)timestamp"):
        produce(target, topic_name, [Message(b"k", b"v", timestamp_ms=1)])
    with pytest.raises(Exception, match=r"(?i)size|large"):
        produce(target, topic_name, [Message(b"k", bytes(2000))])

    report = sync_topic(*pair, mode="off")
    assert report.findings == ()
    assert check_topic(*pair, mode="off") == ()
    assert topic_configs(target, topic_name) == before
    assert partition_count(target, topic_name) == 1


def test_looking_changes_nothing(clusters, connect, topic_name):
    origin, target = clusters
    make(origin, topic_name)
    before = topics(origin), topics(target)
    pair = connect(origin), topic_name, connect(target), topic_name
    assert severities(check_topic(*pair, mode="create"))[-1] == ("note", "topic")
    assert severities(check_topic(*pair, mode="validate"))[0] == ("error", "topic")
    with pytest.raises(UnfitTopicError) as caught:
        sync_topic(*pair, mode="validate")
    assert severities(caught.value.findings)[0] == ("error", "topic")
    assert (topics(origin), topics(target)) == before


@pytest.mark.parametrize("mode", ["create", "validate", "off"])
def test_a_topic_is_not_copied_onto_itself_whatever_its_servers_are_called(
    apache_kafka, connect, topic_name, mode
):
    here = apache_kafka.bootstrap
    make(here, topic_name)
    other_name = here.replace("127.0.0.1", "localhost")
    assert other_name != here
    for check in (sync_topic, check_topic):
        with pytest.raises(UsageError) as caught:
            check(connect(here), topic_name, connect(other_name), topic_name, mode=mode)
        assert caught.value.facts["topic"] == topic_name
        assert caught.value.facts["cluster_id"] == connect(here).cluster_id()
    renamed = "copy-" + topic_name
    report = sync_topic(connect(here), topic_name, connect(other_name), renamed, mode="create")
    assert report.created


def test_a_source_that_is_not_there_is_an_error_and_makes_nothing(clusters, connect, topic_name):
    origin, target = clusters
    with pytest.raises(NotFoundError):
        sync_topic(connect(origin), topic_name, connect(target), topic_name, mode="create")
    assert topic_name not in topics(origin) | topics(target)


def test_more_replicas_than_brokers_are_refused_in_the_words_of_the_broker(
    upgrade, connect, topic_name
):
    origin, target = upgrade
    make(origin, topic_name)
    with pytest.raises(UsageError) as caught:
        sync_topic(
            connect(origin),
            topic_name,
            connect(target),
            topic_name,
            mode="create",
            replication_factor=3,
        )
    assert caught.value.facts["error"] == "INVALID_REPLICATION_FACTOR"
    assert caught.value.facts["topic"] == topic_name
    assert topic_name not in topics(target)
