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
    """One broker and its parts. All of them run on the event loop, except work in `executor`."""

    options: BrokerOptions
    store: MetadataStore
    topics: Topics
    cache: SegmentCache
    commits: GroupCommit
    executor: Executor
    port: int
    """The port that the broker listens on."""

    clock: Clock = SYSTEM_CLOCK


@dataclass(frozen=True, slots=True)
class Caller:
    """The connection of a request, as handlers see it."""

    local_host: str
    """The broker's address that the client connected to."""
