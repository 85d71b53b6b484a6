"""The broker loads neither a compiler nor the configuration's models to serve clients.

Method: the program runs as its user starts it, and prints the names of its modules when it ends.
Times and sizes are asserted in the bench only, because tests run on busy machines.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from typing import Final

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import KafkaConsumer, TopicPartition

PROGRAM: Final = """
import atexit, json, sys
from logmirror.cli.main import main
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), flush=True))
main()
"""
HEAVY: Final = {
    *("boto3", "botocore", "llvmlite", "numba", "numpy", "pandas", "prometheus_client"),
    *("pyarrow", "pydantic", "pyspark", "rich", "yaml"),
}
TIMEOUT_S: Final = 60


def modules_of(folder, work):
    """Run a broker, work with it, and return the names of the modules that it loaded."""
    arguments = ["broker", "--log-dir", str(folder), "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            work(broker.stdout.readline().split()[-1])
        finally:
            broker.send_signal(signal.SIGTERM)
        loaded = json.loads(broker.stdout.readline())
        assert broker.wait(TIMEOUT_S) == 0
    return loaded


def test_a_broker_that_serves_produce_and_fetch_loads_no_heavy_package(tmp_path):
    for work in (exchange, read):  # a restart checks sealed segments
        loaded = modules_of(tmp_path, work)
        assert "logmirror.broker.handlers.fetch" in loaded
        assert {name.partition(".")[0] for name in loaded} & HEAVY == set()
    assert len(list((tmp_path / "flights" / "0").glob("*.batches"))) > 1


def exchange(address):
    """Produce in each codec, into small segments."""
    admin = AdminClient({"bootstrap.servers": address})
    topic = NewTopic("flights", 1, config={"segment.bytes": "1024"})
    admin.create_topics([topic])["flights"].result(TIMEOUT_S)
    for number, codec in enumerate(("none", "gzip", "lz4", "zstd", "snappy")):
        producer = Producer({"bootstrap.servers": address, "compression.type": codec})
        topic = "unread" if codec == "snappy" else "flights"  # kafka-python does not read it here
        for _ in range(100):
            producer.produce(topic, b"value" * 20, timestamp=1000 + number)
        assert producer.flush(TIMEOUT_S) == 0
    read(address)


def read(address):
    """Read everything, and look up by timestamp."""
    partition = TopicPartition("flights", 0)
    consumer = KafkaConsumer(bootstrap_servers=address, consumer_timeout_ms=TIMEOUT_S * 1000)
    try:
        assert consumer.offsets_for_times({partition: 1003})[partition].offset == 300
        consumer.assign([partition])
        consumer.seek_to_beginning(partition)
        values = [record.value for record in itertools.islice(consumer, 400)]
        assert values == [b"value" * 20] * 400
    finally:
        consumer.close()
