"""Compaction and deletion at the source: run Kafka's log cleaner, wait for it, hold it off."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from kit.judges.clients import Message
from kit.judges.gaps import Writer, log_bounds

if TYPE_CHECKING:
    from kit.servers.kafka import ApacheKafka

_TIMEOUT_S: Final = 60
_LAG: Final = "min.compaction.lag.ms"


def clean(broker: ApacheKafka, topic: str, partitions: int) -> None:
    """Compact all current records with Kafka's log cleaner, and wait until it has finished.

    The cleaner skips the active segment, so one more record is written. Its timestamp is the
    current time, later than all others, so it rolls the segment.
    """
    ends = {number: log_bounds(broker.bootstrap, topic, number)[1] for number in range(partitions)}
    time.sleep(0.2)  # longer than segment.ms
    for number, end in ends.items():
        now_ms = time.time_ns() // 1_000_000
        last = Message(b"last-%d" % end, b"in the active segment", (), now_ms)
        Writer(broker.bootstrap, topic, number).send([last])
    deadline = time.monotonic() + 60
    while any(cleaned_up_to(broker, topic, number) < end for number, end in ends.items()):
        if time.monotonic() > deadline:
            found = {number: cleaned_up_to(broker, topic, number) for number in ends}
            message = f"the cleaner did not get to {topic} within 60 s: {found} of {ends}"
            raise TimeoutError(message)
        time.sleep(0.1)


def stop_cleaning(broker: ApacheKafka, topic: str) -> None:
    """Stop the cleaning of a topic, so that its records do not change while they are compared."""
    set_config(broker.bootstrap, topic, _LAG, f"{10**12}")
    time.sleep(1.5)  # the cleaner may be about to begin: it checks every second


def start_cleaning(broker: ApacheKafka, topic: str) -> None:
    """Allow cleaning again after `stop_cleaning`."""
    set_config(broker.bootstrap, topic, _LAG, "0")


def delete_records(broker: ApacheKafka, topic: str, offset: int) -> None:
    """Move the log start offset of partition 0 to `offset`, by DeleteRecords."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    where = TopicPartition(topic, 0, offset)
    assert admin.delete_records([where])[where].result(30).low_watermark == offset


def set_config(bootstrap: str, topic: str, name: str, value: str) -> None:
    """Change one setting of a topic."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(_TIMEOUT_S)


def cleaned_up_to(broker: ApacheKafka, topic: str, partition: int) -> int:
    """Return the offset after the last cleaned one, from the cleaner's own file; 0: none."""
    path = broker.folder / "data" / "cleaner-offset-checkpoint"
    lines = path.read_text().splitlines()[2:] if path.exists() else []
    found = [line.split() for line in lines]
    return next((int(w[2]) for w in found if w[:2] == [topic, str(partition)]), 0)
