"""Coordinators and users of a broker whose other parts a test builds itself."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypedDict

from logmirror.broker.group_service import GroupService
from logmirror.broker.groups.consumer_state import TopicInfo
from logmirror.broker.groups.values import GroupSettings
from logmirror.broker.security.store import SecurityStore
from logmirror.broker.state_store import StateStore
from logmirror.broker.transaction_offsets import TransactionOffsets
from logmirror.broker.transaction_service import TransactionService
from logmirror.broker.transactions.coordinator import Coordinator, Limits
from logmirror.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.metadata import MetadataStore
    from logmirror.broker.topics import Topics


class Coordinators(TypedDict):
    """All arguments of `Broker` but its options and its cache."""

    store: MetadataStore
    topics: Topics
    commits: GroupCommit
    executor: Executor
    changers: Executor
    checkers: Executor
    port: int
    state: StateStore
    groups: GroupService
    transactions: TransactionService
    security: SecurityStore


@contextlib.contextmanager
def coordinators(
    folder: Path, store: MetadataStore, topics: Topics, commits: GroupCommit, executor: Executor
) -> Iterator[Coordinators]:
    """Yield the coordinators and an empty store of users, in databases of the folder."""
    with (
        contextlib.closing(StateStore(folder / "state.sqlite")) as state,
        contextlib.closing(SecurityStore(folder / "security.sqlite")) as security,
    ):
        parts = state, store, topics, commits, executor
        transactions = TransactionService(Coordinator(Limits()), *parts, SYSTEM_CLOCK)
        transactions.load()

        def find_topic(name: str) -> TopicInfo | None:
            topic = topics.by_name.get(name)
            return None if topic is None else TopicInfo(topic.topic_id.bytes, len(topic.logs))

        groups = GroupService(GroupSettings(), state, SYSTEM_CLOCK, find_topic)
        transactions.groups = TransactionOffsets(groups, topics)
        found: Coordinators = {
            "store": store,
            "topics": topics,
            "commits": commits,
            **dict.fromkeys(("executor", "changers", "checkers"), executor),
            "port": 1,
            "state": state,
            "groups": groups,
            "transactions": transactions,
            "security": security,
        }
        yield found
        groups.stop()
