"""The offset syncs of the replicas of one source in one cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.cluster.retry import NotFoundError
from logmirror.groups.offset_syncs import OffsetSyncs
from logmirror.model import TopicPartition
from logmirror.source.compare import chunks
from logmirror.source.partition import FetchBuffer, KafkaSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.cluster.client import ClusterClient
    from logmirror.groups.offset_syncs import SyncIndex
    from logmirror.wire.decode import RecordDecoder


class SyncReader:
    """Follows a topic of offset syncs.

    Args:
        client: The source.
        topic: The topic's name; None: no topic can have it.
        decoder: May be shared with other readers of the same thread.
    """

    def __init__(self, client: ClusterClient, topic: str | None, decoder: RecordDecoder) -> None:
        self._client, self._decoder = client, decoder
        self._where = None if topic is None else TopicPartition(topic, 0)
        self._buffer = FetchBuffer()
        self._syncs = OffsetSyncs()
        self._topic_id: bytes | None = None
        self._next = -1

    @property
    def indexes(self) -> Mapping[TopicPartition, SyncIndex]:
        """The syncs by partition of the source, as of the last `refresh`."""
        return self._syncs.indexes()

    def restart(self) -> None:
        """Read the topic again: a replica was created again, and older syncs are not about it.

        Its first sync ends what older ones say, but may have been removed since.

        Raises:
            LogmirrorError: The topic could not be read.
        """
        self._syncs, self._next = OffsetSyncs(), -1
        self.refresh()

    def refresh(self) -> bool:
        """Read to the end of the topic; return whether there was anything new.

        A missing topic has no syncs. What was read stays valid if the topic is deleted, because
        each sync is about two records; see `restart`.

        Raises:
            LogmirrorError: The topic could not be read.
        """
        if self._where is None:
            return False
        try:
            topic_id = self._client.topic(self._where.topic).topic_id
        except NotFoundError:
            return False
        if self._next < 0 or topic_id != self._topic_id:
            self._topic_id = topic_id
            self._next = self._client.list_offsets([self._where], EARLIEST)[self._where]
        end, first = self._client.list_offsets([self._where], LATEST)[self._where], self._next
        log = KafkaSource(self._client, self._where, topic_id=topic_id, buffer=self._buffer)
        for table, offset in chunks(log, self._decoder, first, end):
            self._syncs.add(table)
            self._next = offset
        return self._next > first
