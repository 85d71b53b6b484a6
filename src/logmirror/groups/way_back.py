"""Whether another process replicates from the target to the source: its heartbeats arrive there.

Heartbeats show clusters, not topics: two clusters may replicate different topics to each other.
So it is a warning.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from logmirror.cluster.client import LATEST
from logmirror.errors import LogmirrorError
from logmirror.model import TopicPartition
from logmirror.wire.replication_policy import HEARTBEATS, ReplicationPolicy

if TYPE_CHECKING:
    from logmirror.cluster.client import ClusterClient

_LOG = logging.getLogger("logmirror.groups")


class WayBack:
    """Warns once. Not thread-safe.

    Args:
        source: The source.
        target_alias: The name of the target.
    """

    def __init__(self, source: ClusterClient, target_alias: str) -> None:
        self._source = source
        topic = ReplicationPolicy().remote_topic(target_alias, HEARTBEATS)
        self._where = None if topic is None else TopicPartition(topic, 0)
        self._end: int | None = None

    def check(self) -> None:
        """Warn if heartbeats of the target have arrived at the source since the last call."""
        if self._where is None:
            return
        try:
            self._source.topic(self._where.topic)
            found = self._source.list_offsets([self._where], LATEST)[self._where]
        except LogmirrorError:
            return  # none arrive, or they are not visible
        before, self._end = self._end, found
        if before is not None and found > before:
            facts = {
                "topic": self._where.topic,
                "hint": "a topic that is mirrored in both directions returns to its cluster; see "
                "docs/fail-over.md#fail-back",
            }
            _LOG.warning(
                "another mirror replicates from the destination to the source",
                extra={"facts": facts},
            )
            self._where = None
