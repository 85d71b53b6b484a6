"""The running broker: what its handlers share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror.broker.changes import Changes
from logmirror.broker.dynamic_configs import DynamicConfigs
from logmirror.broker.groups.patterns import TopicPatterns
from logmirror.broker.quotas.limits import ClientQuotas
from logmirror.broker.security.authorization import ANONYMOUS, Authorizer
from logmirror.broker.segment_loads import SegmentLoads
from logmirror.broker.traffic import Traffic
from logmirror.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.archives.copies import LocalCopies
    from logmirror.broker.error_codes import ErrorCode
    from logmirror.broker.group_service import GroupService
    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.metadata import MetadataStore
    from logmirror.broker.options import BrokerOptions
    from logmirror.broker.security.store import SecurityStore
    from logmirror.broker.state_store import StateStore
    from logmirror.broker.topics import Topics
    from logmirror.broker.transaction_service import TransactionService
    from logmirror.clock import Clock


_BULK_REQUESTS: Final = 4
"""Large requests in progress at the same time; further ones wait."""

_LOGINS: Final = 2
"""Passwords that are checked at the same time; each takes a few milliseconds of a worker."""


@dataclass(slots=True)
class Load:
    """What the requests in progress take, of all connections together."""

    bulk: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_BULK_REQUESTS))
    logins: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LOGINS))
    waiting_partitions: int = 0
    """Partitions of Fetch requests that wait for records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """One broker and its parts. All of them run on the event loop, except work in `executor`."""

    options: BrokerOptions
    store: MetadataStore
    state: StateStore
    """The coordinators' durable state."""

    groups: GroupService
    transactions: TransactionService
    security: SecurityStore
    topics: Topics
    cache: SegmentCache
    commits: GroupCommit
    executor: Executor
    changers: Executor
    """For changes of the databases, which may wait for a bucket for long."""

    checkers: Executor
    """For the checks of large batches, so that they delay nothing else."""

    port: int
    """The port of its first listener."""

    clock: Clock = SYSTEM_CLOCK
    load: Load = field(default_factory=Load)
    traffic: Traffic = field(default_factory=Traffic)
    authorizer: Authorizer = field(default_factory=Authorizer)
    patterns: TopicPatterns = field(default_factory=TopicPatterns)
    quotas: ClientQuotas = field(default_factory=ClientQuotas)
    changes: Changes = field(default_factory=Changes)
    """Changes of ACLs and quotas."""

    configs: DynamicConfigs = field(default_factory=lambda: DynamicConfigs(1, {}))
    """Settings that requests change."""

    volumes: dict[Path, asyncio.Future[tuple[ErrorCode, int, int]]] = field(default_factory=dict)
    """Reads of error, total and usable bytes that are in progress, by log directory."""

    copies: LocalCopies | None = None
    """Those of mounted archives."""


@dataclass(slots=True)
class Caller:
    """The connection of a request, as handlers see it."""

    local_host: str
    """The broker's address that the client connected to."""

    client_id: str = ""
    """The client ID of the request, for those that join a group."""

    fetch_from: tuple[str | bytes, int] | None = None
    """The topic and partition with which its next Fetch begins, if the last one left it out."""

    loads: SegmentLoads = field(default_factory=SegmentLoads)
    """The segments that its Fetch requests wait for."""

    advertised: tuple[str, int] = ("", 0)
    """Host and port that its listener advertises. An empty host stands for `local_host`."""

    principal: str = ANONYMOUS
    """Who it is, as Kafka writes it: `User:name`."""

    client_host: str = ""
    """The client's IP address."""

    fetch_limit: int | None = None
    """Limit for the records of the next Fetch response in bytes, by the client's quota."""

    @property
    def user(self) -> str:
        """The name of the principal, without its type."""
        return self.principal.removeprefix("User:")

    @property
    def broker_address(self) -> tuple[str, int]:
        """Host and port at which this client reaches the broker."""
        host, port = self.advertised
        return host or self.local_host, port
