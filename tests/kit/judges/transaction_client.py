"""A raw client of one transactional ID and partition 0 of one topic."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafka.protocol.producer import ProduceRequest, ProduceResponse  # type: ignore[import-untyped]  # ships no py.typed

from kit.judges.partition_client import data_batch
from kit.judges.raw_client import RawClient, build, nested

if TYPE_CHECKING:
    from collections.abc import Callable

PRODUCE: Final = 0
FIND_COORDINATOR: Final = 10
INIT_PRODUCER_ID: Final = 22
ADD_PARTITIONS_TO_TXN: Final = 24
END_TXN: Final = 26
DESCRIBE_TRANSACTIONS: Final = 65
LIST_TRANSACTIONS: Final = 66

_NOT_YET: Final = frozenset({14, 15, 16, 51})
"""The coordinator is not ready, or still ends the last transaction."""

_DEADLINE_S: Final = 30
_COUNT: Final = 3
"""Records of a batch."""


class Writer(NamedTuple):
    """Producer ID and epoch."""

    producer_id: int
    epoch: int


class TransactionClient(RawClient):
    """A connection to the coordinator, which is also the leader of the partition."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(int(bootstrap.rpartition(":")[2]))
        self.bootstrap = bootstrap
        self.topic = topic
        self.transactional_id = topic
        self._is_found = False

    def _init(self, known: Writer | None, timeout_ms: int, version: int) -> Any:
        producer_id, epoch = known or Writer(-1, -1)
        fields = {
            "transactional_id": self.transactional_id,
            "transaction_timeout": timedelta(milliseconds=timeout_ms),
            "producer_id": producer_id,
            "producer_epoch": epoch,
        }
        if not self._is_found:
            # Apache Kafka creates the coordinator's topic at the first request.
            ids = {"key_type": 1, "coordinator_keys": (self.transactional_id,)}
            _repeated(
                lambda: self.ask(FIND_COORDINATOR, 4, **ids).coordinators[0],
                lambda found: int(found.error_code),
            )
            self._is_found = True
        return _repeated(
            lambda: self.ask(INIT_PRODUCER_ID, version, **fields),
            lambda found: int(found.error_code),
        )

    def init(self, known: Writer | None = None, *, timeout_ms: int = 60_000) -> Writer:
        """Initialize, and return producer ID and epoch."""
        response = self._init(known, timeout_ms, 4)
        assert response.error_code == 0
        return Writer(response.producer_id, response.producer_epoch)

    def init_error(
        self, known: Writer | None = None, *, timeout_ms: int = 60_000, version: int = 4
    ) -> int:
        """Initialize, and return the error."""
        return int(self._init(known, timeout_ms, version).error_code)

    def add(self, writer: Writer) -> int:
        """Add the partition to the transaction; returns the error."""
        return self.add_all(writer, (0,))[0]

    def add_all(self, writer: Writer, partitions: tuple[int, ...]) -> dict[int, int]:
        """Add partitions to the transaction; returns the error of each."""
        return _repeated(lambda: self._add(writer, partitions), lambda codes: max(codes.values()))

    def _add(self, writer: Writer, partitions: tuple[int, ...]) -> dict[int, int]:
        version = 3
        topic = build(
            nested(ADD_PARTITIONS_TO_TXN, version, "request", "AddPartitionsToTxnTopic"),
            name=self.topic,
            partitions=partitions,
        )
        response = self.ask(
            ADD_PARTITIONS_TO_TXN,
            version,
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=writer.producer_id,
            v3_and_below_producer_epoch=writer.epoch,
            v3_and_below_topics=(topic,),
        )
        return _errors(response.results_by_topic_v3_and_below)

    def add_batched(
        self, writer: Writer, partitions: tuple[int, ...], *, verify_only: bool
    ) -> dict[int, int]:
        """Add or verify partitions as another broker does; returns the error of each."""
        version = 4

        def part(entity: str, /, **fields: object) -> Any:
            return build(nested(ADD_PARTITIONS_TO_TXN, version, "request", entity), **fields)

        transaction = part(
            "AddPartitionsToTxnTransaction",
            transactional_id=self.transactional_id,
            producer_id=writer.producer_id,
            producer_epoch=writer.epoch,
            verify_only=verify_only,
            topics=(part("AddPartitionsToTxnTopic", name=self.topic, partitions=partitions),),
        )
        response = self.ask(ADD_PARTITIONS_TO_TXN, version, transactions=(transaction,))
        assert response.error_code == 0
        return _errors(response.results_by_transaction[0].topic_results)

    def batch(self, writer: Writer, sequence: int, *, transactional: bool = True) -> bytes:
        """Return a batch of three records."""
        return data_batch(
            _COUNT,
            producer_id=writer.producer_id,
            epoch=writer.epoch,
            sequence=sequence,
            transactional=transactional,
        )

    def produce(self, writer: Writer, sequence: int, *, version: int = 9) -> int:
        """Append a transactional batch; returns the error."""
        part = build(
            nested(PRODUCE, version, "request", "PartitionProduceData"),
            index=0,
            records=self.batch(writer, sequence),
        )
        topic = build(
            nested(PRODUCE, version, "request", "TopicProduceData"),
            name=self.topic,
            partition_data=(part,),
        )
        response = self.ask(
            PRODUCE,
            version,
            transactional_id=self.transactional_id,
            acks=-1,
            timeout=timedelta(minutes=1),
            topic_data=(topic,),
        )
        return int(response.responses[0].partition_responses[0].error_code)

    def produce_v2(self, writer: Writer, sequence: int) -> int:
        """Append a batch with Produce 12; returns the error. kio has no such version."""
        return _repeated(lambda: self._produce_v2(writer, sequence), lambda code: code)

    def _produce_v2(self, writer: Writer, sequence: int) -> int:
        topic_data = ProduceRequest.TopicProduceData
        part = topic_data.PartitionProduceData(index=0, records=self.batch(writer, sequence))
        request = ProduceRequest(
            version=12,
            transactional_id=self.transactional_id,
            acks=-1,
            timeout_ms=60_000,
            topic_data=[topic_data(name=self.topic, partition_data=[part])],
        )
        request.with_header(correlation_id=7, client_id="test")
        self.send_frame(request.encode(header=True))
        frame = self.receive_frame()
        response = ProduceResponse.decode(frame, version=12, header=True)
        return int(response.responses[0].partition_responses[0].error_code)

    def end(self, writer: Writer, *, commit: bool, version: int = 3) -> tuple[int, Writer]:
        """End the transaction; returns the error, and from version 5 on the next writer."""
        fields = {
            "transactional_id": self.transactional_id,
            "producer_id": writer.producer_id,
            "producer_epoch": writer.epoch,
            "committed": commit,
        }
        response = _repeated(
            lambda: self.ask(END_TXN, version, **fields), lambda found: int(found.error_code)
        )
        found = writer
        if version >= 5:
            found = Writer(response.producer_id, response.producer_epoch)
        return int(response.error_code), found

    def described(self) -> tuple[str, int, int, dict[str, tuple[int, ...]]]:
        """Return state, producer ID, epoch and partitions of a transaction that has begun."""
        ids = (self.transactional_id,)
        [found] = self.ask(DESCRIBE_TRANSACTIONS, 0, transactional_ids=ids).transaction_states
        assert found.error_code == 0
        topics = {topic.topic: tuple(topic.partitions) for topic in found.topics}
        return found.transaction_state, found.producer_id, found.producer_epoch, topics

    def listed(self, *, states: tuple[str, ...] = (), duration_ms: int = -1) -> dict[str, str]:
        """Return this client's ID with its state, as far as ListTransactions lists it."""
        fields = {
            "state_filters": states,
            "producer_id_filters": (),
            "duration_filter": duration_ms,
        }
        response = self.ask(LIST_TRANSACTIONS, 1, **fields)
        assert response.error_code == 0
        return {
            one.transactional_id: one.transaction_state
            for one in response.transaction_states
            if one.transactional_id == self.transactional_id
        }


def _repeated(ask: Callable[[], Any], code_of: Callable[[Any], int]) -> Any:
    """Repeat a request while the coordinator asks for it."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        found = ask()
        if code_of(found) not in _NOT_YET or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _errors(topics: Any) -> dict[int, int]:
    return {
        result.partition_index: int(result.partition_error_code)
        for topic in topics
        for result in topic.results_by_partition
    }
