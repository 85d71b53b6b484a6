"""The topics of a simulated cluster, each of one partition, and its coordinators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.simulation.coordinator import Transactions
from logmirror.simulation.log import Appended, Log
from logmirror.wire.messages import INVALID_TXN_STATE
from logmirror.wire.records import parse_header

if TYPE_CHECKING:
    from logmirror.clock import Chooser
    from logmirror.simulation.schedule import Schedule


class Topics:
    """What a cluster holds.

    Args:
        schedule: Time.
        chooser: Draws what is left to chance.
        number: Of the cluster: no two topics of two clusters have one id.

    Attributes:
        logs: By name.
        ids: The same.
        verifies: Whether leaders ask the coordinator before they open a transaction (KIP-890); what
            a batch of a transaction that is over does depends on it.
    """

    def __init__(self, schedule: Schedule, chooser: Chooser, number: int) -> None:
        self._number = number
        self.logs: dict[str, Log] = {}
        self.ids: dict[str, bytes] = {}
        self.verifies = chooser.random() < 0.5  # noqa: PLR2004  # releases before and after
        self.transactions = Transactions(schedule, chooser, lambda topic: self.logs[topic])

    def create(self, name: str) -> bool:
        """Make a topic; False: it exists."""
        if name in self.logs:
            return False
        self.replace(name)
        return True

    def replace(self, name: str) -> None:
        """Delete a topic, if there is one, and make it anew."""
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
