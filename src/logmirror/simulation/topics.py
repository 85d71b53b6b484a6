"""The topics of a simulated cluster, each of one partition, and its coordinators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.simulation.coordinator import Transactions
from logmirror.simulation.group_coordinator import GroupOffsets
from logmirror.simulation.log import Appended, Log
from logmirror.wire.batch_header import parse_header
from logmirror.wire.messages import INVALID_TXN_STATE

if TYPE_CHECKING:
    from logmirror.clock import Chooser
    from logmirror.simulation.schedule import Schedule


class Topics:
    """The topics of a cluster.

    Args:
        schedule: The scheduler.
        chooser: Draws the random choices.
        number: Number of the cluster. It is part of the topic IDs, so that these are unique.

    Attributes:
        logs: The log of each topic, by name.
        ids: The ID of each topic, by name.
        verifies: Whether leaders verify a transaction with the coordinator before they append its
            first batch (KIP-890). Without it, a late batch of an ended transaction opens one.
        unreadable: Topics on which the users of the product have no Read.
    """

    def __init__(self, schedule: Schedule, chooser: Chooser, number: int) -> None:
        self._number = number
        self.logs: dict[str, Log] = {}
        self.ids: dict[str, bytes] = {}
        self.verifies = chooser.random() < 0.5  # noqa: PLR2004  # releases before and after
        self.groups = GroupOffsets()
        self.unreadable: set[str] = set()
        self.transactions = Transactions(schedule, chooser, lambda topic: self.logs[topic])

    def create(self, name: str) -> bool:
        """Create a topic; False if it exists."""
        if name in self.logs:
            return False
        self.replace(name)
        return True

    def replace(self, name: str) -> None:
        """Delete the topic, if it exists, and create it again."""
        generation = self.ids.get(name, bytes(16))[-1] + 1
        self.logs[name] = Log()
        self.ids[name] = bytes([self._number, len(self.ids), *bytes(13), generation])

    def append(self, topic: str, data: bytes) -> Appended:
        """Append a batch, as the leader of the topic's partition does."""
        header, log = parse_header(data, 0), self.logs[topic]
        if header.is_transactional and self.verifies and not log.is_open(header.producer_id):
            own = (header.producer_id, header.producer_epoch)
            if not self.transactions.is_joined(own, topic):
                return Appended(INVALID_TXN_STATE, -1)
        return log.append(data)
