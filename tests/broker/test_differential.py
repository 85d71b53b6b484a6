"""Goal: groups, offsets, transactions, configurations and errors are as in Apache Kafka.

Method: the same requests go to Apache Kafka 3.9.2 and 4.3.1 and to the embedded broker. Each
response must be that of one of the two releases, error codes included. `DEVIATIONS` has the others,
each with its row in docs/broker-protocol.md; one that no longer occurs must be removed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kit.judges.coordinator_requests import (
    ADD_OFFSETS,
    CONSUMER_BEAT,
    DELETE_OFFSETS,
    INIT,
    JOIN,
    LEAVE,
    TXN_COMMIT,
    Api,
    add,
    beat,
    commit,
    create,
    delete_group,
    describe,
    end,
    fetch_offsets,
    has_coordinators,
    init,
    join,
    joined,
    list_offset,
    produce,
    send_join,
    sync,
    until_known,
    written,
)
from kit.judges.differential import DEVIATIONS, check_same
from kit.judges.partition_client import data_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.judges.conversation import Conversation
    from kit.servers.embedded import EmbeddedBroker
    from kit.servers.kafka import ApacheKafka

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs" / "broker-protocol.md").read_text()

# ---- Groups --------------------------------------------------------------------------------------


def a_group_of_one(talk: Conversation) -> None:
    group = talk.name("one")
    describe(talk, "before", group)
    member = joined(talk, group)
    describe(talk, "stable", group)
    beat(talk, "beat", group, 1, member)
    beat(talk, "beat of an old generation", group, 0, member)
    beat(talk, "beat of a later generation", group, 2, member)
    beat(talk, "beat of an unknown member", group, 1, "nobody")
    beat(talk, "beat in an unknown group", talk.name("none"), 1, member)
    sync(talk, "sync of an old generation", group, 0, member, [])
    sync(talk, "sync of an unknown member", group, 1, "nobody", [])
    sync(talk, "sync again", group, 1, member, [])
    join(talk, "other protocol type", group, "", protocol_type="connect", via="b")
    join(
        talk,
        "no common protocol",
        group,
        "",
        protocols=[{"name": "other", "metadata": b""}],
        via="b",
    )
    delete_group(talk, "delete while it has members", group)
    leave = {"member_id": member, "group_instance_id": None, "reason": None}
    talk.ask("leave", *LEAVE, group_id=group, members=[leave])
    talk.ask("leave again", *LEAVE, group_id=group, members=[leave])
    describe(talk, "empty", group)
    delete_group(talk, "delete", group)
    delete_group(talk, "delete again", group)
    describe(talk, "after", group)


def bad_joins(talk: Conversation) -> None:
    group = talk.name("bad")
    join(talk, "session too short", group, "", session_timeout=1)
    join(talk, "session too long", group, "", session_timeout=100_000_000)
    join(talk, "no protocols", group, "", protocols=[])
    join(talk, "no protocol type", group, "", protocol_type="")
    join(talk, "unknown member", group, "nobody")
    join(talk, "no group", "", "")


def two_members(talk: Conversation) -> None:
    group = talk.name("two")
    first = joined(talk, group)
    asked = join(talk, "second asks", group, "", via="b")
    send_join(talk, group, asked.member_id, via="b")
    until = [0]

    def rebalancing() -> int:
        beat(talk, "rebalancing", group, 1, first)
        until[0] = 0 if talk.heard[-1][1]["error_code"] == "rebalance_in_progress" else 1
        return until[0]

    until_known(rebalancing, talk)
    beat(talk, "beat while it rebalances", group, 1, first)
    commit(talk, "commit while it rebalances", group, talk.name("no-topic"), 5, 1, first)
    describe(talk, "rebalancing", group)
    send_join(talk, group, first)
    talk.receive("first joined again", *JOIN)
    talk.receive("second joined", *JOIN, via="b")
    beat(talk, "beat before the sync", group, 2, first)
    given = [
        {"member_id": first, "assignment": b"one"},
        {"member_id": asked.member_id, "assignment": b"two"},
    ]
    sync(talk, "first synced", group, 2, first, given)
    sync(talk, "second synced", group, 2, asked.member_id, [])
    describe(talk, "stable with two", group)
    beat(talk, "beat of generation 1", group, 1, first)


def static_members(talk: Conversation) -> None:
    group = talk.name("static")
    first = join(talk, "joined", group, "", group_instance_id="i")
    sync(talk, "synced", group, 1, first.member_id, [])
    again = join(talk, "the instance is replaced", group, "", group_instance_id="i", via="b")
    beat(talk, "beat of the replaced member", group, 1, first.member_id)
    join(
        talk, "join of the replaced member", group, first.member_id, group_instance_id="i", via="c"
    )
    leave = {"member_id": "", "group_instance_id": "i", "reason": None}
    unknown = {"member_id": "", "group_instance_id": "other", "reason": None}
    talk.ask("leave by instance", *LEAVE, group_id=group, members=[leave, unknown])
    assert again.member_id != first.member_id


def committed_offsets(talk: Conversation) -> None:
    topic, group = create(talk, "committed"), talk.name("offsets")
    fetch_offsets(talk, "of no group", group, [topic])
    fetch_offsets(talk, "all of no group", group, None)
    commit(talk, "without a member", group, topic, 7)
    commit(talk, "of an unknown topic", group, talk.name("no-topic"), 7)
    commit(talk, "of an unknown partition", group, topic, 7, partition_index=5)
    commit(talk, "metadata too large", group, topic, 8, committed_metadata="x" * 5000)
    commit(talk, "with a generation", group, topic, 9, 3, "nobody")
    commit(talk, "with a generation, in a new group", talk.name("new"), topic, 9, 3, "nobody")
    commit(talk, "negative", group, topic, -1)
    fetch_offsets(talk, "committed", group, [topic])
    fetch_offsets(talk, "all", group, None)
    describe(talk, "a group of commits only", group)
    partition = [{"name": topic, "partitions": [{"partition_index": 0}]}]
    talk.ask("delete its offset", *DELETE_OFFSETS, group_id=group, topics=partition)
    fetch_offsets(talk, "deleted", group, [topic])
    talk.ask("in no group", *DELETE_OFFSETS, group_id=talk.name("none"), topics=partition)
    delete_group(talk, "delete the group", group)


def fenced_commits(talk: Conversation) -> None:
    topic, group = create(talk, "fenced"), talk.name("fenced-group")
    member = joined(talk, group)
    commit(talk, "of the member", group, topic, 3, 1, member)
    commit(talk, "of an old generation", group, topic, 4, 0, member)
    commit(talk, "of an unknown member", group, topic, 5, 1, "nobody")
    commit(talk, "without a member", group, topic, 6)
    fetch_offsets(talk, "kept", group, [topic])


def coordinators(talk: Conversation) -> None:
    for kind in (0, 1, 7):
        talk.ask(f"key type {kind}", Api.FIND_COORDINATOR, 4, key_type=kind, coordinator_keys=["x"])
    talk.ask("no key", Api.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=[""])


# ---- Producers and transactions ------------------------------------------------------------------


def idempotent_producers(talk: Conversation) -> None:
    topic = create(talk, "idempotent")
    found = talk.ask(
        "new producer",
        *INIT,
        transactional_id=None,
        transaction_timeout=2**31 - 1,
        producer_id=-1,
        producer_epoch=-1,
    )
    own = found.producer_id
    produce(talk, "first", topic, data_batch(2, producer_id=own, sequence=0))
    produce(talk, "again", topic, data_batch(2, producer_id=own, sequence=0))
    produce(talk, "a gap", topic, data_batch(2, producer_id=own, sequence=5))
    produce(talk, "next", topic, data_batch(2, producer_id=own, sequence=2))
    produce(talk, "later epoch", topic, data_batch(1, producer_id=own, epoch=1, sequence=0))
    produce(talk, "older epoch", topic, data_batch(1, producer_id=own, epoch=0, sequence=4))
    produce(talk, "later epoch, not 0", topic, data_batch(1, producer_id=own, epoch=2, sequence=1))
    list_offset(talk, "end", topic, -1)


def transactions(talk: Conversation) -> None:
    topic, name = create(talk, "transactions"), talk.name("writer")
    own = init(talk, "first producer", name)
    end(talk, "nothing to commit", name, own, commits=True)
    add(talk, "added", name, own, topic)
    add(talk, "unknown partition", name, own, topic, 7)
    produce(talk, "written", topic, written(own, 0), transactional_id=name)
    list_offset(talk, "committed end while it is open", topic, -1, isolation=1)
    list_offset(talk, "end while it is open", topic, -1)
    end(talk, "committed", name, own, commits=True)
    until_known(lambda: _is_ended(talk, name), talk)
    end(talk, "committed again", name, own, commits=True)
    end(talk, "aborted after the commit", name, own, commits=False)
    list_offset(talk, "committed end", topic, -1, isolation=1)
    later = init(talk, "second producer", name)
    add(talk, "fenced producer", name, own, topic)
    end(talk, "fenced producer ends", name, own, commits=True)
    produce(talk, "fenced producer writes", topic, written(own, 1), transactional_id=name)
    add(talk, "added by the second", name, later, topic)
    produce(talk, "written by the second", topic, written(later, 0), transactional_id=name)
    end(talk, "aborted", name, later, commits=False)
    talk.ask("unknown", Api.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[talk.name("none")])
    end(talk, "unknown id", talk.name("none"), own, commits=True)
    init(talk, "timeout too long", talk.name("long"), ms=2**31 - 1)
    init(talk, "no timeout", talk.name("zero"), ms=0)
    init(talk, "empty id", "")


def _is_ended(talk: Conversation, name: str) -> int:
    talk.ask("", Api.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[name])
    state = talk.heard[-1][1]["transaction_states"][0]["transaction_state"]
    return int(not state.startswith("Complete"))


def transactions_of_version_2(talk: Conversation) -> None:
    topic, name = create(talk, "version-2"), talk.name("writer-2")
    own = init(talk, "producer", name)
    fields: dict[str, Any] = {"transactional_id": name, "version": 12}
    produce(talk, "begins with 3", topic, written(own, 3), **fields)
    produce(talk, "begins with 0", topic, written(own, 0), **fields)
    produce(talk, "next", topic, written(own, 1), **fields)
    writer = {"producer_id": own.producer_id, "producer_epoch": own.producer_epoch}
    talk.ask("committed", Api.END_TXN, 5, transactional_id=name, committed=True, **writer)


def commits_of_a_consumer_member(talk: Conversation) -> None:
    """KIP-848."""
    topic, name, group = create(talk, "members"), talk.name("writer-3"), talk.name("consumers")
    fields = {"group_id": group, "member_id": "mine", "instance_id": None, "rack_id": None}
    fields |= {"member_epoch": 0, "subscribed_topic_names": [topic], "topic_partitions": []}
    fields |= {"subscribed_topic_regex": None, "server_assignor": "uniform"}
    talk.ask("refused", *CONSUMER_BEAT, rebalance_timeout=-1, **fields)
    talk.ask("joined", *CONSUMER_BEAT, rebalance_timeout=60_000, **fields)
    epoch = talk.heard[-1][1]["member_epoch"]
    talk.forget_last()  # the first epoch is 1 here and 2 there: KIP-848 gives none
    partition = {
        "partition_index": 0,
        "committed_offset": 4,
        "committed_leader_epoch": 0,
        "committed_metadata": "",
    }
    topics = [{"name": topic, "partitions": [partition]}]
    for version in (8, 9):
        for label, member, stale in (("own", "mine", 0), ("stale", "mine", 1), ("none", "x", 0)):
            who = epoch - stale, member, version
            commit(talk, f"{label}, version {version}", group, topic, 4, *who)
    own = init(talk, "producer", name)
    writer = {"producer_id": own.producer_id, "producer_epoch": own.producer_epoch}
    talk.ask("added", *ADD_OFFSETS, transactional_id=name, group_id=group, **writer)
    for label, member, stale in (("stale", "mine", 1), ("own", "mine", 0), ("none", "x", 0)):
        talk.ask(
            f"{label}, in a transaction",
            *TXN_COMMIT,
            transactional_id=name,
            group_id=group,
            generation_id=epoch - stale,
            member_id=member,
            group_instance_id=None,
            topics=topics,
            **writer,
        )


def offsets_in_transactions(talk: Conversation) -> None:
    topic, name, group = create(talk, "read"), talk.name("worker"), talk.name("workers")
    own = init(talk, "producer", name)
    partition = {
        "partition_index": 0,
        "committed_offset": 4,
        "committed_leader_epoch": -1,
        "committed_metadata": "",
    }
    fields: dict[str, Any] = {
        "transactional_id": name,
        "group_id": group,
        "producer_id": own.producer_id,
        "producer_epoch": own.producer_epoch,
        "generation_id": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": topic, "partitions": [partition]}],
    }
    added = {key: fields[key] for key in ("transactional_id", "group_id")}
    added |= {"producer_id": own.producer_id, "producer_epoch": own.producer_epoch}
    talk.ask("group added", *ADD_OFFSETS, **added)
    talk.ask("offset", *TXN_COMMIT, **fields)
    fetch_offsets(talk, "not visible yet", group, [topic])
    fetch_offsets(talk, "not stable yet", group, [topic], stable=True)
    end(talk, "committed", name, own, commits=True)
    until_known(lambda: _is_stable(talk, group, topic), talk)
    fetch_offsets(talk, "visible", group, [topic], stable=True)
    talk.ask("unknown member", *TXN_COMMIT, **(fields | {"generation_id": 3, "member_id": "x"}))


def offsets_in_transactions_of_members(talk: Conversation) -> None:
    topic, name, group = create(talk, "read"), talk.name("worker"), talk.name("workers")
    own = init(talk, "producer", name)
    writer = {"producer_id": own.producer_id, "producer_epoch": own.producer_epoch}
    member = join(talk, "asked for an id", group, "").member_id
    join(talk, "joined", group, member)
    talk.ask("group added", *ADD_OFFSETS, transactional_id=name, group_id=group, **writer)

    def ask(label: str, generation: int) -> None:
        partition = {
            "partition_index": 0,
            "committed_offset": 4,
            "committed_leader_epoch": -1,
            "committed_metadata": "",
        }
        talk.ask(
            label,
            *TXN_COMMIT,
            transactional_id=name,
            group_id=group,
            generation_id=generation,
            member_id=member,
            group_instance_id=None,
            topics=[{"name": topic, "partitions": [partition]}],
            **writer,
        )

    commit(talk, "commit before the sync", group, topic, 4, 1, member)
    ask("offset before the sync", 1)
    ask("offset before the sync, of an old generation", 0)
    sync(talk, "synced", group, 1, member, [{"member_id": member, "assignment": b"all"}])
    ask("offset of the member", 1)
    ask("offset of an old generation", 0)
    end(talk, "aborted", name, own, commits=False)


def _is_stable(talk: Conversation, group: str, topic: str) -> int:
    fetch_offsets(talk, "", group, [topic], stable=True)
    partitions = talk.heard[-1][1]["groups"][0]["topics"][0]["partitions"]
    found = [p for p in partitions if p["partition_index"] == 0]
    return int(found[0]["committed_offset"] != 4)


# ---- Topics and configurations -------------------------------------------------------------------


def bad_topics(talk: Conversation) -> None:
    def ask(label: str, **changed: Any) -> None:
        topic: dict[str, Any] = {
            "name": talk.name("bad"),
            "num_partitions": 1,
            "replication_factor": 1,
            "assignments": [],
            "configs": [],
        }
        talk.ask(
            label,
            Api.CREATE_TOPICS,
            5,
            topics=[topic | changed],
            timeout=30_000,
            validate_only=True,
        )
        for heard in talk.heard[-1][1]["topics"]:
            heard.pop("configs", None)  # the two releases have more settings

    ask("fits")
    ask("no partitions", num_partitions=0)
    ask("too many replicas", replication_factor=9)
    ask("bad name", name="no/slash")
    ask("dots", name="..")
    ask("name too long", name="x" * 250)
    ask("bad value", configs=[{"name": "segment.bytes", "value": "many"}])
    ask("bad setting", configs=[{"name": "no.such.setting", "value": "1"}])
    ask("assigned", num_partitions=-1, replication_factor=-1, assignments=[])


def positions(talk: Conversation) -> None:
    topic = create(talk, "positions")
    produce(talk, "written", topic, data_batch(3))
    for label, timestamp in (
        ("latest", -1),
        ("earliest", -2),
        ("largest timestamp", -3),
        ("by time", 1_700_000_000_001),
        ("after all", 1_800_000_000_000),
        ("before all", 5),
    ):
        list_offset(talk, label, topic, timestamp)
    list_offset(talk, "unknown topic", talk.name("none"), -1)


SCENARIOS: Final = [
    a_group_of_one,
    bad_joins,
    two_members,
    static_members,
    committed_offsets,
    fenced_commits,
    coordinators,
    idempotent_producers,
    transactions,
    offsets_in_transactions,
    offsets_in_transactions_of_members,
    bad_topics,
    positions,
]


def test_each_response_that_differs_has_its_row_in_the_page() -> None:
    _, _, rows = PAGE.partition("## Responses that differ")
    listed = re.findall(r"^\| (?!request|---)(.+?) \|", rows, re.MULTILINE)
    assert set(listed) == set(DEVIATIONS.values())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_responses_are_those_of_apache_kafka(
    scenario: Callable[[Conversation], None],
    embedded: EmbeddedBroker,
    kafka_392: ApacheKafka,
    kafka_431: ApacheKafka,
    topic_name: str,
) -> None:
    check_same(
        scenario,
        (embedded, kafka_392, kafka_431),
        topic_name,
        ready=lambda talk: until_known(lambda: has_coordinators(talk), talk),
    )


@pytest.mark.parametrize(
    "scenario",
    [transactions_of_version_2, commits_of_a_consumer_member],
    ids=lambda s: s.__name__,
)
def test_responses_of_newer_protocols_are_those_of_apache_kafka(
    scenario: Callable[[Conversation], None],
    embedded: EmbeddedBroker,
    kafka_431: ApacheKafka,
    topic_name: str,
) -> None:
    check_same(
        scenario,
        (embedded, kafka_431),
        topic_name,
        ready=lambda talk: until_known(lambda: has_coordinators(talk), talk),
    )
