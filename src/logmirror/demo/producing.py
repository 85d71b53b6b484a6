"""Produces the flights with librdkafka, and records the acknowledgements.

The replicas are compared with these receipts: for each partition, the flight that the broker
acknowledged at each offset.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Final

from logmirror.clock import SYSTEM_CLOCK
from logmirror.demo.flights import INSTALL
from logmirror.errors import CorruptionError, UnavailableError, UsageError

try:
    from confluent_kafka import Producer
except ImportError as error:
    raise UsageError("the package confluent-kafka is missing", hint=INSTALL) from error

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from confluent_kafka import KafkaError, Message

    from logmirror.demo.flights import Flights

_SILENCE_S: Final = 60
"""Time without an acknowledgement after which producing fails."""


class FlightProducer:
    """librdkafka's idempotent producer.

    Args:
        bootstrap: Address of the broker.
        topic: The topic; the broker creates it.
        flights: The records.
        log: File for librdkafka's log.
    """

    def __init__(self, bootstrap: str, topic: str, flights: Flights, log: Path) -> None:
        self._topic, self._flights = topic, flights
        self.receipts: defaultdict[int, list[int]] = defaultdict(list)
        """For each partition, the index of the flight at each offset, from offset 0."""

        self.acknowledged = 0
        self._failure: KafkaError | str | None = None
        logger = logging.Logger("librdkafka")  # noqa: LOG001  # not shared, used by this producer only
        logger.addHandler(logging.FileHandler(log, delay=True))
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "compression.type": "zstd",
                "linger.ms": 50,
                "queue.buffering.max.messages": 1_000_000,
            },
            logger=logger,
        )

    def send(self, first: int, end: int, show: Callable[[int], None]) -> None:
        """Produce the flights first <= index < end, and wait for their acknowledgements.

        Args:
            first: Index of the first.
            end: Index after the last.
            show: Called at intervals with the number of acknowledged records.

        Raises:
            UnavailableError: The broker did not acknowledge all of them.
            CorruptionError: It acknowledged a record at an offset that is not the next one.
        """
        count = end - first
        rows = zip(
            range(first, end),
            self._flights.keys.slice(first, count).to_pylist(),
            self._flights.values.slice(first, count).to_pylist(),
            self._flights.timestamps_ms.slice(first, count).to_pylist(),
            strict=True,
        )
        before = self.acknowledged
        for index, key, value, timestamp_ms in rows:
            self._producer.produce(
                self._topic,
                value,
                key,
                timestamp=timestamp_ms,
                on_delivery=partial(self._on_delivery, index),
            )
            if index % 500 == 0:
                self._producer.poll(0)
                show(self.acknowledged - before)
        self._wait_for(before + count, lambda: show(self.acknowledged - before))

    def _wait_for(self, wanted: int, show: Callable[[], None]) -> None:
        seen, since_ms = self.acknowledged, SYSTEM_CLOCK.monotonic_ms()
        while self.acknowledged < wanted and self._failure is None:
            self._producer.flush(0.1)
            show()
            now_ms = SYSTEM_CLOCK.monotonic_ms()
            if self.acknowledged > seen:
                seen, since_ms = self.acknowledged, now_ms
            elif now_ms - since_ms > _SILENCE_S * 1000:
                self._failure = f"no acknowledgement for {_SILENCE_S} s"
        if self._failure is not None:
            raise UnavailableError(
                "the broker did not acknowledge all records",
                cause=str(self._failure),
                acknowledged=self.acknowledged,
                produced=wanted,
            )

    def _on_delivery(self, index: int, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failure = error
            return
        partition, offset = message.partition(), message.offset()
        receipts = self.receipts[partition or 0]
        if offset != len(receipts):
            raise CorruptionError(
                "the broker acknowledged a record at an unexpected offset",
                partition=partition,
                expected=len(receipts),
                found=offset,
            )
        receipts.append(index)
        self.acknowledged += 1
