"""What surrounds the mirrors of the torture: brokers, an S3 server, proxies, folders, replicas."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.config.settings import load
from logmirror.simulation.reading import chain_end, read_batches, read_rows
from logmirror.torture.feeder import end_of, read_topic
from logmirror.torture.processes import PARTITIONS, Broker, MirrorProcess
from logmirror.torture.proxy import Proxy
from logmirror.torture.s3_server import BUCKET, HOST, S3Server
from logmirror.torture.translated import PROGRESS, next_offset, syncs_topic

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence
    from pathlib import Path

    from logmirror.simulation.faults import Destination, Format
    from logmirror.testing.checker import Row

_BEHIND_PROXY: Final = "127.0.0.2"
"""Address of a broker that clients reach only through a proxy on 127.0.0.1."""

TOPIC: Final = "orders"
_EXTENSIONS: Final = {"native": "batches", "parquet": "parquet", "ndjson": "ndjson"}


@dataclass(frozen=True, slots=True)
class Flow:
    """One mirror of the torture.

    Attributes:
        destination: Type of the destination.
        form: Format of the objects; for a cluster `-` (same offsets) or `translate` (new offsets).
        limits: Keys and values of its `flush`.
    """

    destination: Destination
    form: Format
    limits: tuple[tuple[str, int], ...] = (
        ("max-time-ms", 200),
        ("max-bytes", 5_000),
        ("max-offsets", 500),
    )

    @property
    def name(self) -> str:
        """Name of the mirror, and of its folder at the destination."""
        kind = self.destination.lower()
        return kind if self.form == "-" else f"{kind}-{self.form}"


def _topic(flow: Flow) -> str:
    """Return the topic of a replica in a cluster."""
    return f"{TOPIC}-copy" if flow.form == "translate" else TOPIC


class Testbed:
    """Everything around the mirrors: brokers, S3 server, proxies, folders, configuration."""

    def __init__(self, folder: Path, flows: Sequence[Flow], stack: contextlib.ExitStack) -> None:
        self.folder, self.flows, self._stack = folder, flows, stack
        self.left_out: list[str] = []
        self.source = self._source(stack)
        self.target = stack.enter_context(Broker(folder / "target", HOST))
        self.s3 = stack.enter_context(S3Server())
        self.s3_network = stack.enter_context(Proxy((HOST, 0), (HOST, self.s3.port)))
        self.files = folder / "archive"
        self._count = 0
        load(self._config(flows))  # an invalid configuration fails here, not in each mirror

    def _source(self, stack: contextlib.ExitStack) -> Broker:
        folder = self.folder / "source"
        self.network: Proxy | None = None
        try:
            broker = stack.enter_context(Broker(folder, _BEHIND_PROXY, HOST))
            self.network = stack.enter_context(
                Proxy((HOST, broker.port), (_BEHIND_PROXY, broker.port))
            )
        except OSError:
            self.left_out.append(f"network to the source: {_BEHIND_PROXY} is not available")
            return stack.enter_context(Broker(self.folder / "plain-source", HOST))
        return broker

    def _mirror(self, flow: Flow) -> dict[str, object]:
        mirror: dict[str, object] = {
            "name": flow.name,
            "source": {"bootstrap-servers": f"{HOST}:{self.source.port}"},
            "topic": TOPIC,
            "partitions": "all",
        }
        if flow.destination == "Kafka":
            to: dict[str, object] = {"type": "kafka", "name": flow.name}
            to["bootstrap-servers"] = f"{HOST}:{self.target.port}"
            if flow.form == "translate":
                to |= {"topic": _topic(flow), "offsets": "translate"}
            return mirror | {"destinations": [to]}
        mirror |= {"format": flow.form, "flush": dict(flow.limits)}
        if flow.destination == "files":
            to = {"type": "filesystem", "root": str(self.files), "name": flow.name}
            return mirror | {"destinations": [to]}
        bucket: dict[str, object] = {
            "type": "s3",
            "name": flow.name,
            "bucket": BUCKET,
            "region": "us-east-1",
            "endpoint": f"http://{HOST}:{self.s3_network.port}",
            "path-style": True,
            "checksums": "when-required",
            "credentials": {"access-key-id": "torture", "secret-access-key": "torture"},
        }
        return mirror | {"destinations": [bucket]}

    def _config(self, flows: Sequence[Flow]) -> Path:
        """Write a configuration file for some flows."""
        path = self.folder / f"config-{self._count}.json"
        path.write_text(json.dumps({"mirrors": [self._mirror(flow) for flow in flows]}))
        return path

    def start(
        self, *arguments: str, crash_at: str = "", flows: Sequence[Flow] | None = None
    ) -> MirrorProcess:
        """Start a process that mirrors these flows; None: all."""
        self._count += 1
        config = self._config(self.flows if flows is None else flows)
        log = self.folder / f"mirror-{self._count}.log"
        process = MirrorProcess(config, log, *arguments, crash_at=crash_at)
        return self._stack.enter_context(process)

    def stall(self, destination: Destination) -> None:
        """Make a kind of destination respond no longer, or byte by byte; see `resume`."""
        if destination == "Kafka":
            self.target.pause()
        else:
            self.s3_network.drips = True

    def resume(self) -> None:
        """Undo `stall`."""
        self.target.resume()
        self.s3_network.drips = False

    # -- the source ------------------------------------------------------------------------------

    def source_rows(self, partition: int) -> list[Row]:
        """Return the committed records of the source."""
        return read_topic(self.source.address, TOPIC, partition)

    def source_end(self, partition: int) -> int:
        """Return the last stable offset of the source."""
        return end_of(self.source.address, TOPIC, partition)

    def syncs(self, flow: Flow) -> list[Row]:
        """Return the offset syncs of a flow, which are at the source."""
        return read_topic(self.source.address, syncs_topic(flow.name), 0)

    # -- replicas --------------------------------------------------------------------------------

    def names(self, flow: Flow, partition: int) -> list[str] | None:
        """Return the names of a replica's objects; None for a cluster."""
        if flow.destination == "Kafka":
            return None
        if flow.destination == "S3":
            return self.s3.names(f"{flow.name}/{partition}")
        folder = self.files / flow.name / str(partition)
        return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []

    def rows(self, flow: Flow, partition: int) -> list[Row]:
        """Return the records of a replica, with its own offsets."""
        if flow.destination == "Kafka":
            return read_topic(self.target.address, _topic(flow), partition)
        contents = [self._read(flow, partition, name) for name in self.names(flow, partition) or ()]
        if flow.form == "native":
            return read_batches(contents)
        extension = _EXTENSIONS[flow.form]
        return [row for data in contents for row in read_rows(extension, data)]

    def position(self, flow: Flow, partition: int) -> int:
        """Return the source offset up to which a replica is durable."""
        names = self.names(flow, partition)
        if names is not None:
            return chain_end(names)
        if flow.form == "translate":
            progress = read_topic(self.target.address, PROGRESS, 0)
            return next_offset(progress, flow.name, partition)
        return end_of(self.target.address, TOPIC, partition)

    def extent(self, flow: Flow) -> tuple[int, ...]:
        """Return the position of each partition of a replica."""
        return tuple(self.position(flow, number) for number in range(PARTITIONS))

    def _read(self, flow: Flow, partition: int, name: str) -> bytes:
        if flow.destination == "S3":
            return self.s3.read(f"{flow.name}/{partition}/{name}")
        return (self.files / flow.name / str(partition) / name).read_bytes()
