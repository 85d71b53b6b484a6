"""Several brokers of a released Apache Kafka and one controller, on loopback, for tests.

Nodes 1, 2, .. are brokers, node 100 is the controller. Each can be stopped, killed and started by
itself; a restart keeps its ports and its data. Topics have a replica on each of three brokers.
"""

from __future__ import annotations

import base64
import secrets
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self

from confluent_kafka.admin import AdminClient, NewTopic

from kit.judges.raw_client import RawClient
from kit.servers.apache import ApacheTools
from kit.servers.machine import HOST, Process, free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from confluent_kafka.admin import PartitionMetadata

CONTROLLER: Final = 100
REPLICAS: Final = 3

_METADATA: Final = 3
_START_TIMEOUT_S: Final = 180
_CONFIG: Final = {
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "offsets.topic.num.partitions": 1,
    "offsets.topic.replication.factor": REPLICAS,
    "transaction.state.log.num.partitions": 3,  # so that each broker coordinates some ids
    "transaction.state.log.replication.factor": REPLICAS,
    "transaction.state.log.min.isr": 2,
    "default.replication.factor": REPLICAS,
    "min.insync.replicas": 2,
    "group.initial.rebalance.delay.ms": 0,
    "auto.create.topics.enable": "false",
    "auto.leader.rebalance.enable": "false",
    "log.retention.ms": -1,
    "log.cleaner.dedupe.buffer.size": 16 << 20,
    # A killed broker is missed, and may come back, after this long.
    "broker.session.timeout.ms": 3000,
    "broker.heartbeat.interval.ms": 500,
}
_CONFIG_4: Final = {
    "share.coordinator.state.topic.replication.factor": REPLICAS,
    "share.coordinator.state.topic.min.isr": 1,
}


