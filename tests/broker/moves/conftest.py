"""A broker with two log directories, `a` and `b`, in which every partition begins in `a`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from kit.judges.log_dirs_client import LogDirsClient
from kit.judges.partition_client import PartitionClient
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.broker.dynamic_configs import MOVE_RATE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from broker.moves.both_brokers import Side


class TwoDirs(NamedTuple):
    """The broker and its directories."""

    broker: EmbeddedBroker
    a: Path
    b: Path

    @property
    def bootstrap(self) -> str:
        """`host:port`."""
        return self.broker.bootstrap

    def create(self, topic: str, partitions: int = 1, **configs: str) -> None:
        """Create a topic whose partitions are all in `a`."""
        with LogDirsClient(self.bootstrap) as client:
            codes = client.move({self.a: {topic: tuple(range(partitions))}})
            assert set(codes.values()) == {3}
        configs = {name.replace("_", "."): value for name, value in configs.items()}
        create_topic(self.bootstrap, topic, partitions, configs)

    def client(self) -> LogDirsClient:
        """Return a client for log directories."""
        return LogDirsClient(self.bootstrap)

    def partition(self, topic: str) -> PartitionClient:
        """Return a client for partition 0."""
        return PartitionClient(self.bootstrap, topic)

    def limit(self, rate: int | None) -> None:
        """Set the limit of moves in bytes per second, or delete it."""
        kind = AlterConfigOpType.DELETE if rate is None else AlterConfigOpType.SET
        entry = ConfigEntry(MOVE_RATE, str(rate), incremental_operation=kind)
        resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.incremental_alter_configs([resource])[resource].result(20)

    def move(self, topic: str, target: Path, partition: int = 0) -> None:
        """Move a partition, and wait until it is there."""
        with self.client() as client:
            assert client.move_one(topic, target, partition) == 0
            self.wait_in(topic, target, partition)

    def wait_in(self, topic: str, target: Path, partition: int = 0) -> None:
        """Wait until a partition is in a directory, and no move of it is in progress."""
        with self.client() as client:
            wait_until(
                lambda: [*client.where(topic, partition)] == [str(target)],
                what=lambda: f"{topic} in {target}: {client.where(topic, partition)}",
                timeout_s=60,
            )

    def names(self, topic: str) -> list[str]:
        """Every folder of a topic's partitions, as `a/0`."""
        return sorted(
            f"{path.parent.parent.name}/{path.name}"
            for place in (self.a, self.b)
            for path in place.glob(f"{topic}/*")
        )

    def wait_clean(self, topic: str, *names: str) -> None:
        """Wait until a topic has these folders only."""
        wait_until(
            lambda: self.names(topic) == list(names), what=lambda: f"folders: {self.names(topic)}"
        )


@pytest.fixture
def dirs(tmp_path: Path) -> Iterator[TwoDirs]:
    with EmbeddedBroker(
        tmp_path / "broker", more_log_dirs=[str(tmp_path / "b")], segment_bytes=20_000
    ) as broker:
        yield TwoDirs(broker, broker.log_dir, tmp_path / "b")


@pytest.fixture(scope="package")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Side]]:
    """The embedded broker and Apache Kafka in each version; tests share them."""
    from broker.moves.both_brokers import both_brokers  # noqa: PLC0415  # it imports this module

    with both_brokers(tmp_path_factory.mktemp("both")) as found:
        yield found
