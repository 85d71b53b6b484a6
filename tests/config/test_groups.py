"""`groups` of a mirror: settings are read, invalid ones are reported with their place."""

import pytest

from kit.runs.configs import ABSENT, complaints, mirror, settings_of
from logmirror.config.groups_model import GroupsSettings

STANDBY = {"type": "kafka", "bootstrap-servers": "standby:9092", "name": "standby"}


def replica(name="orders", *, groups, **changes):
    """A mirror into a cluster, with `groups`."""
    base = {"destinations": [STANDBY], "flush": ABSENT, "topic": name}
    return mirror(name, **{**base, **changes}, groups=groups)


def test_a_minimal_section_gets_every_default():
    (found,) = settings_of(replica(groups={"source-alias": "primary"})).mirrors

    assert found.groups == GroupsSettings(
        source_alias="primary",
        include=(".*",),
        exclude=("console-consumer-.*", "__.*"),
        interval_ms=5000,
        sync_group_offsets=False,
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
        ({"source-alias": "a", "sync-group-offset": True}, "sync-group-offset", "unknown key"),
    ],
)
def test_what_is_wrong_is_reported_with_its_place(groups, place, message):
    [(found, problem)] = complaints(replica(groups=groups)).items()

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


def test_an_archive_has_no_groups():
    [(place, problem)] = complaints(mirror("orders", groups={"source-alias": "a"})).items()

    assert place == "mirrors[0].groups"
    assert "is only for destinations of type kafka" in problem
