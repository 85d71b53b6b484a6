"""The coordinator of the cluster that receives a copy: transactional ids, and who has them.

It is asked in the requests of the protocol, so that the product's own `TransactionalProducer` and
`Fence` do the asking. It never forgets, and what it has answered is done; as on real brokers, the
markers of a transaction are written after its end was answered, in each log at another moment. That
a leader changes while they are on their way is left to real brokers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from kafka.protocol.admin import (  # type: ignore[import-untyped]  # ships no py.typed
    DescribeTransactionsRequest,
)
from kafka.protocol.metadata import (  # type: ignore[import-untyped]  # ships no py.typed
    FindCoordinatorRequest,
)
from kafka.protocol.producer import (  # type: ignore[import-untyped]  # ships no py.typed
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
)

from logmirror.cluster.properties import ConnectionSettings
from logmirror.errors import LogmirrorError, OutcomeUnknownError, UnavailableError
from logmirror.simulation.world import written
from logmirror.wire.messages import (
    CONCURRENT_TRANSACTIONS,
    DESCRIBE_TRANSACTIONS,
    INVALID_TXN_STATE,
    NONE,
    NOT_COORDINATOR,
    TRANSACTIONAL_ID_NOT_FOUND,
    api_error,
)
from logmirror.wire.records import MarkerType, encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logmirror.clock import Chooser
    from logmirror.simulation.log import Log
    from logmirror.simulation.schedule import Schedule
    from logmirror.simulation.world import Process

PRODUCER_FENCED: Final = 90

_FIRST_PRODUCER: Final = 1000
_NOBODY: Final = -1
MARKER_MS: Final = (0, 0, 2, 30)
"""How long after the end of a transaction a marker may be written."""


@dataclass(kw_only=True, eq=False)
class _Id:
    """A transactional id."""

    producer_id: int
    epoch: int = -1
    timeout_ms: int = 0
    joined: set[str] = field(default_factory=set)
    """Topics in the transaction that is open."""

    count: int = 0
    """Of transactions that were begun."""

    outcome: MarkerType | None = None
    """How the last one ended."""

    awaited: int = 0
    """Its markers that are not written yet."""


class Transactions:
    """What coordinators know.

    Args:
        schedule: Time.
        chooser: Draws how long markers take.
        log: Of a topic.
    """

    def __init__(self, schedule: Schedule, chooser: Chooser, log: Callable[[str], Log]) -> None:
        self._schedule, self._chooser, self._log = schedule, chooser, log
        self._ids: dict[str, _Id] = {}
        self._unwritten: list[tuple[_Id, str]] = []

    def decided(self, topic: str) -> list[bytes]:
        """Markers that will be in a topic's log, whatever happens, and are not there yet."""
        now_ms = self._schedule.now_ms()
        return [
            encode_marker(
                known.outcome, offset=0, producer_id=known.producer_id, timestamp_ms=now_ms
            )
            for known, where in self._unwritten
            if where == topic and known.outcome is not None
        ]

    def describe(self, name: str) -> _Id | None:
        """DescribeTransactions; None: nobody has ever had the id."""
        return self._ids.get(name)

    def is_joined(self, own: tuple[int, int], topic: str) -> bool:
        """Whether a topic is in the open transaction of a producer."""
        ids = self._ids.values()
        return any(own == (k.producer_id, k.epoch) and topic in k.joined for k in ids)

    def init(self, name: str, timeout_ms: int, expected: tuple[int, int]) -> tuple[int, int, int]:
        """InitProducerId.

        Returns:
            Error code, producer id, epoch.
        """
        known = self._ids.setdefault(name, _Id(producer_id=_FIRST_PRODUCER + len(self._ids)))
        repeated = (known.producer_id, known.epoch - 1)
        if expected[0] != _NOBODY and expected not in (repeated, (known.producer_id, known.epoch)):
            return PRODUCER_FENCED, -1, -1
        if known.joined:
            self._abort(known)
        if known.awaited:
            return CONCURRENT_TRANSACTIONS, -1, -1
        if expected != repeated:
            known.epoch += 1
        known.timeout_ms = timeout_ms
        return NONE, known.producer_id, known.epoch

    def add(self, name: str, own: tuple[int, int], topics: Iterable[str]) -> int:
        """AddPartitionsToTxn; returns an error code."""
        known = self._ids[name]
        if own != (known.producer_id, known.epoch):
            return PRODUCER_FENCED
        if known.awaited:
            return CONCURRENT_TRANSACTIONS
        if not known.joined:
            known.count += 1
            count = known.count

            def time_out() -> None:
                if known.joined and known.count == count:
                    self._abort(known)

            self._schedule.after(known.timeout_ms, time_out)
        known.joined.update(topics)
        return NONE

    def end(self, name: str, own: tuple[int, int], marker: MarkerType) -> int:
        """EndTxn, which may be repeated; returns an error code."""
        known = self._ids[name]
        if own != (known.producer_id, known.epoch):
            return PRODUCER_FENCED
        if not known.joined:
            return NONE if known.outcome is marker else INVALID_TXN_STATE
        self._decide(known, marker)
        return NONE

    def _abort(self, known: _Id) -> None:
        """Against the will of its producer, who is fenced by that."""
        known.epoch += 1
        self._decide(known, MarkerType.ABORT)

    def _decide(self, known: _Id, marker: MarkerType) -> None:
        known.outcome = marker
        topics, known.joined = sorted(known.joined), set()
        known.awaited = len(topics)
        for topic in topics:
            self._unwritten.append((known, topic))
            delay_ms = self._chooser.choice(MARKER_MS)
            if delay_ms:
                self._schedule.after(delay_ms, lambda topic=topic: self._mark(known, topic))  # type: ignore[misc]  # bound at once
            else:
                self._mark(known, topic)

    def _mark(self, known: _Id, topic: str) -> None:
        assert known.outcome is not None  # noqa: S101  # for mypy
        known.awaited -= 1
        self._unwritten.remove((known, topic))
        self._log(topic).append_marker(
            known.producer_id, known.epoch, 0, self._schedule.now_ms(), known.outcome
        )


