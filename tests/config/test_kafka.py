"""Destinations in another Kafka cluster: settings are read, invalid ones are reported.

Method: whole settings are compared with the file, in both of its shapes; a valid file is changed in
one place, and all problems are compared; replicas between clusters with and without loops, with
every spelling of a server.
"""

import json
import pickle

import pytest

from kit.runs.configs import (
    ABSENT,
    complaints,
    folder,
    mirror,
    problems_of,
    settings_of,
    shared_destination,
    shared_mirror,
    text_of,
)
from logmirror.config.settings import FilesystemDestination, KafkaDestination

NOT_SHARED = "is not allowed in a destination for all mirrors"
ARCHIVES_ONLY = "is only for destinations of type filesystem or s3"
CANARY = "Tr0ub4dor&3"


def cluster(servers="standby:9092", /, **changes):
    """A valid destination in another cluster."""
    base = {"type": "kafka", "bootstrap-servers": servers}
    changes = {key.replace("_", "-"): value for key, value in changes.items()}
    return {key: value for key, value in (base | changes).items() if value is not ABSENT}


def copy(name="orders", /, *destinations, **changes):
    """A valid mirror whose destinations are all in Kafka; without any, in one."""
    changes.setdefault("flush", ABSENT)
    return mirror(name, destinations=list(destinations) or [cluster()], **changes)


def between(name, origin, *targets, topic="orders", to=None, **changes):
    """A mirror from one cluster into others."""
    destinations = [
        cluster(f"{server}:9092", topic=to or ABSENT, name=server) for server in targets
    ]
    source = {"bootstrap-servers": f"{origin}:9092"}
    return copy(name, *destinations, source=source, topic=topic, **changes)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.mirror_v3("CFG-01")
def test_a_minimal_replica_gets_every_default_and_needs_no_flush():
    (mirrored,) = settings_of(copy("orders-copy")).mirrors
    assert mirrored.flush is None
    assert mirrored.destinations == (
        KafkaDestination(
            name="orders-copy",
            bootstrap_servers="standby:9092",
            topic="orders",
            properties={},
            offsets="preserve",
            gaps="markers",
            topic_sync="create",
            timestamp_mode="source",
            replication_factor=None,
            max_batch_bytes=1_000_000,
        ),
    )


@pytest.mark.mirror_v3("CFG-02")
def test_every_key_of_a_kafka_destination_is_read():
    (mirrored,) = settings_of(
        copy(
            "a",
            cluster(
                "SSL://b-1:9094 , [::1]:9092,",
                name="standby",
                topic="a.orders",
                properties={"sasl.password": "x", "retry.backoff.ms": 5},
                replication_factor=3,
                timestamp_mode="destination",
                max_batch_bytes=0,
            )
            | {"holes": "fail"},
            cluster("c:1", name="third", offsets="translate", topic_sync="validate"),
        )
    ).mirrors
    assert mirrored.destinations == (
        KafkaDestination(
            name="standby",
            bootstrap_servers="SSL://b-1:9094,[::1]:9092",
            topic="a.orders",
            properties={"sasl.password": "x", "retry.backoff.ms": "5"},
            gaps="fail",
            replication_factor=3,
            timestamp_mode="destination",
            max_batch_bytes=0,
        ),
        KafkaDestination(
            name="third",
            bootstrap_servers="c:1",
            topic="orders",
            offsets="translate",
            topic_sync="validate",
        ),
    )


@pytest.mark.mirror_v3("CFG-29")
def test_an_archive_beside_a_replica_keeps_its_settings():
    (mirrored,) = settings_of(
        mirror(
            destinations=[cluster(name="standby"), folder(name="archive")],
            chain_start="earliest",
            format="native",
        )
    ).mirrors
    kinds = [type(one) for one in mirrored.destinations]
    assert kinds == [KafkaDestination, FilesystemDestination]
    assert mirrored.flush is not None
    assert (mirrored.format, mirrored.chain_start) == ("native", "earliest")


@pytest.mark.parametrize(
    ("of_mirror", "of_destination", "expected"),
    [
        (ABSENT, ABSENT, "source"),
        ("destination", ABSENT, "destination"),
        (ABSENT, "destination", "destination"),
        ("destination", "source", "source"),
    ],
)
def test_the_timestamp_mode_of_a_mirror_is_the_default_of_its_destinations(
    of_mirror, of_destination, expected
):
    mirrored = copy("a", cluster(timestamp_mode=of_destination), timestamp_mode=of_mirror)
    assert settings_of(mirrored).mirrors[0].destinations[0].timestamp_mode == expected


