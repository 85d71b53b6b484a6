"""Access to the values of a file that may be invalid. A value of the wrong type counts as absent.

The rules read a file through these functions: the models report a wrong type, and it does not hide
problems of other settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logmirror.config.scalars import parse_partitions

if TYPE_CHECKING:
    from collections.abc import Iterator


def items(parent: dict[str, Any], key: str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the mappings in the list under `key`, with their paths."""
    listed = parent.get(key)
    for index, item in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(item, dict):
            yield f"{path}.{key}[{index}]" if path else f"{key}[{index}]", item


def mapping(parent: dict[str, Any], key: str) -> dict[str, Any] | None:
    """Return the mapping under `key`."""
    value = parent.get(key)
    return value if isinstance(value, dict) else None


def text(parent: dict[str, Any], key: str) -> str | None:
    """Return the text under `key`; None if it is empty."""
    value = parent.get(key)
    return value if isinstance(value, str) and value else None


def partitions(mirror: dict[str, Any]) -> frozenset[int] | None:
    """Return the partitions of a mirror: None for all, empty if they are unknown."""
    one, several = mirror.get("partition"), mirror.get("partitions")
    if type(one) is int:
        return frozenset([one])
    try:
        found = parse_partitions(several)
    except ValueError:
        return frozenset()
    return None if found is None else frozenset(found)


def shared_partitions(
    one: frozenset[int] | None, other: frozenset[int] | None
) -> frozenset[int] | None:
    """Return the partitions in both; None means all partitions."""
    return other if one is None else one if other is None else one & other


def shared_partition(one: frozenset[int] | None, other: frozenset[int] | None) -> int | None:
    """Return the lowest partition in both; None if there is none."""
    both = shared_partitions(one, other)
    return 0 if both is None else min(both, default=None)
