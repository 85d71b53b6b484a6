"""One Apache Kafka broker of a released version, on loopback, for tests.

A node is both broker and controller (KRaft), with its own directory and ports. The first listener
is always plain text, and is the address in `bootstrap`; others are optional.
"""

from __future__ import annotations

import base64
import functools
import secrets
import shutil
import signal
import socket
import struct
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from kit.servers.apache import ApacheTools
from kit.servers.class_archives import make_once
from kit.servers.machine import HOST, Process, free_ports

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable, Mapping

_START_TIMEOUT_S: Final = 180
_QUICK: Final = ("-XX:TieredStopAtLevel=1",)
_TO_ARCHIVE: Final = "-XX:ArchiveClassesAtExit="
_PORTS_TAKEN: Final = "Address already in use"

# Small and quick: no wait before a group's first assignment. Compaction looks every 3 seconds: one
# that looks each second takes a sixth of the CPU time of an idle broker.
_CONFIG: Final = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 1,
    "group.initial.rebalance.delay.ms": 0,
    "auto.create.topics.enable": "false",
    "log.retention.ms": -1,  # records of the past are deleted within minutes otherwise
    "log.cleaner.backoff.ms": 3000,
    "metadata.max.idle.interval.ms": 0,  # a record each half second costs as much as all else
    "log.cleaner.dedupe.buffer.size": 16 << 20,
}
_CONFIG_4: Final = {
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
}


@dataclass(frozen=True, kw_only=True)
class Listener:
    """An additional listener of a broker.

    Attributes:
        name: As in Kafka's `listeners`: `SECURE`.
        protocol: `PLAINTEXT`, `SSL`, `SASL_PLAINTEXT` or `SASL_SSL`.
        advertised: `host:port` for clients, for example that of a proxy; its own by default.
        config: Its properties, without the prefix `listener.name.<name>.`.
    """

    name: str
    protocol: str
    advertised: str = ""
    config: Mapping[str, object] = field(default_factory=dict)


class ApacheKafka:
    """A broker; `start` it, or use it in a `with`.

    Args:
        version: An exact release: `3.9.2`.
        folder: Directory of its data and logs.
        config: Broker properties in addition to the defaults. After a kill, the controller refuses
            a broker until `broker.session.timeout.ms` (9 s) is over: tests that kill lower it.
        listeners: Listeners in addition to the plain one.
        scram_users: `(user, password)` pairs of every SCRAM mechanism, created at the first start.
        jvm: JVM options. The default favours a quick start over fast code.
        heap: Maximum heap.
    """

    def __init__(  # noqa: PLR0913  # a broker has that many properties, each with a default
        self,
        version: str,
        folder: Path,
        *,
        config: Mapping[str, object] | None = None,
        listeners: Iterable[Listener] = (),
        scram_users: Iterable[tuple[str, str]] = (),
        jvm: tuple[str, ...] = _QUICK,
        heap: str = "512m",
    ) -> None:
        self.version = version
        self.folder = folder
        self.tools = ApacheTools(version)
        self.log = folder / "server.log"
        self._config = dict(config or {})
        self._listeners = tuple(listeners)
        self._scram_users = tuple(scram_users)
        self._jvm = jvm
        self._heap = heap
        self._ports: dict[str, int] = {}
        self._process: Process | None = None
        self._formatted = False
        self._was_ready = False

    @property
    def bootstrap(self) -> str:
        """`host:port` of the plain listener."""
        return self.address("PLAINTEXT")

    def address(self, listener: str) -> str:
        """`host:port` of a listener."""
        return f"{HOST}:{self._ports[listener]}"

    @property
    def pid(self) -> int:
        """PID of the running broker."""
        return self._running().pid

    def start(self) -> Self:
        """Start it and wait until it responds; a restart keeps ports and data."""
        if not any(option.startswith(_TO_ARCHIVE) for option in self._jvm):
            make_once(self.tools.class_archive, functools.partial(_archive_classes, self.version))
        for attempt in range(4):
            if not self._ports:
                self._choose_ports()
            self._write_config()
            self._format()
            log_size = self.log.stat().st_size if self.log.exists() else 0
            command = self.tools.java_command(
                "kafka.Kafka",
                str(self._config_file),
                heap=self._heap,
                jvm=self._jvm,
                log_level="INFO",
            )
            self._process = Process(command, log=self.log)
            if self._wait_until_ready():
                return self
            self._process.end(kill=True)
            self._process = None
            said = self.log.read_bytes()[log_size:].decode(errors="replace")
            if _PORTS_TAKEN not in said or attempt == 3:
                message = f"Apache Kafka {self.version} did not start:\n{said[-4000:]}"
                raise RuntimeError(message)
            if not self._was_ready:
                self._ports = {}  # no client uses them yet
        raise AssertionError

    def stop(self) -> None:
        """Stop it cleanly; ignored if it is not running."""
        self._end(kill=False)

    def kill(self) -> None:
        """End it like `kill -9`."""
        self._end(kill=True)

    def restart(self, *, kill: bool = False) -> None:
        """Stop it, or kill it, and start it again."""
        self._end(kill=kill)
        self.start()

    def pause(self) -> None:
        """Pause its threads (SIGSTOP): connections stay open without responses."""
        self._running().signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it after `pause`."""
        self._running().signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def remove(self) -> None:
        """Kill it and delete its data; its log stays for the analysis of failed tests."""
        self.kill()
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def tool(
        self, name: str, *arguments: str, stdin: str = "", timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a console tool of the same release. See `ApacheTools.run`."""
        return self.tools.run(name, *arguments, stdin=stdin, timeout_s=timeout_s, check=check)

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None
    ) -> str:
        """Create a topic and wait until each partition has a leader that responds."""
        settings = {key: str(value) for key, value in (config or {}).items()}
        create_topic(self.bootstrap, name, partitions, settings)
        return name

    def delete_topic(self, name: str) -> None:
        """Delete a topic and wait until the broker no longer lists it."""
        delete_topic(self.bootstrap, name)

    @property
    def _config_file(self) -> Path:
        return self.folder / "server.properties"

    def _running(self) -> Process:
        assert self._process is not None, "the broker is not running"
        return self._process

    def _choose_ports(self) -> None:
        names = ["PLAINTEXT", "CONTROLLER", *(listener.name for listener in self._listeners)]
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))

    def _write_config(self) -> None:
        protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
        config: dict[str, object] = {**_CONFIG, **(_CONFIG_4 if self.tools.major >= 4 else {})}
        for listener in self._listeners:
            protocols[listener.name] = listener.protocol
            prefix = f"listener.name.{listener.name.lower()}."
            config |= {prefix + key: value for key, value in listener.config.items()}
        config |= {
            "log.dirs": self.folder / "data",
            "controller.quorum.voters": f"1@{self.address('CONTROLLER')}",
            "listeners": ",".join(f"{name}://{self.address(name)}" for name in self._ports),
            "listener.security.protocol.map": ",".join(f"{n}:{p}" for n, p in protocols.items()),
        }
        advertised = {listener.name: listener.advertised for listener in self._listeners}
        if any(advertised.values()):
            names = [name for name in self._ports if name != "CONTROLLER"]
            config["advertised.listeners"] = ",".join(
                f"{name}://{advertised.get(name) or self.address(name)}" for name in names
            )
        config |= self._config
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{key}={value}\n" for key, value in config.items())
        self._config_file.write_text(text.replace("\\", "\\\\"))

    def _format(self) -> None:
        if self._formatted:
            return
        cluster_id = "L" + base64.urlsafe_b64encode(secrets.token_bytes(16)).decode()[1:22]
        users = [
            f"--add-scram={mechanism}=[name={user},password={password}]"
            for user, password in self._scram_users
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
        ]
        self.tool("kafka-storage", "format", "-t", cluster_id, "-c", str(self._config_file), *users)
        self._formatted = True

    def _wait_until_ready(self) -> bool:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self._running().alive:
            if _lists_itself(self._ports["PLAINTEXT"]):
                self._was_ready = True
                _wait_for_coordinator(self.bootstrap, deadline)
                return True
            time.sleep(0.1)
        return False

    def _end(self, *, kill: bool) -> None:
        if self._process is not None:
            self._process.end(kill=kill)
            self._process = None


