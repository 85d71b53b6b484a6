"""Sources and groups of the end-to-end tests.

A run takes seconds, most of them the start of Spark. The tests are therefore divided into groups
that two processes share; each group starts the broker that it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.runs.commands import BrokerCommand
from kit.servers.apache import VERSIONS
from kit.servers.kafka import ApacheKafka
from kit.servers.shared import SharedKafka
from kit.tiers import NIGHTLY

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE = Path(__file__).parent

collect_ignore = [] if NIGHTLY else ["test_installed.py", "test_lost_executors.py"]
"""Minutes: of downloads; and of Spark, which is long in seeing that an executor is gone."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests of one kind of source share the process that has started it."""
    for item in items:
        if _HERE in item.path.parents and hasattr(item, "callspec"):
            version = item.callspec.params.get("source")
            if version:
                name = version.replace(".", "")
                item.add_marker(pytest.mark.xdist_group(f"kafka_{name}"))


@pytest.fixture(scope="session")
def cli_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCommand]:
    """The embedded broker, started by the command line."""
    broker = BrokerCommand(tmp_path_factory.mktemp("embedded"))
    try:
        yield broker.start()
    finally:
        broker.remove()


@pytest.fixture(scope="session")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """A broker of the newest Apache Kafka beside `kafka_431`, for another process's tests."""
    broker = SharedKafka(VERSIONS[-1], tmp_path_factory.mktemp("own-kafka"))
    try:
        yield broker.start()
    finally:
        broker.remove()


@pytest.fixture(scope="session")
def forgetful_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """A broker of the newest Apache Kafka that forgets producers of old records within a second.

    Others do within ten minutes. It is quick to come back after `kill -9`.
    """
    config = {
        "producer.id.expiration.check.interval.ms": 1000,
        "broker.session.timeout.ms": 6000,
        "broker.heartbeat.interval.ms": 500,
    }
    broker = ApacheKafka(VERSIONS[-1], tmp_path_factory.mktemp("forgetful-kafka"), config=config)
    try:
        yield broker.start()
    finally:
        broker.remove()


@pytest.fixture(scope="session", params=[*VERSIONS, BrokerCommand.version])
def source(request: pytest.FixtureRequest) -> ApacheKafka | BrokerCommand:
    """Each kind of source in turn: the test runs once with each."""
    fixtures = {version: "kafka_" + version.replace(".", "") for version in VERSIONS}
    broker = request.getfixturevalue(fixtures.get(request.param, "cli_broker"))
    assert isinstance(broker, (ApacheKafka, BrokerCommand))
    return broker
