"""A cluster whose brokers know a topic some time after the controller has created it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from logmirror.cluster.client import ClusterClient


class LateTopics(Clock):
    """A client and its clock: a topic that was created appears after `polls` waits."""

    def __init__(self, client: ClusterClient, polls: int) -> None:
        self.client, self.polls = client, polls
        self.admin = self
        self.late: dict[str, list[Any]] = {}
        """Waits that remain and the settings, for each topic that was created."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def create_topic(self, topic: str, **settings: Any) -> None:
        if topic in self.late:
            raise UsageError("the topic exists", error="TOPIC_ALREADY_EXISTS")
        self.late[topic] = [self.polls, settings]

    def now_ms(self) -> int:
        return SYSTEM_CLOCK.now_ms()

    def monotonic_ms(self) -> int:
        return SYSTEM_CLOCK.monotonic_ms()

    def sleep_ms(self, duration_ms: float) -> None:
        del duration_ms
        for topic, late in self.late.items():
            late[0] -= 1
            if late[0] == 0:
                self.client.admin.create_topic(topic, **late[1])
