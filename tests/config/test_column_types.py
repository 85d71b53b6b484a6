"""`keys` and `values`: their meaning, their places, their requirements.

Method: a valid file is changed in one place, and all problems are compared.
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
from logmirror.app.specs import mirror_specs
from logmirror.model import ColumnTypes

KAFKA = {"type": "kafka", "bootstrap-servers": "other:9092", "name": "k"}
BUCKET = {"type": "s3", "bucket": "archive", "prefix": "p", "name": "lake"}
KINDS = ("bytes", "utf8", "json", "json-parseable")


def types_of(*mirrors, **top):
    """Return the types of each mirror; all of its destinations must have the same types."""
    settings = settings_of(*mirrors, **top)
    specs = mirror_specs(settings)
    for one, spec in zip(settings.mirrors, specs, strict=True):
        assert {written.types for _, written in spec.destinations} == {one.types}
    return [one.types for one in settings.mirrors]


def test_by_default_keys_and_values_are_bytes_and_are_not_checked():
    assert types_of(mirror()) == [ColumnTypes(key="bytes", value="bytes")]
    assert not ColumnTypes().are_checked
    # `keys:` without a value counts as absent.
    assert types_of(mirror(keys=None)) == [ColumnTypes()]


def test_cfg_17_an_empty_mapping_means_utf8():
    assert types_of(mirror(keys={}, values={})) == [ColumnTypes(key="utf8", value="utf8")]
    assert types_of(mirror(values={"type": None})) == [ColumnTypes(value="utf8")]


@pytest.mark.parametrize("kind", KINDS)
def test_cfg_18_keys_and_values_can_have_each_type(kind):
    assert types_of(mirror(keys={"type": kind})) == [ColumnTypes(key=kind)]
    assert types_of(mirror(values={"type": kind})) == [ColumnTypes(value=kind)]


def test_cfg_08_two_mirrors_with_different_types_may_write_to_one_bucket():
    first = mirror("a", destinations=[BUCKET | {"name": "a"}], values={"type": "json"})
    second = mirror("b", destinations=[BUCKET | {"name": "b"}], compaction="log", keys={})
    assert types_of(first, second) == [ColumnTypes(value="json"), ColumnTypes(key="utf8")]


@pytest.mark.parametrize("keys", [None, {}, *({"type": kind} for kind in KINDS)])
def test_cfg_15_snapshots_accept_keys_of_any_type(keys):
    assert complaints(mirror(compaction="log", keys=keys)) == {}


@pytest.mark.parametrize("kind", ["bytes", "json", "json-parseable"])
@pytest.mark.parametrize("key", ["keys", "values"])
def test_cfg_19_ndjson_accepts_only_utf8(key, kind):
    expected = {f"mirrors[0].{key}.type": "must be utf8 with format: ndjson"}
    change = {"format": "ndjson", key: {"type": kind}}
    assert complaints(mirror(**change)) == expected
    assert complaints(mirror(destinations=[folder(name="f"), KAFKA], **change)) == expected
    one = shared_destination(format="ndjson")
    assert complaints(shared_mirror(**{key: {"type": kind}}), destination=one) == expected


@pytest.mark.parametrize("encoding", ["base64", "utf8"])
@pytest.mark.parametrize("keys", [None, {}, {"type": "utf8"}])
def test_ndjson_accepts_utf8_explicitly(keys, encoding):
    assert complaints(mirror(format="ndjson", encoding=encoding, keys=keys, values=keys)) == {}


def test_native_objects_and_replicas_in_kafka_can_have_types():
    types = {"keys": {"type": "utf8"}, "values": {"type": "json-parseable"}}
    expected = [ColumnTypes(key="utf8", value="json-parseable")]
    assert types_of(mirror(format="native", **types)) == expected
    # Unlike `format`, `compression` and `flush`, they apply to Kafka destinations.
    assert types_of(mirror(destinations=[KAFKA], flush=None, **types)) == expected
    translated = KAFKA | {"offsets": "translate"}
    assert types_of(mirror(destinations=[translated], flush=None, **types)) == expected


def test_with_a_shared_destination_each_mirror_has_its_types():
    first, second = shared_mirror("a", values={"type": "json"}), shared_mirror("b", partition=1)
    expected = [ColumnTypes(value="json"), ColumnTypes()]
    assert types_of(first, second, destination=shared_destination()) == expected
    kafka = {"type": "kafka", "bootstrap-servers": "other:9092"}
    assert types_of(first, second, destination=kafka) == expected


def test_invalid_settings_are_reported():
    assert complaints(mirror(keys={"type": "text"})) == {
        "mirrors[0].keys.type": "must be bytes, utf8, json or json-parseable"
    }
    assert complaints(mirror(keys={"typ": "utf8"})) == {"mirrors[0].keys.typ": "unknown key"}
    assert complaints(mirror(keys="utf8")) == {"mirrors[0].keys": "must be a mapping"}
    found = complaints(mirror(destinations=[folder(keys={"type": "utf8"})]))
    assert found == {"mirrors[0].destinations[0].keys": "unknown key"}
