"""Apache Kafka's Connect in distributed mode: a worker whose cluster is the broker under test.

with ConnectWorker(tools, bootstrap, folder) as worker:
    worker.put("name", {"connector.class": ...})     until all its tasks run
    worker.kill(); worker.start()                    like `kill -9`
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Self

from kit.runs.commands import wait_until
from kit.servers.machine import HOST, Process, free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kit.servers.apache import ApacheTools

_BYTES: Final = "org.apache.kafka.connect.converters.ByteArrayConverter"
_STORES: Final = ("config", "offset", "status")
_REQUEST_S: Final = 30


class ConnectWorker:
    """A worker; use it in a `with`.

    Args:
        tools: A release that includes Connect.
        bootstrap: Bootstrap servers of its cluster, which keeps its configuration and offsets.
        folder: Directory of its properties and its log.
    """

    def __init__(self, tools: ApacheTools, bootstrap: str, folder: Path) -> None:
        self.log = folder / "connect.log"
        self._tools, self._file = tools, folder / "worker.properties"
        (port,) = free_ports(1)
        self._url = f"http://{HOST}:{port}"
        topics = {f"{name}.storage.topic": f"connect-{name}" for name in _STORES}
        properties = {
            "bootstrap.servers": bootstrap,
            "group.id": "connect",
            "key.converter": _BYTES,
            "value.converter": _BYTES,
            "listeners": self._url,
            "exactly.once.source.support": "enabled",
            "connector.client.config.override.policy": "All",
            "offset.flush.interval.ms": "500",
            "session.timeout.ms": "6000",
            "heartbeat.interval.ms": "1000",
            "scheduled.rebalance.max.delay.ms": "0",
            **topics,
            **{f"{name}.storage.replication.factor": "1" for name in _STORES},
        }
        folder.mkdir(parents=True, exist_ok=True)
        self._file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        self._process: Process | None = None

    def start(self) -> None:
        """Start it, and wait until it has joined its group."""
        command = self._tools.java_command(
            "org.apache.kafka.connect.cli.ConnectDistributed",
            str(self._file),
            heap="512m",
            jvm=("-XX:TieredStopAtLevel=1",),
            log_level="WARN",
        )
        self._process = process = Process(command, log=self.log)
        wait_until(
            lambda: self._get("/connectors") is not None or not process.alive, what=process.tail
        )
        assert process.alive, process.tail()

    def put(self, name: str, config: Mapping[str, str]) -> None:
        """Create a connector, and wait until it and its tasks run."""
        data = json.dumps({"name": name, **config}).encode()

        def accepted() -> bool:  # 409 while the worker is not in its group
            return self._ask(f"/connectors/{name}/config", data) is not None

        wait_until(accepted, what=lambda: self.log.read_text()[-4000:])
        self.wait_until_running(name)

    def wait_until_running(self, name: str) -> None:
        """Wait until a connector and its tasks run; fails at once if one of them failed."""

        def is_running() -> bool:
            status = self._get(f"/connectors/{name}/status")
            parts = [status["connector"], *status["tasks"]] if status else []
            assert all(part["state"] != "FAILED" for part in parts), status
            return len(parts) > 1 and all(part["state"] == "RUNNING" for part in parts)

        wait_until(is_running, what=lambda: f"{name}: {self._get(f'/connectors/{name}/status')}")

    def _get(self, path: str) -> Any:
        return self._ask(path, None)

    def _ask(self, path: str, data: bytes | None) -> Any:
        """Return the parsed response; None if there is none, or if it may be asked again."""
        method = "GET" if data is None else "PUT"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(  # the worker's own address
            self._url + path, data, headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:  # as above
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.BAD_REQUEST:
                raise AssertionError(error.read().decode()) from error
            return None
        except OSError:
            return None

    def kill(self) -> None:
        """End it like `kill -9`."""
        assert self._process is not None
        self._process.end(kill=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.end(kill=True)
