"""Driver: how far each mirror is, reported to the caller of a run while it runs."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from logmirror.monitoring import metrics
from logmirror.reports import MirrorProgress, RunProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logmirror.clock import Clock
    from logmirror.mirror.flow_state import FlowState
    from logmirror.monitoring.metrics import Metric, Recorder

_LOG = logging.getLogger("logmirror.mirror")

EVERY_MS: Final = 500
"""Interval of the reports."""


class ProgressReports:
    """Calls back with the progress of all mirrors, every `EVERY_MS` and at the end.

    Args:
        mirrors: The names of the mirrors, in the order of the reports.
        recorder: The metrics, which count records and bytes.
        clock: Time.
        on_progress: Receives the reports. What it raises is logged, and ends the reports.
    """

    def __init__(
        self,
        mirrors: Sequence[str],
        recorder: Recorder,
        clock: Clock,
        on_progress: Callable[[RunProgress], None],
    ) -> None:
        self._mirrors, self._recorder, self._clock = mirrors, recorder, clock
        self._on_progress: Callable[[RunProgress], None] | None = on_progress
        self._begun_ms: int | None = None
        self._next_ms = 0

    def report(self, states: Iterable[FlowState], *, is_last: bool = False) -> None:
        """Report if it is due. `states` are the flows of all lanes."""
        now_ms = self._clock.monotonic_ms()
        if self._on_progress is None or (now_ms < self._next_ms and not is_last):
            return
        self._next_ms = now_ms + EVERY_MS
        self._begun_ms = now_ms if self._begun_ms is None else self._begun_ms
        try:
            self._on_progress(self._progress(list(states), now_ms - self._begun_ms, now_ms))
        except Exception:  # noqa: BLE001  # replication does not depend on what a callback does
            self._on_progress = None
            message = "the callback for progress failed; it is not called any more"
            _LOG.exception(message, extra={"facts": {}})

    def _progress(self, states: Sequence[FlowState], elapsed_ms: int, now_ms: int) -> RunProgress:
        records, written = self._sums(metrics.RECORDS), self._sums(metrics.BYTES)
        remaining: dict[str, int] = defaultdict(int)
        waiting: dict[str, int] = defaultdict(int)
        for state in states:
            remaining[state.flow.mirror] += state.pending
            waiting[state.flow.mirror] += state.backs_off(now_ms)
        return RunProgress(
            elapsed_s=elapsed_ms / 1000,
            mirrors=tuple(
                MirrorProgress(
                    mirror=name,
                    records=int(records[name]),
                    written_bytes=int(written[name]),
                    remaining=remaining[name],
                    waiting=waiting[name],
                )
                for name in self._mirrors
            ),
        )

    def _sums(self, metric: Metric) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self._recorder.numbers(metric):
            sums[labels[0]] += value
        return sums
