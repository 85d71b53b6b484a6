"""docs/fail-over.md: groups that are moved by the page's commands read each record once.

On two embedded brokers, and on Apache Kafka with its own tools. `logmirror run` does without Spark
except at night (`make nightly`).
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from confluent_kafka.admin import AdminClient

from kit.runs.page import Reader, blocks, commands
from kit.servers.kafka import delete_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers.kafka import ApacheKafka

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs" / "fail-over.md").read_text("utf-8")
EMBEDDED: Final = ("127.0.0.1:9092", "127.0.0.1:9093")
APACHE: Final = ("kafka-a:9092", "kafka-b:9092")


def section(title: str) -> str:
    """Return a section of the page."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def numbers(first: int, last: int) -> list[str]:
    return [str(number) for number in range(first, last + 1)]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path, *EMBEDDED, with_spark=False)
    yield made
    made.end()


@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_the_groups_of_the_page_read_every_record_once(reader):
    (configuration,) = blocks(section("Try it"), "yaml")
    reader.write("mirror.yaml", configuration)
    rest = deque(commands(section("Try it")))
    for _ in range(2):
        reader.leave_running(rest.popleft(), until=lambda output: "listening on " in output)
    printed = {command: reader.type(command) for command in rest}

    for group, count in (("billing", 40), ("shipping", 70)):
        before, after = (text for command, text in printed.items() if f"-G {group}" in command)
        assert before.split() == numbers(1, count)
        assert after.split() == numbers(count + 1, 100)
    planned, applied = (text for command, text in printed.items() if " groups " in command)
    step = ["shipping", "standby", "orders", "0", "70"]
    assert planned.splitlines()[1].split()[:7] == [*step, "70", "-"]
    assert applied.splitlines()[1].split() == [*step, "ok"]

    (back,) = blocks(section("Fail back"), "yaml")
    reader.write("back.yaml", back)
    printed = [reader.type(command) for command in commands(section("Fail back"))]
    assert printed[1].split() == numbers(101, 120)
    assert printed[3].splitlines()[1].split()[-1] == "ok"
    assert printed[4].split() == numbers(121, 150)


def forget_group(server: str) -> None:
    """Delete the group of the page, if there is one."""
    admin = AdminClient({"bootstrap.servers": server})
    listed = admin.list_consumer_groups(request_timeout=30).result(30).valid
    if "billing" in {group.group_id for group in listed}:
        (deleted,) = admin.delete_consumer_groups(["billing"]).values()
        deleted.result(30)


@pytest.fixture
def on_kafka(kafka_392: ApacheKafka, kafka_431: ApacheKafka, tmp_path: Path) -> Iterator[Reader]:
    """The clusters of the page, without what it has written there afterwards."""
    servers = kafka_392.bootstrap, kafka_431.bootstrap
    for server in servers:
        forget_group(server)  # other pages have a group of this name
    made = Reader(tmp_path, with_spark=False, servers=dict(zip(APACHE, servers, strict=True)))
    made.use(kafka_431.tools)
    yield made
    for server in servers:
        # First the group: with its topic, the coordinator forgets its offsets, and may delete it.
        forget_group(server)
        admin = AdminClient({"bootstrap.servers": server})
        for topic in {"orders", "primary.checkpoints.internal"} & set(admin.list_topics().topics):
            delete_topic(server, topic)


@pytest.mark.gate("a page by copy and paste; the README runs in `make test`")
@pytest.mark.timeout(600)
def test_a_group_fails_over_between_clusters_of_apache_kafka(on_kafka):
    text = section("On Apache Kafka")
    (configuration,) = blocks(text, "yaml")
    on_kafka.write("standby.yaml", configuration)

    printed = [on_kafka.type(command) for command in commands(text)]

    assert printed[2].split() == numbers(1, 40)
    assert printed[5].split() == numbers(41, 100)
    [row] = [line.split() for line in printed[4].splitlines() if line.startswith("billing ")]
    assert row[1:6] == ["orders", "0", "40", "100", "60"]