def test_one_cluster_for_all_mirrors_names_topics_after_the_override():
    settings = settings_of(
        shared_mirror("a"),
        shared_mirror("b", partition=1, destination_name_override="renamed"),
        destination=cluster(timestamp_mode="destination", topic_sync="off"),
    )
    found = [mirrored.destinations[0] for mirrored in settings.mirrors]
    assert [(one.name, one.topic) for one in found] == [("orders",) * 2, ("renamed",) * 2]
    assert {(one.timestamp_mode, one.topic_sync) for one in found} == {("destination", "off")}
    assert {mirrored.flush for mirrored in settings.mirrors} == {None}


def test_a_kafka_destination_is_picklable_and_hides_its_secrets():
    text = text_of(copy("a", cluster(properties={"sasl.password": CANARY})))
    settings = settings_of(copy("a", cluster(properties={"sasl.password": CANARY})))
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert CANARY not in repr(settings)
    for broken in (text.replace('"kafka"', '"kafak"'), text.replace('"topic"', '"tpic"')):
        problems = problems_of(broken)
        assert problems
        assert CANARY not in repr(problems)


# -- one destination -------------------------------------------------------------------------------


@pytest.mark.mirror_v3("CFG-09")
@pytest.mark.parametrize(
    ("changes", "key", "message", "suggestion"),
    [
        ({"bootstrap_servers": ABSENT}, "bootstrap-servers", "is required", ""),
        ({"bootstrap_servers": "a:0"}, "bootstrap-servers", None, ""),
        ({"topic": "a b"}, "topic", None, ""),
        ({"type": "kafak"}, "type", "must be filesystem, kafka or s3", "did you mean kafka?"),
        ({"root": "/a"}, "root", "unknown key", "it belongs below mirrors.destinations"),
        ({"bootstrap_server": "a"}, "bootstrap-server", "unknown key", None),
        ({"offset": "x"}, "offset", "unknown key", "did you mean offsets?"),
        ({"offsets": "keep"}, "offsets", "must be preserve or translate", ""),
        ({"holes": "skip"}, "holes", "must be markers or fail", ""),
        ({"topic_sync": True}, "topic-sync", "must be create, validate or off", ""),
        ({"timestamp_mode": "now"}, "timestamp-mode", "must be source or destination", ""),
        ({"replication_factor": 0}, "replication-factor", "must be 1 or more", ""),
        ({"replication_factor": 2**15}, "replication-factor", "must be 32767 or less", ""),
        ({"replication_factor": "3"}, "replication-factor", "must be a whole number", None),
        ({"max_batch_bytes": -1}, "max-batch-bytes", "must be 0 or more", ""),
        ({"max_batch_bytes": 2**31}, "max-batch-bytes", "must be 2147483647 or less", ""),
        ({"max_batch_bytes": "1 MB"}, "max-batch-bytes", None, "write 1000000"),
        ({"format": "native"}, "format", ARCHIVES_ONLY, "remove it"),
        (
            {"offsets": "translate", "holes": "fail"},
            "holes",
            "is only for offsets: preserve",
            "remove it",
        ),
        (
            {"topic_sync": "validate", "replication_factor": 3},
            "replication-factor",
            "is only for topic-sync: create",
            "remove it",
        ),
        (
            {"properties": {"bootstrap.servers": "x"}},
            "properties.bootstrap.servers",
            "the file has a key for this",
            "write bootstrap-servers in the destination",
        ),
    ],
)
def test_one_error_of_a_kafka_destination_is_one_problem_with_its_place(
    changes, key, message, suggestion
):
    (problem,) = problems_of(text_of(copy("a", cluster(**changes))))
    assert problem.path == f"mirrors[0].destinations[0].{key}"
    assert message in (None, problem.message)
    assert suggestion in (None, problem.suggestion)


@pytest.mark.mirror_v3("CFG-11")
@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"format": "native"}, "format", ARCHIVES_ONLY),
        ({"format": "native", "compression": "lz4"}, "format compression", ARCHIVES_ONLY),
        ({"encoding": "utf8"}, "encoding", ARCHIVES_ONLY),
        ({"chain_start": "earliest"}, "chain-start", ARCHIVES_ONLY),
        (
            {"flush": {"max-time-ms": 1, "max-bytes": 1, "max-offsets": 1}},
            "flush",
            ARCHIVES_ONLY,
        ),
    ],
)
def test_archive_settings_are_refused_without_an_archive(changes, key, message):
    found = complaints(copy("a", **changes))
    assert found == {f"mirrors[0].{one}": message for one in key.split()}


