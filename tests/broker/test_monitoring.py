"""The broker's monitoring port: metrics, probes and status while clients work.

Method: the program serves librdkafka; values are compared with what the client did. The cost of a
scrape is CPU time of its thread, with as many partitions as a page may have.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from confluent_kafka import Producer
from kafka import KafkaConsumer, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from kit.judges.partition_client import PartitionClient, data_batch
from kit.judges.quota_requests import alter
from logmirror.broker.monitoring import STALLED_MS, BrokerValues, BrokerViews
from logmirror.broker.traffic import Traffic
from logmirror.errors import UnavailableError
from logmirror.monitoring.broker_metrics import BROKER_CATALOGUE
from logmirror.monitoring.exposition import Exposition
from logmirror.testing import broker

TIMEOUT_S = 20
ROOT = Path(__file__).resolve().parents[2]
SERIES = re.compile(
    r"\b((?:logmirror|process)_[a-z_]+?)(_bucket|_count)?\b(?:\{([^}]*)\})?(?=[\[) -]|$)"
)
FROM_ELSEWHERE = {"process_resident_memory_bytes", "process_cpu_seconds_total"}


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=TIMEOUT_S) as response:
        return response.read().decode()


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_probes_and_status(port, tmp_path):
    options = {"topics": {"orders": 2}, "arguments": [f"--monitoring-port={port}"]}
    with broker(log_dir=tmp_path / "data", **options) as kafka:
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "acks": "all"})
        for _ in range(50):
            producer.produce("orders", b"x" * 100, partition=1)
        assert producer.flush(TIMEOUT_S) == 0
        consumer = KafkaConsumer(bootstrap_servers=kafka.bootstrap_servers)
        partition = TopicPartition("orders", 1)
        consumer.assign([partition])
        consumer.seek_to_beginning(partition)
        assert len(list(itertools.islice(consumer, 50))) == 50
        consumer.seek(partition, 1_000)
        assert consumer.poll(1_000) == {}
        consumer.close()
        with PartitionClient(kafka.bootstrap_servers, "orders") as client:
            alter(client, ([("client-id", "test")], {"producer_byte_rate": 1.0}))
            client.produce(data_batch(1))

        found = samples(get(port, "/metrics"))
        status = json.loads(get(port, "/status.json"))
        assert get(port, "/livez") == get(port, "/readyz") == "ok\n"
        stored = (tmp_path / "data" / "orders" / "1").glob("*.open")
        stored_bytes = sum(path.stat().st_size for path in stored)
        other_bytes = len(data_batch(1))

    prefix = "logmirror_broker_"
    assert found[f"{prefix}throttled_requests_total", "producer_byte_rate"] == 1
    assert found[f"{prefix}records_in_total", "orders"] == 51
    assert found[f"{prefix}bytes_in_total", "orders"] == stored_bytes + other_bytes > 5_000
    assert found[f"{prefix}bytes_out_total", "orders"] >= stored_bytes
    assert found[f"{prefix}log_bytes", "1", "orders"] == stored_bytes
    assert found[f"{prefix}log_bytes", "0", "orders"] == other_bytes
    assert found[f"{prefix}high_watermark", "1", "orders"] == 50
    assert found[f"{prefix}log_end_offset", "1", "orders"] == 50
    assert found[f"{prefix}durable_offset", "1", "orders"] == 50
    assert found[f"{prefix}log_start_offset", "1", "orders"] == 0
    assert found[f"{prefix}topics",] == 1
    assert found[f"{prefix}offline_partitions",] == 0
    assert found[f"{prefix}connections",] >= 1
    assert found["logmirror_ready",] == 1
    assert found[f"{prefix}request_seconds_count", "Produce"] >= 1
    assert found[f"{prefix}request_seconds_bucket", "+Inf", "Fetch"] >= 1
    assert found[f"{prefix}request_errors_total", "Fetch", "OFFSET_OUT_OF_RANGE"] >= 1
    assert status["topics"] == [
        {"name": "orders", "partitions": 2, "offsets": 51, "bytes": stored_bytes + other_bytes}
    ]
    assert status["offline"] == {}


def test_a_port_in_use_is_an_error_with_the_option_to_change():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = [f"--monitoring-port={taken.getsockname()[1]}"]
        refused = pytest.raises(UnavailableError, match="another port with --monitoring-port")
        with refused, broker(arguments=arguments):
            pass


def test_probes_report_a_loop_that_does_not_turn_and_a_broker_that_stops():
    clock = SimpleNamespace(monotonic_ms=lambda: 100_000)
    connections = SimpleNamespace(swept_ms=100_000 - STALLED_MS, is_stopping=False)
    state = SimpleNamespace(failure=None)
    views = BrokerViews(SimpleNamespace(clock=clock, state=state), connections)
    assert views.not_live() == views.not_ready() == []

    state.failure = UnavailableError("the disk is full")
    assert views.not_live() == []
    assert views.not_ready() == [
        "not ready: groups and transactions are not written until a restart: the disk is full"
    ]

    connections.swept_ms -= 1
    connections.is_stopping = True
    assert views.not_live() == ["not live: the event loop has not responded for 10 s"]
    assert views.not_ready() == ["not ready: the broker is stopping"]


def test_errors_of_topics_that_do_not_exist_share_one_series():
    traffic = Traffic()
    refused = SimpleNamespace(error=3)
    traffic.produced([("known", [refused, SimpleNamespace(error=0)])], {"known": None})
    for number in range(100):
        traffic.produced([(f"invented-{number}", [refused])], {"known": None})
    assert dict(traffic.produce_errors) == {("known", 3): 1, ("", 3): 100}


def test_a_scrape_of_1000_partitions_is_cheap():
    log = SimpleNamespace(
        **dict.fromkeys(("appended_bytes", "appended_records", "fetched_bytes"), 12_345),
        **dict.fromkeys(
            ("log_start", "log_end", "high_watermark", "durable", "size_bytes"), 12_345
        ),
        failure=None,
    )
    topics = {f"t{n}": SimpleNamespace(name=f"t{n}", logs=(log,) * 10) for n in range(100)}
    made = SimpleNamespace(
        topics=SimpleNamespace(by_name=topics, moves=None, dirs=SimpleNamespace(offline={})),
        traffic=Traffic(),
        options=SimpleNamespace(archives=()),
        commits=None,
        copies=None,
        state=SimpleNamespace(failure=None),
    )
    connections = SimpleNamespace(open=(), is_stopping=False)
    values, views = BrokerValues(made, connections), BrokerViews(made, connections)
    exposition = Exposition(values, views, catalogue=BROKER_CATALOGUE)
    took_s = []
    for _ in range(5):
        began_s = time.thread_time()
        lines = b"".join(exposition.chunks()).count(b"\n")
        took_s.append(time.thread_time() - began_s)
    assert lines > 4_000
    assert min(took_s) < 0.05  # measured: 0.002; the machine may be busy


def test_the_dashboard_is_generated_and_queries_metrics_and_labels_that_exist():
    spec = importlib.util.spec_from_file_location("w", ROOT / "scripts" / "write_dashboard.py")
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    text = writer.BROKER_FILE.read_text(encoding="utf-8")
    assert text == writer.broker_text(), "run `make schema`"

    names = {metric.name: metric for metric in BROKER_CATALOGUE}
    queries = [t["expr"] for panel in json.loads(text)["panels"] for t in panel["targets"]]
    used = set()
    for query in queries:
        for name, suffix, inside in SERIES.findall(query):
            assert name in names.keys() | FROM_ELSEWHERE, query
            used.add(name)
            if name in names:
                assert set(re.findall(r"(\w+)=", inside)) <= set(names[name].labels), query
                assert (names[name].kind == "histogram") == bool(suffix), query
    assert len(used) >= 15


@pytest.mark.parametrize("metric", BROKER_CATALOGUE, ids=lambda metric: metric.name)
def test_each_metric_is_named_as_prometheus_wants_it_and_explained(metric):
    assert re.fullmatch(r"logmirror(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.meaning.endswith(".")
    assert bool(metric.buckets) == (metric.kind == "histogram")
