"""Offsets without a record keep their places: records after a gap have the source's offsets.

Gaps arise as in practice: from transactions of real producers, Kafka's log cleaner and
DeleteRecords. Apache Kafka's console consumer (read_committed) must print the same for both sides,
offset by offset, and both logs must begin and end at the same offsets. Destinations that allow
WriteTxnMarkers get markers, others get empty transactions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from kit.judges.clients import rows_by_librdkafka
from kit.judges.copies import copy, forget_connections
from kit.judges.gaps import (
    COMPACTED,
    CREDENTIALS,
    USER,
    Writer,
    allow_copies,
    allowed_on_cluster,
    log_bounds,
    look,
    look_at_all,
    plain_messages,
    secured_kafka,
    stored_batches,
    take_head,
    trim,
    write_duplicated_keys,
    write_idempotently,
    write_transactions,
)
from kit.judges.partition_client import PartitionClient
from kit.runs.cleaning import clean, stop_cleaning
from kit.runs.commands import BrokerCommand
from kit.runs.inline_run import mirror_to_cluster
from kit.servers.apache import RELEASES, VERSIONS, ApacheTools
from kit.tiers import sized
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.errors import PositionError
from logmirror.model import TopicPartition
from logmirror.to_kafka.gap_writer import GapWriter
from logmirror.to_kafka.idempotence import marker_producer_id, producer_id

if TYPE_CHECKING:
    from kit.servers.kafka import ApacheKafka

pytestmark = [pytest.mark.xdist_group("e2e-holes"), pytest.mark.timeout(600)]

FAIL_AT_GAPS = {"holes": "fail"}

KINDS = (*VERSIONS, BrokerCommand.version)
PAIRS = sized(
    (("3.9.2", "4.3.1"), ("4.3.1", "3.9.2"), ("4.3.1", BrokerCommand.version)),
    tuple(product(VERSIONS, KINDS)),
    tuple(product(VERSIONS, KINDS)),
)
"""Sources and destinations."""
HEAD = 1_200_000
"""More than two padding batches."""

PRODUCER = producer_id("t", 0, None)
PARTITIONS = {"kept": 4, "cleaned": 3}
"""Of each topic: one that is only deleted from, and one that is compacted."""


@dataclass(frozen=True)
class Origin:
    """The topics of one source, and what is seen there."""

    broker: ApacheKafka

    def topic(self, name):
        return f"{name}-of-{self.broker.version}"


@pytest.fixture(scope="module")
def brokers(request):
    names = ("kafka_392", "kafka_431", "cli_broker")
    yield dict(zip(KINDS, map(request.getfixturevalue, names), strict=True))
    forget_connections()


@pytest.fixture(scope="module")
def origins(brokers):
    return {version: fill(Origin(brokers[version])) for version in VERSIONS}


def fill(origin):
    broker, bootstrap = origin.broker, origin.broker.bootstrap
    kept, cleaned = origin.topic("kept"), origin.topic("cleaned")
    broker.create_topic(kept, partitions=PARTITIONS["kept"])
    take_head(bootstrap, kept, HEAD)
    write_transactions(bootstrap, kept, 0)
    write_transactions(bootstrap, kept, 1, seed=1)
    write_idempotently(bootstrap, kept, 2)
    Writer(bootstrap, kept, 3).send(plain_messages(300, seed=3))
    trim(bootstrap, kept, 3, 137)

    broker.create_topic(cleaned, partitions=PARTITIONS["cleaned"], config=COMPACTED)
    for partition in (0, 1):
        write_duplicated_keys(bootstrap, cleaned, partition, codec=("none", "lz4")[partition])
    for partition in (0, 2):
        write_transactions(bootstrap, cleaned, partition, seed=2, keys=20)
    clean(broker, cleaned, PARTITIONS["cleaned"])
    for partition in (0, 1):
        write_duplicated_keys(bootstrap, cleaned, partition, seed=5)
    write_transactions(bootstrap, cleaned, 0, seed=6)
    clean(broker, cleaned, PARTITIONS["cleaned"])
    stop_cleaning(broker, cleaned)
    write_transactions(bootstrap, cleaned, 0, seed=7)  # behind what was cleaned
    trim(bootstrap, cleaned, 0, 150)
    return origin


@pytest.fixture(scope="module")
def restricted(tmp_path_factory):
    """Brokers that grant the mirror what its documentation asks for, and no right to markers."""
    versions = sized(VERSIONS[-1:], VERSIONS, VERSIONS)
    made = {v: secured_kafka(v, tmp_path_factory.mktemp(f"restricted-{v}")) for v in versions}
    try:
        yield {version: broker.start() for version, broker in made.items()}
    finally:
        for broker in made.values():
            broker.remove()


def mirrors_of(origin, destination, properties=None):
    """One for each topic of an origin."""
    where = {"properties": properties} if properties else {}
    return [
        mirror_to_cluster(
            origin.topic(name),
            origin.broker.bootstrap,
            destination,
            name=f"{origin.topic(name)}-to-{destination.rpartition(':')[2]}",
            topic=origin.topic(name) + "-copy",
            **where,
        )
        for name in PARTITIONS
    ]


def every_mirror(brokers, origins):
    return [
        mirror
        for origin, kind in PAIRS
        for mirror in mirrors_of(origins[origin], brokers[kind].bootstrap)
    ]


@pytest.fixture(scope="module")
def copied(brokers, origins):
    """What is seen of each topic at its source and, after one run, at each destination."""
    copy(*every_mirror(brokers, origins))
    looks = {}
    for version, name in product(VERSIONS, PARTITIONS):
        topic, tools = origins[version].topic(name), ApacheTools(version)
        looks[version, "", name] = functools.partial(
            look, tools, brokers[version].bootstrap, topic, PARTITIONS[name]
        )
        for kind in [kind for source, kind in PAIRS if source == version]:
            tools = ApacheTools(kind if kind in VERSIONS else VERSIONS[-1])
            looks[version, kind, name] = functools.partial(
                look,
                tools,
                brokers[kind].bootstrap,
                f"{topic}-copy",
                PARTITIONS[name],
                has_groups=kind in VERSIONS,
            )
    return dict(zip(looks, look_at_all(looks.values()), strict=True))


@pytest.mark.thinned
@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("pair", PAIRS, ids="-to-".join)
def test_the_console_consumer_prints_the_same_for_source_and_replica(copied, pair, name):
    origin, kind = pair
    truth, found = copied[origin, "", name], copied[origin, kind, name]

    assert found.bounds == truth.bounds
    assert found.printed == {number: truth.printed[number] for number in found.printed}
    assert found.rows == truth.rows


@pytest.mark.parametrize("version", VERSIONS)
def test_the_sources_have_gaps_of_every_kind(copied, origins, version):
    kept, cleaned = (copied[version, "", name] for name in PARTITIONS)
    batches = stored_batches(origins[version].broker.bootstrap, origins[version].topic("cleaned"))
    missing = [b.count < b.last_offset - b.base_offset + 1 for b in batches]

    assert [kept.bounds[n][0] for n in range(4)] == [HEAD, 0, 0, 137]
    assert [len(kept.rows[n]) for n in (2, 3)] == [500, 163]
    assert len(kept.rows[1]) < kept.bounds[1][1] - 100  # markers and aborted records
    assert all(len(rows) < cleaned.bounds[n][1] / 2 for n, rows in cleaned.rows.items())
    assert cleaned.bounds[0][0] == 150
    assert any(row.value is None for row in cleaned.rows[0])  # a tombstone
    assert any(b.count == 0 for b in batches)  # emptied, kept for its producer's sake
    assert any(m and b.count > 0 for m, b in zip(missing, batches, strict=True))
    assert any(b.is_control for b in batches)
    assert any(after.base_offset > before.last_offset + 1 for before, after in pairwise(batches))


def test_a_second_run_finds_nothing_to_do(copied, brokers, origins):
    def bounds():
        return {
            (kind, version, name): log_bounds(brokers[kind].bootstrap, f"{topic}-copy", 0)
            for (version, kind), name in product(PAIRS, PARTITIONS)
            for topic in [origins[version].topic(name)]
        }

    before = bounds()
    copy(*every_mirror(brokers, origins))

    assert bounds() == before


# Empty transactions


@pytest.mark.parametrize("version", RELEASES)
def test_documented_permissions_suffice_and_gaps_are_empty_transactions(
    copied, origins, restricted, version
):
    origin, broker = origins[VERSIONS[1 - VERSIONS.index(version)]], restricted[version]
    targets = {name: origin.topic(name) + "-copy" for name in PARTITIONS}
    allow_copies(broker, targets.values())

    copy(*mirrors_of(origin, broker.address("SASL"), CREDENTIALS))

    looks = [
        functools.partial(look, broker.tools, broker.bootstrap, targets[name], count)
        for name, count in PARTITIONS.items()
    ]
    for (name, topic), found in zip(targets.items(), look_at_all(looks), strict=True):
        truth = copied[origin.broker.version, "", name]
        assert found.bounds == truth.bounds
        assert found.printed == truth.printed
        # Those who read what is not committed see nothing more.
        uncommitted = {"isolation.level": "read_uncommitted"}
        start = truth.bounds[0][0]
        rows = rows_by_librdkafka(broker.bootstrap, topic, start=start, config=uncommitted)
        assert list(rows) == truth.rows[0]
        assert max(producers_of_markers(broker, topic)) < 1 << 40  # given out by the cluster


@pytest.mark.thinned
@pytest.mark.parametrize("version", VERSIONS)
def test_gaps_are_filled_with_markers_where_permitted(copied, brokers, origins, version):
    origin = origins[version]
    topic = origin.topic("kept") + "-copy"
    with ClusterClient(connection_settings(origin.broker.bootstrap, {})) as client:
        source_id = client.topic(origin.topic("kept")).topic_id
    wanted = {marker_producer_id(producer_id(topic, 0, source_id))}

    for broker in [brokers[kind] for source, kind in PAIRS if source == version]:
        assert producers_of_markers(broker, topic) == wanted


@pytest.fixture
def limited(restricted, version):
    """A client of the mirror's user."""
    address = restricted[version].address("SASL")
    with ClusterClient(connection_settings(address, CREDENTIALS)) as client:
        yield client


