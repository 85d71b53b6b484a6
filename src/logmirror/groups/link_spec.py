"""What a link translates, without the code that does it: `run` starts without kernels."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.mirror.ports import KafkaSpec

TRANSACTIONAL_ID_PREFIX: Final = "logmirror-groups-"
"""Before the source's alias."""

_DIGITS: Final = 16


class ReplicaSpec(NamedTuple):
    """A mirrored topic, and how it is written."""

    mirror: str
    topic: str
    partitions: tuple[int, ...] | None
    """The replicated partitions. None: all."""

    written: KafkaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """The groups of one source, for one target."""

    source: ConnectionSettings
    source_alias: str
    """The name of the source in the names of topics at the target."""

    target: ConnectionSettings
    destination: str
    """The name of the target."""

    replicas: tuple[ReplicaSpec, ...]
    include: tuple[str, ...]
    """Regular expressions; a group matches one of them as a whole."""

    exclude: tuple[str, ...]
    """The same, for groups that are left out."""

    interval_ms: int
    commits: bool
    """Whether offsets are committed at the target, not only written as checkpoints."""

    def selects(self, group: str) -> bool:
        """Whether a group is translated, by its name."""
        return _matches(self.include, group) and not _matches(self.exclude, group)

    @property
    def transactional_id(self) -> str:
        """The same for all processes that translate the groups of these topics."""
        topics = sorted((one.mirror, one.topic, one.written.topic) for one in self.replicas)
        identity = [self.source_alias, self.destination, topics]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:_DIGITS]
        return f"{TRANSACTIONAL_ID_PREFIX}{self.source_alias}-{digest}"


def _matches(patterns: tuple[str, ...], group: str) -> bool:
    return any(re.fullmatch(pattern, group) for pattern in patterns)
