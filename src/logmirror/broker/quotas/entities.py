"""For whom a quota is: a user, a client ID, both, or a client address (KIP-13, KIP-546, KIP-612).

Names and types are those of Kafka's requests. The default of a type holds for every name that has
no quota of its own.
"""

from __future__ import annotations

import enum
import ipaddress
import json
import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT: Final = ""
"""Stands for all names of a type. A name is never empty."""

MAX_NAME: Final = 255
"""Limit for the characters of a name. Of longer names of clients only the beginning counts."""

_TYPES: Final = ("user", "client-id", "ip")
_MAX_LONG: Final = 2**63 - 1
_MAX_INT: Final = 2**31 - 1


class Quota(enum.StrEnum):
    """What a quota limits, by Kafka's key."""

    PRODUCE = "producer_byte_rate"
    """Bytes of Produce requests per second."""

    FETCH = "consumer_byte_rate"
    """Bytes of Fetch responses per second."""

    REQUEST = "request_percentage"
    """Time of the event loop, which is one thread, in percent."""

    CONNECTION = "connection_creation_rate"
    """Connections per second; for addresses only."""


class RefusedQuotaError(Exception):
    """A quota, or a filter for quotas, is not allowed. Maps to INVALID_REQUEST."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UnknownTypeError(RefusedQuotaError):
    """A filter has an unknown type of entity. Maps to UNSUPPORTED_VERSION, as in Apache Kafka."""


class Entity(NamedTuple):
    """Whom a quota is for. None: any name, or no name; `DEFAULT`: the default of the type."""

    user: str | None = None
    client_id: str | None = None
    ip: str | None = None

    def named(self) -> list[tuple[str, str | None]]:
        """Return types and names as Kafka's messages have them, where None is the default."""
        pairs = zip(_TYPES, self, strict=True)
        return [(kind, name or None) for kind, name in pairs if name is not None]

    def text(self) -> str:
        """Return the form in which it is stored."""
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> Entity:
        """Read the stored form."""
        return cls(*json.loads(text))


def entity(named: Iterable[tuple[str, str | None]]) -> Entity:
    """Return the entity of a request to change quotas.

    Args:
        named: Types and names; None is the default of the type.

    Raises:
        RefusedQuotaError: There is no such entity.
    """
    found: dict[str, str] = {}
    for kind, name in named:
        if kind not in _TYPES:
            raise RefusedQuotaError(f"unknown entity type: {kind}")
        if kind in found:
            raise RefusedQuotaError(f"entity type is named twice: {kind}")
        if name is not None and not 0 < len(name) <= MAX_NAME:
            raise RefusedQuotaError(f"{kind}: a name has 1 to {MAX_NAME} characters")
        found[kind] = DEFAULT if name is None else name
    if not found:
        raise RefusedQuotaError("no entity")
    if "ip" in found and len(found) > 1:
        raise RefusedQuotaError("an IP address is not combined with a user or a client ID")
    if found.get("ip"):
        found["ip"] = _address(found["ip"])
    return Entity(*(found.get(kind) for kind in _TYPES))


def _address(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        raise RefusedQuotaError("not an IP address") from None


def check(who: Entity, key: str, value: float) -> Quota:
    """Check the value of a quota.

    Raises:
        RefusedQuotaError: The entity cannot have this quota, or the value is not allowed.
    """
    keys = [Quota.CONNECTION] if who.ip is not None else list(Quota)[:3]
    if key not in keys:
        raise RefusedQuotaError(f"not a quota of this broker for this entity: {key}")
    quota = Quota(key)
    if not (math.isfinite(value) and value > 0):
        raise RefusedQuotaError(f"{key}: must be greater than 0")
    largest = _MAX_INT if quota == Quota.CONNECTION else _MAX_LONG
    if value > largest:
        raise RefusedQuotaError(f"{key}: must not exceed {largest}")
    if quota != Quota.REQUEST and not value.is_integer():
        raise RefusedQuotaError(f"{key}: must be an integer")
    return quota


class Match(enum.IntEnum):
    """How a filter compares a name."""

    EXACT = 0
    DEFAULT = 1
    ANY = 2


class Filter:
    """Which entities a request describes.

    Args:
        components: Type, `Match` and name of each part.
        strict: Whether entities that have further parts are left out.

    Raises:
        UnknownTypeError: There is no such type of entity.
        RefusedQuotaError: The parts contradict each other or themselves.
    """

    def __init__(self, components: Iterable[tuple[str, int, str | None]], *, strict: bool) -> None:
        self._strict = strict
        self._wanted: dict[str, str | None] = {}
        for kind, match, name in components:
            if kind and kind not in _TYPES:
                raise UnknownTypeError(f"unknown entity type: {kind}")
            if not kind or kind in self._wanted:
                raise RefusedQuotaError(f"entity type is empty or named twice: {kind}")
            if match not in list(Match) or (name is None) == (match == Match.EXACT):
                raise RefusedQuotaError(f"{kind}: unknown match type, or name missing or needless")
            wanted = _address(name) if name and kind == "ip" else name
            self._wanted[kind] = DEFAULT if match == Match.DEFAULT else wanted
        if "ip" in self._wanted and len(self._wanted) > 1:
            raise RefusedQuotaError("an IP address is not combined with a user or a client ID")

    def matches(self, who: Entity) -> bool:
        """Whether the entity is one of those."""
        has = {kind: name for kind, name in zip(_TYPES, who, strict=True) if name is not None}
        if self._strict and has.keys() != self._wanted.keys():
            return False
        return all(
            kind in has and (wanted is None or has[kind] == wanted)
            for kind, wanted in self._wanted.items()
        )