def producers_of_markers(broker, topic):
    return {b.producer_id for b in stored_batches(broker.bootstrap, topic) if b.is_control}


@pytest.mark.parametrize("version", RELEASES)
def test_refused_markers_are_replaced_by_empty_transactions(
    restricted, limited, version, topic_name, monkeypatch
):
    monkeypatch.setattr(limited.admin, "may_write_markers", lambda: True)
    restricted[version].create_topic(topic_name)
    allow_copies(restricted[version], [topic_name])

    GapWriter(limited).fill(TopicPartition(topic_name, 0), 0, 5, verified_ms=0, producer=PRODUCER)

    assert log_bounds(restricted[version].bootstrap, topic_name, 0) == (0, 5)
    assert max(producers_of_markers(restricted[version], topic_name)) < 1 << 40


@pytest.mark.parametrize("version", RELEASES)
def test_alter_permission_on_the_cluster_allows_markers(restricted, limited, version, topic_name):
    restricted[version].create_topic(topic_name)
    allow_copies(restricted[version], [topic_name])

    with allowed_on_cluster(restricted[version], "ALTER"):  # includes Describe
        GapWriter(limited).fill(
            TopicPartition(topic_name, 0), 0, 5, verified_ms=0, producer=PRODUCER
        )

    assert producers_of_markers(restricted[version], topic_name) == {marker_producer_id(PRODUCER)}


