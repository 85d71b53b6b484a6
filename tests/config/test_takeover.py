"""`takeover` of a destination: the topic's default name, and what MirrorMaker's copy needs."""

import pytest

from kit.runs.configs import ABSENT, complaints, mirror, settings_of

STANDBY = {
    "type": "kafka",
    "bootstrap-servers": "standby:9092",
    "name": "standby",
    "offsets": "translate",
    "takeover": "mm2",
}


def replica(changes=None, **of_mirror):
    written = {key: v for key, v in (STANDBY | (changes or {})).items() if v is not ABSENT}
    groups = {"source-alias": "primary"}
    base = {"destinations": [written], "flush": ABSENT, "topic": "orders", "groups": groups}
    return mirror("orders", **(base | of_mirror))


@pytest.mark.parametrize(
    ("changes", "topic"),
    [
        ({}, "primary.orders"),
        ({"topic": "orders"}, "orders"),
        ({"takeover": ABSENT}, "orders"),
    ],
)
def test_the_topic_has_the_name_that_mirrormaker_gave_it(changes, topic):
    (found,) = settings_of(replica(changes)).mirrors
    assert found.destinations[0].topic == topic


@pytest.mark.parametrize(
    ("changes", "of_mirror", "place", "message"),
    [
        ({"takeover": "mm1"}, {}, "takeover", "must be mm2"),
        ({"offsets": ABSENT}, {}, "takeover", "is only for offsets: translate"),
        ({"name": ABSENT}, {}, "takeover", "MirrorMaker's alias of the target"),
        ({"timestamp-mode": "destination"}, {}, "takeover", "timestamps are compared"),
        ({}, {"timestamp_mode": "destination"}, "takeover", "timestamps are compared"),
        ({}, {"groups": ABSENT}, "takeover", "needs groups.source-alias"),
        ({}, {"topic": "o" * 245}, "topic", "249"),
    ],
)
def test_what_is_wrong_is_reported_with_its_place(changes, of_mirror, place, message):
    [(found, problem)] = complaints(replica(changes, **of_mirror)).items()

    assert found == f"mirrors[0].destinations[0].{place}"
    assert message in problem


def test_the_name_counts_where_replicas_are_compared():
    taken = replica()
    other = replica({"topic": "primary.orders", "takeover": ABSENT, "name": "other"})
    [(place, problem)] = complaints(taken, other | {"name": "second"}).items()

    assert place == "mirrors[1].destinations[0]"
    assert "also writes primary.orders-" in problem
