"""Which replicas to move between the log directories of one broker, so that they hold equal bytes.

Decides with values only. From the fullest directory, the replica whose size is nearest to half of
the difference moves to the emptiest one that has space for it. That repeats until the fullest and
the emptiest differ by less than a tenth of the mean, or no replica is small enough.

Each move makes the fullest directory smaller, and no other one as full as it was. A replica moves
once at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logmirror.model import TopicPartition

_BALANCED: Final = 0.1
"""Difference of the fullest and the emptiest directory, as part of the mean, that is left alone."""

_WORTH: Final = 0.9
"""Size of a replica, as part of the difference, above which its move would only exchange the roles
of two directories."""


class Volume(NamedTuple):
    """A log directory."""

    name: str
    replicas: Mapping[TopicPartition, int]
    """The size of each replica that may move away, in bytes."""

    fixed_bytes: int = 0
    """The size of those that may not."""

    free_bytes: int | None = None
    """What can be written to it; None: not known."""

    is_cordoned: bool = False
    """Whether nothing may move to it."""


class Step(NamedTuple):
    """A move."""

    replica: TopicPartition
    source: str
    target: str
    size_bytes: int


def balance(volumes: Sequence[Volume]) -> list[Step]:
    """Return the moves that balance directories, which have different names and replicas."""
    sizes = {volume.name: dict(volume.replicas) for volume in volumes}
    free = {one.name: 0 if one.is_cordoned else one.free_bytes for one in volumes}
    loads = {volume.name: volume.fixed_bytes + sum(volume.replicas.values()) for volume in volumes}
    steps = list[Step]()
    while (step := _next(sizes, free, loads)) is not None:
        steps.append(step)
        del sizes[step.source][step.replica]
        loads[step.source] -= step.size_bytes
        loads[step.target] += step.size_bytes
        free_bytes = free[step.target]
        if free_bytes is not None:
            free[step.target] = free_bytes - step.size_bytes
    return steps


def _next(
    sizes: Mapping[str, Mapping[TopicPartition, int]],
    free: Mapping[str, int | None],
    loads: Mapping[str, int],
) -> Step | None:
    by_load = sorted(loads, key=lambda name: (loads[name], name))
    targets = [name for name in by_load[:-1] if free[name] != 0]
    if not targets:
        return None
    source = by_load[-1]
    mean = sum(loads.values()) / len(loads)
    if loads[source] - loads[targets[0]] < max(1, _BALANCED * mean):
        return None
    for target in targets:
        difference = loads[source] - loads[target]
        free_bytes = free[target]
        limit = difference * _WORTH if free_bytes is None else min(difference * _WORTH, free_bytes)
        fitting = [(size, key) for key, size in sizes[source].items() if 0 < size <= limit]
        if fitting:
            size, key = min(fitting, key=lambda one: (abs(difference - 2 * one[0]), -one[0]))
            return Step(key, source, target, size)
    return None
