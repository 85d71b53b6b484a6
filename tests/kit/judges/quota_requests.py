"""Requests that set and describe client quotas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from kit.judges.raw_client import build, nested
from logmirror.broker.apis import Api

if TYPE_CHECKING:
    from kit.judges.raw_client import RawClient

Named = list[tuple[str, str | None]]
"""Types and names of an entity; None is the default of the type."""


def alter(
    client: RawClient,
    *entries: tuple[Named, dict[str, float | None]],
    version: int = 1,
    validate_only: bool = False,
) -> list[ErrorCode]:
    """Set quotas, and remove those with value None; returns the error code of each entity."""
    api = Api.ALTER_CLIENT_QUOTAS

    def part(name: str, **fields: object) -> Any:
        return build(nested(api, version, "request", name), **fields)

    asked = tuple(
        part(
            "EntryData",
            entity=tuple(part("EntityData", entity_type=k, entity_name=n) for k, n in named),
            ops=tuple(
                part("OpData", key=key, value=value or 0.0, remove=value is None)
                for key, value in values.items()
            ),
        )
        for named, values in entries
    )
    found = client.ask(api, version, entries=asked, validate_only=validate_only).entries
    echoed = [[(one.entity_type, one.entity_name) for one in entry.entity] for entry in found]
    assert echoed == list({tuple(named): named for named, _ in entries}.values())
    return [ErrorCode(entry.error_code) for entry in found]


def describe(
    client: RawClient, *parts: tuple[str, int, str | None], strict: bool = False, version: int = 1
) -> tuple[ErrorCode, list[tuple[Named, dict[str, float]]]]:
    """Return the error code, and entities with their quotas."""
    api = Api.DESCRIBE_CLIENT_QUOTAS
    cls = nested(api, version, "request", "ComponentData")
    components = tuple(
        build(cls, entity_type=kind, match_type=match, match=name) for kind, match, name in parts
    )
    found = client.ask(api, version, components=components, strict=strict)
    entries = [
        (
            [(one.entity_type, one.entity_name) for one in entry.entity],
            {one.key: one.value for one in entry.values},
        )
        for entry in found.entries or ()
    ]
    return ErrorCode(found.error_code), entries
