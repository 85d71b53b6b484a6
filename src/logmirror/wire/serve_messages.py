"""All other requests and responses of a server, by kio's message classes.

kio's classes are the schema and its serializer writes our answers. Its parser is not used for what
strangers send: version 0.6.5 reserves memory for the count that an array announces before it looks
at what is there, and a frame of thirty bytes ends the process. `read_request` walks the same
classes with a `Cursor`, which refuses such a count.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import io
import types
import typing
import uuid
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any, Final

from kio.index import load_payload_module
from kio.serial import entity_writer
from kio.static.constants import EntityType

from logmirror.errors import InternalError
from logmirror.wire.frames import Cursor, body_cursor

# kio types its fields with classes that check nothing at run time: a plain int, str or timedelta
# stands wherever one of them is named. So a message is `Any` to us, and tests hold the shapes.
Message = Any
FieldReader = Callable[[Cursor], Any]

NO_THROTTLE: Final = dt.timedelta(0)
_HEAD: Final = Struct(">ii")
_SIZE: Final = Struct(">i")
_API_VERSIONS: Final = 18


def _uuid(cursor: Cursor) -> uuid.UUID | None:
    found = bytes(cursor.take(16))
    return uuid.UUID(bytes=found) if any(found) else None


_FIXED: Final[Mapping[str, FieldReader]] = {
    "int8": Cursor.int8,
    "int16": Cursor.int16,
    "int32": Cursor.int32,
    "int64": Cursor.int64,
    "bool": lambda cursor: cursor.int8() != 0,
    "uuid": _uuid,
    "timedelta_i32": lambda cursor: dt.timedelta(milliseconds=cursor.int32()),
}
_LEAST_BYTES: Final = {"int16": 2, "int32": 4, "int64": 8, "uuid": 16, "timedelta_i32": 4}


def _split_null(annotation: Any) -> tuple[Any, bool]:  # noqa: ANN401  # a type, as dataclasses give it
    if isinstance(annotation, types.UnionType):
        inner = [part for part in typing.get_args(annotation) if part is not types.NoneType]
        return inner[0], True
    return annotation, False


def _value_reader(
    field: dataclasses.Field[Any],
    annotation: Any,  # noqa: ANN401  # a type, as dataclasses give it
    *,
    nullable: bool,
    compact: bool,
) -> tuple[FieldReader, int]:
    """Return how to read one value, and how many bytes it takes at least."""
    if dataclasses.is_dataclass(annotation):
        return _entity_reader(typing.cast("Any", annotation))
    kind = field.metadata["kafka_type"]
    if kind == "string":
        read = Cursor.string if nullable else Cursor.name
        return functools.partial(read, compact=compact), 1 if compact else 2
    if kind not in _FIXED:
        message = "no reader for a field of a request"
        raise InternalError(message, field=field.name, type=kind)
    return _FIXED[kind], _LEAST_BYTES.get(kind, 1)


def _field_reader(field: dataclasses.Field[Any], *, compact: bool) -> tuple[FieldReader, int]:
    annotation, nullable = _split_null(field.type)
    if typing.get_origin(annotation) is not tuple:
        return _value_reader(field, annotation, nullable=nullable, compact=compact)
    element, _ = _split_null(typing.get_args(annotation)[0])
    read, least_bytes = _value_reader(field, element, nullable=False, compact=compact)

    def read_array(cursor: Cursor) -> tuple[Any, ...] | None:
        count = cursor.count(compact=compact, least_bytes=least_bytes)
        if count < 0:
            # Only a nullable field tells null from empty.
            return None if nullable else ()
        return tuple([read(cursor) for _ in range(count)])

    return read_array, 1 if compact else 4


@functools.cache
def _entity_reader(entity: Any) -> tuple[FieldReader, int]:  # noqa: ANN401  # a kio class
    compact = bool(entity.__flexible__)
    plain: list[tuple[str, FieldReader]] = []
    tagged: dict[int, tuple[str, FieldReader]] = {}
    least_bytes = 1 if compact else 0
    for field in dataclasses.fields(entity):
        read, least = _field_reader(field, compact=compact)
        if "tag" in field.metadata:
            tagged[field.metadata["tag"]] = (field.name, read)
        else:
            plain.append((field.name, read))
            least_bytes += least

    def read_entity(cursor: Cursor) -> Message:
        values = {name: read(cursor) for name, read in plain}

        def known(tag: int, content: Cursor) -> None:
            if tag in tagged:
                name, read = tagged[tag]
                values[name] = read(content)

        if compact:
            cursor.tagged_fields(known)
        return entity(**values)

    return read_entity, max(1, least_bytes)


@functools.cache
def _request_reader(api_key: int, version: int) -> tuple[FieldReader, bool]:
    module = load_payload_module(api_key, version, EntityType.request)
    entity = _payload_class(module, "Request")
    return _entity_reader(entity)[0], bool(entity.__flexible__)


def _payload_class(module: types.ModuleType, suffix: str) -> Any:  # noqa: ANN401  # a kio class
    for name in module.__all__ if hasattr(module, "__all__") else dir(module):
        found = getattr(module, name)
        if name.endswith(suffix) and getattr(found, "__type__", None) is EntityType[suffix.lower()]:
            return found
    message = "kio has no such message"
    raise InternalError(message, module=module.__name__, suffix=suffix)


def read_request(frame: memoryview, api_key: int, version: int) -> Message:
    """Read a whole frame as the kio request of that key and version.

    Raises:
        RemoteProtocolError: The bytes are not such a request.
    """
    read, flexible = _request_reader(api_key, version)
    cursor = body_cursor(frame, flexible=flexible)
    return read(cursor)


class ResponseKind:
    """One response message: builds its entities by name, and packs whole frames of it.

    Fields that this version does not have are dropped, so a handler states all it knows once and
    serves every version.
    """

    def __init__(self, api_key: int, version: int) -> None:
        self._module = load_payload_module(api_key, version, EntityType.response)
        self._payload = _payload_class(self._module, "Response")
        self._write = entity_writer(self._payload)
        # The header of an ApiVersions answer is never flexible: who asks does not know yet what we
        # speak, and must be able to read it.
        self._tagged_header = self._payload.__flexible__ and api_key != _API_VERSIONS

    def has(self, entity_name: str) -> bool:
        """Whether this version knows an entity."""
        return hasattr(self._module, entity_name)

    def entity(self, entity_name: str, **fields: object) -> Message:
        """Build a nested entity by the name that Kafka's schema gives it."""
        return _build(getattr(self._module, entity_name), fields)

    def frame(self, correlation_id: int, **fields: object) -> bytes:
        """Build the response and return its whole frame, the size field included."""
        out = io.BytesIO()
        out.write(_HEAD.pack(0, correlation_id))
        if self._tagged_header:
            out.write(b"\0")
        self._write(out, _build(self._payload, {"throttle_time": NO_THROTTLE, **fields}))
        view = out.getbuffer()
        _SIZE.pack_into(view, 0, len(view) - 4)
        view.release()
        return out.getvalue()


@functools.cache
def response_kind(api_key: int, version: int) -> ResponseKind:
    """Return the response message of that key and version."""
    return ResponseKind(api_key, version)


@functools.cache
def _field_names(entity: Any) -> frozenset[str]:  # noqa: ANN401  # a kio class
    return frozenset(field.name for field in dataclasses.fields(entity))


def _build(entity: Any, fields: Mapping[str, object]) -> Message:  # noqa: ANN401  # a kio class
    known = _field_names(entity)
    return entity(**{name: value for name, value in fields.items() if name in known})
