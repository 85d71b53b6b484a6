"""What commands share: Kafka clients, and the driver's side of each destination."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.mirror.ports import ArchiveSpec
from logmirror.to_archive.commit import Committer
from logmirror.to_archive.destination import ArchiveDestination
from logmirror.to_archive.whole_chain import LongChains
from logmirror.to_kafka.preserve_destination import LaneClusters, PreserveDestination
from logmirror.to_kafka.translate_destination import TranslateDestination

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.locations import StoreLocation
    from logmirror.mirror.destination import Destination
    from logmirror.mirror.observer import Observer
    from logmirror.mirror.ports import DestinationSpec
    from logmirror.stores.base import BlobStore

COMMAND_BUDGET_MS: Final = 10_000
"""How long a command at a terminal retries a cluster that does not respond."""


class Clients:
    """The open Kafka clients of one thread, one per cluster.

    Args:
        budget_ms: Time limit for one request and its retries; None: as the settings say. Commands
            at a terminal report early instead of waiting for minutes.
        limits_attempts: Whether connecting, and waiting for one response, have this limit too.
    """

    def __init__(self, budget_ms: int | None = None, *, limits_attempts: bool = False) -> None:
        self._budget_ms, self._limits_attempts = budget_ms, limits_attempts
        self._open: dict[ConnectionSettings, ClusterClient] = {}

    def __call__(self, settings: ConnectionSettings) -> ClusterClient:
        """Return the client of a cluster."""
        if settings not in self._open:
            budget_ms = min(self._budget_ms or settings.retry_budget_ms, settings.retry_budget_ms)
            used = replace(settings, retry_budget_ms=budget_ms)
            if self._limits_attempts:
                used = replace(
                    used,
                    connect_timeout_ms=min(budget_ms, settings.connect_timeout_ms),
                    socket_timeout_ms=min(budget_ms, settings.socket_timeout_ms),
                )
            self._open[settings] = ClusterClient(used)
        return self._open[settings]

    def close(self) -> None:
        """Close all clients."""
        for client in self._open.values():
            client.close()
        self._open.clear()


def destinations(
    clients: Clients,
    open_store: Callable[[StoreLocation], BlobStore],
    writer_id: str,
    observer: Observer | None = None,
    *,
    listing_ms: int | None = None,
) -> Callable[[DestinationSpec], Destination]:
    """Return what makes a destination's driver side. All that it makes share clients and time.

    Args:
        clients: Opens clients of clusters.
        open_store: Opens the stores of archives.
        writer_id: The writer ID of the run.
        observer: Reports events.
        listing_ms: See `LongChains`. None: positions are those of wholly checked chains.
    """
    committer = Committer(open_store, clock=SYSTEM_CLOCK, observer=observer)
    long_chains = LongChains(SYSTEM_CLOCK, listing_ms)
    clusters = LaneClusters(clients, SYSTEM_CLOCK)

    def make(spec: DestinationSpec) -> Destination:
        if isinstance(spec, ArchiveSpec):
            return ArchiveDestination(
                spec, open_store, committer, SYSTEM_CLOCK, long_chains=long_chains
            )
        if spec.takeover is not None:
            from logmirror.to_kafka.takeover_destination import (  # noqa: PLC0415  # loads kernels
                TakeoverDestination,
            )

            return TakeoverDestination(spec, clusters, writer_id, observer)
        if spec.offsets == "translate":
            return TranslateDestination(spec, clusters, writer_id, observer)
        return PreserveDestination(spec, clusters, observer)

    return make
