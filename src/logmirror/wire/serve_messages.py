"""Requests and responses of a server, by kafka-python's message classes.

Produce and Fetch have codecs of their own (`serve_produce`, `serve_fetch`). The classes carry
Kafka's schema of each message; kafka-python writes the responses. Its decoder does not read the
requests: it trusts the counts and lengths of a frame. `read_request` walks the same schema with a
`Cursor`, which compares each of them with the bytes that the frame has left.

Field names are those of Kafka's schema in snake case. A field that the request's version does not
have reads as the default that the schema gives it; one that the response's version does not have is
not written. So a handler states all fields once and serves every version.
"""

from __future__ import annotations

import functools
import types
import typing
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any, Final

from kafka.protocol import (  # type: ignore[import-untyped]  # ships no py.typed
    admin,
    consumer,
    metadata,
    producer,
    sasl,
)

from logmirror.errors import InternalError
from logmirror.wire.frames import Cursor, RemoteProtocolError, body_cursor

Message = Any  # kafka-python has no types; tests check the shapes with another codec
FieldReader = Callable[[Cursor], Any]


def _uuid(cursor: Cursor) -> uuid.UUID | None:
    found = bytes(cursor.take(16))
    return uuid.UUID(bytes=found) if any(found) else None


def _blob(cursor: Cursor, *, nullable: bool, compact: bool) -> bytes | None:
    found = cursor.blob(compact=compact)
    if found is None and not nullable:
        raise RemoteProtocolError("bytes must not be null", position=cursor.position)
    return None if found is None else bytes(found)


MESSAGES: Final[Mapping[int, tuple[Any, Any]]] = {
    request.API_KEY: (request, response)
    for request, response in (
        (consumer.ListOffsetsRequest, consumer.ListOffsetsResponse),
        (consumer.OffsetCommitRequest, consumer.OffsetCommitResponse),
        (consumer.OffsetFetchRequest, consumer.OffsetFetchResponse),
        (consumer.JoinGroupRequest, consumer.JoinGroupResponse),
        (consumer.HeartbeatRequest, consumer.HeartbeatResponse),
        (consumer.LeaveGroupRequest, consumer.LeaveGroupResponse),
        (consumer.SyncGroupRequest, consumer.SyncGroupResponse),
        (consumer.OffsetDeleteRequest, consumer.OffsetDeleteResponse),
        (admin.DescribeGroupsRequest, admin.DescribeGroupsResponse),
        (admin.ListGroupsRequest, admin.ListGroupsResponse),
        (admin.DeleteGroupsRequest, admin.DeleteGroupsResponse),
        (metadata.MetadataRequest, metadata.MetadataResponse),
        (metadata.FindCoordinatorRequest, metadata.FindCoordinatorResponse),
        (metadata.ApiVersionsRequest, metadata.ApiVersionsResponse),
        (admin.CreateTopicsRequest, admin.CreateTopicsResponse),
        (admin.DeleteTopicsRequest, admin.DeleteTopicsResponse),
        (admin.DeleteRecordsRequest, admin.DeleteRecordsResponse),
        (producer.InitProducerIdRequest, producer.InitProducerIdResponse),
        (consumer.OffsetForLeaderEpochRequest, consumer.OffsetForLeaderEpochResponse),
        (producer.AddPartitionsToTxnRequest, producer.AddPartitionsToTxnResponse),
        (producer.AddOffsetsToTxnRequest, producer.AddOffsetsToTxnResponse),
        (producer.EndTxnRequest, producer.EndTxnResponse),
        (producer.WriteTxnMarkersRequest, producer.WriteTxnMarkersResponse),
        (producer.TxnOffsetCommitRequest, producer.TxnOffsetCommitResponse),
        (sasl.SaslHandshakeRequest, sasl.SaslHandshakeResponse),
        (sasl.SaslAuthenticateRequest, sasl.SaslAuthenticateResponse),
        (admin.DescribeAclsRequest, admin.DescribeAclsResponse),
        (admin.CreateAclsRequest, admin.CreateAclsResponse),
        (admin.DeleteAclsRequest, admin.DeleteAclsResponse),
        (admin.DescribeClientQuotasRequest, admin.DescribeClientQuotasResponse),
        (admin.AlterClientQuotasRequest, admin.AlterClientQuotasResponse),
        (admin.DescribeUserScramCredentialsRequest, admin.DescribeUserScramCredentialsResponse),
        (admin.AlterUserScramCredentialsRequest, admin.AlterUserScramCredentialsResponse),
        (admin.DescribeConfigsRequest, admin.DescribeConfigsResponse),
        (admin.AlterConfigsRequest, admin.AlterConfigsResponse),
        (admin.AlterReplicaLogDirsRequest, admin.AlterReplicaLogDirsResponse),
        (admin.DescribeLogDirsRequest, admin.DescribeLogDirsResponse),
        (
            admin.AlterPartitionReassignmentsRequest,
            admin.AlterPartitionReassignmentsResponse,
        ),
        (admin.ListPartitionReassignmentsRequest, admin.ListPartitionReassignmentsResponse),
        (admin.CreatePartitionsRequest, admin.CreatePartitionsResponse),
        (admin.IncrementalAlterConfigsRequest, admin.IncrementalAlterConfigsResponse),
        (admin.DescribeClusterRequest, admin.DescribeClusterResponse),
        (admin.DescribeProducersRequest, admin.DescribeProducersResponse),
        (admin.DescribeTransactionsRequest, admin.DescribeTransactionsResponse),
        (admin.ListTransactionsRequest, admin.ListTransactionsResponse),
    )
}
"""Request and response class by API key."""