@pytest.mark.mirror_v3("CFG-12", "CFG-13")
def test_a_timestamp_mode_needs_a_kafka_destination():
    message = "is only for destinations of type kafka"
    assert complaints(mirror(timestamp_mode="source")) == {"mirrors[0].timestamp-mode": message}
    there = complaints(shared_mirror(timestamp_mode="source"), destination=shared_destination())
    assert there == {"mirrors[0].timestamp-mode": message}
    mixed = mirror(destinations=[cluster(name="a"), folder(name="b")], timestamp_mode="destination")
    assert complaints(mixed) == {}


def test_an_archive_beside_a_replica_needs_a_flush():
    mixed = mirror(destinations=[cluster(name="a"), folder(name="b")], flush=ABSENT)
    assert complaints(mixed) == {"mirrors[0].flush": "is required"}


@pytest.mark.parametrize(
    ("changes", "of_mirror", "path", "message"),
    [
        (
            {"topic": "x"},
            {},
            "destination.topic",
            "is not allowed in a destination for all mirrors",
        ),
        ({"name": "x"}, {}, "destination.name", "is not allowed in a destination for all mirrors"),
        ({"flush": {}}, {}, "destination.flush", ARCHIVES_ONLY),
        ({"format": "native"}, {}, "destination.format", ARCHIVES_ONLY),
        ({"holes": "fail", "offsets": "translate"}, {}, "destination.holes", None),
        ({"properties": {"metadata.broker.list": "x"}}, {}, None, "the file has a key for this"),
        ({}, {"format": "native"}, "mirrors[0].format", ARCHIVES_ONLY),
        ({}, {"chain_start": 5}, "mirrors[0].chain-start", ARCHIVES_ONLY),
        ({}, {"timestamp_mode": "source"}, "mirrors[0].timestamp-mode", None),
        ({}, {"destination_name_override": "a b"}, "mirrors[0].destination-name-override", None),
    ],
)
def test_a_shared_kafka_destination_is_checked_like_a_mirrors_own(
    changes, of_mirror, path, message
):
    (problem,) = problems_of(
        text_of(shared_mirror("a", **of_mirror), destination=cluster(**changes))
    )
    assert path in (None, problem.path)
    assert message in (None, problem.message)


def test_properties_of_both_clusters_are_validated():
    origin = {"bootstrap-servers": "a:1", "properties": {"one": "1", "group.id": "x"}}
    text = text_of(
        copy("a", cluster(properties={"two": 2, "group.id": "y"}, name="x"), source=origin)
    )
    validated = []

    def validate(properties):
        validated.append(dict(properties))
        return [(name, "is odd", "remove it") for name in properties]

    found = {
        problem.path: problem.message for problem in problems_of(text, check_properties=validate)
    }
    assert validated == [{"one": "1"}, {"two": "2", "group.id": "y"}]
    assert found == {
        "mirrors[0].source.properties.group.id": (
            "has no effect: logmirror uses no consumer group"
        ),
        "mirrors[0].source.properties.one": "is odd",
        "mirrors[0].destinations[0].properties.two": "is odd",
        "mirrors[0].destinations[0].properties.group.id": "is odd",
    }
    shared = text_of(shared_mirror(), destination=cluster(properties={"three": "3"}))
    (problem,) = problems_of(shared, check_properties=validate)
    assert problem.path == "destination.properties.three"


@pytest.mark.parametrize("shape", ["${KIND}", "${KIND:-kafka}"])
def test_the_type_may_come_from_the_environment(shape):
    text = text_of(copy("a", cluster(type=shape)))
    assert problems_of(text, environ={"KIND": "kafka"}) == []
    unset = problems_of(text)
    assert [problem.path for problem in unset] == (
        [] if ":-" in shape else ["mirrors[0].destinations[0].type"]
    )


# -- several replicas ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "target", "same"),
    [
        ("a:9092", "a:9092", True),
        ("a:9092,b:9092", "b:9092", True),
        ("a:9092,b:9092", "b:9092, c:9092", True),
        ("A", "a:9092", True),
        ("PLAINTEXT://a:9092", "a", True),
        ("[::1]:9092", "[::1]", True),
        ("a:9092", "a:9093", False),
        ("a:9092", "b:9092", False),
    ],
)
def test_a_topic_cannot_be_replicated_onto_itself(origin, target, same):
    def found(**changes):
        source = {"bootstrap-servers": origin}
        return complaints(copy("a", cluster(target, **changes), source=source))

    expected = {"mirrors[0].destinations[0]": "replicates the topic 'orders' onto itself"}
    assert found() == (expected if same else {})
    assert found(topic="orders-copy") == {}


def test_a_list_of_servers_joins_two_others_into_one_cluster():
    found = complaints(
        copy("a", cluster("x:1"), source={"bootstrap-servers": "y:1"}),
        copy("b", cluster("far:1"), source={"bootstrap-servers": "x:1,y:1"}, topic="other"),
    )
    assert found == {"mirrors[0].destinations[0]": "replicates the topic 'orders' onto itself"}


