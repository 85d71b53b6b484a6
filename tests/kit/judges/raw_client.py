"""A client that sends anything: requests encoded by kio's classes, or any bytes."""

from __future__ import annotations

import io
import socket
import struct
from datetime import timedelta
from typing import Any, Self

from kio.index import load_payload_module
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType


def message_class(api_key: int, version: int, kind: str) -> Any:
    """Return kio's class of a request or response."""
    module = load_payload_module(api_key, version, EntityType[kind])
    for name in dir(module):
        found = getattr(module, name)
        if getattr(found, "__type__", None) is EntityType[kind]:
            return found
    raise AssertionError((api_key, version, kind))


def nested(api_key: int, version: int, kind: str, name: str) -> Any:
    """Return kio's class of a structure within a request or response."""
    return getattr(load_payload_module(api_key, version, EntityType[kind]), name)


def build(cls: Any, /, **fields: object) -> Any:
    """Build an entity with those of the fields that its version has."""
    return cls(
        **{name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
    )


def request_frame(
    api_key: int, version: int, request: Any, *, correlation_id: int = 7, client_id: str = "test"
) -> bytes:
    """Return a request without its size field."""
    out = io.BytesIO()
    header = request.__header_schema__
    entity_writer(header)(
        out,
        build(
            header,
            request_api_key=api_key,
            request_api_version=version,
            correlation_id=correlation_id,
            client_id=client_id,
        ),
    )
    entity_writer(type(request))(out, request)
    return out.getvalue()


def read_response(api_key: int, version: int, frame: bytes) -> tuple[int, Any]:
    """Return correlation id and message of a response without its size field; all of it is read."""
    cls = message_class(api_key, version, "response")
    header, position = entity_reader(cls.__header_schema__)(frame, 0)
    message, size = entity_reader(cls)(frame, position)
    assert position + size == len(frame), "bytes behind the response"
    return header.correlation_id, message


class RawClient:
    """One connection.

    Attributes:
        client_id: The client ID in requests of `ask`.
        throttle_s: The throttle time in the last response of `ask`.
    """

    def __init__(self, port: int, *, timeout_s: float = 20, client_id: str = "test") -> None:
        self.client_id = client_id
        self.throttle_s = 0.0
        self.socket = socket.create_connection(("127.0.0.1", port), timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send_frame(self, frame: bytes) -> None:
        """Send a frame with its size."""
        self.socket.sendall(struct.pack(">i", len(frame)) + frame)

    def receive_frame(self) -> bytes:
        """Return the next frame without its size; EOFError if the broker closed the connection."""
        size = struct.unpack(">i", self._receive(4))[0]
        return self._receive(size)

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self.socket.recv(size - len(data))
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def is_closed(self) -> bool:
        """Wait until the broker closes the connection; False if it sends something instead."""
        try:
            self._receive(1)
        except EOFError:
            return True
        return False

    def ask(self, api_key: int, version: int, /, **fields: object) -> Any:
        """Send a request of those fields and return its response."""
        request = build(message_class(api_key, version, "request"), **fields)
        self.send_frame(request_frame(api_key, version, request, client_id=self.client_id))
        correlation_id, response = read_response(api_key, version, self.receive_frame())
        assert correlation_id == 7
        self.throttle_s = getattr(response, "throttle_time", timedelta(0)).total_seconds()
        return response
