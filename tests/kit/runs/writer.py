"""A producer that writes while a test does something else."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from confluent_kafka import Producer

from kit.judges.clients import odd_messages

if TYPE_CHECKING:
    from collections.abc import Iterator

_PAUSE_S = 0.1


@contextlib.contextmanager
def writing(  # noqa: PLR0913  # each test says only what it cares about
    bootstrap: str,
    topic: str,
    *,
    partitions: int,
    seed: int,
    records_per_second: int = 150,
    timestamp_ms: int = 0,
) -> Iterator[None]:
    """Write odd messages to all partitions in turn, a few at a time, until the block ends.

    Every value is unique, so that a duplicate is visible. All records must be acknowledged when the
    block ends. Their timestamp is the current time, unless another one is given.
    """
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20})
    messages = odd_messages(1000, seed=seed)
    refused: list[object] = []
    stop = threading.Event()

    def delivered(error: object, _message: object) -> None:
        if error is not None:
            refused.append(error)

    def write() -> None:
        number = 0
        while not stop.wait(_PAUSE_S):
            for _ in range(int(records_per_second * _PAUSE_S)):
                message = messages[number % len(messages)]
                producer.produce(
                    topic,
                    key=message.key,
                    value=b"%d:%b" % (number, message.value or b""),
                    headers=[(name.decode(), value) for name, value in message.headers],
                    partition=number % partitions,
                    timestamp=timestamp_ms,
                    on_delivery=delivered,
                )
                number += 1
            producer.poll(0)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        left = producer.flush(60)
    assert (left, refused) == (0, [])
