"""The running broker: what its handlers share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.metadata import MetadataStore
    from logmirror.broker.options import BrokerOptions
    from logmirror.broker.topics import Topics
    from logmirror.clock import Clock


_BULK_REQUESTS: Final = 4
"""Large requests in progress at the same time; further ones wait."""


@dataclass(slots=True)
class Load:
    """What the requests in progress take, of all connections together."""

    bulk: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_BULK_REQUESTS))
    waiting_partitions: int = 0
    """Partitions of Fetch requests that wait for records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """One broker and its parts. All of them run on the event loop, except work in `executor`."""

    options: BrokerOptions
    store: MetadataStore
    topics: Topics
    cache: SegmentCache
    commits: GroupCommit
    executor: Executor
    checkers: Executor
    """For the checks of large batches, so that they delay nothing else."""

    port: int
    """The port that the broker listens on."""

    clock: Clock = SYSTEM_CLOCK
    load: Load = field(default_factory=Load)


@dataclass(slots=True)
class Caller:
    """The connection of a request, as handlers see it."""

    local_host: str
    """The broker's address that the client connected to."""

    fetch_from: tuple[str | bytes, int] | None = None
    """The topic and partition with which its next Fetch begins, if the last one left it out."""
