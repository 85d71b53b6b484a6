"""The replicas of a simulation, and how they are read: without code of the writers."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import struct
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logmirror.archive.naming import is_object_of
from logmirror.locations import FolderLocation
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec
from logmirror.simulation.bucket import LOCATION, Bucket, BucketCalls
from logmirror.simulation.cluster import TargetView
from logmirror.simulation.disk import Disk, DiskCalls
from logmirror.simulation.log import Memory
from logmirror.simulation.node import TARGET, SimulatedDestination
from logmirror.simulation.reading import (
    chain_end,
    covering,
    latest_by_key,
    newest_end,
    read_batches,
    read_rows,
)
from logmirror.simulation.source import NUMBER
from logmirror.simulation.topics import Topics
from logmirror.stores.filesystem import FilesystemStore
from logmirror.stores.s3 import S3Store
from logmirror.to_kafka.idempotence import producer_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logmirror.clock import Chooser
    from logmirror.locations import StoreLocation
    from logmirror.simulation.faults import Destination, Format
    from logmirror.simulation.log import Log
    from logmirror.simulation.world import Process, World
    from logmirror.stores.base import BlobStore
    from logmirror.testing.checker import Row, Truth

_MEMORY: Final = "/dev/shm"  # noqa: S108  # a new folder is created there
"""A file system in memory, where Linux has one. `Disk` tracks what was flushed."""

_DESTINATION: Final = "copy"
_FOLDER: Final = f"{_DESTINATION}/0"
_EXTENSIONS: Final = {
    "native": "batches",
    "parquet": "parquet",
    "ndjson": "ndjson",
    "snapshots": "parquet",
}
_TOPIC: Final = "copy"
_PROGRESS: Final = "__logmirror-progress"
_SYNCS: Final = "mm2-offset-syncs.copy.internal"
"""Names of internal topics of logmirror and MirrorMaker 2, whose records are parsed here."""


class Replica(ABC):
    """The replica of a simulation: how processes reach it, and its content."""

    target: SimulatedDestination

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return its records, as a consumer of committed records sees them."""

    @abstractmethod
    def names(self) -> list[str] | None:
        """Return the names of its objects; None for a cluster."""

    def wrong_pairs(self) -> Iterator[str]:
        """Yield offset syncs whose two offsets belong to different records."""
        return iter(())

    def expected(self, truth: Truth) -> Truth:
        """Return the records that the replica must have."""
        return truth


class _Objects(Replica):
    """A chain of objects."""

    def __init__(self, world: World, spec: ArchiveSpec, form: Format) -> None:
        self.spec, self._form = spec, form
        world.durable_end = self.durable_end
        self._read: dict[tuple[str, int], list[Row]] = {}

    @abstractmethod
    def durable_names(self) -> list[str]:
        """Return the names of all durable objects."""

    @abstractmethod
    def contents(self) -> dict[str, bytes]:
        """Return the content of all durable objects."""

    def names(self) -> list[str] | None:
        is_pruned = self._form == "snapshots" and self.spec.keep_snapshots
        return None if is_pruned else covering(self.contents())

    def durable_end(self) -> int:
        """Return the end of the durable chain."""
        names = self.durable_names()
        return newest_end(names) if self._form == "snapshots" else chain_end(names)

    def rows(self) -> list[Row]:
        contents = self.contents()
        names = covering(contents)
        if self._form == "native":
            return read_batches(contents[name] for name in names)
        if self._form == "snapshots":  # the newest one holds all keys, in key order
            names = names[-1:]
            return sorted(row for name in names for row in self._rows("parquet", contents[name]))
        extension = _EXTENSIONS[self._form]
        return [row for name in names for row in self._rows(extension, contents[name])]

    def expected(self, truth: Truth) -> Truth:
        if self._form != "snapshots":
            return truth
        return latest_by_key(truth, end=self.durable_end())

    def _rows(self, extension: str, data: bytes) -> list[Row]:
        key = (extension, hash(data))
        if key not in self._read:
            self._read[key] = read_rows(extension, data)
        return self._read[key]


class _Files(_Objects):
    def __init__(self, world: World, chooser: Chooser, form: Format, folder: Path) -> None:
        spec = _archive(form, chooser, FolderLocation("/simulated"))
        super().__init__(world, spec, form)
        self._disk = disk = Disk(folder, chooser)
        world.power_lost = disk.lose_power

        def open_store(process: Process) -> BlobStore:
            return FilesystemStore(
                disk.root,
                writer_id=process.driver.name,
                syscalls=DiskCalls(process, disk),
                clock=world.schedule,
            )

        def begin_writing(store: BlobStore, stack: contextlib.ExitStack) -> None:
            if isinstance(store, FilesystemStore):
                stack.enter_context(store.hold_writer_lock())
                store.sweep()

        self.target = SimulatedDestination(spec, open_store=open_store, begin_writing=begin_writing)

    def durable_names(self) -> list[str]:
        return self._disk.durable_names(_FOLDER)

    def contents(self) -> dict[str, bytes]:
        folder, names = self._disk.root / _FOLDER, self.durable_names()
        return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


