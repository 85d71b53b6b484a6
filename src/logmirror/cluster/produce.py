"""Writing to a cluster: record batches to their leaders, in order, with many requests in flight.

Nothing here is sent twice. Whether a batch was written is known from its response or from the
destination's log, never guessed:

    the response to a batch has        written?    what the caller does
    no error                           yes         compares the base offset with the expected one
    UnavailableError                   no          sends it again, later
    OutcomeUnknownError                unknown     reads the log end, then decides
    any other (45, 47, 87, ...)        no          as the kind says; 45: reads the log end

Invariants:
1. Every batch that `send` accepted gets exactly one response; those of one partition come in the
   order of sending (`produce_responses`).
2. A partition's batches are sent over one connection as long as a response is awaited or not
   collected: the old leader has responded to all before anything is sent to the new one.
3. While a failure of a partition is not collected, nothing more is sent to it: the caller must
   decide first.
4. After `not_after_ms` no byte is handed to the kernel. A request that was handed over in part is
   cut off, and the broker does not process it, because it reads whole frames.
5. Bytes that the kernel has taken reach the broker's machine within `LINGER_MS_MAX`
   (TCP_USER_TIMEOUT), or never. Bytes of an aborted connection are dropped at once.
6. A connection is aborted if the response at its head is missing for `socket_timeout_ms` + the
   request's own timeout, or if it takes no bytes for that long (plus 1 ms for each 128 bytes).

Not covered: bytes that the broker's machine has received and the broker has not read yet. A paused
broker processes them when it resumes, however late.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from logmirror.clock import jittered_ms
from logmirror.cluster.produce_connection import ProduceConnection
from logmirror.cluster.produce_responses import PendingResponses, ProduceResponse
from logmirror.errors import (
    InternalError,
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
)
from logmirror.wire.messages import api_error, error_of
from logmirror.wire.produce import ACKS_ALL, ACKS_LEADER, ProduceRequest, ProduceResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logmirror.cluster.router import Router
    from logmirror.model import TopicPartition

_BACKOFF_SHIFT_MAX: Final = 20
_BROKEN: Final = UnavailableError("not sent: the connection broke")
_NOT_COLLECTED: Final = UnavailableError(
    "not sent: an earlier batch of the partition failed", hint="collect its response first"
)


class _Assignment(NamedTuple):
    """The connections of the batches of one `send`."""

    refused: dict[TopicPartition, LogmirrorError]
    by_connection: dict[ProduceConnection, list[tuple[TopicPartition, memoryview]]]


class ProducePipeline:
    """Sends batches to the leaders of one cluster, and collects their responses.

    A pipeline has its own connections, one per leader, opened on first use. It belongs to one
    thread of one process. `close` it, or use it in a `with`.

    Args:
        router: The cluster; see `ClusterClient.pipeline`.
        acks: `ACKS_ALL` or `ACKS_LEADER`.
        timeout_ms: How long a leader waits for its replicas; None for `request_timeout_ms`.
        transactional_id: For batches with the transactional bit, whose producer ID and epoch are
            those of a `TransactionalProducer`, to which their partitions were added.
    """

    def __init__(
        self,
        router: Router,
        *,
        acks: int = ACKS_ALL,
        timeout_ms: int | None = None,
        transactional_id: str | None = None,
    ) -> None:
        if acks not in (ACKS_ALL, ACKS_LEADER):
            raise InternalError("acks=0 is not supported", acks=acks)
        self._router = router
        self._clock = router.clock
        self._acks = acks
        self._timeout_ms = router.settings.request_timeout_ms if timeout_ms is None else timeout_ms
        self._transactional_id = transactional_id
        self._connections: dict[int, ProduceConnection] = {}
        self._unreachable: dict[int, tuple[int, int, LogmirrorError]] = {}
        """Brokers that could not be reached: node ID to (next attempt at, failures, last error)."""
        self._pending = PendingResponses()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abandon what is in flight, and close the connections.

        The outcome of a batch without a response is unknown; `collect` still returns a response for
        every batch.
        """
        for connection in list(self._connections.values()):
            self._pull(connection)
            if connection.in_flight:
                self._give_up(connection, UnavailableError("the pipeline was closed"))
            connection.close()
        self._connections.clear()

    def in_flight(self, partition: TopicPartition | None = None) -> int:
        """The number of batches whose responses were not collected: of a partition, or in all."""
        return self._pending.count(partition)

    def send(
        self,
        batches: Sequence[tuple[TopicPartition, memoryview]],
        *,
        not_after_ms: int | None = None,
    ) -> None:
        """Send one request per leader; return when the kernel has taken all bytes.

        The buffers may be reused then. Responses are read meanwhile, so that no broker blocks. A
        batch that cannot be sent now (no leader, leader unreachable, an uncollected failure of its
        partition, no such topic) still gets a response, usually an `UnavailableError`, and does not
        delay other partitions. `send` waits, within deadlines, for a connection to be opened
        (`connect_timeout_ms` each), a throttle, and a reauthentication. It looks up leaders once.
        After an `UnavailableError` the caller must pause before it sends to that partition again.

        Args:
            batches: Record batches (magic 2, base offset 0), at most one per partition.
            not_after_ms: Deadline on `clock.monotonic_ms()`, after which the caller's reading of
            the
                log end is too old. It is checked immediately before bytes are handed to the kernel.
                After the deadline no more are, and batches that were not sent whole get an
                `UnavailableError`.

        Raises:
            UnavailableError: The deadline had passed before sending began. No batch of this call
            was
                sent, and none gets a response.
            InternalError: Two batches of one partition.
        """
        if len({partition for partition, _ in batches}) != len(batches):
            raise InternalError("two batches of one partition in one send")
        refused, by_connection = self._assign(batches)
        broken = self._prepare(by_connection)
        if not_after_ms is not None and self._clock.monotonic_ms() >= not_after_ms:
            raise _too_late()
        for partition, error in refused.items():
            self._pending.add_unsent(partition, error)
        for connection, wanted in by_connection.items():
            self._begin(connection, wanted, broken.get(connection, _BROKEN))
        try:
            self._push(by_connection, not_after_ms)
        except BaseException:  # an interrupt or a bug: no request may stay partly sent
            for connection in [connection for connection in by_connection if connection.is_sending]:
                self._give_up(connection, UnavailableError("sending was interrupted"))
            raise

    def collect(self, *, block: bool) -> list[ProduceResponse]:
        """Return the responses that have come, each once.

        Args:
            block: Wait until there is at least one, or nothing is in flight. The wait has a
            deadline
                (invariant 6).

        Returns:
            The responses, in the order of sending for each partition; may be empty.
        """
        self._pull_all()
        while block and not self._pending.has_ready and self._has_in_flight():
            self._wait(())
        return self._pending.collect()

    def _has_in_flight(self) -> bool:
        return any(connection.in_flight for connection in self._connections.values())

    # Connections.

    def _assign(self, batches: Sequence[tuple[TopicPartition, memoryview]]) -> _Assignment:
        """Find the connection of each batch, or the reason why it has none."""
        refused: dict[TopicPartition, LogmirrorError] = {}
        by_connection: dict[ProduceConnection, list[tuple[TopicPartition, memoryview]]] = {}
        self._pull_all()
        unbound: list[tuple[TopicPartition, memoryview]] = []
        for partition, view in batches:
            connection = self._pending.connection_of(partition)
            if self._pending.has_failure(partition):
                refused[partition] = _NOT_COLLECTED
            elif connection is not None and not connection.closed:
                by_connection.setdefault(connection, []).append((partition, view))
            else:
                unbound.append((partition, view))
        leaders = self._leaders([partition for partition, _ in unbound], refused)
        for partition, view in unbound:
            if partition in refused:
                continue
            try:
                connection = self._connection(leaders[partition])
            except LogmirrorError as error:
                refused[partition] = error
            else:
                by_connection.setdefault(connection, []).append((partition, view))
        return _Assignment(refused, by_connection)

    def _leaders(
        self, partitions: list[TopicPartition], refused: dict[TopicPartition, LogmirrorError]
    ) -> dict[TopicPartition, int]:
        leaders: dict[TopicPartition, int] = {}
        topology = self._router.topology
        try:
            topology.ensure(partition.topic for partition in partitions)
        except UnavailableError as error:
            refused |= dict.fromkeys(partitions, error)
            return leaders
        except LogmirrorError:
            pass  # of one topic; each is looked up below
        for partition in partitions:
            try:
                leaders[partition] = topology.partition(partition).leader
            except LogmirrorError as error:
                refused[partition] = error
        return leaders

    def _connection(self, node: int) -> ProduceConnection:
        """The connection to a leader; after a failure it is opened again with back-off."""
        connection = self._connections.get(node)
        if connection is not None:
            if not connection.has_hung_up():
                return connection
            self._pull(connection)  # remaining responses, then the error
            if not connection.closed:
                self._give_up(connection, UnavailableError("the broker closed the connection"))
        now_ms = self._clock.monotonic_ms()
        not_before_ms, failures, why = self._unreachable.get(node, (0, 0, None))
        if why is not None and now_ms < not_before_ms:
            self._router.topology.forget()  # its address may change, or the leader
            raise why.copy()
        try:
            connection = self._router.topology.new_connection(node, ProduceConnection)
        except LogmirrorError as error:
            settings = self._router.settings
            pause_ms = min(
                settings.reconnect_backoff_ms << min(failures, _BACKOFF_SHIFT_MAX),
                settings.reconnect_backoff_max_ms,
            )
            not_before_ms = self._clock.monotonic_ms() + int(jittered_ms(pause_ms))
            self._unreachable[node] = (not_before_ms, failures + 1, error)
            self._router.topology.forget()
            raise
        self._unreachable.pop(node, None)
        self._connections[node] = connection
        return connection

    def _prepare(
        self, connections: Iterable[ProduceConnection]
    ) -> dict[ProduceConnection, LogmirrorError]:
        """Wait out throttles and reauthenticate; return the connections that failed."""
        broken: dict[ProduceConnection, LogmirrorError] = {}
        for connection in connections:
            while connection.session_ends_soon and connection.in_flight and not connection.closed:
                self._wait(())
            if connection.closed or connection.in_flight:
                pause_ms = connection.throttled_until_ms - self._clock.monotonic_ms()
                self._clock.sleep_ms(0 if connection.closed else pause_ms)
                continue
            try:
                connection.prepare()
            except LogmirrorError as error:
                broken[connection] = error
                self._give_up(connection, error)
        return broken

    # Bytes.

    def _begin(
        self,
        connection: ProduceConnection,
        wanted: list[tuple[TopicPartition, memoryview]],
        why_closed: LogmirrorError,
    ) -> None:
        """Queue one request, without partitions that have failed since they were assigned."""
        accepted: list[tuple[TopicPartition, memoryview]] = []
        for partition, view in wanted:
            if connection.closed:
                self._pending.add_unsent(partition, why_closed)
            elif self._pending.has_failure(partition):
                self._pending.add_unsent(partition, _NOT_COLLECTED)
            else:
                self._pending.add_sent(partition, connection)
                accepted.append((partition, view))
        if accepted:
            connection.begin(
                ProduceRequest(accepted, self._acks, self._timeout_ms, self._transactional_id)
            )

    def _push(self, connections: Iterable[ProduceConnection], not_after_ms: int | None) -> None:
        sending = [connection for connection in connections if connection.is_sending]
        while sending:
            for connection in sending:
                try:
                    in_time = connection.push(not_after_ms)
                except LogmirrorError as error:
                    self._give_up(connection, error)
                    continue
                if not in_time:
                    self._cut_off(connection)
            sending = [connection for connection in sending if connection.is_sending]
            if sending:
                self._wait(sending, not_after_ms)

    def _cut_off(self, connection: ProduceConnection) -> None:
        """Stop sending over a connection: the deadline has passed."""
        if connection.has_begun:
            self._give_up(connection, _too_late())
        else:
            for partition in connection.withdraw().partitions:
                self._pending.cut_off(partition, _too_late())

    def _wait(self, sending: Sequence[ProduceConnection], not_after_ms: int | None = None) -> None:
        """Wait until a connection is ready or a deadline has passed; read the responses."""
        poller = select.poll()
        by_descriptor = {
            connection.fileno(): connection
            for connection in self._connections.values()
            if connection.in_flight
        }
        for descriptor, connection in by_descriptor.items():
            events = select.POLLIN | select.POLLOUT if connection in sending else select.POLLIN
            poller.register(descriptor, events)
        moments = [connection.deadline_ms for connection in by_descriptor.values()]
        moments.append(not_after_ms)
        until_ms = min((moment for moment in moments if moment is not None), default=0)
        timeout_ms = max(until_ms - self._clock.monotonic_ms(), 0)
        for descriptor, events in poller.poll(timeout_ms):
            if events & ~select.POLLOUT:
                self._pull(by_descriptor[descriptor])
        for connection in by_descriptor.values():
            if self._is_overdue(connection):
                self._pull(connection)  # after a pause of this process the response may be here
            if self._is_overdue(connection):
                self._give_up(connection, UnavailableError("the broker did not respond in time"))

    def _is_overdue(self, connection: ProduceConnection) -> bool:
        deadline_ms = None if connection.closed else connection.deadline_ms
        return deadline_ms is not None and self._clock.monotonic_ms() >= deadline_ms

    def _pull_all(self) -> None:
        for connection in list(self._connections.values()):
            if connection.in_flight:
                self._pull(connection)

    def _pull(self, connection: ProduceConnection) -> None:
        if connection.closed:
            return
        results: list[ProduceResult] = []
        failure: LogmirrorError | None = None
        try:
            connection.pull(results)
        except LogmirrorError as error:
            failure = error
        for result in results:
            self._accept(result)
        if failure is not None:
            self._give_up(connection, failure)

    # Responses.

    def _accept(self, result: ProduceResult) -> None:
        partition, code = result.partition, result.error_code
        error: LogmirrorError | None = None
        if code:
            facts: dict[str, object] = {} if result.message is None else {"reason": result.message}
            error = api_error(
                code,
                action="could not write",
                topic=partition.topic,
                partition=partition.partition,
                **facts,
            )
            if error_of(code).stale_metadata:
                self._router.topology.forget([partition.topic])
        self._pending.respond(
            ProduceResponse(
                partition,
                code,
                result.base_offset,
                result.log_append_time_ms,
                result.log_start_offset,
                error,
            )
        )

    def _give_up(self, connection: ProduceConnection, why: LogmirrorError) -> None:
        """Abort a connection, and respond to every batch that it carried."""
        unsent = connection.in_flight.pop().partitions if connection.is_sending else ()
        lost = [partition for request in connection.in_flight for partition in request.partitions]
        connection.in_flight.clear()
        connection.abort()
        self._connections = {
            node: other for node, other in self._connections.items() if other is not connection
        }
        self._router.topology.forget()
        facts = {"host": connection.host, "port": connection.port, **why.facts}
        unknown = OutcomeUnknownError(
            f"no response to a write: {why.message}",
            hint=why.hint or "read the log end before anything is written again",
            **facts,
        )
        for partition in lost:
            self._pending.lose(partition, unknown)
        cut_off = UnavailableError(f"not sent whole: {why.message}", hint=why.hint, **facts)
        for partition in unsent:
            self._pending.cut_off(partition, cut_off)


def _too_late() -> UnavailableError:
    return UnavailableError(
        "not sent: the send deadline has passed",
        hint="read the log end again",
    )
