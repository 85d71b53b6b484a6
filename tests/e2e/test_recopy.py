"""docs/recopy-a-partition.md: its commands replace a damaged replica, as they stand.

Apache Kafka at both ends, with its own console tools. Partition 0 is damaged as a broker does it: a
transaction marker is written twice. Consumers continue where they were.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as Position

from kit.judges.clients import produce, rows_by_librdkafka
from kit.judges.copies import anomalies
from kit.judges.gaps import Writer, log_bounds, plain_messages
from kit.judges.partition_client import PartitionClient
from kit.runs.commands import QUIET
from kit.runs.inline_run import python_path
from logmirror.clock import SYSTEM_CLOCK

pytestmark = [pytest.mark.xdist_group("e2e-recopy"), pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs/recopy-a-partition.md"
BLOCK = re.compile(r"```(sh|yaml)\n(.*?)```", re.DOTALL)
TOOLS = ("kafka-topics", "kafka-consumer-groups")
PARTITIONS = range(3)
COMMITTED = {0: 4, 1: 7, 2: 2}


class Page:
    """Runs blocks of the page in a folder."""

    def __init__(self, folder, source, destination, topic):
        self._folder = folder
        self._names = {
            "kafka-a.example.com:9092": source.bootstrap,
            "kafka-b.example.com:9092": destination.bootstrap,
            "orders": topic,
        }
        programs = folder / "bin"
        programs.mkdir()
        for name in TOOLS:
            self._program(name, shlex.join(destination.tools.command(name)) + ' "$@"')
        python = shlex.quote(sys.executable)
        self._program("logmirror", f'exec {python} -m kit.runs.inline_run "$@"')

    def _program(self, name, command):
        path = self._folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)

    def blocks(self, section):
        """The YAML and the commands of a section, with this test's addresses and topic."""
        text = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
        for name, actual in self._names.items():
            text = text.replace(name, actual)
        return BLOCK.findall(text)

    def save(self, name, text):
        (self._folder / name).write_text(text)

    def run(self, script, *, code=0):
        done = subprocess.run(
            ["bash", "-ec", script],
            cwd=self._folder,
            env={
                **os.environ,
                **QUIET,
                "PYTHONPATH": python_path(),
                "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def page(kafka_392, kafka_431, topic_name, tmp_path):
    """The page's situation: a replica of three partitions, of which 0 is damaged."""
    source, destination = kafka_392, kafka_431
    source.create_topic(topic_name, partitions=len(PARTITIONS))
    page = Page(tmp_path, source, destination, topic_name)
    ((_, config),) = [b for b in page.blocks("Keep the other partitions running") if b[0] == "yaml"]
    page.save("standby.yaml", config.replace("[1, 2]", "all"))
    write(source, topic_name, seed=1)
    page.run("logmirror run -c standby.yaml --until-now")
    commit(destination, topic_name)
    with PartitionClient(destination.bootstrap, topic_name) as raw:  # the broker's second marker
        assert raw.write_markers((4711, 0)) == {4711: 0}
    write(source, topic_name, seed=2)
    assert "reason=HoleTooLong" in page.run("logmirror run -c standby.yaml --until-now", code=69)
    return page


def write(broker, topic, *, seed):
    messages = plain_messages(30, seed=seed, start_ms=SYSTEM_CLOCK.now_ms())
    Writer(broker.bootstrap, topic, transactional_id=topic).transaction(messages[:10], commit=True)
    for partition in PARTITIONS[1:]:
        produce(broker.bootstrap, topic, messages[10 * partition :][:10], partition=partition)


def commit(broker, topic):
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "billing"})
    positions = [Position(topic, number, offset) for number, offset in COMMITTED.items()]
    consumer.commit(offsets=positions, asynchronous=False)
    consumer.close()


def committed(broker, topic):
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "billing"})
    found = consumer.committed([Position(topic, number) for number in PARTITIONS], timeout=30)
    consumer.close()
    return {position.partition: position.offset for position in found}


def ends(broker, topic):
    return [log_bounds(broker.bootstrap, topic, number)[1] for number in PARTITIONS]


def test_the_other_partitions_continue(page, kafka_392, kafka_431, topic_name):
    (_, config), (_, commands) = page.blocks("Keep the other partitions running")
    page.save("others.yaml", config)

    page.run(commands)

    assert ends(kafka_431, topic_name)[1:] == ends(kafka_392, topic_name)[1:]
    found = anomalies(kafka_392.bootstrap, topic_name, kafka_431.bootstrap, partitions=[1, 2])
    assert found == []


@pytest.mark.gate("a page by copy and paste, with many starts of Java")
def test_a_copy_under_the_same_name(page, kafka_392, kafka_431, topic_name):
    ((_, commands),) = page.blocks("Under the same name")

    page.run(commands)

    assert ends(kafka_431, topic_name) == ends(kafka_392, topic_name)
    assert not anomalies(
        kafka_392.bootstrap, topic_name, kafka_431.bootstrap, partitions=PARTITIONS
    )
    assert committed(kafka_431, topic_name) == COMMITTED


@pytest.mark.gate("a page by copy and paste, with many starts of Java")
def test_a_copy_under_another_name(page, kafka_392, kafka_431, topic_name):
    (_, config), (_, copy), (_, move), (_, delete) = page.blocks("Under another name")
    page.save("recopy.yaml", config)

    page.run(copy)

    assert ends(kafka_431, f"{topic_name}-2") == ends(kafka_392, topic_name)
    assert not anomalies(
        kafka_392.bootstrap,
        topic_name,
        kafka_431.bootstrap,
        f"{topic_name}-2",
        partitions=PARTITIONS,
    )
    page.run(move)
    assert committed(kafka_431, f"{topic_name}-2") == COMMITTED
    ((_, back),) = page.blocks("Consumers that have read wrong offsets")
    page.run(back.replace("18240", "3"))
    assert committed(kafka_431, f"{topic_name}-2") == {**COMMITTED, 0: 3}
    page.run(delete)
    assert list(rows_by_librdkafka(kafka_431.bootstrap, f"{topic_name}-2"))
