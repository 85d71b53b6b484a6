"""Driver: the cleanup policies of the source topics, read again while their flows are open.

`cleanup.policy` decides whether an offset gap without a marker has a cause (R2). It can change at
any time. A topic that loses `compact` must no longer have its gaps explained by compaction, and the
gaps of a topic that gains it must not stop the mirror. The log cleaner waits 15 s between two runs
by default, so a policy is known before the gaps that it causes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from logmirror.errors import LogmirrorError
from logmirror.mirror.flow_state import DAY_MS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.mirror.flow_state import FlowState

REFRESH_MS: Final = 10_000
"""Interval between two requests to one source."""

_POLICY: Final = "cleanup.policy"
_RETENTION: Final = "delete.retention.ms"
_LOG = logging.getLogger("logmirror.mirror")


def is_compacted(configs: Mapping[str, str | None]) -> bool:
    """Whether a topic's `cleanup.policy` contains `compact`."""
    return "compact" in (configs.get(_POLICY) or "")


def delete_retention_ms(configs: Mapping[str, str | None]) -> int:
    """Return a topic's `delete.retention.ms`; a day if the source does not report it."""
    return int(configs.get(_RETENTION) or DAY_MS)


class CleanupPolicies:
    """Keeps `compacted` and `delete_retention_ms` of open flows up to date.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_ms: dict[ConnectionSettings, int] = {}

    def refresh(
        self, source: ConnectionSettings, client: ClusterClient, states: Iterable[FlowState]
    ) -> None:
        """Read the policies of these flows' topics, with one request at most each `REFRESH_MS`.

        The last known policy stays if the source does not respond, or does not report the topic.

        Args:
            source: The source of the flows.
            client: Its client.
            states: The open flows from this source.
        """
        now_ms = self._clock.monotonic_ms()
        by_topic: dict[str, list[FlowState]] = defaultdict(list)
        for state in states:
            by_topic[state.flow.topic].append(state)
        if not by_topic or now_ms < self._due_ms.get(source, now_ms):
            return
        self._due_ms[source] = now_ms + REFRESH_MS
        try:
            found = client.describe_configs_of_topics(sorted(by_topic), (_POLICY, _RETENTION))
        except LogmirrorError as error:
            _LOG.debug("cleanup policies were not read", extra={"facts": {"error": str(error)}})
            return
        for topic, configs in found.items():
            if _POLICY in configs:
                _update(by_topic[topic], configs)


def _update(states: Iterable[FlowState], configs: Mapping[str, str | None]) -> None:
    compacted = is_compacted(configs)
    for state in states:
        if state.compacted != compacted:
            flow = state.flow
            _LOG.info(
                "the cleanup policy of the source topic changed",
                extra={
                    "facts": {
                        "mirror": flow.mirror,
                        "destination": flow.destination,
                        "topic": flow.topic,
                        "partition": flow.partition,
                        "cleanup_policy": configs[_POLICY],
                    }
                },
            )
        state.compacted = compacted
        state.delete_retention_ms = delete_retention_ms(configs)