@pytest.mark.parametrize(
    ("one", "other", "partition"),
    [
        ({"partition": 3}, {"partition": 3}, 3),
        ({"partitions": "all"}, {"partition": 3}, 3),
        ({"partitions": "all"}, {"partitions": "all"}, 0),
        ({"partitions": [0, "5-9"]}, {"partitions": ["3-5"]}, 5),
        ({"partition": 3}, {"partition": 4}, None),
    ],
)
def test_two_replicas_cannot_write_one_partition(one, other, partition):
    one, other = ({"partition": ABSENT} | keys for keys in (one, other))
    message = f"mirrors[0].destinations[0] also writes orders-{partition} of this cluster"
    found = complaints(
        between("x", "a", "z", **one), between("y", "b", "z", topic="theirs", to="orders", **other)
    )
    assert found == ({} if partition is None else {"mirrors[1].destinations[0]": message})


def test_two_destinations_of_one_mirror_cannot_write_one_partition():
    found = complaints(copy("a", cluster("z:1", name="one"), cluster("z:1", name="two")))
    message = "mirrors[0].destinations[0] also writes orders-0 of this cluster"
    assert found == {"mirrors[0].destinations[1]": message}


def test_mirrors_that_share_one_cluster_cannot_write_one_partition():
    found = complaints(
        shared_mirror("a"),
        shared_mirror("b", topic="other", destination_name_override="orders"),
        shared_mirror("c", partition=1),
        destination=cluster(),
    )
    assert found == {"mirrors[1]": "mirrors[0] also writes orders-0 of this cluster"}


@pytest.mark.parametrize(
    ("mirrors", "at", "names"),
    [
        ([("there", "a", "b"), ("back", "b", "a")], 1, "'back' to 'there'"),
        (
            [("x", "a", "b"), ("y", "b", "c"), ("z", "c", "a")],
            2,
            "'z' to 'x' to 'y'",
        ),
        ([("x", "a", "b"), ("y", "a", "c"), ("z", "b", "c")], None, None),
    ],
)
def test_a_loop_is_refused_at_the_mirror_that_closes_it(mirrors, at, names):
    found = complaints(*(between(*one, topic="t") for one in mirrors))
    # The last case writes one partition from two mirrors, which is another error.
    loops = {path: message for path, message in found.items() if "loop" in message}
    message = f"closes a loop: records return to their topic, from {names}"
    assert loops == ({} if at is None else {f"mirrors[{at}].destinations[0]": message})


def test_only_the_same_partitions_close_a_loop():
    there = between("there", "a", "b", partition=ABSENT, partitions=["0-3"])
    back = between("back", "b", "a", partition=ABSENT, partitions=["4-7"])
    assert complaints(there, back) == {}
    through = between("through", "b", "c", partition=ABSENT, partitions=["2-5"])
    home = between("home", "c", "a", partition=ABSENT, partitions=["4-5"])
    assert complaints(there, through, home) == {}
    home["partitions"] = ["3-5"]
    assert list(complaints(there, through, home)) == ["mirrors[2].destinations[0]"]


def test_another_topic_closes_no_loop_and_a_renamed_one_does():
    there = between("there", "a", "b", to="a.orders")
    assert complaints(there, between("back", "b", "a", to="b.orders")) == {}
    renamed = between("back", "b", "a", topic="a.orders", to="orders")
    assert list(complaints(there, renamed)) == ["mirrors[1].destinations[0]"]


def test_a_disabled_mirror_closes_a_loop_like_any_other():
    found = complaints(between("there", "a", "b"), between("back", "b", "a", enabled=False))
    assert list(found) == ["mirrors[1].destinations[0]"]


def test_an_invalid_destination_does_not_hide_problems_of_others():
    broken = copy("a", cluster("z:1", name="one") | {"holes": "x"}, cluster("z:1", name="two"))
    assert list(complaints(broken, copy("a", cluster("far:1"), partition=1))) == [
        "mirrors[0].destinations[0].holes",
        "mirrors[0].destinations[1]",
        "mirrors[1].name",
    ]


def test_a_thousand_mirrors_are_checked_quickly():
    mirrors = [between(f"m{n}", "a", "b", partition=n) for n in range(1000)]
    assert complaints(*mirrors, between("last", "b", "a", partition=1000)) == {}
    text = json.dumps({"mirrors": [*mirrors, between("last", "b", "a", partition=999)]})
    assert [problem.path for problem in problems_of(text)] == ["mirrors[1000].destinations[0]"]
