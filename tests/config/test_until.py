"""`until` of a mirror: settings are read, invalid ones are reported with their place."""

import pytest

from kit.runs.configs import ABSENT, complaints, mirror, settings_of
from logmirror.app.specs import mirror_specs
from logmirror.mirror.until import Until


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        ({"time": "1970-01-01T00:00:01Z"}, Until(time_ms=1000)),
        ({"time": "1970-01-01T01:00:00.0015+01:00"}, Until(time_ms=2)),  # never an earlier record
        ({"time": 7}, Until(time_ms=7)),
        ({"offset": 0}, Until(offset=0)),
        ({"offset": 2**63 - 1}, Until(offset=2**63 - 1)),
    ],
)
def test_a_time_or_an_offset(until, expected):
    (found,) = mirror_specs(settings_of(mirror(until=until)))
    assert found.until == expected


def test_native_objects_cannot_end_inside_a_batch():
    (found,) = complaints(mirror(until={"offset": 1}, format="native")).items()
    assert found == (
        "mirrors[0].until",
        "would split a batch, and native objects hold whole batches",
    )
    replica = {"type": "kafka", "bootstrap-servers": "b:9092"}
    changes = {"destinations": [replica], "flush": ABSENT}
    assert not complaints(mirror(until={"offset": 1}, **changes))


def test_without_it_a_copy_does_not_end():
    (found,) = mirror_specs(settings_of(mirror()))
    assert found.until is None


@pytest.mark.parametrize(
    ("until", "message"),
    [
        ({}, "needs either time or offset"),
        ({"time": 1, "offset": 1}, "needs either time or offset"),
        ({"time": "2026-11-25T12:00:00"}, "must be a time with its zone"),
        ({"time": "yesterday"}, "must be a time with its zone"),
        ({"time": "1969-12-31T23:59:59Z"}, "must be a time with its zone"),
        ({"time": True}, "must be a time with its zone"),
        ({"offset": -1}, "must be 0 or more"),
    ],
)
def test_anything_else_is_reported(until, message):
    ((place, found),) = complaints(mirror(until=until)).items()
    assert place.startswith("mirrors[0].until")
    assert message in found
