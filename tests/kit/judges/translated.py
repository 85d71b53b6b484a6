"""Replicas with new offsets: their configuration, and the committed records of a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.judges.clients import rows_by_librdkafka
from kit.judges.gaps import log_bounds
from kit.runs.inline_run import mirror_to_cluster

if TYPE_CHECKING:
    from kit.servers.kafka import ApacheKafka


def visible(broker: ApacheKafka, topic: str, partition: int = 0) -> list[tuple[object, ...]]:
    """Return the committed records of a topic, without offsets."""
    start = log_bounds(broker.bootstrap, topic, partition)[0]
    rows = rows_by_librdkafka(broker.bootstrap, topic, partition=partition, start=start)
    return [(r.timestamp_ms, r.key, r.value, r.headers) for r in rows]


def mirror_of(broker: ApacheKafka, topic: str, **more: object) -> dict[str, object]:
    """Return a mirror to a topic beside the source, with new offsets."""
    keys = {"name": "copy", "topic": f"{topic}-copy", "offsets": "translate", **more}
    name = str(keys.pop("name"))
    return mirror_to_cluster(topic, broker.bootstrap, broker.bootstrap, name=name, **keys)
