"""Requests of consumer groups, producers and transactions, for a `Conversation`.

Each asks once and keeps the response under a label; those that a broker refuses while it completes
something else are repeated.
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING, Any, Final

from kit.judges.partition_client import data_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.judges.conversation import Conversation


class Api(enum.IntEnum):
    """Kafka's API keys."""

    PRODUCE = 0
    LIST_OFFSETS = 2
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    CREATE_TOPICS = 19
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28
    DELETE_GROUPS = 42
    OFFSET_DELETE = 47
    DESCRIBE_TRANSACTIONS = 65
    CONSUMER_GROUP_HEARTBEAT = 68


JOIN: Final = (Api.JOIN_GROUP, 9)
SYNC: Final = (Api.SYNC_GROUP, 5)
BEAT: Final = (Api.HEARTBEAT, 4)
CONSUMER_BEAT: Final = (Api.CONSUMER_GROUP_HEARTBEAT, 1)
LEAVE: Final = (Api.LEAVE_GROUP, 5)
COMMIT: Final = (Api.OFFSET_COMMIT, 8)
FETCH_OFFSETS: Final = (Api.OFFSET_FETCH, 8)
DESCRIBE: Final = (Api.DESCRIBE_GROUPS, 5)
DELETE_GROUPS: Final = (Api.DELETE_GROUPS, 2)
DELETE_OFFSETS: Final = (Api.OFFSET_DELETE, 0)
INIT: Final = (Api.INIT_PRODUCER_ID, 4)
ADD: Final = (Api.ADD_PARTITIONS_TO_TXN, 3)
ADD_OFFSETS: Final = (Api.ADD_OFFSETS_TO_TXN, 3)
END: Final = (Api.END_TXN, 3)
TXN_COMMIT: Final = (Api.TXN_OFFSET_COMMIT, 3)
RETRY_S: Final = 30


def create(talk: Conversation, suffix: str, *, partitions: int = 1, **configs: str) -> str:
    """Create a topic and wait until its leader serves requests."""
    name = talk.name(suffix)
    topic = {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": 1,
        "assignments": [],
        "configs": [{"name": key.replace("_", "."), "value": configs[key]} for key in configs],
    }
    talk.ask("created", Api.CREATE_TOPICS, 7, topics=[topic], timeout=30_000, validate_only=False)
    talk.forget_last()
    until_known(lambda: list_offset(talk, "", name, -1), talk)
    return name


def until_known(ask: Callable[[], Any], talk: Conversation) -> None:
    """Repeat a request until it succeeds; nothing of it is kept."""
    deadline = time.monotonic() + RETRY_S
    while True:
        code = ask()
        talk.forget_last()
        if code == 0:
            return
        assert time.monotonic() < deadline, code
        time.sleep(0.05)


def list_offset(
    talk: Conversation, label: str, topic: str, timestamp: int, *, isolation: int = 0
) -> int:
    """Ask for an offset; returns the error code."""
    partition = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
    response = talk.ask(
        label,
        Api.LIST_OFFSETS,
        7,
        replica_id=-1,
        isolation_level=isolation,
        topics=[{"name": topic, "partitions": [partition]}],
    )
    return int(response.topics[0].partitions[0].error_code)


def produce(  # noqa: PLR0913  # the fields of a request
    talk: Conversation,
    label: str,
    topic: str,
    batch: bytes,
    *,
    transactional_id: str | None = None,
    version: int = 9,
) -> None:
    talk.ask(
        label,
        Api.PRODUCE,
        version,
        transactional_id=transactional_id,
        acks=-1,
        timeout=30_000,
        topic_data=[{"name": topic, "partition_data": [{"index": 0, "records": batch}]}],
    )


def join(talk: Conversation, label: str, group: str, member: str, **changed: Any) -> Any:
    send_join(talk, group, member, **changed)
    return talk.receive(label, *JOIN, via=changed.get("via", "a"))


def send_join(talk: Conversation, group: str, member: str, **changed: Any) -> None:
    fields: dict[str, Any] = {
        "group_id": group,
        "session_timeout": 10_000,
        "rebalance_timeout": 10_000,
        "member_id": member,
        "group_instance_id": None,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"meta"}],
        "reason": None,
    }
    talk.send(*JOIN, **(fields | changed))


def joined(talk: Conversation, group: str, **changed: Any) -> str:
    """Make a new member the only one of a stable group; returns its ID."""
    first = join(talk, "asked for an id", group, "", **changed)
    member = first.member_id
    if first.error_code.name == "member_id_required":
        join(talk, "joined", group, member, **changed)
    sync(talk, "synced", group, 1, member, [{"member_id": member, "assignment": b"all"}])
    return str(member)


