"""Goal: the responses of coordinators in a bucket hold for the next owner, too.

Method: raw clients and real brokers. The next owner starts after a `kill -9`, or while the former
one lives and cannot reach the bucket.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
from confluent_kafka import Producer

from kit.fakes.s3_proxy import Fault, S3Proxy
from kit.judges.clients import rows_by_librdkafka
from kit.judges.coordinator_requests import Api
from kit.judges.raw_client import RawClient, build, nested
from kit.judges.transaction_client import TransactionClient, Writer
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.servers.bucket_broker import BucketBroker
    from kit.servers.embedded import EmbeddedBroker

pytestmark = pytest.mark.slow
TOPIC: Final = "t"
CONSUMER_GROUP_HEARTBEAT: Final = 68
UNAVAILABLE, FENCED_INSTANCE_ID, FENCED = 15, 82, 90
COMMIT_TIMEOUT_MS = 2_000
FOREVER = 10**9
MINUTE = timedelta(minutes=1)


def test_a_commit_after_a_kill_has_all_acknowledged_records_of_its_transaction(machines):
    """With a flush after an hour: those that were only acknowledged would be lost."""
    late = ("--override", "log.flush.interval.ms=3600000")
    broker = machines("--no-flush-on-ack", *late).start()
    create_topic(broker.bootstrap, TOPIC, 1, {})
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "tx"})
    producer.init_transactions(30)
    producer.begin_transaction()
    values = [b"%d" % number for number in range(3)]
    for value in values:
        producer.produce(TOPIC, value, partition=0)
    assert producer.flush(30) == 0

    broker.kill()
    broker.start()

    producer.commit_transaction(60)
    assert [row.value for row in rows_by_librdkafka(broker.bootstrap, TOPIC)] == values


class Clients(NamedTuple):
    """Requests of clients that have come from one owner to another."""

    port: int

    def ask(self, api: int, version: int, /, **fields: object) -> Any:
        """Send a request on a connection of its own; returns the response."""
        with RawClient(self.port) as client:
            return client.ask(api, version, **fields)

    def transactions(self, transactional_id: str) -> TransactionClient:
        client = TransactionClient(f"127.0.0.1:{self.port}", TOPIC)
        client.transactional_id = transactional_id
        return client

    def join(self, member_id: str = "") -> Any:
        """Join the group `classic` as the static member `static`."""
        protocol = nested(Api.JOIN_GROUP, 9, "request", "JoinGroupRequestProtocol")
        return self.ask(
            Api.JOIN_GROUP,
            9,
            group_id="classic",
            session_timeout=timedelta(seconds=30),
            rebalance_timeout=timedelta(seconds=30),
            member_id=member_id,
            group_instance_id="static",
            protocol_type="consumer",
            protocols=(build(protocol, name="range", metadata=b""),),
            reason=None,
        )

    def sync(self, member_id: str) -> Any:
        given = nested(Api.SYNC_GROUP, 5, "request", "SyncGroupRequestAssignment")
        return self.ask(
            Api.SYNC_GROUP,
            5,
            **self._member(member_id),
            protocol_type="consumer",
            protocol_name="range",
            assignments=(build(given, member_id=member_id, assignment=b"all"),),
        )

    def beat(self, member_id: str) -> Any:
        return self.ask(Api.HEARTBEAT, 4, **self._member(member_id))

    @staticmethod
    def _member(member_id: str) -> dict[str, object]:
        who = {"group_id": "classic", "generation_id": 1, "member_id": member_id}
        return {**who, "group_instance_id": "static"}

    def beat_new(self, member_id: str, epoch: int, **changed: object) -> Any:
        """Send a full heartbeat of a member of the group `new`, or as it joins or leaves."""
        fields: dict[str, object] = {
            "group_id": "new",
            "member_id": member_id,
            "member_epoch": epoch,
            "instance_id": None,
            "rack_id": None,
            "rebalance_timeout": MINUTE,
            "subscribed_topic_names": (TOPIC,),
            "subscribed_topic_regex": None,
            "server_assignor": None,
            "topic_partitions": (),
        }
        return self.ask(CONSUMER_GROUP_HEARTBEAT, 1, **fields | changed)

    def init(self, transactional_id: str, known: Writer) -> Any:
        return self.ask(
            Api.INIT_PRODUCER_ID,
            4,
            transactional_id=transactional_id,
            transaction_timeout=MINUTE,
            producer_id=known.producer_id,
            producer_epoch=known.epoch,
        )

    def add(self, transactional_id: str, writer: Writer) -> int:
        topic = nested(Api.ADD_PARTITIONS_TO_TXN, 3, "request", "AddPartitionsToTxnTopic")
        [found] = self.ask(
            Api.ADD_PARTITIONS_TO_TXN,
            3,
            v3_and_below_transactional_id=transactional_id,
            v3_and_below_producer_id=writer.producer_id,
            v3_and_below_producer_epoch=writer.epoch,
            v3_and_below_topics=(build(topic, name=TOPIC, partitions=(0,)),),
        ).results_by_topic_v3_and_below
        return int(found.results_by_partition[0].partition_error_code)

    def add_offsets(self, transactional_id: str, writer: Writer) -> Any:
        who = _producer(transactional_id, writer)
        return self.ask(Api.ADD_OFFSETS_TO_TXN, 3, **who, group_id="readers")

    def commit_offsets(self, transactional_id: str, writer: Writer) -> int:
        topic = nested(Api.TXN_OFFSET_COMMIT, 3, "request", "TxnOffsetCommitRequestTopic")
        partition = nested(Api.TXN_OFFSET_COMMIT, 3, "request", "TxnOffsetCommitRequestPartition")
        one = build(
            partition,
            partition_index=0,
            committed_offset=1,
            committed_leader_epoch=-1,
            committed_metadata=None,
        )
        [found] = self.ask(
            Api.TXN_OFFSET_COMMIT,
            3,
            **_producer(transactional_id, writer),
            group_id="readers",
            generation_id=-1,
            member_id="",
            group_instance_id=None,
            topics=(build(topic, name=TOPIC, partitions=(one,)),),
        ).topics
        return int(found.partitions[0].error_code)

    def commit(self, transactional_id: str, writer: Writer) -> Any:
        return self.ask(Api.END_TXN, 3, **_producer(transactional_id, writer), committed=True)


def _producer(transactional_id: str, writer: Writer) -> dict[str, object]:
    return {
        "transactional_id": transactional_id,
        "producer_id": writer.producer_id,
        "producer_epoch": writer.epoch,
    }


def code_of(found: Any) -> int:
    return found if isinstance(found, int) else int(found.error_code)


def codes(**requests: Callable[[], Any]) -> dict[str, int]:
    """Send requests at the same time; returns their error codes."""
    with ThreadPoolExecutor(len(requests)) as pool:
        found = {name: pool.submit(request) for name, request in requests.items()}
    return {name: code_of(one.result()) for name, one in found.items()}


def begin(clients: Clients) -> tuple[Writer, Writer, Writer, str]:
    """Begin at the first owner: three producers, and a static member of each group."""
    with clients.transactions("moving") as client:
        moving = client.init()
    with clients.transactions("steady") as client:
        steady = client.init()
        assert client.add(steady) == client.produce(steady, 0) == 0
        assert client.end(steady, commit=True)[0] == 0
    with clients.transactions("open") as client:
        ongoing = client.init()
        assert client.add(ongoing) == 0
    joined = clients.join()
    assert clients.sync(joined.member_id).assignment == b"all"
    assert code_of(clients.beat_new("x", 0, instance_id="static")) == 0
    return moving, steady, ongoing, joined.member_id


def resume(clients: Clients, steady: Writer, ongoing: Writer) -> tuple[Writer, str, int]:
    """Continue at the next owner. `moving` and the members have restarted."""
    with clients.transactions("moving") as client:
        moving = client.init()
        assert client.add(moving) == 0
    with clients.transactions("steady") as client:
        assert client.add(steady) == client.produce(steady, 3) == 0
    with clients.transactions("open") as client:
        assert client.end(ongoing, commit=True)[0] == 0
    joined = clients.join()
    assert code_of(joined) == 0
    left = {"instance_id": "static", "topic_partitions": None}
    assert code_of(clients.beat_new("x", -2, **left)) == 0
    found = clients.beat_new("y", 0, instance_id="static")
    assert code_of(found) == 0
    return moving, joined.member_id, found.member_epoch


def test_an_owner_that_was_replaced_and_cut_off_refuses_nothing_for_good(machines, s3_server):
    """It cannot learn of the other one. Clients come back to it, as with a load balancer."""
    with S3Proxy(s3_server.endpoint, lambda _: None) as proxy:
        first: BucketBroker = machines(endpoint=proxy.endpoint).start()
        create_topic(first.bootstrap, TOPIC, 1, {})
        old = Clients(first.port)
        zombie, steady, ongoing, former = begin(old)
        proxy.spoil(Fault("reset", "", times=FOREVER))
        new = Clients(machines().start().port)
        moving, member, epoch = resume(new, steady, ongoing)

        found = codes(
            init=lambda: old.init("moving", moving),
            add=lambda: old.add("moving", moving),
            add_offsets=lambda: old.add_offsets("moving", moving),
            commit_offsets=lambda: old.commit_offsets("moving", moving),
            commit=lambda: old.commit("moving", moving),
            commit_of_the_next_transaction=lambda: old.commit("steady", steady),
            add_to_the_next_transaction=lambda: old.add("open", ongoing),
            join=lambda: old.join(member),
            sync=lambda: old.sync(member),
            beat=lambda: old.beat(member),
            beat_new=lambda: old.beat_new("y", epoch, instance_id="static"),
            join_new=lambda: old.beat_new("z", 0, instance_id="static"),
        )
        assert found == dict.fromkeys(found, UNAVAILABLE)
        assert first.alive
        by_owner = codes(
            commit=lambda: new.commit("moving", zombie),
            beat=lambda: new.beat(former),
            steady=lambda: new.commit("steady", steady),
        )
        assert by_owner == {"commit": FENCED, "beat": FENCED_INSTANCE_ID, "steady": 0}


def topic_id(broker: EmbeddedBroker) -> uuid.UUID:
    topic = build(nested(3, 12, "request", "MetadataRequestTopic"), topic_id=None, name=TOPIC)
    with RawClient(broker.port) as client:
        [found] = client.ask(
            3,
            12,
            topics=(topic,),
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        ).topics
    return uuid.UUID(str(found.topic_id))


def test_a_repeated_heartbeat_gets_nothing_that_is_not_durable(proxied):
    """Else a partition has two owners after a crash: the next broker knows the one before."""
    running = proxied(commit_timeout_ms=COMMIT_TIMEOUT_MS)
    running.create_topic(TOPIC, {}, partitions=2)
    clients = Clients(running.broker.port)
    kept = build(
        nested(CONSUMER_GROUP_HEARTBEAT, 1, "request", "TopicPartitions"),
        topic_id=topic_id(running.broker),
        partitions=(0,),
    )
    first = clients.beat_new("x", 0)
    assert first.assignment.topic_partitions[0].partitions == (0, 1)
    assert code_of(clients.beat_new("y", 0)) == 0

    running.proxy.spoil(Fault("503", "PutObject", times=FOREVER))
    beats = [clients.beat_new("x", first.member_epoch, topic_partitions=(kept,)) for _ in range(2)]
    assert [code_of(one) for one in beats] == [UNAVAILABLE] * 2
    running.proxy.spoil()

    done = clients.beat_new("x", first.member_epoch, topic_partitions=(kept,))
    assert (code_of(done), done.member_epoch) == (0, first.member_epoch + 1)
    assert done.assignment.topic_partitions[0].partitions == (0,)
