"""Renders the recorded metrics as Prometheus's text format, version 0.0.4, in chunks.

A line is the metric's name, the text of its labels, and the value. The text of a label set is built
once and shared by all metrics that have it, so a line costs one concatenation. Prometheus's client
library, which renders the `process_*` metrics, takes some ten times as long for each line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from logmirror.clock import SYSTEM_CLOCK
from logmirror.monitoring.derived_metrics import AGGREGATES, MIRROR_V3_CATALOGUE
from logmirror.monitoring.metrics import CATALOGUE, READY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logmirror.clock import Clock
    from logmirror.monitoring.metrics import Distribution, Labels, Metric

CHUNK_LINES: Final = 1000
"""Lines of a chunk: about a millisecond of CPU."""


class Values(Protocol):
    """The source of the metrics, such as a `Recorder`. All methods are safe from any thread."""

    def numbers(self, metric: Metric, now_s: float = 0) -> list[tuple[Labels, float]]:
        """Return the current values of a gauge or counter, by labels."""
        ...

    def distributions(self, metric: Metric) -> list[tuple[Labels, Distribution]]:
        """Return the current values of a histogram, by labels."""
        ...


class Views(Protocol):
    """The source of probes and status. All methods are safe from any thread."""

    def not_live(self) -> list[str]:
        """Return why the process should be restarted. Empty: it is live."""
        ...

    def not_ready(self) -> list[str]:
        """Return why the process is not ready. Empty: it is ready."""
        ...

    def status(self) -> dict[str, object]:
        """Return the content of `/status.json`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Which metrics `/metrics` exports."""

    partitions: bool = True
    """Whether metrics of single partitions are exported, in addition to the aggregates."""

    mirror_v3_names: bool = False
    """Whether metrics under the names of mirror-v3 are exported."""


class _LabelTexts(dict["Labels", str]):
    """The text of each label set of one tuple of label names. Grows as the recorder does."""

    def __init__(self, names: Labels) -> None:
        super().__init__()
        self._ordered = sorted((name, place) for place, name in enumerate(names))

    def __missing__(self, labels: Labels) -> str:
        inner = ",".join(f'{name}="{_escaped(labels[place])}"' for name, place in self._ordered)
        text = self[labels] = f"{{{inner}}} " if inner else " "
        return text


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class Exposition:
    """All metrics of this process. One thread renders at a time.

    Args:
        recorder: The source of the metrics.
        views: The source of `logmirror_ready`. None: it is not exported.
        shown: Which metrics are exported. None: the defaults of `Shown`.
        clock: The current time, for ages.
        catalogue: The metrics. None: those of mirrors.
    """

    def __init__(
        self,
        recorder: Values,
        views: Views | None = None,
        shown: Shown | None = None,
        clock: Clock = SYSTEM_CLOCK,
        catalogue: Sequence[Metric] | None = None,
    ) -> None:
        shown = shown or Shown()
        self._recorder, self._views, self._clock = recorder, views, clock
        of_v3 = MIRROR_V3_CATALOGUE if shown.mirror_v3_names else ()
        wanted = (*CATALOGUE, *AGGREGATES, *of_v3) if catalogue is None else catalogue
        self._metrics = [
            metric
            for metric in wanted
            if (shown.partitions or "partition" not in metric.labels)
            and (metric is not READY or views is not None)
        ]
        self._texts = {metric.labels: _LabelTexts(metric.labels) for metric in self._metrics}
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def chunks(self) -> Iterator[bytes]:
        """Yield the text of one scrape, in chunks of whole lines."""
        now_s = self._clock.now_ms() / 1000
        for metric in self._metrics:
            meaning = metric.meaning.replace("\\", r"\\").replace("\n", r"\n")
            yield f"# HELP {metric.name} {meaning}\n# TYPE {metric.name} {metric.kind}\n".encode()
            if metric.kind == "histogram":
                yield from self._histogram(metric)
            else:
                yield from self._numbers(metric, now_s)
        yield generate_latest(self._process)

    def _numbers(self, metric: Metric, now_s: float) -> Iterator[bytes]:
        if metric is READY and self._views is not None:
            values: list[tuple[Labels, float]] = [((), int(not self._views.not_ready()))]
        else:
            values = self._recorder.numbers(metric, now_s)
        name, texts = metric.name, self._texts[metric.labels]
        for at in range(0, len(values), CHUNK_LINES):
            part = values[at : at + CHUNK_LINES]
            yield "".join([f"{name}{texts[labels]}{value}\n" for labels, value in part]).encode()

    def _histogram(self, metric: Metric) -> Iterator[bytes]:
        """Each bucket counts what is not above its bound, so counts are summed up."""
        bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
        texts = self._texts[metric.labels]
        for labels, found in self._recorder.distributions(metric):
            text, count, lines = texts[labels], 0, []
            before = f"{text[:-2]}," if labels else "{"
            for bound, more in zip(bounds, found.counts, strict=True):
                count += more
                lines.append(f'{metric.name}_bucket{before}le="{bound}"}} {count}\n')
            lines.append(f"{metric.name}_count{text}{count}\n")
            lines.append(f"{metric.name}_sum{text}{found.total}\n")
            yield "".join(lines).encode()
