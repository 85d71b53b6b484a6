"""The text of `/metrics`: what Prometheus's own library would write, at a fraction of its cost.

Method: the recorder is filled with every metric. Prometheus's library builds its own families from
the same values, and its parser reads both texts.
"""

import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from kit.fakes.scripted import SteppingClock
from logmirror.monitoring import metrics
from logmirror.monitoring.derived_metrics import AGGREGATES, MIRROR_V3_CATALOGUE
from logmirror.monitoring.exposition import CHUNK_LINES, Exposition, Shown
from logmirror.monitoring.metrics import (
    CATALOGUE,
    FLOW,
    READY,
    Recorder,
)

NOW_MS = 1_700_000_000_000


def filled(flows):
    """A recorder with every metric of this many flows; 100 to a mirror."""
    recorder = Recorder()
    for number in range(flows):
        mirror = f"orders-{number // 100}"
        labels = (mirror, "standby", f"orders.topic.{number // 100}", str(number % 100))
        for metric in CATALOGUE:
            if metric.labels == FLOW:
                value = NOW_MS / 1000 - number if metric.is_age else 123_456_789 + number
                recorder.set(metric, labels, value)
        for trigger in ("max-offsets", "max-bytes", "max-time"):
            recorder.add(metrics.FLUSHES, (*labels, trigger), 5)
        for cause in ("control", "aborted", "compacted"):
            recorder.add(metrics.GAPS, (*labels, cause), 5)
        recorder.add(metrics.ERRORS, (*labels, "unavailable"))
        if number % 100 == 0:
            recorder.observe(metrics.FLUSH_SECONDS, labels[:2], 0.3)
            recorder.set(metrics.MAX_TIME, labels[:2], 60.0)
            for state in ("running", "waiting", "stopped"):
                recorder.set(metrics.FLOWS, (*labels[:2], state), 100)
    recorder.set(metrics.BUDGET, (), 1 << 30)
    recorder.set(metrics.SLOT_PEAK, (), 1 << 62)
    return recorder


class Library:
    """The same values, rendered by Prometheus's library."""

    def __init__(self, recorder):
        self.recorder = recorder

    def describe(self):
        return []

    def collect(self):
        for metric in (*CATALOGUE, *AGGREGATES, *MIRROR_V3_CATALOGUE):
            if metric.kind == "histogram":
                yield self.histogram(metric)
                continue
            kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = kind(metric.name, metric.meaning, labels=metric.labels)
            values = [((), 1)] if metric is READY else self.recorder.numbers(metric, NOW_MS / 1000)
            for labels, value in values:
                family.add_metric(labels, value)
            yield family

    def histogram(self, metric):
        family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
        for labels, found in self.recorder.distributions(metric):
            sums = [sum(found.counts[: at + 1]) for at in range(len(found.counts))]
            family.add_metric(labels, list(zip(bounds, sums, strict=True)), found.total)
        return family


class Ready:
    """A status board of which every mirror is running."""

    def not_ready(self):
        return []


def text_of(recorder, shown):
    exposition = Exposition(recorder, Ready(), shown, SteppingClock(NOW_MS))
    return b"".join(exposition.chunks()).decode()


def parsed(text):
    return {
        family.name: (family.type, family.documentation, family.samples)
        for family in text_string_to_metric_families(text)
        if not family.name.startswith("process_")
    }


def test_the_text_is_what_prometheus_s_library_makes_of_the_same_values():
    recorder = filled(250)
    recorder.set(metrics.LAG, ('a"b\\c', "line\nbreak", "t\\n", ""), 0.5)
    registry = CollectorRegistry()
    registry.register(Library(recorder))
    found = parsed(text_of(recorder, Shown(mirror_v3_names=True)))
    assert len(found) == len((*CATALOGUE, *AGGREGATES, *MIRROR_V3_CATALOGUE))
    assert found == parsed(generate_latest(registry).decode())


def test_without_partitions_there_is_no_such_label():
    text = text_of(filled(250), Shown(partitions=False, mirror_v3_names=True))
    assert 'partition="' not in text
    assert "logmirror_mirror_lag_offsets{" in text
    assert "mirror_v3" not in text


def test_no_chunk_has_more_than_some_thousand_lines():
    exposition = Exposition(filled(3 * CHUNK_LINES), shown=Shown(mirror_v3_names=True))
    assert max(chunk.count(b"\n") for chunk in exposition.chunks()) <= CHUNK_LINES


@pytest.mark.parametrize("names", [False, True])
def test_a_scrape_makes_few_calls_for_a_line_however_many_flows_there_are(names):
    def counted(flows):
        exposition = Exposition(filled(flows), Ready(), Shown(mirror_v3_names=names))
        calls = [0]

        def count(_frame, event, _arg):
            calls[0] += event == "call"

        sys.setprofile(count)
        try:
            lines = sum(chunk.count(b"\n") for chunk in exposition.chunks())
        finally:
            sys.setprofile(None)
        assert lines > 22 * flows
        return calls[0] / lines

    assert counted(250) < 5
    assert counted(1000) < 5
