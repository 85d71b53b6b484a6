"""Writing to a cluster: record batches to their leaders, in order, many requests under way.

Nothing here is ever sent twice. Whether a batch was written is known from its answer or from the
destination's log, never guessed:

    the answer to a batch has          written?    what its caller does
    no error                           yes         compares the base offset with the expected one
    UnavailableError                   no          sends it again, later
    OutcomeUnknownError                who knows   looks at the log's end, then decides
    any other (45, 47, 87, ...)        no          as the kind says; 45 means: look

Invariants:
1. Every batch that `send` accepted gets exactly one answer, whatever happens; those of one
   partition come in the order in which they were sent.
2. A partition's batches are sent over one connection for as long as an answer of it is awaited or
   not collected: what was sent to an old leader is answered before anything goes to a new one.
3. While a failure of a partition is not collected, nothing more is sent to it: the caller decides
   on knowledge that he has.
4. After `not_after_ms` no byte is handed to the kernel. A request that was handed over in part is
   cut off, which the broker never processes (it reads whole frames).
5. Bytes that the kernel has taken are on the broker's machine within `LINGER_MS_MAX`
   (TCP_USER_TIMEOUT), or never; bytes of a connection that we gave up are dropped at once.
6. A connection without an answer at its head for `socket_timeout_ms` + the request's own timeout is
   given up; so is one that does not take our bytes for that long (plus 1 ms for each 128 bytes).

What remains open: bytes that the broker's machine has taken and the broker has not read yet. A
broker that was paused processes them when it wakes, however late.
"""

from __future__ import annotations

import select
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from logmirror.clock import jittered_ms
from logmirror.cluster.produce_connection import ProduceConnection
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

NO_RESPONSE: Final = -2
"""`ProduceResponse.error_code` where no broker has said anything; no code of Kafka's."""


_DOUBLINGS_MAX: Final = 20
_BROKEN: Final = UnavailableError("not sent: the connection broke")
_NOT_COLLECTED: Final = UnavailableError(
    "not sent: an earlier batch of the partition failed", hint="collect its answer first"
)


class ProduceResponse(NamedTuple):
    """What became of one batch."""

    partition: TopicPartition
    error_code: int
    """Kafka's, 0: written; `NO_RESPONSE`: nothing was said, `error` tells what is known."""
    base_offset: int
    """Where its first record stands. With an error it is -1 or what the broker says; see 7, 20."""
    log_append_time_ms: int
    """The broker's time on a topic of LogAppendTime, else -1; but for a duplicate (error 0, nothing
    written again, the first base offset) Apache Kafka gives a time on every topic."""
    log_start_offset: int
    """-1: not told."""
    error: LogmirrorError | None
    """None: written. `OutcomeUnknownError`: look. `UnavailableError`: not written. Its facts have
    `topic`, `partition`, and `code` and `error` where Kafka gave a code."""


class _Assignment(NamedTuple):
    """Where the batches of one `send` go."""

    refused: dict[TopicPartition, LogmirrorError]
    by_link: dict[ProduceConnection, list[tuple[TopicPartition, memoryview]]]


