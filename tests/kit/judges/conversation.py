"""The same requests to any broker, and its responses in a form that can be compared.

Requests are plain dicts and lists in Kafka's field names; kio encodes them. A response becomes
plain values too: error codes by name, without what differs between two runs on one broker. IDs that
a broker chooses are replaced by the order in which they were first seen.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from kit.judges.raw_client import RawClient, message_class, read_response, request_frame

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

_CHOSEN: Final = {
    "member_id": "member",
    "leader": "member",
    "producer_id": "producer",
    "topic_id": "topic",
}
"""Fields with IDs that the broker chooses, and what they name."""

_LEFT_OUT: Final = frozenset(
    {
        "throttle_time",
        "error_message",
        "host",
        "port",
        "node_id",
        "leader_id",
        "client_host",
        "client_id",
        "log_append_time",
        "transaction_start_time",
        "transaction_timeout",
        "last_timestamp",
        "tagged_fields",
    }
)
"""Fields that say nothing about behaviour, or hold times and addresses."""


def entity(cls: Any, value: Mapping[str, Any]) -> Any:
    """Build a message of kio from plain values; fields that the version lacks are left out."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: _typed(hints[name], value[name]) for name in names if name in value})


def _typed(hint: Any, value: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        if value is None:
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return tuple(_typed(typing.get_args(hint)[0], item) for item in value)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return entity(hint, value)
    if isinstance(value, int) and "imedelta" in getattr(hint, "__name__", ""):
        return timedelta(milliseconds=value)
    return value


class Conversation:
    """Requests to one broker and its responses.

    Args:
        port: The broker's port, on loopback.
        prefix: Begins each name of a topic, group or transactional ID of this conversation.
    """

    def __init__(self, port: int, prefix: str) -> None:
        self.prefix = prefix
        self.heard: list[tuple[str, Any]] = []
        self._port = port
        self._clients: dict[str, RawClient] = {}
        self._seen: dict[tuple[str, object], str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.socket.close()

    def name(self, suffix: str) -> str:
        """Return a name of this conversation."""
        return f"{self.prefix}-{suffix}"

    def send(self, key: int, version: int, /, *, via: str = "a", **fields: Any) -> None:
        """Send a request on a connection, without waiting for the response."""
        client = self._clients.get(via)
        if client is None:
            client = self._clients[via] = RawClient(self._port)
        request = entity(message_class(key, version, "request"), fields)
        client.send_frame(request_frame(key, version, request, client_id="conversation"))

    def receive(self, label: str, key: int, version: int, /, *, via: str = "a") -> Any:
        """Return the next response of a connection, and keep it under a label."""
        _, response = read_response(key, version, self._clients[via].receive_frame())
        self.heard.append((label, self.plain(response)))
        return response

    def ask(self, label: str, key: int, version: int, /, *, via: str = "a", **fields: Any) -> Any:
        """Send a request and return its response, which is kept under a label."""
        self.send(key, version, via=via, **fields)
        return self.receive(label, key, version, via=via)

    def forget_last(self) -> None:
        """Leave the last response out: a step that is repeated until the broker is ready."""
        self.heard.pop()

    def plain(self, value: Any, field: str = "") -> Any:
        """Return what can be compared of a value."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {
                found.name: self.plain(getattr(value, found.name), found.name)
                for found in dataclasses.fields(value)
                if found.name not in _LEFT_OUT
            }
        if isinstance(value, tuple):
            parts = [self.plain(item, field) for item in value]
            return sorted(parts, key=str) if all(isinstance(p, dict) for p in parts) else parts
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, str) and value.startswith(self.prefix):
            return value.replace(self.prefix, "NAME")
        kind = _CHOSEN.get(field)
        is_none = value in {"", -1} if isinstance(value, str | int) else value is None
        if kind is None or is_none or value == uuid.UUID(int=0):
            return value
        number = sum(1 for of, _ in self._seen if of == kind) + 1
        return self._seen.setdefault((kind, value), f"{kind} {number}")
