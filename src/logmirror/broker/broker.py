"""The running broker: what its handlers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logmirror.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.metadata import MetadataStore
    from logmirror.broker.options import BrokerOptions
    from logmirror.broker.topics import Topics
    from logmirror.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """One broker and its parts. Everything but `executor`'s work happens on the event loop."""

    options: BrokerOptions
    store: MetadataStore
    topics: Topics
    cache: SegmentCache
    commits: GroupCommit
    executor: Executor
    port: int
    """Where it listens, also if the system chose."""

    clock: Clock = SYSTEM_CLOCK


@dataclass(frozen=True, slots=True)
class Caller:
    """What a handler may know about the connection that asks."""

    local_host: str
    """Our address as the client reached it."""
