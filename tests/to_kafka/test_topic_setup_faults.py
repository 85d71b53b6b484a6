"""The destination topic when responses are lost, brokers are slow or permissions are missing.

Method: a scripted cluster does at each call what a real one does at the worst moment; time passes
only in `sleep_ms`. Real clusters are in test_topic_setup.
"""

import dataclasses

import pytest

from logmirror.clock import Clock
from logmirror.cluster.retry import NotFoundError
from logmirror.cluster.topology import PartitionMetadata, TopicMetadata
from logmirror.errors import OutcomeUnknownError, UnavailableError, UsageError
from logmirror.to_kafka.topic_setup import UnfitTopicError, sync_topic


def severities(findings):
    return [(finding.severity, finding.setting) for finding in findings]


class SteppingClock(Clock):
    """Time passes only in `sleep_ms`."""

    def __init__(self):
        self.at_ms = 0.0

    def monotonic_ms(self):
        return int(self.at_ms)

    def sleep_ms(self, duration_ms):
        self.at_ms += duration_ms


@dataclasses.dataclass
class Cluster:
    """What `sync_topic` asks of a cluster; `admin` is the same object."""

    name: str
    partitions: dict = dataclasses.field(default_factory=dict)
    late: int = 0
    """So many looks at a topic find no leader."""
    hidden: int = 0
    """So many questions about a topic meet a broker that has not heard of it, once it is made."""
    on_create: object = None
    on_grow: object = None
    brokers: object = dataclasses.field(default_factory=lambda: {1: {"log.cleanup.policy": "x"}})
    configs: dict = dataclasses.field(default_factory=dict)
    created: list = dataclasses.field(default_factory=list)
    asked_offsets: int = 0

    @property
    def admin(self):
        return self

    def cluster_id(self):
        return self.name

    def topic(self, name):
        self.find(name)
        self.late -= 1
        leader = -1 if self.late >= 0 else 1
        one = PartitionMetadata(leader=leader, leader_epoch=0, error=0)
        count = self.partitions[name]
        return TopicMetadata(name=name, topic_id=None, partitions=dict.fromkeys(range(count), one))

    def find(self, name):
        self.hidden -= name in self.partitions
        if name not in self.partitions or self.hidden >= 0:
            raise NotFoundError("topic does not exist", topic=name)

    def describe_topic_configs(self, name):
        self.find(name)
        return {"cleanup.policy": "delete", **self.configs}

    def broker_configs(self):
        if isinstance(self.brokers, Exception):
            raise self.brokers
        return self.brokers

    def list_offsets(self, partitions, _at):
        self.asked_offsets += len(list(partitions))
        return {}

    def create_topic(self, name, *, partition_count, replication_factor, configs):
        self.created.append((name, partition_count, replication_factor, configs))
        if self.on_create is not None:
            self.on_create(name, partition_count)
        else:
            self.partitions[name] = partition_count

    def create_partitions(self, name, count):
        if self.on_grow is not None:
            self.on_grow(name, count)
        else:
            self.partitions[name] = count


def sync(destination, source=None, **changes):
    source = source or Cluster("origin", {"t": 3})
    return sync_topic(
        source, "t", destination, "t", mode="create", clock=SteppingClock(), **changes
    )


def test_a_topic_that_another_client_creates_meanwhile_is_used():
    def lose_the_race(name, _count):
        there.partitions[name] = 2
        raise UsageError("the topic exists already", error="TOPIC_ALREADY_EXISTS")

    there = Cluster("there", on_create=lose_the_race)
    report = sync(there)
    assert (report.created, report.partitions_added) == (False, 1)
    assert there.partitions == {"t": 3}


@pytest.mark.parametrize("was_made", [True, False])
def test_a_lost_response_is_looked_for(was_made):
    def lose(name, count):
        if was_made:
            there.partitions[name] = count
        raise OutcomeUnknownError("no response")

    there = Cluster("there", on_create=lose)
    if was_made:
        assert not sync(there).created  # another client may have created it
    else:
        with pytest.raises(OutcomeUnknownError):
            sync(there)
    assert len(there.created) == 1


def test_a_refusal_to_create_a_topic_is_reported():
    def refuse(_name, _count):
        raise UsageError("a policy of the broker forbids it", error="POLICY_VIOLATION")

    with pytest.raises(UsageError) as caught:
        sync(Cluster("there", on_create=refuse))
    assert caught.value.facts["error"] == "POLICY_VIOLATION"


def test_a_topic_that_would_break_the_copy_is_not_grown_first():
    there = Cluster("there", {"t": 1}, configs={"cleanup.policy": "compact"})
    with pytest.raises(UnfitTopicError):
        sync(there)
    assert there.partitions == {"t": 1}


@pytest.mark.parametrize("hidden", [1, 2, 3, 7])
def test_brokers_that_hear_of_a_topic_late_are_waited_for(hidden):
    there = Cluster("there", hidden=hidden)
    assert sync(there).created
    assert there.hidden < 0


@pytest.mark.parametrize("error", [OutcomeUnknownError("lost"), UsageError("they are there")])
@pytest.mark.parametrize("were_added", [True, False])
def test_partitions_that_may_have_been_added_are_looked_for(error, were_added):
    def lose(name, count):
        if were_added:
            there.partitions[name] = count
        raise error

    there = Cluster("there", {"t": 1}, on_grow=lose)
    if were_added:
        assert sync(there).partitions_added == 2
    else:
        with pytest.raises(type(error)):
            sync(there)


def test_leaders_are_waited_for_and_asked():
    there = Cluster("there", late=20)
    assert sync(there).created
    assert there.asked_offsets == 3
    assert there.late < 0


def test_the_wait_for_leaders_ends():
    with pytest.raises(UnavailableError) as caught:
        sync(Cluster("there", late=10_000))
    assert caught.value.facts["topic"] == "t"


def test_brokers_that_may_not_be_asked_do_not_stop_a_copy():
    there = Cluster(
        "there", brokers=UsageError("not allowed", error="CLUSTER_AUTHORIZATION_FAILED")
    )
    report = sync(there)
    assert severities(report.findings) == [("note", "producer.id.expiration.ms")]
    ((_, _, _, configs),) = there.created
    assert configs["cleanup.policy"] == "delete"
    assert not any("timestamp" in name and "max" in name for name in configs)


@pytest.mark.parametrize(("asked", "sent"), [(None, -1), (-1, -1), (3, 3)])
def test_the_replication_factor_is_the_clusters_default_unless_configured(asked, sent):
    there = Cluster("there")
    sync(there, replication_factor=asked)
    assert there.created[0][2] == sent
