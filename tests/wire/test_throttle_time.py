"""Goal: the throttle time of a response is where every client reads it.

Method: kio, an independent codec, reads responses of all APIs and versions before and after the
change: only the throttle time differs.
"""

from __future__ import annotations

import dataclasses
import io
import uuid
from datetime import timedelta

import pytest
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer

from kit.judges.raw_client import build, message_class, read_response
from logmirror.broker.apis import VERSIONS, Api
from logmirror.wire.serve_fetch import Fetched, pack_fetch_response
from logmirror.wire.serve_produce import Produced, pack_produce_response
from logmirror.wire.throttle_time import set_throttle_time

WITHOUT = {
    Api.API_VERSIONS: range(5),  # behind the list of APIs
    Api.SASL_HANDSHAKE: range(2),
    Api.SASL_AUTHENTICATE: range(3),
    Api.WRITE_TXN_MARKERS: range(2),
    Api.LIST_OFFSETS: range(2),
    Api.METADATA: range(3),
    Api.OFFSET_COMMIT: range(3),
    Api.OFFSET_FETCH: range(3),
    Api.FIND_COORDINATOR: range(1),
    Api.JOIN_GROUP: range(2),
    Api.HEARTBEAT: range(1),
    Api.LEAVE_GROUP: range(1),
    Api.SYNC_GROUP: range(1),
    Api.DESCRIBE_GROUPS: range(1),
    Api.LIST_GROUPS: range(1),
    Api.OFFSET_DELETE: range(1),  # behind the error code
}
"""Versions whose throttle time is not set, because there is none, or not at the beginning."""


def _frame(api, version) -> bytearray:
    if api == Api.PRODUCE:
        return pack_produce_response(version, 7, [("t", [Produced(0, 0, 1, 2, 3)])])
    if api == Api.FETCH:
        name = bytes(range(16)) if version >= 13 else "t"
        [whole] = pack_fetch_response(version, 7, [(name, [Fetched(0, 0, 5, 1, 0, 5)])])
        return whole
    cls = message_class(api, version, "response")
    fields = {
        field.name: _value(field)
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
    }
    out = io.BytesIO()
    header = cls.__header_schema__
    entity_writer(header)(out, build(header, correlation_id=7))
    entity_writer(cls)(out, cls(**fields))
    return bytearray(len(out.getvalue()).to_bytes(4) + out.getvalue())


def _value(field: dataclasses.Field) -> object:
    kind = str(field.type)
    if "tuple" in kind:
        return ()
    if "imedelta" in kind:
        return timedelta(0)
    if "ErrorCode" in kind:
        return ErrorCode.none
    empty = {"str": "x", "bytes": b"", "bool": False, "UUID": uuid.UUID(int=1)}
    return next((value for name, value in empty.items() if name in kind), 0)


@pytest.mark.parametrize(
    ("api", "version"),
    [(api, n) for api, (first, last) in VERSIONS.items() for n in range(first, last + 1)],
)
def test_only_the_throttle_time_changes(api, version):
    frame = _frame(api, version)
    before = read_response(api, version, bytes(frame[4:]))[1]

    set_throttle_time(frame, api, version, 12_345)

    after = read_response(api, version, bytes(frame[4:]))[1]
    if version in WITHOUT.get(api, ()):
        assert after == before
    else:
        assert after == dataclasses.replace(before, throttle_time=timedelta(milliseconds=12_345))
