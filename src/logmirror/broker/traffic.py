"""Counters of requests: by API and error, and how long they took. Nothing is counted per record."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from time import perf_counter
from typing import TYPE_CHECKING

from logmirror.monitoring.broker_metrics import REQUEST_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.wire.serve_produce import Produced


class Latency:
    """How long the requests of one API took."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(REQUEST_SECONDS.buckets) + 1)
        self.total_s = 0.0


class Traffic:
    """The counters of one broker. The event loop writes; other threads may read.

    Attributes:
        latencies: By API key.
        errors: How often a response had an error code, by API key and code. Those of the other
            APIs are counted by their messages (`serve_messages.error_counts`).
        produce_errors: How often a batch was refused, by topic and code.
        throttled: How often a request exceeded a quota, by Kafka's key of the quota.
    """

    def __init__(self) -> None:
        self.latencies: dict[int, Latency] = {}
        self.errors: Counter[tuple[int, int]] = Counter()
        self.produce_errors: Counter[tuple[str, int]] = Counter()
        self.throttled: Counter[str] = Counter()

    @staticmethod
    def now_s() -> float:
        """Return the time from which a request's latency is measured."""
        return perf_counter()

    def responded(self, api_key: int, began_s: float) -> None:
        """Count a request whose response is complete."""
        latency = self.latencies.get(api_key)
        if latency is None:
            latency = self.latencies[api_key] = Latency()
        took_s = perf_counter() - began_s
        latency.counts[bisect_left(REQUEST_SECONDS.buckets, took_s)] += 1
        latency.total_s += took_s

    def produced(self, topics: Iterable[tuple[str, list[Produced]]], known: Iterable[str]) -> None:
        """Count the errors of a Produce response.

        Args:
            topics: The topics of the response.
            known: The topics that exist. Others are counted as "", because a client can invent any
                number of names.
        """
        for name, partitions in topics:
            for produced in partitions:
                if produced.error:
                    topic = name if name in known else ""
                    self.produce_errors[topic, int(produced.error)] += 1