class _Bucket(_Objects):
    def __init__(self, world: World, chooser: Chooser, form: Format) -> None:
        spec = _archive(form, chooser, LOCATION)
        super().__init__(world, spec, form)
        self._bucket = bucket = Bucket(page=chooser.choice((2, 3, 1000)))

        def open_store(process: Process) -> BlobStore:
            return S3Store(LOCATION, calls=BucketCalls(process, bucket), clock=world.schedule)

        def begin_writing(store: BlobStore, stack: contextlib.ExitStack) -> None:
            del stack
            if isinstance(store, S3Store):
                store.sweep([_DESTINATION], functools.partial(is_object_of, [_DESTINATION]))

        self.target = SimulatedDestination(spec, open_store=open_store, begin_writing=begin_writing)

    def durable_names(self) -> list[str]:
        return self._bucket.names(_FOLDER)

    def contents(self) -> dict[str, bytes]:
        prefix = f"{LOCATION.prefix}/{_FOLDER}"
        return {name: self._bucket.objects[f"{prefix}/{name}"] for name in self.durable_names()}


class _Cluster(Replica):
    """A partition with the source's offsets."""

    def __init__(self, world: World, chooser: Chooser, *, grants: bool) -> None:
        topics = Topics(world.schedule, chooser, 2)
        topics.create(_TOPIC)
        self._log = log = topics.logs[_TOPIC]
        world.durable_end = lambda: log.end
        spec = KafkaSpec(
            cluster=TARGET, topic=_TOPIC, name="copy", mirror="orders", topic_sync="off"
        )
        if chooser.random() < 0.7:  # noqa: PLR2004  # share of brokers that know the producer
            known = Memory(last_timestamp_ms=world.schedule.now_ms())
            log.producers[producer_id(_TOPIC, 0, world.application.topic_id)] = known
        self.target = SimulatedDestination(
            spec, view=lambda process: TargetView(process, topics, grants=grants)
        )

    def names(self) -> None:
        return None

    def rows(self) -> list[Row]:
        return _shown(self._log)


class _Translated(Replica):
    """A partition with new offsets. A header of each record identifies its source record."""

    def __init__(self, world: World, chooser: Chooser) -> None:
        self._application = world.application
        self._topics = topics = Topics(world.schedule, chooser, 2)
        topics.create(_TOPIC)
        world.durable_end = self._durable_end
        spec = KafkaSpec(
            cluster=TARGET,
            topic=_TOPIC,
            name="copy",
            mirror="orders",
            topic_sync="off",
            offsets="translate",
        )
        self.target = SimulatedDestination(
            spec, view=lambda process: TargetView(process, topics, grants=False)
        )

    def _durable_end(self) -> int:
        """Return the position in the last progress record whose transaction is decided.

        Without a progress record, return the log start offset of the source.
        """
        log = self._topics.logs.get(_PROGRESS)
        end = self._application.log.start
        decided = self._topics.transactions.decided(_PROGRESS)
        for row in _shown(log, decided) if log else ():
            if json.loads(row.key or b"")[0] == "next":
                end = max(end, json.loads(row.value or b"")["next"])
        return end

    def names(self) -> None:
        return None

    def rows(self) -> list[Row]:
        """Return the records with their source offsets; -1 if the source never had the record."""
        return [row._replace(offset=self._origin(row)) for row in self._shown()]

    def _shown(self) -> list[Row]:
        return _shown(self._topics.logs[_TOPIC])

    def _origin(self, row: Row) -> int:
        numbers = [int(value or b"-1") for name, value in row.headers if name == NUMBER]
        return self._application.offsets.get(numbers[0], -1) if len(numbers) == 1 else -1

    def wrong_pairs(self) -> Iterator[str]:
        syncs = self._application.topics.logs.get(_SYNCS)
        origins = {row.offset: self._origin(row) for row in self._shown()}
        for row in _shown(syncs) if syncs else ():
            upstream, downstream = struct.unpack(">qq", row.value or b"")
            found = origins.get(downstream)
            if found != upstream:
                yield f"{upstream} maps to {downstream}, which holds the record of offset {found}"


def _shown(log: Log, decided: Iterable[bytes] = ()) -> list[Row]:
    """Return the committed records of a log, with `decided` as markers at its end."""
    return read_batches([*(entry.data for entry in log.entries), *decided])


def _archive(form: Format, chooser: Chooser, location: StoreLocation) -> ArchiveSpec:
    is_snapshot = form == "snapshots"
    return ArchiveSpec(
        location=location,
        format="parquet" if form == "snapshots" else form,
        compaction="log" if is_snapshot else None,
        keep_snapshots=chooser.choice((None, 1, 3)) if is_snapshot else None,
        extension=_EXTENSIONS[form],
        compression="zstd-1",
        encoding="base64",
        max_bytes=chooser.choice((200, 600, 1 << 20)),
        max_offsets=chooser.choice((5, 9, 1000)),
        max_time_ms=chooser.choice((300, 1000)),
        drift_check_ms=2_000,
    )


@contextlib.contextmanager
def opened_replica(
    destination: Destination, form: Format, world: World, chooser: Chooser, *, grants: bool
) -> Iterator[Replica]:
    """Create an empty replica, and delete it at the end of the block.

    Args:
        destination: Type of the destination.
        form: Format of the objects; for Kafka `-` (same offsets) or `translate` (new offsets).
        world: The simulation.
        chooser: Draws the settings of the replica.
        grants: Whether the cluster grants ClusterAction.
    """
    if form == "translate":
        yield _Translated(world, chooser)
    elif destination == "Kafka":
        yield _Cluster(world, chooser, grants=grants)
    elif destination == "S3":
        yield _Bucket(world, chooser, form)
    else:
        memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="logmirror-simulation-", dir=memory) as folder:
            yield _Files(world, chooser, form, Path(folder))
