"""`keys` and `values`: what they mean, where they may stand, what they need.

Of the checklist: CFG-08, CFG-15, CFG-17, CFG-18, CFG-19.

Method: one change to a valid file at a time, and the whole answer is compared.
"""

import pytest

from kit.runs.configs import (
    complaints,
    folder,
    mirror,
    settings_of,
    shared_destination,
    shared_mirror,
)
from logmirror.app import run
from logmirror.model import ColumnTypes

KAFKA = {"type": "kafka", "bootstrap-servers": "other:9092", "name": "k"}
BUCKET = {"type": "s3", "bucket": "archive", "prefix": "p", "name": "lake"}
KINDS = ("bytes", "utf8", "json", "json-parseable")


def types_of(*mirrors, **top):
    """What each mirror says, having seen that each of its destinations is told the same."""
    settings = settings_of(*mirrors, **top)
    specs = run.mirror_specs(settings)
    for one, spec in zip(settings.mirrors, specs, strict=True):
        assert {written.types for _, written in spec.destinations} == {one.types}
    return [one.types for one in settings.mirrors]


def test_without_them_everything_is_bytes_and_passes():
    assert types_of(mirror()) == [ColumnTypes(key="bytes", value="bytes")]
    assert not ColumnTypes().are_checked
    # `keys:` with nothing behind it means what leaving it out means.
    assert types_of(mirror(keys=None)) == [ColumnTypes()]


def test_cfg_17_an_empty_mapping_says_utf8():
    assert types_of(mirror(keys={}, values={})) == [ColumnTypes(key="utf8", value="utf8")]
    assert types_of(mirror(values={"type": None})) == [ColumnTypes(value="utf8")]


@pytest.mark.parametrize("kind", KINDS)
def test_cfg_18_each_type_may_be_said_of_keys_and_of_values(kind):
    assert types_of(mirror(keys={"type": kind})) == [ColumnTypes(key=kind)]
    assert types_of(mirror(values={"type": kind})) == [ColumnTypes(value=kind)]


def test_cfg_08_two_mirrors_with_other_types_may_write_to_one_bucket():
    first = mirror("a", destinations=[BUCKET | {"name": "a"}], values={"type": "json"})
    second = mirror("b", destinations=[BUCKET | {"name": "b"}], compaction="log", keys={})
    assert types_of(first, second) == [ColumnTypes(value="json"), ColumnTypes(key="utf8")]


@pytest.mark.parametrize("keys", [None, {}, *({"type": kind} for kind in KINDS)])
def test_cfg_15_snapshots_take_keys_of_any_type(keys):
    assert complaints(mirror(compaction="log", keys=keys)) == {}


@pytest.mark.parametrize("kind", ["bytes", "json", "json-parseable"])
@pytest.mark.parametrize("key", ["keys", "values"])
def test_cfg_19_lines_of_json_take_text_alone(key, kind):
    told = {f"mirrors[0].{key}.type": "must be utf8 with format: ndjson"}
    change = {"format": "ndjson", key: {"type": kind}}
    assert complaints(mirror(**change)) == told
    assert complaints(mirror(destinations=[folder(name="f"), KAFKA], **change)) == told
    one = shared_destination(format="ndjson")
    assert complaints(shared_mirror(**{key: {"type": kind}}), destination=one) == told


@pytest.mark.parametrize("encoding", ["base64", "utf8"])
@pytest.mark.parametrize("keys", [None, {}, {"type": "utf8"}])
def test_lines_of_json_may_say_that_they_hold_text(keys, encoding):
    assert complaints(mirror(format="ndjson", encoding=encoding, keys=keys, values=keys)) == {}


def test_native_objects_and_copies_in_kafka_may_have_them_too():
    asked = {"keys": {"type": "utf8"}, "values": {"type": "json-parseable"}}
    expected = [ColumnTypes(key="utf8", value="json-parseable")]
    assert types_of(mirror(format="native", **asked)) == expected
    # Though `format`, `compression` and `flush` have no place there.
    assert types_of(mirror(destinations=[KAFKA], flush=None, **asked)) == expected
    translated = KAFKA | {"offsets": "translate"}
    assert types_of(mirror(destinations=[translated], flush=None, **asked)) == expected


def test_with_one_destination_for_all_each_mirror_says_its_own():
    first, second = shared_mirror("a", values={"type": "json"}), shared_mirror("b", partition=1)
    expected = [ColumnTypes(value="json"), ColumnTypes()]
    assert types_of(first, second, destination=shared_destination()) == expected
    kafka = {"type": "kafka", "bootstrap-servers": "other:9092"}
    assert types_of(first, second, destination=kafka) == expected


def test_what_makes_no_sense_is_found():
    assert complaints(mirror(keys={"type": "text"})) == {
        "mirrors[0].keys.type": "must be bytes, utf8, json or json-parseable"
    }
    assert complaints(mirror(keys={"typ": "utf8"})) == {"mirrors[0].keys.typ": "unknown key"}
    assert complaints(mirror(keys="utf8")) == {"mirrors[0].keys": "must be a mapping"}
    found = complaints(mirror(destinations=[folder(keys={"type": "utf8"})]))
    assert found == {"mirrors[0].destinations[0].keys": "unknown key"}