def sync(  # noqa: PLR0913, PLR0917  # the fields of the request
    talk: Conversation, label: str, group: str, generation: int, member: str, given: list[Any]
) -> None:
    talk.ask(
        label,
        *SYNC,
        group_id=group,
        generation_id=generation,
        member_id=member,
        group_instance_id=None,
        protocol_type="consumer",
        protocol_name="range",
        assignments=given,
    )


def beat(talk: Conversation, label: str, group: str, generation: int, member: str) -> None:
    talk.ask(
        label,
        *BEAT,
        group_id=group,
        generation_id=generation,
        member_id=member,
        group_instance_id=None,
    )


def commit(  # noqa: PLR0913, PLR0917  # the fields of the request
    talk: Conversation,
    label: str,
    group: str,
    topic: str,
    offset: int,
    generation: int = -1,
    member: str = "",
    version: int = COMMIT[1],
    **changed: Any,
) -> None:
    partition = {
        "partition_index": 0,
        "committed_offset": offset,
        "committed_leader_epoch": 0,
        "committed_metadata": "note",
    } | changed
    talk.ask(
        label,
        *(Api.OFFSET_COMMIT, version),
        group_id=group,
        generation_id_or_member_epoch=generation,
        member_id=member,
        group_instance_id=None,
        topics=[{"name": topic, "partitions": [partition]}],
    )


def fetch_offsets(
    talk: Conversation, label: str, group: str, topics: list[str] | None, *, stable: bool = False
) -> None:
    asked = None if topics is None else [{"name": t, "partition_indexes": [0, 9]} for t in topics]
    talk.ask(
        label,
        *FETCH_OFFSETS,
        groups=[{"group_id": group, "topics": asked}],
        require_stable=stable,
    )


def describe(talk: Conversation, label: str, group: str) -> None:
    talk.ask(label, *DESCRIBE, groups=[group], include_authorized_operations=False)


def delete_group(talk: Conversation, label: str, group: str) -> None:
    talk.ask(label, *DELETE_GROUPS, groups_names=[group])


def init(  # noqa: PLR0913, PLR0917  # the fields of the request
    talk: Conversation,
    label: str,
    name: str | None,
    own: int = -1,
    epoch: int = -1,
    ms: int = 60_000,
) -> Any:
    """Ask for a producer until no other transaction of it is being completed."""
    deadline = time.monotonic() + RETRY_S
    while True:
        found = talk.ask(
            label,
            *INIT,
            transactional_id=name,
            transaction_timeout=ms,
            producer_id=own,
            producer_epoch=epoch,
        )
        if found.error_code.name != "concurrent_transactions" or time.monotonic() > deadline:
            return found
        talk.forget_last()
        time.sleep(0.05)


def add(  # noqa: PLR0913, PLR0917  # the fields of the request
    talk: Conversation, label: str, name: str, own: Any, topic: str, index: int = 0
) -> Any:
    """Add a partition, until no other transaction of the producer is being completed."""
    deadline = time.monotonic() + RETRY_S
    while True:
        found = talk.ask(
            label,
            *ADD,
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=own.producer_id,
            v3_and_below_producer_epoch=own.producer_epoch,
            v3_and_below_topics=[{"name": topic, "partitions": [index]}],
        )
        code = found.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
        if code.name != "concurrent_transactions" or time.monotonic() > deadline:
            return found
        talk.forget_last()
        time.sleep(0.05)


def end(talk: Conversation, label: str, name: str, own: Any, *, commits: bool) -> None:
    talk.ask(
        label,
        *END,
        transactional_id=name,
        producer_id=own.producer_id,
        producer_epoch=own.producer_epoch,
        committed=commits,
    )


def written(own: Any, sequence: int) -> bytes:
    return data_batch(
        1,
        producer_id=own.producer_id,
        epoch=own.producer_epoch,
        sequence=sequence,
        transactional=True,
    )


def has_coordinators(talk: Conversation) -> int:
    """Ask until a new broker has its internal topics; returns an error code."""
    for kind in (0, 1):
        keys = [talk.name("any")]
        talk.ask("", Api.FIND_COORDINATOR, 4, key_type=kind, coordinator_keys=keys)
        code = talk.heard.pop()[1]["coordinators"][0]["error_code"]
        if code != "none":
            talk.heard.append(("", None))
            return 1
    code = init(talk, "", talk.name("any")).error_code
    fetch_offsets(talk, "", talk.name("any"), None)
    group = talk.heard.pop()[1]["groups"][0]["error_code"]
    return int(code != 0 or group != "none")
