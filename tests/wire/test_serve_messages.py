"""Goal: every request and response that the broker advertises is coded as Kafka's schema defines.

Method: random messages of every API and version. kio, an independent codec, writes the requests and
reads the responses; every field is compared, by its place in the schema.
"""

from __future__ import annotations

import dataclasses
import random
import types
import typing
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from kit.judges.raw_client import message_class, read_response, request_frame
from logmirror.broker.apis import VERSIONS, Api
from logmirror.wire.serve_messages import MESSAGES, read_request, response_kind

COUNT = 25
CODED = [
    (api_key, version)
    for api_key, (first, last) in VERSIONS.items()
    if api_key in MESSAGES and api_key not in (Api.PRODUCE, Api.FETCH)
    for version in range(first, last + 1)
]
BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
NO_OPERATIONS = -(2**31)

RANDOM = {
    "string": lambda rng: "".join(rng.choices("abc\u00fc\U0001f600", k=rng.choice([0, 1, 5, 200]))),
    "bytes": lambda rng: rng.randbytes(rng.choice([0, 1, 5, 200])),
    "bool": lambda rng: rng.random() < 0.5,
    "uuid": lambda rng: uuid.UUID(int=rng.randrange(1, 2**128)),
    "timedelta_i32": lambda rng: timedelta(milliseconds=rng.randrange(2**31)),
    "timedelta_i64": lambda rng: timedelta(milliseconds=rng.randrange(2**40)),
    "float64": lambda rng: rng.choice([0.0, -1.5, 1e300]),
    "datetime_i64": lambda rng: datetime.fromtimestamp(rng.randrange(2**33), UTC),
    "error_code": lambda rng: rng.choice(list(ErrorCode)),
}


def _without_null(annotation: Any) -> tuple[Any, bool]:
    if isinstance(annotation, types.UnionType):
        kept = [part for part in typing.get_args(annotation) if part is not types.NoneType]
        return kept[0], True
    return annotation, False


def _random_value(rng: random.Random, annotation: Any, kind: str) -> Any:
    if dataclasses.is_dataclass(annotation):
        return _random_message(rng, annotation)
    if kind in BITS:
        limit = 2 ** rng.randrange(BITS[kind])
        return rng.randrange(-limit, limit)
    return RANDOM[kind](rng)


def _random_message(rng: random.Random, cls: Any) -> Any:
    values = {}
    for field in dataclasses.fields(cls):
        annotation, nullable = _without_null(field.type)
        kind = field.metadata.get("kafka_type", "")
        if nullable and rng.random() < 0.3:
            values[field.name] = None
        elif typing.get_origin(annotation) is tuple:
            element = typing.get_args(annotation)[0]
            count = rng.choice([0, 1, 2, 5])
            values[field.name] = tuple(_random_value(rng, element, kind) for _ in range(count))
        else:
            values[field.name] = _random_value(rng, annotation, kind)
    return cls(**values)


def _pairs(fields: dict[str, Any], version: int, expected: Any) -> list[tuple[str, Any, Any]]:
    """Return name, schema field and expected value of each field, in the schema's order."""
    of_version = [(n, field) for n, field in fields.items() if field.for_version_q(version)]
    values = [(f.name, getattr(expected, f.name)) for f in dataclasses.fields(expected)]
    assert len(of_version) == len(values), (of_version, values)
    paired = []
    for (name, field), (other_name, value) in zip(of_version, values, strict=True):
        # kio leaves "Ms" out; kafka-python has "authorized_operations" for both of Kafka's names.
        assert name.removesuffix("_ms") in other_name
        paired.append((name, field, _plain(value, field)))
    return paired


def _plain(value: Any, field: Any) -> Any:
    if isinstance(value, timedelta):
        return round(value.total_seconds() * 1000)
    if isinstance(value, datetime):
        return round(value.timestamp() * 1000)
    if field.type_str == "bitfield":
        bits = {bit for bit in range(32) if value >> bit & 1}
        return None if value == NO_OPERATIONS else bits
    return value


def _assert_same(found: Any, fields: dict[str, Any], version: int, expected: Any) -> None:
    for name, field, value in _pairs(fields, version, expected):
        actual = getattr(found, name)
        if value is None or not field.is_array():
            assert actual == value, name
        elif field.is_struct_array():
            assert len(actual) == len(value)
            for one, other in zip(actual, value, strict=True):
                _assert_same(one, field.fields, version, other)
        else:
            assert tuple(actual) == value, name


@pytest.mark.parametrize(("api_key", "version"), CODED)
def test_requests_are_read_as_kio_wrote_them(api_key: int, version: int):
    rng = random.Random(f"{api_key} {version}")
    cls = message_class(api_key, version, "request")
    for _ in range(COUNT):
        written = _random_message(rng, cls)

        found = read_request(memoryview(request_frame(api_key, version, written)), api_key, version)

        _assert_same(found, MESSAGES[api_key][0].fields, version, written)


def _rebuilt(kind: Any, fields: dict[str, Any], version: int, wanted: Any) -> dict[str, Any]:
    values = {}
    for name, field, value in _pairs(fields, version, wanted):
        if value is not None and field.is_struct_array():
            values[name] = tuple(
                kind.entity(field.type_str, **_rebuilt(kind, field.fields, version, one))
                for one in value
            )
        else:
            values[name] = value
    return values


@pytest.mark.parametrize(("api_key", "version"), CODED)
def test_kio_reads_responses_as_they_were_built(api_key: int, version: int):
    rng = random.Random(f"{api_key} {version}")
    cls = message_class(api_key, version, "response")
    kind = response_kind(api_key, version)
    fields = MESSAGES[api_key][1].fields
    for _ in range(COUNT):
        wanted = _random_message(rng, cls)

        frame = kind.frame(77, **_rebuilt(kind, fields, version, wanted))

        assert int.from_bytes(frame[:4]) == len(frame) - 4
        assert read_response(api_key, version, frame[4:]) == (77, wanted)


def test_a_field_that_no_version_has_is_refused():
    kind = response_kind(Api.METADATA, 1)

    with pytest.raises(ValueError, match="no_such_field"):
        kind.frame(1, no_such_field=5)


def test_a_structure_newer_than_the_version_is_not_written():
    kind = response_kind(Api.CREATE_TOPICS, 4)
    config = kind.entity("CreatableTopicConfigs", name="n", value="v")

    topic = kind.entity("CreatableTopicResult", name="t", error_code=0, configs=(config,))

    _, response = read_response(Api.CREATE_TOPICS, 4, kind.frame(1, topics=(topic,))[4:])
    assert [found.name for found in response.topics] == ["t"]
