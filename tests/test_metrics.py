"""The catalogue of metrics and the recorder.

Method: the catalogue is held against Prometheus's naming rules and against its page; the recorder
is filled and read back by Prometheus's own parser, which shares no code with what we keep.
"""

import importlib.util
import re
import threading
import tracemalloc
from pathlib import Path

import pytest

from kit.scrape import samples
from logmirror import metrics
from logmirror.metrics import CATALOGUE, FLOW, Recorder

ROOT = Path(__file__).resolve().parents[1]
ONE = ("orders", "archive", "orders", "0")


@pytest.fixture(scope="module")
def writer():
    spec = importlib.util.spec_from_file_location("w", ROOT / "scripts" / "write_metrics.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_generated_table(writer):
    page = writer.PAGE.read_text(encoding="utf-8")
    assert page == writer.page_text(page), "run `make schema`"


def test_a_page_without_its_marks_is_an_error(writer):
    with pytest.raises(ValueError, match="lacks the marks"):
        writer.page_text("# no marks")


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_each_metric_is_named_as_prometheus_wants_it_and_explained(metric):
    assert re.fullmatch(r"logmirror_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.unit.startswith("seconds") == ("_seconds" in metric.name)
    assert metric.meaning.endswith(".")
    assert set(metric.labels) <= {*FLOW, "trigger", "cause", "kind"}
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_names_are_unique_and_all_of_them_are_in_the_catalogue():
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    named = {value for value in vars(metrics).values() if isinstance(value, metrics.Metric)}
    assert named == set(CATALOGUE)


def test_what_is_recorded_is_what_a_scrape_reads():
    recorder = Recorder()
    recorder.set(metrics.LAG, ONE, 7)
    recorder.set(metrics.LAG, ONE, 5)
    recorder.add(metrics.RECORDS, ONE, 2)
    recorder.add(metrics.RECORDS, ONE, 3)
    recorder.add(metrics.GAPS, (*ONE, "aborted"), 4)
    found = samples(recorder)
    assert found["source_lag_offsets", ONE] == 5
    assert found["destination_records_total", ONE] == 5
    assert found["source_offset_gap_records_total", (*ONE, "aborted")] == 4
    assert found["process_resident_memory_bytes", ()] > 0


def test_odd_names_are_escaped():
    recorder = Recorder()
    labels = ('a"b\\c', "line\nbreak", "t", "0")
    recorder.set(metrics.LAG, labels, 1)
    assert samples(recorder)["source_lag_offsets", labels] == 1


def test_a_histogram_counts_what_is_not_above_each_bound():
    recorder = Recorder()
    for seconds in (0.05, 0.051, 60, 61):
        recorder.observe(metrics.FLUSH_SECONDS, ONE[:2], seconds)
    found = samples(recorder)
    name = "destination_flush_duration_seconds"
    buckets = {labels[2]: n for (of, labels), n in found.items() if of == f"{name}_bucket"}
    assert (buckets["0.05"], buckets["0.1"], buckets["30.0"]) == (1, 2, 2)
    assert (buckets["60.0"], buckets["+Inf"]) == (3, 4)
    assert found[f"{name}_count", ONE[:2]] == 4
    assert found[f"{name}_sum", ONE[:2]] == pytest.approx(121.101)


def test_memory_does_not_grow_with_time():
    recorder = Recorder()

    def work():
        for number in range(5000):
            labels = ("orders", "archive", "orders", str(number % 10))
            recorder.set(metrics.LAG, labels, number * 1000)
            recorder.add(metrics.FLUSHES, (*labels, "max-time"))
            recorder.observe(metrics.FLUSH_SECONDS, labels[:2], number / 100)

    work()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000


def test_scrapes_while_values_change_see_whole_values():
    recorder, ended = Recorder(), threading.Event()

    def write():
        for number in range(200_000):
            if ended.is_set():
                return
            recorder.add(metrics.RECORDS, ("m", "d", "t", str(number % 3000)))
            recorder.observe(metrics.FLUSH_SECONDS, ("m", "d"), 1.0)

    thread = threading.Thread(target=write)
    thread.start()
    name = "destination_flush_duration_seconds"
    try:
        totals = []
        for _ in range(5):
            found = samples(recorder)
            totals.append(found.get((f"{name}_count", ("m", "d")), 0))
            assert found.get((f"{name}_sum", ("m", "d")), 0) == totals[-1]
        assert totals == sorted(totals)
    finally:
        ended.set()
        thread.join()