class ProducePipeline:
    """Sends batches to the leaders of one cluster and gathers their answers.

    Connections are its own, one per leader, opened when first needed. One pipeline belongs to one
    thread of one process. `close` it, or use it in a `with`.

    Args:
        router: Of the cluster; see `ClusterClient.pipeline`.
        acks: `ACKS_ALL` or `ACKS_LEADER`.
        timeout_ms: How long a leader waits for its replicas; None: `request_timeout_ms`.
        transactional_id: For batches with the transactional bit, whose producer id and epoch are
            those of a `TransactionalProducer`; their partitions were added there.
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
            raise InternalError("writes without an answer are not offered", acks=acks)
        self._router = router
        self._clock = router.clock
        self._acks = acks
        self._timeout_ms = router.settings.request_timeout_ms if timeout_ms is None else timeout_ms
        self._transactional_id = transactional_id
        self._links: dict[int, ProduceConnection] = {}
        self._unreachable: dict[int, tuple[int, int, LogmirrorError]] = {}
        """Node id to (not before, failures, why): brokers that could not be connected to."""
        self._responses: list[ProduceResponse] = []
        self._counts: Counter[TopicPartition] = Counter()
        self._link_of: dict[TopicPartition, ProduceConnection] = {}
        self._failed: Counter[TopicPartition] = Counter()
        """How many of a partition's failures are not collected."""
        self._awaited: Counter[TopicPartition] = Counter()
        """How many of a partition's batches are under way."""
        self._behind: dict[TopicPartition, list[ProduceResponse]] = {}
        """Answers to batches that were not sent, kept until those sent before are answered."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is under way and close the connections.

        What has no answer by now is unknown; `collect` still gives out every answer.
        """
        for link in list(self._links.values()):
            self._pull(link)
            if link.underway:
                self._give_up(link, UnavailableError("the pipeline was closed"))
            link.close()
        self._links.clear()

    def in_flight(self, partition: TopicPartition | None = None) -> int:
        """How many batches were sent and their answers not collected: of a partition, or in all."""
        if partition is None:
            return self._counts.total()
        return self._counts[partition]

    def send(
        self,
        batches: Sequence[tuple[TopicPartition, memoryview]],
        *,
        not_after_ms: int | None = None,
    ) -> None:
        """Send one request to each leader; returns when all bytes are handed to the kernel.

        Then the buffers may be used again. Answers that come meanwhile are read, so that no broker
        waits for us. A batch that cannot be sent now (no leader, leader out of reach, an earlier
        failure of its partition not collected, no such topic) gets its answer all the same, mostly
        an `UnavailableError`: one partition in trouble holds up no other. What it does wait for,
        within deadlines: a connection to be opened (`connect_timeout_ms` each), a throttle, an
        authentication that is due. It asks for leaders once; pacing is the caller's: after an
        `UnavailableError` he waits before he sends to that partition again.

        Args:
            batches: Record batches (magic 2, base offset 0), a partition at most once.
            not_after_ms: Moment of `clock.monotonic_ms()` after which what the caller knows about
                the log's end is too old. It is looked at immediately before bytes are handed to the
                kernel. Once it has passed, no more are, and batches that were not sent whole are
                answered with `UnavailableError`.

        Raises:
            UnavailableError: `not_after_ms` had passed when sending was to begin. No batch of this
                call was sent, and none of them gets an answer.
            InternalError: A partition is there twice.
        """
        if len({partition for partition, _ in batches}) != len(batches):
            raise InternalError("a partition is twice in one send")
        refused, by_link = self._assign(batches)
        broken = self._settle(by_link)
        if not_after_ms is not None and self._clock.monotonic_ms() >= not_after_ms:
            raise _too_late()
        for partition, error in refused.items():
            self._counts[partition] += 1
            self._response_unsent(partition, error)
        for link, wanted in by_link.items():
            self._begin(link, wanted, broken.get(link, _BROKEN))
        try:
            self._push(by_link, not_after_ms)
        except BaseException:  # an interrupt, a bug: nothing may stay half sent
            for link in [link for link in by_link if link.is_sending]:
                self._give_up(link, UnavailableError("sending was interrupted"))
            raise

    def collect(self, *, block: bool) -> list[ProduceResponse]:
        """Return the answers that have come, each once.

        Args:
            block: Wait until there is at least one, or nothing is under way; a deadline makes one
                (invariant 6).

        Returns:
            For each partition in the order of sending; may be empty.
        """
        self._pull_all()
        while block and not self._responses and any(link.underway for link in self._links.values()):
            self._wait(())
        responses, self._responses = self._responses, []
        for response in responses:
            self._counts[response.partition] -= 1
            if not self._counts[response.partition]:
                del self._counts[response.partition]
                self._link_of.pop(response.partition, None)
            if response.error is not None:
                self._failed[response.partition] -= 1
        return responses

    # Which connection.

    def _assign(self, batches: Sequence[tuple[TopicPartition, memoryview]]) -> _Assignment:
        """Find each batch's connection, or why it has none."""
        refused: dict[TopicPartition, LogmirrorError] = {}
        by_link: dict[ProduceConnection, list[tuple[TopicPartition, memoryview]]] = {}
        self._pull_all()
        unbound: list[tuple[TopicPartition, memoryview]] = []
        for partition, view in batches:
            link = self._link_of.get(partition)
            if self._failed[partition]:
                refused[partition] = _NOT_COLLECTED
            elif link is not None and not link.closed:
                by_link.setdefault(link, []).append((partition, view))
            else:
                unbound.append((partition, view))
        leaders = self._leaders([partition for partition, _ in unbound], refused)
        for partition, view in unbound:
            if partition in refused:
                continue
            try:
                link = self._link(leaders[partition])
            except LogmirrorError as error:
                refused[partition] = error
            else:
                by_link.setdefault(link, []).append((partition, view))
        return _Assignment(refused, by_link)

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
            pass  # of one of the topics; below each is asked for by itself
        for partition in partitions:
            try:
                leaders[partition] = topology.partition(partition).leader
            except LogmirrorError as error:
                refused[partition] = error
        return leaders

    def _link(self, node: int) -> ProduceConnection:
        """The connection to a leader; one that failed to open is tried again after a pause."""
        link = self._links.get(node)
        if link is not None:
            if not link.has_hung_up():
                return link
            self._pull(link)  # what it still says, then why it ended
            if not link.closed:
                self._give_up(link, UnavailableError("the broker closed the connection"))
        now_ms = self._clock.monotonic_ms()
        not_before_ms, failures, why = self._unreachable.get(node, (0, 0, None))
        if why is not None and now_ms < not_before_ms:
            self._router.topology.forget()  # it may come back at another address, or lead no more
            raise _copy_of(why)
        try:
            link = self._router.topology.new_connection(node, ProduceConnection)
        except LogmirrorError as error:
            settings = self._router.settings
            pause_ms = min(
                settings.reconnect_backoff_ms << min(failures, _DOUBLINGS_MAX),
                settings.reconnect_backoff_max_ms,
            )
            not_before_ms = self._clock.monotonic_ms() + int(jittered_ms(pause_ms))
            self._unreachable[node] = (not_before_ms, failures + 1, error)
            self._router.topology.forget()
            raise
        self._unreachable.pop(node, None)
        self._links[node] = link
        return link

    def _settle(
        self, links: Iterable[ProduceConnection]
    ) -> dict[ProduceConnection, LogmirrorError]:
        """Before sending: no throttle, no session about to end. Returns what went wrong."""
        broken: dict[ProduceConnection, LogmirrorError] = {}
        for link in links:
            while link.session_ends_soon and link.underway and not link.closed:
                self._wait(())
            if link.closed or link.underway:
                pause_ms = link.throttled_until_ms - self._clock.monotonic_ms()
                self._clock.sleep_ms(0 if link.closed else pause_ms)
                continue
            try:
                link.prepare()
            except LogmirrorError as error:
                broken[link] = error
                self._give_up(link, error)
        return broken

    # Bytes.

    def _begin(
        self,
        link: ProduceConnection,
        wanted: list[tuple[TopicPartition, memoryview]],
        why_closed: LogmirrorError,
    ) -> None:
        """Put one request in line, without what has failed since it was assigned."""
        accepted: list[tuple[TopicPartition, memoryview]] = []
        for partition, view in wanted:
            self._counts[partition] += 1
            if link.closed:
                self._response_unsent(partition, why_closed)
            elif self._failed[partition]:
                self._response_unsent(partition, _NOT_COLLECTED)
            else:
                self._link_of[partition] = link
                self._awaited[partition] += 1
                accepted.append((partition, view))
        if accepted:
            link.begin(
                ProduceRequest(accepted, self._acks, self._timeout_ms, self._transactional_id)
            )

    def _push(self, links: Iterable[ProduceConnection], not_after_ms: int | None) -> None:
        sending = [link for link in links if link.is_sending]
        while sending:
            for link in sending:
                try:
                    in_time = link.push(not_after_ms)
                except LogmirrorError as error:
                    self._give_up(link, error)
                    continue
                if not in_time:
                    self._cut_off(link)
            sending = [link for link in sending if link.is_sending]
            if sending:
                self._wait(sending, not_after_ms)

    def _cut_off(self, link: ProduceConnection) -> None:
        """It is too late for what `link` is sending."""
        if link.has_begun:
            self._give_up(link, _too_late())
        else:
            for partition in link.withdraw().partitions:
                self._response_unsent(partition, _too_late())
                self._settle_one(partition)

    def _wait(self, sending: Sequence[ProduceConnection], not_after_ms: int | None = None) -> None:
        """Wait until some connection can go on or a deadline has come; read what has come."""
        poller = select.poll()
        by_descriptor = {link.fileno(): link for link in self._links.values() if link.underway}
        for descriptor, link in by_descriptor.items():
            events = select.POLLIN | select.POLLOUT if link in sending else select.POLLIN
            poller.register(descriptor, events)
        moments = [link.deadline_ms for link in by_descriptor.values()]
        moments.append(not_after_ms)
        until_ms = min((moment for moment in moments if moment is not None), default=0)
        timeout_ms = max(until_ms - self._clock.monotonic_ms(), 0)
        for descriptor, events in poller.poll(timeout_ms):
            if events & ~select.POLLOUT:
                self._pull(by_descriptor[descriptor])
        for link in by_descriptor.values():
            if self._is_overdue(link):
                self._pull(link)  # we may have been paused, with the answer long here
            if self._is_overdue(link):
                self._give_up(link, UnavailableError("the broker did not answer in time"))

    def _is_overdue(self, link: ProduceConnection) -> bool:
        deadline_ms = None if link.closed else link.deadline_ms
        return deadline_ms is not None and self._clock.monotonic_ms() >= deadline_ms

    def _pull_all(self) -> None:
        for link in list(self._links.values()):
            if link.underway:
                self._pull(link)

    def _pull(self, link: ProduceConnection) -> None:
        if link.closed:
            return
        results: list[ProduceResult] = []
        failure: LogmirrorError | None = None
        try:
            link.pull(results)
        except LogmirrorError as error:
            failure = error
        for result in results:
            self._accept(result)
        if failure is not None:
            self._give_up(link, failure)

    # Answers.

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
            self._failed[partition] += 1
            if error_of(code).stale_metadata:
                self._router.topology.forget([partition.topic])
        self._responses.append(
            ProduceResponse(
                partition,
                code,
                result.base_offset,
                result.log_append_time_ms,
                result.log_start_offset,
                error,
            )
        )
        self._settle_one(partition)

    def _give_up(self, link: ProduceConnection, why: LogmirrorError) -> None:
        """End a connection; all that it carried is answered."""
        unsent = link.underway.pop().partitions if link.is_sending else ()
        lost = [partition for request in link.underway for partition in request.partitions]
        link.underway.clear()
        link.abort()
        self._links = {node: other for node, other in self._links.items() if other is not link}
        self._router.topology.forget()
        facts = {"host": link.host, "port": link.port, **why.facts}
        unknown = OutcomeUnknownError(
            f"no answer to a write: {why.message}",
            hint=why.hint or "read the log's end before anything is written again",
            **facts,
        )
        for partition in lost:
            self._responses.append(self._failure(partition, unknown))
            self._settle_one(partition)
        cut_off = UnavailableError(f"not sent whole: {why.message}", hint=why.hint, **facts)
        for partition in unsent:
            self._response_unsent(partition, cut_off)
            self._settle_one(partition)

    def _response_unsent(self, partition: TopicPartition, why: LogmirrorError) -> None:
        """Answer a batch that was not sent, after those that were sent before it."""
        self._behind.setdefault(partition, []).append(self._failure(partition, why))
        if not self._awaited[partition]:
            self._responses += self._behind.pop(partition)

    def _failure(self, partition: TopicPartition, why: LogmirrorError) -> ProduceResponse:
        error = _copy_of(why).add_facts(topic=partition.topic, partition=partition.partition)
        self._failed[partition] += 1
        return ProduceResponse(partition, NO_RESPONSE, -1, -1, -1, error)

    def _settle_one(self, partition: TopicPartition) -> None:
        """One of the partition's batches is no longer under way."""
        self._awaited[partition] -= 1
        if not self._awaited[partition]:
            del self._awaited[partition]
            self._responses += self._behind.pop(partition, ())


def _copy_of(error: LogmirrorError) -> LogmirrorError:
    """Make another of the same, to be raised or given facts apart from the first."""
    return type(error)(error.message, hint=error.hint, **error.facts)


def _too_late() -> UnavailableError:
    return UnavailableError(
        "not sent: the moment after which nothing may be sent has passed",
        hint="read the log's end again",
    )
