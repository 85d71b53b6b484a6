"""The catalogue of metrics, the recorder, and what is made of its values.

Method: the catalogue is held against Prometheus's naming rules and against its page; the recorder
is filled and read back by Prometheus's own parser, which shares no code with what we keep.
"""

import gc
import importlib.util
import itertools
import re
import threading
import tracemalloc
from pathlib import Path

import pytest

from kit.fakes.scripted import SteppingClock
from kit.judges.scrape import samples
from logmirror.monitoring import metrics
from logmirror.monitoring.derived_metrics import AGGREGATES, MIRROR_V3_CATALOGUE
from logmirror.monitoring.exposition import Shown
from logmirror.monitoring.metrics import CATALOGUE, FLOW, Recorder

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize("metric", [*CATALOGUE, *AGGREGATES], ids=lambda m: m.name)
def test_each_metric_is_named_as_prometheus_wants_it_and_explained(metric):
    assert re.fullmatch(r"logmirror_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.unit.startswith("seconds") == ("_seconds" in metric.name)
    assert metric.unit == "seconds" or not metric.is_age
    assert metric.meaning.endswith(".")
    assert set(metric.labels) <= {*FLOW, "trigger", "cause", "kind", "state", "source", "reason"}
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_names_are_unique_and_all_of_them_are_in_the_catalogue():
    everything = (*CATALOGUE, *AGGREGATES, *MIRROR_V3_CATALOGUE)
    assert len({metric.name for metric in everything}) == len(everything)
    named = {value for value in vars(metrics).values() if isinstance(value, metrics.Metric)}
    assert {metric for metric in named if metric.of is None} == set(CATALOGUE)


def test_a_scrape_returns_the_recorded_values():
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


def test_a_garbage_collection_that_lets_the_writer_in_does_not_stop_a_scrape():
    recorder, numbers = Recorder(), itertools.count()

    def write(*_: object) -> None:
        labels = ("m", "d", "t", str(next(numbers)))
        recorder.add(metrics.RECORDS, labels)
        recorder.observe(metrics.FLUSH_SECONDS, labels, 1.0)

    for _ in range(5_000):
        write()
    gc.callbacks.append(write)
    try:
        assert len(recorder.numbers(metrics.RECORDS)) >= 5_000
        assert len(recorder.distributions(metrics.FLUSH_SECONDS)) >= 5_000
    finally:
        gc.callbacks.remove(write)
    assert next(numbers) > 5_000  # it did write


# -- what is made of them --------------------------------------------------------------------------


def flow(mirror, destination, partition):
    return (mirror, destination, "orders", str(partition))


def test_an_age_is_measured_when_it_is_read():
    recorder, clock = Recorder(), SteppingClock(1_000_000)
    recorder.set(metrics.LAG_SECONDS, ONE, 990)
    recorder.set(metrics.STALLED, ONE, metrics.NEVER)
    recorder.set(metrics.RETRY_SECONDS, ONE, 1_001)  # of a clock that was set back
    for _ in range(2):
        found = samples(recorder, clock=clock)
        assert found["source_lag_seconds", ONE] == 10 + clock.ms / 1000
        assert found["flow_stalled_seconds", ONE] == 0
        assert found["flow_inflight_retry_seconds", ONE] == max(clock.ms / 1000 - 1, 0)
        clock.ms += 5000


def test_sums_and_maxima_are_over_the_partitions_of_a_mirror_and_destination():
    recorder, clock = Recorder(), SteppingClock(1_000_000)
    for partition, (lag, moment) in enumerate([(5, 990), (7, metrics.NEVER), (0, 400)]):
        recorder.set(metrics.LAG, flow("a", "d", partition), lag)
        recorder.set(metrics.LAG_SECONDS, flow("a", "d", partition), moment)
        recorder.set(metrics.STALLED, flow("a", "d", partition), moment)
        for metric in (metrics.RECORDS, metrics.BYTES, metrics.COMMITS):
            recorder.add(metric, flow("a", "d", partition), 10)
        for metric in (metrics.CONFLICTS, metrics.RESTARTS):
            recorder.add(metric, flow("a", "d", partition), partition)
        for cause in ("control", "aborted"):
            recorder.add(metrics.GAPS, (*flow("a", "d", partition), cause), partition)
        recorder.add(metrics.ERRORS, (*flow("a", "d", partition), "unavailable"))
    recorder.set(metrics.LAG, flow("a", "e", 0), 1)
    recorder.set(metrics.LAG, flow("b", "d", 0), 2)
    found = samples(recorder, clock=clock)
    assert found["mirror_lag_offsets", ("a", "d")] == 12
    assert found["mirror_lag_offsets_max", ("a", "d")] == 7
    assert found["mirror_lag_seconds_max", ("a", "d")] == 600
    assert found["mirror_stalled_seconds_max", ("a", "d")] == 600
    for name in ("records", "bytes", "commits"):
        assert found[f"mirror_{name}_total", ("a", "d")] == 30
    for name in ("create_conflicts", "restarts"):
        assert found[f"mirror_{name}_total", ("a", "d")] == 3
    assert found["mirror_gap_offsets_total", ("a", "d", "aborted")] == 3
    assert found["mirror_errors_total", ("a", "d", "unavailable")] == 3
    assert found["mirror_lag_offsets", ("a", "e")] == 1
    assert found["mirror_lag_offsets", ("b", "d")] == 2


def test_without_series_of_partitions_a_thousand_of_them_cost_no_more_than_one():
    counts = []
    for partitions in (1, 1000):
        recorder = Recorder()
        for partition in range(partitions):
            for metric in CATALOGUE:
                labels = (*flow("a", "d", partition), *("x",) * (len(metric.labels) - len(FLOW)))
                if metric.labels[:4] == FLOW and metric.kind != "histogram":
                    recorder.add(metric, labels, 1)
        found = samples(recorder, shown=Shown(partitions=False, mirror_v3_names=True))
        assert found["mirror_records_total", ("a", "d")] == partitions
        assert ("destination_records_total", flow("a", "d", 0)) not in found
        assert not any(name.startswith("mirror_v3_") for name, _ in found)
        counts.append(len(found))
    assert counts[0] == counts[1] < 40


def test_mirror_v3_names_have_its_labels_and_combine_destinations():
    recorder = Recorder()
    for destination, position, records, at, failures in (
        ("d", 5, 10, 900, 0),
        ("e", 7, 30, 800, 2),
    ):
        labels = flow("a", destination, 3)
        recorder.set(metrics.OFFSET_VERIFIED, labels, position)
        recorder.set(metrics.LAG, labels, 100 - position)
        recorder.set(metrics.LAST_FLUSH, labels, at)
        recorder.set(metrics.RETRY, labels, failures)
        recorder.add(metrics.RECORDS, labels, records)
        recorder.add(metrics.BYTES, labels, records * 2)
        recorder.add(metrics.COMMITS, labels, 1)
        recorder.add(metrics.RESTARTS, labels, failures)
        recorder.add(metrics.GAPS, (*labels, "control"), 4)
        recorder.add(metrics.GAPS, (*labels, "aborted"), position)
    recorder.set(metrics.KEYS, flow("a", "d", 3), 42)
    assert not any("mirror_v3" in name for name, _ in samples(recorder))
    text = samples(recorder, shown=Shown(mirror_v3_names=True))
    found = {name.removeprefix("mirror_v3_"): n for (name, _), n in text.items() if "v3" in name}
    assert found == {
        "destination_offset_verified": 5,
        "destination_offset_inflight_retry": 2,
        "destination_records_total": 40,
        "destination_last_flush_timestamp_seconds": 800,
        "destination_bytes_total": 80,
        "destination_flushes_total": 2,
        "destination_compaction_keys": 42,
        "source_offset_gap_records_total": 11,
        "source_lag_offsets": 95,
        "mirror_restarts_total": 2,
    }
    assert {labels for name, labels in text if "v3" in name} == {("a", "orders", "3")}
    assert text["destination_records_total", flow("a", "e", 3)] == 30