_API_VERSIONS: Final = 18
"""Its response has a header without tags in every version, for clients of older versions."""

_FRAME: Final = Struct(">ii")
"""Size and correlation ID."""

_MAX_MESSAGE: Final = 1000
"""Limit for the characters of an error message; the protocol's is 32,767 bytes."""

_FIXED: Final[Mapping[str, tuple[FieldReader, int]]] = {
    "int8": (Cursor.int8, 1),
    "int16": (Cursor.int16, 2),
    "int32": (Cursor.int32, 4),
    "int64": (Cursor.int64, 8),
    "float64": (Cursor.float64, 8),
    "bool": (lambda cursor: cursor.int8() != 0, 1),
    "uuid": (_uuid, 16),
}
"""Reader and size in bytes of each type of fixed size."""


def _value_reader(
    field: Any,  # noqa: ANN401  # a field of kafka-python's schema
    version: int,
    *,
    nullable: bool,
    compact: bool,
) -> tuple[FieldReader, int]:
    """Return the reader of one value, and the least number of bytes that the value takes."""
    if field.is_struct():
        return _struct_reader(field.fields, version, compact=compact)
    if field.type_str == "string":
        read = Cursor.string if nullable else Cursor.name
        return functools.partial(read, compact=compact), 1 if compact else 2
    if field.type_str == "bytes":
        return functools.partial(_blob, nullable=nullable, compact=compact), 1 if compact else 4
    if field.type_str not in _FIXED:
        message = "no reader for a field of a request"
        raise InternalError(message, field=field.name, type=field.type_str)
    return _FIXED[field.type_str]


def _field_reader(
    field: Any,  # noqa: ANN401  # a field of kafka-python's schema
    version: int,
    *,
    compact: bool,
) -> tuple[FieldReader, int]:
    nullable = field.nullable_for_version_q(version)
    if not field.is_array():
        return _value_reader(field, version, nullable=nullable, compact=compact)
    read, least_bytes = _value_reader(field.array_of, version, nullable=False, compact=compact)

    def read_array(cursor: Cursor) -> list[Any] | None:
        count = cursor.count(compact=compact, least_bytes=least_bytes)
        if count < 0:
            # Null reads as empty where the schema does not allow null.
            return None if nullable else []
        return [read(cursor) for _ in range(count)]

    return read_array, 1 if compact else 4