def _archive_classes(version: str, path: Path) -> None:
    """Start a broker that dumps the list of its loaded classes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ApacheKafka(version, Path(folder), jvm=(*_QUICK, f"{_TO_ARCHIVE}{path}")) as broker,
    ):
        create_topic(broker.bootstrap, "any", 1, {})


def create_topic(bootstrap: str, name: str, partitions: int, config: Mapping[str, str]) -> None:
    """Create a topic on any broker and wait until each partition has a leader that responds."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config))
    admin.create_topics([topic], operation_timeout=30)[name].result(30)
    deadline = time.monotonic() + 30
    while True:
        try:
            _latest_offsets(admin, name, partitions)
        except Exception:
            # Metadata names a leader before the leader knows it is one.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def delete_topic(bootstrap: str, name: str) -> None:
    """Delete a topic on any broker and wait until it is no longer listed."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([name], operation_timeout=30)[name].result(30)
    deadline = time.monotonic() + 30
    while name in admin.list_topics(timeout=10).topics:
        if time.monotonic() > deadline:
            message = f"topic {name} is still listed 30 s after it was deleted"
            raise TimeoutError(message)
        time.sleep(0.05)


def _wait_for_coordinator(bootstrap: str, deadline: float) -> None:
    """Wait until the broker has loaded its groups: librdkafka retries no commit before that."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "none", "log_level": 0})
    try:
        while True:
            try:
                consumer.committed([TopicPartition("none", 0)], timeout=5)
            except KafkaException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return
    finally:
        consumer.close()


def _latest_offsets(admin: AdminClient, topic: str, partitions: int) -> None:
    asked = {TopicPartition(topic, number): OffsetSpec.latest() for number in range(partitions)}
    for future in admin.list_offsets(asked, request_timeout=10).values():
        future.result(10)


def _lists_itself(port: int) -> bool:
    """Whether the broker lists a broker in Metadata v1: it is registered and unfenced."""
    request = struct.pack(
        ">hhihi", 3, 1, 1, -1, 0
    )  # key, version, correlation, no client, no topics
    try:
        with socket.create_connection((HOST, port), 2) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as response:
                (size,) = struct.unpack(">i", response.read(4))
                body = response.read(size)
    except (OSError, struct.error):
        return False
    (brokers,) = struct.unpack_from(">i", body, 4)
    return bool(brokers > 0)
