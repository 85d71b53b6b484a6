"""`logmirror broker --demo-data flights`: a newcomer has records after one command.

Method: the command runs twice on one directory. The second run must leave the topic as it is.
"""

from __future__ import annotations

import importlib.util
import json
import time

import pytest
from kafka import KafkaConsumer, TopicPartition

from logmirror.demo import fill
from logmirror.errors import UsageError
from logmirror.testing import broker

FLIGHTS = 336_776
TIMEOUT_S = 120
PARTITION = TopicPartition("flights", 0)


def said(kafka, text):
    deadline = time.monotonic() + TIMEOUT_S
    while f"demo data: {text}\n" not in kafka.log():
        assert time.monotonic() < deadline, kafka.log()
        time.sleep(0.1)


def test_the_topic_is_filled_once(tmp_path):
    arguments = ["--demo-data", "flights"]
    with broker(log_dir=tmp_path, arguments=arguments) as kafka:
        said(kafka, f"{FLIGHTS} records in topic flights")
        consumer = KafkaConsumer(bootstrap_servers=kafka.bootstrap_servers)
        assert consumer.end_offsets([PARTITION]) == {PARTITION: FLIGHTS}
        consumer.close()
    with broker(log_dir=tmp_path, arguments=arguments) as kafka:
        said(kafka, f"topic flights has {FLIGHTS} records already; none was added")
        consumer = KafkaConsumer(bootstrap_servers=kafka.bootstrap_servers)
        assert consumer.end_offsets([PARTITION]) == {PARTITION: FLIGHTS}
        consumer.assign([PARTITION])
        consumer.seek(PARTITION, FLIGHTS - 1)
        assert json.loads(next(consumer).value)["year"] == 2013
        consumer.close()


def test_a_missing_package_is_an_error_before_the_broker_starts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="packages of the demo are missing"):
        fill.check_installed()