class SimulatedRouter:
    """What the product's parts ask of a `Router` to reach a coordinator.

    Args:
        process: Who asks.
        ask: Asks the cluster something; raises where it does not answer.
        transactions: What coordinators know.
    """

    def __init__(
        self, process: Process, ask: Callable[[str], None], transactions: Transactions
    ) -> None:
        self.settings = ConnectionSettings(bootstrap_servers=(("target", 1),))
        self.clock = process.world.schedule
        self.topology = self
        self._connection = _Connection(process, ask, transactions)

    def any_connection(self) -> _Connection:
        """See `Topology.any_connection`."""
        return self._connection

    def connection_at(self, host: str, port: int) -> _Connection:
        """See `Topology.connection_at`."""
        del host, port
        return self._connection


class _Connection:
    """See `Connection`: requests to a coordinator, and what they answer."""

    versions: Final = {DESCRIBE_TRANSACTIONS: (0, 0), InitProducerIdRequest.API_KEY: (0, 5)}

    def __init__(
        self, process: Process, ask: Callable[[str], None], transactions: Transactions
    ) -> None:
        self._process, self._ask, self._transactions = process, ask, transactions

    def call(
        self,
        request: Any,  # noqa: ANN401  # untyped library
        *,
        low: int = 0,
        high: int = 0,
    ) -> SimpleNamespace:
        """See `Connection.call`."""
        del low, high
        if isinstance(request, FindCoordinatorRequest):
            return SimpleNamespace(error_code=NONE, host="target", port=1)
        self._ask(type(request).__name__)
        if isinstance(request, DescribeTransactionsRequest):
            return self._describe(*request.transactional_ids)

        def failed(error: LogmirrorError) -> SimpleNamespace | LogmirrorError:
            if isinstance(error, OutcomeUnknownError):
                return UnavailableError(error.message)
            return api_error(NOT_COORDINATOR, action="could not ask")

        def answered(answer: SimpleNamespace) -> SimpleNamespace | LogmirrorError:
            return answer

        answer = written(self._process, lambda: self._change(request), answered, failed)
        if isinstance(answer, LogmirrorError):
            raise answer
        return answer

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

    def _change(self, request: Any) -> SimpleNamespace:  # noqa: ANN401  # untyped library
        known = self._transactions
        if isinstance(request, InitProducerIdRequest):
            expected = (request.producer_id, request.producer_epoch)
            code, producer_id, epoch = known.init(
                request.transactional_id, request.transaction_timeout_ms, expected
            )
            return SimpleNamespace(error_code=code, producer_id=producer_id, producer_epoch=epoch)
        if isinstance(request, EndTxnRequest):
            own = (request.producer_id, request.producer_epoch)
            marker = MarkerType.COMMIT if request.committed else MarkerType.ABORT
            return SimpleNamespace(error_code=known.end(request.transactional_id, own, marker))
        assert isinstance(request, AddPartitionsToTxnRequest)  # noqa: S101  # nothing else is asked
        own = (request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        topics = [topic.name for topic in request.v3_and_below_topics]
        code = known.add(request.v3_and_below_transactional_id, own, topics)
        partition = SimpleNamespace(partition_index=0, partition_error_code=code)
        result = SimpleNamespace(name=topics[0], results_by_partition=[partition])
        return SimpleNamespace(results_by_topic_v3_and_below=[result])