def _struct_reader(
    fields: Mapping[str, Any], version: int, *, compact: bool
) -> tuple[FieldReader, int]:
    plain: list[tuple[str, FieldReader]] = []
    tagged: dict[int, tuple[str, FieldReader]] = {}
    least_bytes = 1 if compact else 0
    defaults = {name: field.default for name, field in fields.items()}
    for name, field in fields.items():
        if not field.for_version_q(version):
            continue
        read, least = _field_reader(field, version, compact=compact)
        if field.tagged_field_q(version):
            tagged[field.tag] = (name, read)
        else:
            plain.append((name, read))
            least_bytes += least

    def read_struct(cursor: Cursor) -> Message:
        values = defaults.copy()
        for name, read in plain:
            values[name] = read(cursor)

        def read_tagged(tag: int, content: Cursor) -> None:
            if tag in tagged:
                name, read = tagged[tag]
                values[name] = read(content)

        if compact:
            cursor.tagged_fields(read_tagged)
        return types.SimpleNamespace(**values)

    return read_struct, max(1, least_bytes)


@functools.cache
def _request_reader(api_key: int, version: int) -> tuple[FieldReader, bool]:
    request, _ = MESSAGES[api_key]
    flexible = bool(request.flexible_version_q(version))
    return _struct_reader(request.fields, version, compact=flexible)[0], flexible


def read_request(frame: memoryview, api_key: int, version: int) -> Message:
    """Read a whole frame as the request of that key and version.

    Raises:
        RemoteProtocolError: The bytes are not such a request.
    """
    read, flexible = _request_reader(api_key, version)
    return read(body_cursor(frame, flexible=flexible))


class ResponseKind:
    """One response message in one version: builds its structures by name, and encodes frames."""

    def __init__(self, api_key: int, version: int) -> None:
        _, self._response = MESSAGES[api_key]
        self._version = version
        self.errors: Counter[int] = Counter()
        """How often a part of a response had an error code, by code."""

        self._structs = dict(_structs(self._response.fields))
        has_tags = self._response.flexible_version_q(version) and api_key != _API_VERSIONS
        self._header_tags = b"\0" if has_tags else b""

    def entity(self, struct_name: str, **fields: object) -> Message:
        """Build a nested structure by the name that Kafka's schema gives it.

        Structures that the version does not have can be built; they are not written.
        """
        self._check(fields)
        return self._structs[struct_name](**fields)

    def frame(self, correlation_id: int, **fields: object) -> bytes:
        """Encode the response; returns its whole frame, the size field included."""
        self._check(fields)
        body = self._response(version=self._version, **fields).encode()
        tags = self._header_tags
        return bytes(_FRAME.pack(4 + len(tags) + len(body), correlation_id) + tags + body)

    def _check(self, fields: dict[str, Any]) -> None:
        """Count the error, and shorten its message: it may have names of any length in it."""
        if code := fields.get("error_code"):
            self.errors[int(code)] += 1
            if message := fields.get("error_message"):
                fields["error_message"] = message[:_MAX_MESSAGE]


def _structs(fields: Mapping[str, Any]) -> typing.Iterator[tuple[str, Any]]:
    for field in fields.values():
        if field.is_struct_array() or field.is_struct():
            yield field.type_str, field.data_class
            yield from _structs(field.fields)


@functools.cache
def response_kind(api_key: int, version: int) -> ResponseKind:
    """Return the response message of that key and version."""
    kind = _KINDS[api_key, version] = ResponseKind(api_key, version)
    return kind


_KINDS: Final[dict[tuple[int, int], ResponseKind]] = {}


def error_counts() -> Counter[tuple[int, int]]:
    """Return how often responses of this process had an error code, by API key and code."""
    found: Counter[tuple[int, int]] = Counter()
    for (api_key, _), kind in tuple(_KINDS.items()):
        for code, count in tuple(kind.errors.items()):
            found[api_key, code] += count
    return found
