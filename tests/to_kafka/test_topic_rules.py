"""Each unsuitable setting of a destination topic is reported, with advice.

Method: one setting at a time differs from a suitable destination, and all findings are compared, so
that neither a missing nor a superfluous finding can pass.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.to_kafka.topic_rules import (
    Finding,
    cluster_findings,
    partition_findings,
    settings_for_copy,
    strictest,
    topic_findings,
)

FOREVER = 2**63 - 1
WEEK_MS = 7 * 86_400_000

APACHE_3 = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": str(FOREVER),
    "message.timestamp.before.max.ms": str(FOREVER),
    "message.timestamp.difference.max.ms": str(FOREVER),
    "message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
    "retention.bytes": "-1",
    "retention.ms": str(WEEK_MS),
    "segment.bytes": "1073741824",
    "segment.ms": str(WEEK_MS),
    "unclean.leader.election.enable": "false",
}
"""A topic of Apache Kafka 3.9 with every default."""

BROKER_3 = {
    "compression.type": "producer",
    "log.cleanup.policy": "delete",
    "log.message.timestamp.after.max.ms": str(FOREVER),
    "log.message.timestamp.before.max.ms": str(FOREVER),
    "log.message.timestamp.difference.max.ms": str(FOREVER),
    "log.message.timestamp.type": "CreateTime",
    "log.retention.bytes": "-1",
    "log.retention.ms": None,
    "message.max.bytes": "1048588",
    "producer.id.expiration.ms": "86400000",
    "socket.request.max.bytes": "104857600",
}
BROKER_4 = {key: value for key, value in BROKER_3.items() if "difference" not in key}
EMBEDDED = {"message.max.bytes": "2097152", "socket.request.max.bytes": "104857600"}


def changed(configs, **changes):
    changes = {key.replace("_", "."): value for key, value in changes.items()}
    return {key: value for key, value in (configs | changes).items() if value != "absent"}


def fits(source=APACHE_3, mode="source"):
    """A destination that was made for a source."""
    return APACHE_3 | settings_for_copy(source, BROKER_3, timestamp_mode=mode)


def found(source, destination, mode="source"):
    findings = list(topic_findings(source, destination, timestamp_mode=mode))
    assert all(finding.advice and not finding.advice.endswith(".") for finding in findings)
    return {(finding.severity, finding.setting) for finding in findings}


# -- what a topic is made with ---------------------------------------------------------------------


def test_a_copy_keeps_records_as_long_as_the_source_and_a_segment_more():
    assert settings_for_copy(APACHE_3, BROKER_3, timestamp_mode="source") == {
        "cleanup.policy": "delete",
        "compression.type": "producer",
        "max.message.bytes": "1048588",
        "message.timestamp.after.max.ms": str(FOREVER),
        "message.timestamp.before.max.ms": str(FOREVER),
        "message.timestamp.difference.max.ms": str(FOREVER),
        "message.timestamp.type": "CreateTime",
        "retention.bytes": "-1",
        "retention.ms": str(2 * WEEK_MS),
    }


@pytest.mark.parametrize(
    ("changes", "retention_ms", "retention_bytes"),
    [
        ({"retention_ms": "-1"}, "-1", "-1"),
        ({"retention_ms": str(FOREVER)}, "-1", "-1"),
        ({"retention_ms": str(FOREVER - 1)}, "-1", "-1"),
        ({"retention_ms": "1000", "segment_ms": "absent"}, "1000", "-1"),
        (
            {"retention_bytes": "1000", "segment_bytes": "50", "segment_ms": "1"},
            str(WEEK_MS + 1),
            "1050",
        ),
        ({"cleanup_policy": "compact"}, "-1", "-1"),
        ({"cleanup_policy": ""}, "-1", "-1"),
        ({"cleanup_policy": "compact,delete"}, str(2 * WEEK_MS), "-1"),
    ],
)
def test_a_copy_is_limited_only_if_the_source_is(changes, retention_ms, retention_bytes):
    source = changed(APACHE_3, **changes)
    made = settings_for_copy(source, BROKER_4, timestamp_mode="source")
    assert (made["retention.ms"], made["retention.bytes"]) == (retention_ms, retention_bytes)
    assert made["cleanup.policy"] == "delete"


def test_only_what_a_cluster_knows_is_set():
    assert "message.timestamp.difference.max.ms" not in settings_for_copy(
        APACHE_3, BROKER_4, timestamp_mode="source"
    )
    assert settings_for_copy(APACHE_3, EMBEDDED, timestamp_mode="source") == {
        "max.message.bytes": "2097152"
    }
    unread = settings_for_copy(APACHE_3, None, timestamp_mode="source")
    assert not any("max.ms" in name for name in unread)
    assert unread["retention.ms"] == str(2 * WEEK_MS)


@pytest.mark.parametrize("cluster", [BROKER_3, BROKER_4, EMBEDDED, None])
def test_a_destination_that_stamps_is_made_to_stamp(cluster):
    made = settings_for_copy(APACHE_3, cluster, timestamp_mode="destination")
    assert made["message.timestamp.type"] == "LogAppendTime"


@pytest.mark.parametrize(
    ("source", "cluster", "expected"),
    [("1048588", "1048588", "1048588"), ("5", "1048588", "1048588"), ("52428800", "7", "52428800")],
)
def test_batches_may_be_as_large_as_on_either_side(source, cluster, expected):
    made = settings_for_copy(
        changed(APACHE_3, max_message_bytes=source),
        BROKER_4 | {"message.max.bytes": cluster},
        timestamp_mode="source",
    )
    assert made["max.message.bytes"] == expected


_SOURCES = st.fixed_dictionaries(
    {
        "cleanup.policy": st.sampled_from(
            ["delete", "compact", "compact,delete", "delete,compact"]
        ),
        "retention.ms": st.integers(-1, FOREVER).map(str),
        "retention.bytes": st.integers(-1, FOREVER).map(str),
        "segment.ms": st.integers(1, FOREVER).map(str),
        "segment.bytes": st.integers(14, 2**31 - 1).map(str),
        "max.message.bytes": st.integers(0, 2**31 - 1).map(str),
        "message.timestamp.type": st.sampled_from(["CreateTime", "LogAppendTime"]),
        "message.timestamp.before.max.ms": st.integers(0, FOREVER).map(str),
        "message.timestamp.after.max.ms": st.integers(0, FOREVER).map(str),
    }
)


@given(_SOURCES, st.sampled_from(["source", "destination"]))
def test_what_is_made_for_a_source_suits_it(source, mode):
    made = APACHE_3 | settings_for_copy(source, BROKER_3, timestamp_mode=mode)
    assert {severity for severity, _ in found(source, made, mode)} <= {"note"}
    for name in ("retention.ms", "retention.bytes"):
        assert -1 <= int(made[name]) <= FOREVER


# -- what is found ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_source", "of_destination", "expected"),
    [
        ({}, {}, set()),
        ({}, {"cleanup_policy": "compact"}, {("error", "cleanup.policy")}),
        ({}, {"cleanup_policy": "delete,compact"}, {("error", "cleanup.policy")}),
        (
            {"cleanup_policy": "compact"},
            {"cleanup_policy": "compact"},
            {("error", "cleanup.policy")},
        ),
        ({}, {"cleanup_policy": ""}, set()),
        ({}, {"retention_ms": str(WEEK_MS)}, set()),
        ({}, {"retention_ms": str(WEEK_MS - 1)}, {("error", "retention.ms")}),
        ({"retention_ms": "-1"}, {}, {("error", "retention.ms")}),
        ({}, {"retention_bytes": "5"}, {("error", "retention.bytes")}),
        ({"retention_bytes": "5"}, {"retention_bytes": "5"}, set()),
        ({"cleanup_policy": "compact"}, {}, {("error", "retention.ms")}),
        ({}, {"max_message_bytes": "1048587"}, {("error", "max.message.bytes")}),
        ({}, {"max_message_bytes": "1048589"}, set()),
        ({}, {"compression_type": "zstd"}, {("note", "compression.type")}),
        ({}, {"compression_type": "uncompressed"}, {("note", "compression.type")}),
        ({}, {"message_timestamp_type": "LogAppendTime"}, {("error", "message.timestamp.type")}),
        (
            {"message_timestamp_type": "LogAppendTime"},
            {},
            {("note", "message.timestamp.type")},
        ),
        (
            {},
            {"unclean_leader_election_enable": "true"},
            {("warning", "unclean.leader.election.enable")},
        ),
        ({"min_insync_replicas": "2"}, {}, {("warning", "min.insync.replicas")}),
        ({}, {"min_insync_replicas": "2"}, set()),
    ],
)
def test_a_setting_that_does_not_suit_a_copy_is_found(of_source, of_destination, expected):
    assert found(changed(APACHE_3, **of_source), changed(fits(), **of_destination)) == expected


@pytest.mark.parametrize(
    ("of_source", "of_destination", "expected"),
    [
        ({}, {"message.timestamp.before.max.ms": "86400000"}, "error before"),
        ({}, {"message.timestamp.difference.max.ms": "86400000"}, "error+warning difference"),
        (
            {"message.timestamp.before.max.ms": str(WEEK_MS)},
            {"message.timestamp.before.max.ms": str(3 * WEEK_MS)},
            "",
        ),
        (
            {"message.timestamp.before.max.ms": str(WEEK_MS)},
            {"message.timestamp.before.max.ms": str(3 * WEEK_MS - 1)},
            "error before",
        ),
        ({}, {"message.timestamp.after.max.ms": "3600000"}, "warning after"),
        (
            {"message.timestamp.after.max.ms": "3600000"},
            {"message.timestamp.after.max.ms": "3600000"},
            "",
        ),
    ],
)
def test_times_that_would_be_refused_are_found(of_source, of_destination, expected):
    severities, _, name = expected.partition(" ")
    setting = f"message.timestamp.{name}.max.ms"
    assert found(APACHE_3 | of_source, fits() | of_destination) == {
        (severity, setting) for severity in severities.split("+") if severity
    }
    # Where the destination stamps, no time of the source is looked at.
    stamping = fits(mode="destination") | of_destination
    assert found(APACHE_3 | of_source, stamping, "destination") == set()


def test_a_destination_that_is_asked_to_stamp_must_do_so():
    assert found(APACHE_3, fits(), "destination") == {("error", "message.timestamp.type")}
    assert found(APACHE_3, changed(fits(), message_timestamp_type="absent"), "destination") == {
        ("error", "message.timestamp.type")
    }


def test_a_broker_that_shows_few_settings_has_no_limits():
    few = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
    assert found(few, few) == set()
    assert found(APACHE_3, few) == set()


def test_a_value_that_is_not_shown_is_not_taken_for_a_limit():
    assert found(APACHE_3, changed(fits(), max_message_bytes=None)) == set()


@pytest.mark.parametrize(
    ("counts", "needed", "grows", "severity"),
    [
        ((4, 4), 4, False, None),
        ((4, 3), 4, True, "note"),
        ((4, 3), 4, False, "error"),
        ((4, 3), 3, False, "warning"),
        ((4, 5), 4, True, "warning"),
    ],
)
def test_numbers_of_partitions_are_compared(counts, needed, grows, severity):
    findings = list(partition_findings(*counts, needed=needed, grows=grows))
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert [finding.setting for finding in findings] == ["partitions"] * len(findings)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"producer.id.expiration.ms": "86399999"}, [("note", "producer.id.expiration.ms")]),
        ({"socket.request.max.bytes": "1048588"}, [("error", "socket.request.max.bytes")]),
    ],
)
def test_settings_of_brokers_are_looked_at(changes, expected):
    findings = list(cluster_findings(APACHE_3, BROKER_4 | changes))
    assert [(finding.severity, finding.setting) for finding in findings] == expected


def test_brokers_that_may_not_be_asked_are_a_note():
    (finding,) = cluster_findings(APACHE_3, None)
    assert (finding.severity, finding.destination) == ("note", None)
    assert "DescribeConfigs" in finding.advice


def test_of_different_brokers_the_strictest_counts():
    one = {"a": "5", "b": "x", "only": "1", "c": None, "d": None}
    other = {"a": "10", "b": "x", "c": "7", "d": None}
    assert strictest([one, other]) == {"a": "5", "b": "x", "c": "7", "d": None}
    assert strictest([other, one]) == {"a": "5", "b": "x", "c": "7", "d": None}
    assert strictest([one]) == one
    assert strictest([]) == {}


def test_a_finding_shows_both_values_and_advice():
    finding = Finding(
        severity="error", setting="retention.ms", source="2", destination="1", advice="raise it"
    )
    assert str(finding) == "error: retention.ms: 1 (source: 2): raise it"
    missing = Finding(severity="note", setting="topic", source=None, destination=None, advice="x")
    assert str(missing) == "note: topic: absent: x"
