"""Counters of moves: copied bytes, and how long swaps held the event loop."""

from __future__ import annotations

from bisect import bisect_left
from time import perf_counter

from logmirror.monitoring.broker_metrics import SWAP_SECONDS


class MoveCounts:
    """The counters of one broker since its start. The event loop writes; other threads may read.

    Attributes:
        copied_bytes: Bytes that were written to copies.
        swaps: How many swaps took how long, by bucket of the metric.
        swaps_total_s: How long all of them took.
    """

    def __init__(self) -> None:
        self.copied_bytes = 0
        self.swaps = [0] * (len(SWAP_SECONDS.buckets) + 1)
        self.swaps_total_s = 0.0

    @staticmethod
    def now_s() -> float:
        """Return the time from which a swap is measured."""
        return perf_counter()

    def swapped(self, began_s: float) -> None:
        """Count a swap that is complete."""
        took_s = perf_counter() - began_s
        self.swaps[bisect_left(SWAP_SECONDS.buckets, took_s)] += 1
        self.swaps_total_s += took_s
