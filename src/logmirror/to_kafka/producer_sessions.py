"""Executor: the transactional producers of one process, kept open between slices."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.produce import ProducePipeline
    from logmirror.cluster.transactions import TransactionalProducer

_SESSIONS_MAX: Final = 16


@dataclass(slots=True)
class ProducerSession:
    """A transactional producer, and the pipeline for its batches."""

    producer: TransactionalProducer
    pipeline: ProducePipeline


class ProducerSessions:
    """The open sessions of one process with one cluster; the least recently used are closed."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._sessions: OrderedDict[str, ProducerSession] = OrderedDict()

    def open(self, transactional_id: str) -> ProducerSession:
        """Open a session, and fence the previous owner of the transactional ID.

        Raises:
            UsageError: No permission to write with that ID.
            UnavailableError: No coordinator responded within the budget.
        """
        session = self._sessions.pop(transactional_id, None) or ProducerSession(
            self._client.transactional_producer(transactional_id),
            self._client.pipeline(transactional_id=transactional_id),
        )
        self._sessions[transactional_id] = session
        while len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)[1].pipeline.close()
        session.producer.init()
        return session

    def discard(self, transactional_id: str) -> None:
        """Close a session, and abandon what is in flight on it."""
        session = self._sessions.pop(transactional_id, None)
        if session is not None:
            session.pipeline.close()