class KafkaCluster:
    """A cluster; `start` it, or use it in a `with`.

    Args:
        version: An exact release: `4.3.1`.
        folder: Directory of its data and logs.
        brokers: Number of brokers, at least three.
        config: Properties of all nodes, in addition to the defaults.
        heap: Maximum heap of each node.
    """

    def __init__(
        self,
        version: str,
        folder: Path,
        *,
        brokers: int = 3,
        config: Mapping[str, object] | None = None,
        heap: str = "320m",
    ) -> None:
        self.version = version
        self.folder = folder
        self.tools = ApacheTools(version)
        self.brokers = tuple(range(1, brokers + 1))
        nodes = (*self.brokers, CONTROLLER)
        self._ports = dict(zip(nodes, free_ports(len(nodes)), strict=True))
        self._config = dict(config or {})
        self._heap = heap
        self._processes: dict[int, Process] = {}
        self._formatted = False

    @property
    def bootstrap(self) -> str:
        """Addresses of all brokers, running or not."""
        return ",".join(self.address(node) for node in self.brokers)

    def address(self, node: int) -> str:
        """`host:port` of a node."""
        return f"{HOST}:{self._ports[node]}"

    def pid(self, node: int) -> int:
        """Return the PID of a running node."""
        return self._processes[node].pid

    def start(self) -> Self:
        """Start all nodes that do not run, and wait until every broker is known to the cluster."""
        self._format()
        for node in (CONTROLLER, *self.brokers):
            if node not in self._processes:
                self._launch(node)
        for node in self.brokers:
            self._wait_until_known(node)
        return self

    def start_node(self, node: int) -> None:
        """Start one node, and wait until the others know it."""
        self._launch(node)
        if node != CONTROLLER:
            self._wait_until_known(node)

    def stop_node(self, node: int) -> None:
        """Stop one node cleanly: its partitions get other leaders first."""
        self._processes.pop(node).end()

    def kill_node(self, node: int) -> None:
        """End one node like `kill -9`."""
        self._processes.pop(node).end(kill=True)

    def restart_node(self, node: int, *, kill: bool = False) -> None:
        """Stop or kill a node, and start it again."""
        self._processes.pop(node).end(kill=kill)
        self.start_node(node)

    def pause_node(self, node: int) -> None:
        """Pause its threads (SIGSTOP): connections stay open without responses."""
        self._processes[node].signal(signal.SIGSTOP)

    def resume_node(self, node: int) -> None:
        """Resume it after `pause_node`."""
        self._processes[node].signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop all nodes cleanly, the controller last."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.stop_node, [node for node in self.brokers if self._runs(node)]))
        if self._runs(CONTROLLER):
            self.stop_node(CONTROLLER)

    def remove(self) -> None:
        """Kill all nodes and delete their data; their logs stay."""
        for node in list(self._processes):
            self.kill_node(node)
        for node in self._ports:
            shutil.rmtree(self._folder_of(node) / "data", ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.remove()

    # -- topics ----------------------------------------------------------------------------------

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None
    ) -> str:
        """Create a topic with three replicas and wait until all are in sync."""
        settings = {key: str(value) for key, value in (config or {}).items()}
        topic = NewTopic(
            name, num_partitions=partitions, replication_factor=REPLICAS, config=settings
        )
        self._create(topic)
        self.wait_until_in_sync(name, partitions=partitions)
        return name

    def create_unreplicated(self, name: str) -> str:
        """Create a topic with one partition on each broker: 0 on node 1, 1 on node 2, and so on."""
        placed = [[node] for node in self.brokers]
        config = {"min.insync.replicas": "1"}
        self._create(NewTopic(name, len(placed), replica_assignment=placed, config=config))
        self.wait_until_in_sync(name, partitions=len(placed), replicas=1)
        return name

    def _create(self, topic: NewTopic) -> None:
        admin = self._admin()  # what it was asked is lost when it goes
        admin.create_topics([topic], operation_timeout=30)[topic.topic].result(30)

    def partitions(self, topic: str) -> dict[int, PartitionMetadata]:
        """Leader, replicas and in-sync replicas of each partition, as the cluster reports them."""
        found = self._admin().list_topics(topic, timeout=20).topics[topic]
        return dict(found.partitions)

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the leader of a partition; -1: none."""
        return int(self.partitions(topic)[partition].leader)

    def wait_until_in_sync(
        self, topic: str, *, partitions: int = 1, replicas: int = REPLICAS, timeout_s: float = 90
    ) -> None:
        """Wait until each partition has a leader and that number of in-sync replicas."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.partitions(topic)
            if len(found) >= partitions and all(
                one.leader >= 0 and len(one.isrs) >= replicas for one in found.values()
            ):
                return
            if time.monotonic() > deadline:
                state = {number: (one.leader, one.isrs) for number, one in found.items()}
                message = f"{topic} is not in sync after {timeout_s} s: {state}"
                raise TimeoutError(message)
            time.sleep(0.1)

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap})

    # -- nodes -----------------------------------------------------------------------------------

    def _folder_of(self, node: int) -> Path:
        return self.folder / f"node-{node}"

    def _runs(self, node: int) -> bool:
        return node in self._processes and self._processes[node].alive

    def _launch(self, node: int) -> None:
        command = self.tools.java_command(
            "kafka.Kafka",
            str(self._folder_of(node) / "server.properties"),
            heap=self._heap,
            jvm=("-XX:TieredStopAtLevel=1",),
            log_level="INFO",
        )
        self._processes[node] = Process(command, log=self._folder_of(node) / "server.log")

    def _format(self) -> None:
        if self._formatted:
            return
        # A leading "-" would be an option to the tool.
        cluster_id = "L" + base64.urlsafe_b64encode(secrets.token_bytes(16)).decode()[1:22]

        def format_node(node: int) -> None:
            folder = self._folder_of(node)
            folder.mkdir(parents=True, exist_ok=True)
            lines = [f"{key}={value}\n" for key, value in self._properties(node).items()]
            (folder / "server.properties").write_text("".join(lines))
            arguments = ("-t", cluster_id, "-c", str(folder / "server.properties"))
            self.tools.run("kafka-storage", "format", *arguments)

        with ThreadPoolExecutor() as pool:
            list(pool.map(format_node, self._ports))
        self._formatted = True

    def _properties(self, node: int) -> dict[str, object]:
        is_broker = node != CONTROLLER
        listener = "PLAINTEXT" if is_broker else "CONTROLLER"
        return {
            **_CONFIG,
            **(_CONFIG_4 if self.tools.major >= 4 else {}),
            **({"inter.broker.listener.name": "PLAINTEXT"} if is_broker else {}),
            "process.roles": "broker" if is_broker else "controller",
            "node.id": node,
            "controller.quorum.voters": f"{CONTROLLER}@{self.address(CONTROLLER)}",
            "listeners": f"{listener}://{self.address(node)}",
            "log.dirs": self._folder_of(node) / "data",
            **self._config,
        }

    def _wait_until_known(self, node: int) -> None:
        """Wait until every running broker lists this one."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            running = [broker for broker in self.brokers if self._runs(broker)]
            if self._runs(node) and all(node in self._known_to(broker) for broker in running):
                return
            if not self._runs(node) or time.monotonic() > deadline:
                message = f"node {node} did not start:\n{self._processes[node].tail()}"
                raise RuntimeError(message)
            time.sleep(0.1)

    def _known_to(self, broker: int) -> set[int]:
        """Return the brokers that one of them lists; none while it does not respond."""
        try:
            with RawClient(self._ports[broker], timeout_s=5) as client:
                return {int(one.node_id) for one in client.ask(_METADATA, 1, topics=()).brokers}
        except (OSError, EOFError):
            return set()
