"""Reading values of a file that may not be valid: what has the wrong type is absent here.

The rules look at a file through these, so that a typing error in one setting is found by the shape
and does not hide what is wrong with the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logmirror.config.scalars import parse_partitions

if TYPE_CHECKING:
    from collections.abc import Iterator


def items(parent: dict[str, Any], key: str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings in the list under `key`, with their paths."""
    listed = parent.get(key)
    for index, item in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(item, dict):
            yield f"{path}.{key}[{index}]" if path else f"{key}[{index}]", item


def mapping(parent: dict[str, Any], key: str) -> dict[str, Any] | None:
    """The mapping under `key`."""
    value = parent.get(key)
    return value if isinstance(value, dict) else None


def text(parent: dict[str, Any], key: str) -> str | None:
    """The text under `key`, if it has any."""
    value = parent.get(key)
    return value if isinstance(value, str) and value else None


def partitions(mirror: dict[str, Any]) -> frozenset[int] | None:
    """The partitions of a mirror, None for all; empty if they are not known."""
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
    """The partitions in both; `None` stands for all partitions."""
    return other if one is None else one if other is None else one & other


def shared_partition(one: frozenset[int] | None, other: frozenset[int] | None) -> int | None:
    """Some partition in both, None if there is none."""
    both = shared_partitions(one, other)
    return 0 if both is None else min(both, default=None)
