"""A network with faults: Toxiproxy, a proxy between client and broker.

It is built once with Go's tools and kept outside the repository, beside the brokers' jars. A broker
behind it must advertise the proxy's address (`kit.servers.kafka.Listener.advertised`), otherwise
clients bypass it.

    with Toxiproxy(folder) as toxiproxy:
        link = toxiproxy.link("to-the-copy", listen=port, upstream=broker.address("PROXIED"))
        with link.spoiled("latency", latency=300, jitter=100): ...
        with link.down(): ...

Toxics and their attributes: https://github.com/Shopify/toxiproxy#toxics
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.request import Request, urlopen

from kit.servers.go import go_program
from kit.servers.machine import HOST, Process, free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_START_TIMEOUT_S: Final = 180


class Link:
    """A proxied connection from a loopback address to a server, with faults in both directions."""

    def __init__(self, proxy: Toxiproxy, name: str, port: int) -> None:
        self._proxy, self._name = proxy, name
        self.address = f"{HOST}:{port}"

    @contextlib.contextmanager
    def spoiled(self, toxic: str, *, stream: str = "", **attributes: int) -> Iterator[None]:
        """Inject a fault while the block runs.

        Args:
            toxic: Type of the fault.
            stream: `upstream` (requests) or `downstream` (responses); empty: both.
            attributes: Attributes of the fault.
        """
        names = []
        for direction in (stream,) if stream else ("upstream", "downstream"):
            name = f"{toxic}-{direction}"
            body = {"name": name, "type": toxic, "stream": direction, "attributes": attributes}
            self._proxy.ask("POST", f"/proxies/{self._name}/toxics", body)
            names.append(name)
        try:
            yield
        finally:
            for name in names:
                self._proxy.ask("DELETE", f"/proxies/{self._name}/toxics/{name}")

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Close all connections, and refuse new ones while the block runs."""
        self._proxy.ask("POST", f"/proxies/{self._name}", {"enabled": False})
        try:
            yield
        finally:
            self._proxy.ask("POST", f"/proxies/{self._name}", {"enabled": True})


class Toxiproxy:
    """The program; use it in a `with`.

    Args:
        folder: Directory of its log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_ports(1)[0]
        self._process: Process | None = None

    def link(self, name: str, *, listen: int, upstream: str) -> Link:
        """Open a link from a port on loopback to `host:port`."""
        body = {"name": name, "listen": f"{HOST}:{listen}", "upstream": upstream, "enabled": True}
        self.ask("POST", "/proxies", body)
        return Link(self, name, listen)

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request to its HTTP API."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"http://{HOST}:{self._port}{path}", data=data, method=method)
        with urlopen(request, timeout=10) as response:
            content = response.read()
        return json.loads(content) if content else None

    def __enter__(self) -> Self:
        program = go_program("toxiproxy")
        command = [str(program), "-host", HOST, "-port", str(self._port)]
        self._process = Process(command, log=self._folder / "toxiproxy.log")
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                socket.create_connection((HOST, self._port), 1).close()
            except OSError:
                if time.monotonic() > deadline or not self._process.alive:
                    self._process.end(kill=True)
                    message = f"Toxiproxy did not start:\n{self._process.tail()}"
                    raise RuntimeError(message) from None
                time.sleep(0.01)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.end(kill=True)