@pytest.mark.gate("why the documentation calls it an administrator's right")
@pytest.mark.parametrize("version", VERSIONS)
def test_alter_permission_on_the_cluster_allows_changing_acls(restricted, version):
    admin = AdminClient({"bootstrap.servers": restricted[version].address("SASL"), **CREDENTIALS})
    where = (ResourceType.TOPIC, "of-others", ResourcePatternType.LITERAL)
    wanted = AclBinding(*where, f"User:{USER}", "*", AclOperation.READ, AclPermissionType.ALLOW)

    def grant_itself():
        return admin.create_acls([wanted])[wanted].result(30)

    with pytest.raises(KafkaException, match="CLUSTER_AUTHORIZATION_FAILED"):
        grant_itself()

    with allowed_on_cluster(restricted[version], "ALTER"):
        grant_itself()


# Open transactions


@pytest.mark.parametrize("version", VERSIONS)
def test_an_open_transaction_ends_the_copy_until_it_is_committed(brokers, version):
    source, topic = brokers[version], f"open-at-{version}"
    destination = brokers[VERSIONS[1 - VERSIONS.index(version)]]
    source.create_topic(topic)
    mirror = mirror_to_cluster(topic, source.bootstrap, destination.bootstrap)
    plain, late = (Writer(source.bootstrap, topic, transactional_id=t) for t in ("in-time", topic))
    messages = plain_messages(60, seed=1, start_ms=SYSTEM_CLOCK.now_ms())
    plain.transaction(messages[:10], commit=True)
    late.begin()
    late.send(messages[10:20])
    plain.transaction(messages[20:30], commit=True)
    plain.transaction(messages[30:40], commit=False)

    copy(mirror)

    before = look(destination.tools, destination.bootstrap, topic, 1)
    assert before.bounds == {0: (0, 11)}
    assert [row.value for row in before.rows[0]] == [m.value for m in messages[:10]]
    late.send(messages[40:50])
    late.end(commit=True)
    plain.transaction(messages[50:60], commit=True)
    copy(mirror)

    truth, found = look_at_all(
        functools.partial(look, broker.tools, broker.bootstrap, topic, 1)
        for broker in (source, destination)
    )
    assert found == truth
    assert len(found.rows[0]) == 50


