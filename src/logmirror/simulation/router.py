"""Requests of the Kafka protocol to simulated coordinators, whose responses can be lost or late.

The product's own `TransactionalProducer`, `Lease` and `Groups` send them.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from logmirror.cluster.properties import ConnectionSettings
from logmirror.cluster.retry import Retrier
from logmirror.errors import LogmirrorError, OutcomeUnknownError, UnavailableError
from logmirror.simulation.world import write_under_faults
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.messages import (
    DESCRIBE_TRANSACTIONS,
    NONE,
    NOT_COORDINATOR,
    TRANSACTIONAL_ID_NOT_FOUND,
    api_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logmirror.cluster.connection import ResponseMemo
    from logmirror.simulation.topics import Topics
    from logmirror.simulation.world import Process

_INIT_PRODUCER_ID: Final = 22


class SimulatedRouter:
    """The part of `Router` that leads to a coordinator.

    Args:
        process: The process that sends.
        ask: Checks that the cluster is reachable; raises UnavailableError otherwise.
        topics: The cluster, with the state of its coordinators.
    """

    settings = ConnectionSettings(bootstrap_servers=(("target", 1),))

    def __init__(self, process: Process, ask: Callable[[str], None], topics: Topics) -> None:
        self.clock = process.world.schedule
        self.topology = self
        self.retry = Retrier(self.settings, self.clock, lambda: None)
        self._connection = _Connection(process, ask, topics)

    def refresh(self, _names: Iterable[str]) -> None:
        """See `Topology.refresh`; the only broker is known."""

    def nodes(self) -> list[int]:
        """See `Topology.nodes`."""
        return [1]

    def connection(self, _node: int) -> _Connection:
        """See `Topology.connection`."""
        return self._connection

    def any_connection(self) -> _Connection:
        """See `Topology.any_connection`."""
        return self._connection

    def connection_at(self, host: str, port: int) -> _Connection:
        """See `Topology.connection_at`."""
        del host, port
        return self._connection


class _Connection:
    """See `Connection`: requests to a coordinator."""

    versions: Final = {DESCRIBE_TRANSACTIONS: (0, 0), _INIT_PRODUCER_ID: (0, 5)}

    def __init__(self, process: Process, ask: Callable[[str], None], topics: Topics) -> None:
        self._process, self._ask, self._topics = process, ask, topics
        self._transactions = topics.transactions

    def call(
        self,
        request: Any,  # noqa: ANN401  # untyped library
        *,
        low: int = 0,
        high: int = 0,
        memo: ResponseMemo | None = None,
    ) -> SimpleNamespace:
        """See `Connection.call`."""
        del low, high
        if request.name == "FindCoordinatorRequest":
            return SimpleNamespace(error_code=NONE, host="target", port=1)
        self._ask(request.name)
        if request.name == "DescribeTransactionsRequest":
            return self._describe(*request.transactional_ids)
        if request.name == "ListGroupsRequest":
            return self._topics.groups.listed()
        if request.name == "OffsetFetchRequest":
            return self._fetched(request, memo)

        def failed(error: LogmirrorError) -> SimpleNamespace | LogmirrorError:
            if isinstance(error, OutcomeUnknownError):
                return UnavailableError(error.message)
            return api_error(NOT_COORDINATOR, action="could not reach the coordinator")

        def responded(response: SimpleNamespace) -> SimpleNamespace | LogmirrorError:
            return response

        change = functools.partial(self._change, request)
        if request.name == "OffsetCommitRequest":
            groups, process = self._topics.groups, self._process.name
            read = groups.read_by(process, request.group_id)
            change = functools.partial(groups.commit, request, self._topics.logs, process, read)
        response = write_under_faults(self._process, change, responded, failed)
        if isinstance(response, LogmirrorError):
            raise response
        return response

    def _describe(self, name: str) -> SimpleNamespace:
        known = self._transactions.describe(name)
        if known is None:
            return SimpleNamespace(
                transaction_states=[SimpleNamespace(error_code=TRANSACTIONAL_ID_NOT_FOUND)]
            )
        state = SimpleNamespace(
            error_code=NONE,
            producer_id=known.producer_id,
            producer_epoch=known.epoch,
            transaction_timeout_ms=known.timeout_ms,
            transaction_state="PrepareAbort" if known.awaited else "Empty",
        )
        return SimpleNamespace(transaction_states=[state])

    def _fetched(self, request: Any, memo: ResponseMemo | None) -> SimpleNamespace:  # noqa: ANN401  # untyped library
        """Return a group's offsets; with a memo, the same object if they have not changed."""
        response = self._topics.groups.fetched(request, self._process.name)
        if memo is None:
            return response
        if memo.response != response:
            memo.response = response
        return memo.response  # type: ignore[no-any-return]  # it is what was set

    def _change(self, request: Any) -> SimpleNamespace:  # noqa: ANN401  # untyped library
        known = self._transactions
        if request.name == "InitProducerIdRequest":
            expected = (request.producer_id, request.producer_epoch)
            code, producer_id, epoch = known.init(
                request.transactional_id, request.transaction_timeout_ms, expected
            )
            return SimpleNamespace(error_code=code, producer_id=producer_id, producer_epoch=epoch)
        if request.name == "EndTxnRequest":
            own = (request.producer_id, request.producer_epoch)
            marker = MarkerType.COMMIT if request.committed else MarkerType.ABORT
            return SimpleNamespace(error_code=known.end(request.transactional_id, own, marker))
        assert request.name == "AddPartitionsToTxnRequest"  # noqa: S101  # no other request is sent
        own = (request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        topics = [topic.name for topic in request.v3_and_below_topics]
        code = known.add(request.v3_and_below_transactional_id, own, topics)
        partition = SimpleNamespace(partition_index=0, partition_error_code=code)
        result = SimpleNamespace(name=topics[0], results_by_partition=[partition])
        return SimpleNamespace(results_by_topic_v3_and_below=[result])
