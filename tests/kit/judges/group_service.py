"""A service in a process of its own, by librdkafka: the same as `GroupService.java`, by commits.

Arguments: bootstrap servers, topic, group, pause after a record in ms.
"""

from __future__ import annotations

import os
import sys
import time

from confluent_kafka import Consumer

COMMITTED_AFTER = 20


def main() -> None:
    """Read until the process is killed."""
    bootstrap, topic, group, pause_ms = sys.argv[1:]
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    count = 0
    while True:
        message = consumer.poll(1)
        if message is None or message.error() is not None:
            continue
        os.write(1, b"> %b\n" % message.value())
        consumer.store_offsets(message)
        count += 1
        if count % COMMITTED_AFTER == 0:
            consumer.commit(asynchronous=False)
        time.sleep(int(pause_ms) / 1000)


if __name__ == "__main__":
    main()
