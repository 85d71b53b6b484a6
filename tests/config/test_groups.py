"""`groups` of a mirror: settings are read, invalid ones are reported with their place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.configs import ABSENT, complaints, mirror, problems_of, settings_of, text_of
from logmirror.app.specs import archive_link_specs, link_specs
from logmirror.config.groups_model import GroupsSettings
from logmirror.config.kafka_rules import is_cycle
from logmirror.wire.replication_policy import ReplicationPolicy

STANDBY = {"type": "kafka", "bootstrap-servers": "standby:9092", "name": "standby"}


def replica(name="orders", *, groups, **changes):
    """A mirror into a cluster, with `groups`."""
    base = {"destinations": [STANDBY], "flush": ABSENT, "topic": name}
    return mirror(name, **{**base, **changes, "groups": groups})


def test_a_minimal_section_gets_every_default():
    (found,) = settings_of(replica(groups={"source-alias": "primary"})).mirrors

    assert found.groups == GroupsSettings(
        source_alias="primary",
        include=(".*",),
        exclude=("console-consumer-.*", "__.*"),
        interval_ms=5000,
        sync_group_offsets=False,
        archive_interval_ms=60_000,
        keep_archived=100,
    )


@pytest.mark.parametrize(
    ("groups", "place", "message"),
    [
        ({}, "source-alias", "is required"),
        ({"source-alias": "a.b"}, "source-alias", "must be 1 to 100 letters"),
        ({"source-alias": "standby"}, "source-alias", "is the name of a destination too"),
        ({"source-alias": "a", "include": []}, "include", "must list at least one"),
        ({"source-alias": "a", "exclude": ["("]}, "exclude[0]", "is not a regular expression"),
        ({"source-alias": "a", "interval-ms": 99}, "interval-ms", "must be 100 or more"),
        (
            {"source-alias": "a", "archive-interval-ms": 3_600_001},
            "archive-interval-ms",
            "must be 3600000 or less",
        ),
        ({"source-alias": "a", "keep-archived": 0}, "keep-archived", "must be 1 or more"),
        ({"source-alias": "a", "sync-group-offset": True}, "sync-group-offset", "unknown key"),
    ],
)
def test_what_is_wrong_is_reported_with_its_place(groups, place, message):
    both = {"destinations": [STANDBY, {"type": "filesystem", "root": "/data", "name": "files"}]}
    both["flush"] = {"max-time-ms": 60000, "max-bytes": 1048576, "max-offsets": 1000}
    [(found, problem)] = complaints(replica(groups=groups, **both)).items()

    assert found == f"mirrors[0].groups.{place}"
    assert message in problem


def test_an_alias_of_two_clusters_is_refused():
    two = [
        replica(name, groups={"source-alias": "a"}, source={"bootstrap-servers": f"{name}:9092"})
        for name in ("one", "two")
    ]

    [(place, problem)] = complaints(*two).items()

    assert place == "mirrors[1].groups.source-alias"
    assert "mirrors[0] uses it for another source cluster" in problem


@pytest.mark.parametrize("key", ["interval-ms", "sync-group-offsets"])
def test_what_only_replicas_use_is_refused_for_archives_alone(key):
    groups = {"source-alias": "a", key: 500 if key == "interval-ms" else True}
    [(place, problem)] = complaints(mirror("orders", groups=groups)).items()

    assert place == f"mirrors[0].groups.{key}"
    assert "is only for destinations of type kafka" in problem


@pytest.mark.parametrize("key", ["archive-interval-ms", "keep-archived"])
def test_what_only_archives_use_is_refused_for_replicas_alone(key):
    [(place, problem)] = complaints(replica(groups={"source-alias": "a", key: 500})).items()

    assert place == f"mirrors[0].groups.{key}"
    assert "is only for destinations of type filesystem or s3" in problem


def test_the_groups_of_an_archive_become_one_link_for_each_archive():
    groups = {"source-alias": "a", "archive-interval-ms": 500, "keep-archived": 7}
    files = {"type": "filesystem", "root": "/data"}
    own = {"destinations": [{**files, "name": "one"}, {**files, "name": "two"}]}
    settings = settings_of(mirror("orders", groups=groups, **own))

    links = archive_link_specs(settings)

    assert [(one.destination, one.interval_ms, one.keep) for one in links] == [
        ("one", 500, 7),
        ("two", 500, 7),
    ]
    assert [topic.mirror for one in links for topic in one.topics] == ["orders", "orders"]
    assert link_specs(settings) == []


@pytest.mark.parametrize("topic", ["standby.orders", "third.standby.orders", "standby.heartbeats"])
def test_a_topic_that_came_from_its_destination_is_refused(topic):
    cycle = replica(topic, groups={"source-alias": "primary"})

    [problem] = problems_of(text_of(cycle))

    assert problem.path == "mirrors[0].destinations[0].name"
    assert problem.message == f"the topic {topic!r} came from 'standby' by its name: a cycle"
    assert "rename the destination" in problem.suggestion


@pytest.mark.parametrize("topic", ["orders", "primary.orders", "standby", "standby-2.orders"])
def test_a_topic_of_another_cluster_is_no_cycle(topic):
    assert complaints(replica(topic, groups={"source-alias": "primary"})) == {}


def test_without_groups_a_dot_in_a_name_means_nothing():
    cycle = replica("standby.orders", groups=ABSENT)

    assert complaints(cycle) == {}


@given(st.text("ab.", max_size=8), st.sampled_from(["a", "b", "ab", "a-b"]))
def test_cycles_are_those_of_the_replication_policy(topic, destination):
    assert is_cycle(topic, destination) == ReplicationPolicy().is_cycle(topic, destination)


@pytest.mark.parametrize("offsets", ["preserve", "translate"])
def test_both_directions_of_a_topic_in_one_file_are_refused(offsets):
    there = replica("there", topic="orders", groups={"source-alias": "primary"})
    there["destinations"] = [{**STANDBY, "offsets": offsets}]
    source = {"bootstrap-servers": STANDBY["bootstrap-servers"]}
    back = replica("back", topic="orders", groups={"source-alias": "secondary"}, source=source)
    primary = {"type": "kafka", "bootstrap-servers": "localhost:9092", "name": "first"}
    back["destinations"] = [{**primary, "offsets": offsets}]

    [(place, message)] = complaints(there, back).items()

    assert place == "mirrors[1].destinations[0]"
    assert "closes a loop: records return to their topic" in message
