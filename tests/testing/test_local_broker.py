"""`logmirror.testing.broker`: starts, stops, crashes and failures of a broker for tests."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from confluent_kafka.admin import AdminClient

from logmirror.errors import UnavailableError
from logmirror.testing import broker

TIMEOUT_S = 10
KILLED = """
import os, signal
from logmirror.testing import broker
with broker() as kafka:
    print(kafka.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def partitions_of(kafka) -> dict[str, int]:
    found = AdminClient({"bootstrap.servers": kafka.bootstrap_servers}).list_topics(
        timeout=TIMEOUT_S
    )
    return {name: len(topic.partitions) for name, topic in found.topics.items()}


def test_topics_exist_when_the_block_begins_and_nothing_is_left_behind():
    with broker(topics={"orders": 3, "payments": 1}) as kafka:
        assert partitions_of(kafka) == {"orders": 3, "payments": 1}
        process = psutil.Process(kafka.pid)
        folder = kafka.log_dir
        assert folder.is_dir()

    assert not process.is_running()
    assert not folder.exists()
    assert kafka.pid is None


def test_a_folder_of_the_callers_is_kept_with_its_topics(tmp_path):
    with broker(topics=["orders"], partitions=2, log_dir=tmp_path / "data"):
        pass
    with broker(topics=["orders"], partitions=5, log_dir=tmp_path / "data") as kafka:
        assert partitions_of(kafka) == {"orders": 2}


def test_the_port_stays_after_a_crash():
    with broker(topics=["orders"]) as kafka:
        address = kafka.bootstrap_servers
        kafka.kill()
        assert kafka.pid is None
        kafka.restart()
        assert kafka.bootstrap_servers == address
        assert partitions_of(kafka) == {"orders": 1}


def test_a_broker_that_cannot_start_reports_its_log(tmp_path):
    second = broker(log_dir=tmp_path)
    with (
        broker(log_dir=tmp_path),
        pytest.raises(UnavailableError, match="in use by another"),
        second,
    ):
        pass


def test_a_topic_that_is_not_allowed_is_refused():
    kafka = broker(topics=["no spaces"])
    with pytest.raises(UnavailableError, match="topic cannot be created"), kafka:
        pass
    assert kafka.pid is None


def test_the_log_is_printed_if_the_block_fails(capfd):
    with pytest.raises(ZeroDivisionError), broker(auto_create=False):
        raise ZeroDivisionError
    assert "INFO listening on 127.0.0.1:" in capfd.readouterr().err


def test_a_broker_ends_with_a_process_that_is_killed():
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        process = psutil.Process(int(program.stdout.readline()))
        process.wait(TIMEOUT_S)
    assert not process.is_running()