# `holes: fail`


def aborted(broker, topic):
    one = Writer(broker.bootstrap, topic, transactional_id=topic)
    one.transaction(plain_messages(5, seed=1), commit=False)


def committed(broker, topic, seed=1):
    messages = plain_messages(5, seed=seed, start_ms=SYSTEM_CLOCK.now_ms())
    Writer(broker.bootstrap, topic, transactional_id=topic).transaction(messages, commit=True)


def compacted(broker, topic):
    one = Writer(broker.bootstrap, topic)
    one.send(plain_messages(5, seed=1, keys=1))
    clean(broker, topic, 1)


@pytest.mark.parametrize(
    ("make", "offset", "cause"),
    [(aborted, 10, "aborted"), (committed, 15, "control"), (compacted, 10, "compacted")],
)
def test_the_fail_policy_stops_before_the_first_gap(brokers, make, offset, cause):
    source, destination = brokers["4.3.1"], brokers["3.9.2"]
    topic = f"refused-{cause}"
    source.create_topic(topic, config=COMPACTED if make is compacted else {})
    Writer(source.bootstrap, topic).send(plain_messages(10, seed=2))
    make(source, topic)
    Writer(source.bootstrap, topic).send(plain_messages(10, seed=3))

    with pytest.raises(PositionError) as caught:
        copy(mirror_to_cluster(topic, source.bootstrap, destination.bootstrap, **FAIL_AT_GAPS))

    facts = caught.value.facts
    assert (facts["reason"], facts["topic"], facts["partition"]) == ("HoleAtSource", topic, 0)
    assert (facts["offset"], facts["cause"]) == (offset, cause)
    assert log_bounds(destination.bootstrap, topic, 0) == (0, offset)
    rows = list(rows_by_librdkafka(destination.bootstrap, topic))
    assert rows == list(rows_by_librdkafka(source.bootstrap, topic))[:offset]


def test_the_fail_policy_stops_before_a_missing_head(brokers):
    source, destination, topic = brokers["4.3.1"], brokers["3.9.2"], "refused-head"
    source.create_topic(topic)
    Writer(source.bootstrap, topic).send(plain_messages(10, seed=2))
    trim(source.bootstrap, topic, 0, 4)

    with pytest.raises(PositionError) as caught:
        copy(mirror_to_cluster(topic, source.bootstrap, destination.bootstrap, **FAIL_AT_GAPS))

    facts = caught.value.facts
    assert (facts["reason"], facts["position"], facts["log_start"]) == ("SourceTrimmed", 0, 4)
    assert log_bounds(destination.bootstrap, topic, 0) == (0, 0)


def test_a_record_displaced_by_a_marker_is_found_at_the_next_start(brokers):
    source, destination, topic = brokers["3.9.2"], brokers["4.3.1"], "overtaken"
    source.create_topic(topic)
    committed(source, topic)
    mirror = mirror_to_cluster(topic, source.bootstrap, destination.bootstrap)
    copy(mirror)
    with PartitionClient(destination.bootstrap, topic) as raw:  # the broker's second marker
        assert raw.write_markers((4711, 0)) == {4711: 0}
    committed(source, topic, seed=2)

    with pytest.raises(PositionError) as caught:
        copy(mirror)

    facts = caught.value.facts
    assert (facts["reason"], facts["expected"], facts["found"]) == ("HoleTooLong", 6, 7)
    assert log_bounds(destination.bootstrap, topic, 0) == (0, 7)
