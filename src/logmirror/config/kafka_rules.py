"""Rules for destinations in Kafka: settings that do nothing there, topics with two writers, loops.

A file names clusters by their bootstrap servers. Two lists with a server in common are one cluster;
two without may still be one, which only a connection can tell: that is checked at the start.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logmirror.config.scalars import check_topic
from logmirror.config.values import (
    items,
    mapping,
    partitions,
    shared_partition,
    shared_partitions,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.config.source import Source

_OF_FILES: Final = (
    *("format", "compression", "encoding", "compaction", "snapshots", "flush", "chain-start"),
)
"""Settings of a mirror that say how files are written."""

_ONLY_FILES: Final = "is only for destinations of type filesystem or s3"
_ONLY_KAFKA: Final = "is only for destinations of type kafka"


def types_of(mirror: dict[str, Any], shared: dict[str, Any] | None, path: str) -> set[object]:
    """The types of a mirror's destinations as they are written, whatever they are."""
    if shared is not None:
        return {text(shared, "type")}
    return {text(item, "type") for _, item in items(mirror, "destinations", path)}


def refuse_misplaced(source: Source, path: str, destination: dict[str, Any]) -> None:
    """Refuse, and take out, keys of a Kafka destination that have their place elsewhere."""
    for key in [key for key in _OF_FILES if key in destination]:
        source.complain(f"{path}.{key}", _ONLY_FILES, "remove it")
        del destination[key]
    for own_key in ("name", "topic"):
        if path == "destination" and own_key in destination:
            message = "is not for a destination of all mirrors"
            suggestion = "write destination-name-override in the mirror"
            source.complain(f"{path}.{own_key}", message, suggestion)
            del destination[own_key]


def check_mirror(
    source: Source, path: str, mirror: dict[str, Any], shared: dict[str, Any] | None
) -> None:
    """Find settings of a mirror that none of its destinations uses."""
    types = types_of(mirror, shared, path)
    if types == {"kafka"}:
        for key in _OF_FILES:
            if mirror.get(key) is not None:
                suggestion = "remove it: a copy in Kafka has the batches of the source"
                if key == "chain-start":
                    suggestion = "remove it: a copy in Kafka begins where the source begins"
                source.complain(f"{path}.{key}", _ONLY_FILES, suggestion)
        override = text(mirror, "destination-name-override")
        if shared is not None and override is not None:
            _check_override(source, path, override)
    if types and types <= {"filesystem", "s3"} and text(mirror, "timestamp-mode") is not None:
        suggestion = "remove it: files keep the timestamps of the source"
        source.complain(f"{path}.timestamp-mode", _ONLY_KAFKA, suggestion)
    if shared is None:
        for item_path, item in items(mirror, "destinations", path):
            check_destination(source, item_path, item)


def _check_override(source: Source, path: str, override: str) -> None:
    try:
        check_topic(override)
    except ValueError as error:
        source.complain(f"{path}.destination-name-override", str(error))


def check_destination(source: Source, path: str, destination: dict[str, Any]) -> None:
    """Find settings of one Kafka destination that another of them leaves without effect."""
    if text(destination, "type") != "kafka":
        return
    if destination.get("offsets") == "translate" and destination.get("holes") is not None:
        source.complain(f"{path}.holes", "is only for offsets: preserve", "remove it")
    creates = destination.get("topic-sync") in (None, "create")
    if not creates and destination.get("replication-factor") is not None:
        source.complain(f"{path}.replication-factor", "is only for topic-sync: create", "remove it")


# Rules across mirrors.


class _Topic(NamedTuple):
    """One topic of one cluster."""

    cluster: str
    """One of its servers, the same for every list that shares a server with another."""

    name: str


@dataclass(frozen=True, slots=True)
class _Copy:
    """Some partitions of a topic on their way into another topic."""

    path: str
    mirror: str
    origin: _Topic
    target: _Topic
    partitions: frozenset[int] | None


class _Clusters:
    """Which servers belong together, as far as the file tells."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def add(self, servers: str) -> None:
        """Learn that these servers, as the file writes them, are one cluster."""
        first, *others = _endpoints(servers) or [""]
        for other in others:
            self._parent[self._root(other)] = self._root(first)

    def name_of(self, servers: str) -> str:
        """The name of their cluster."""
        return self._root((_endpoints(servers) or [""])[0])

    def _root(self, server: str) -> str:
        while (above := self._parent.get(server, server)) != server:
            server = above
        return server


def _endpoints(servers: str) -> list[str]:
    """Each server as `host:port`, however it is written."""
    found = []
    for server in servers.split(","):
        bare = (server.strip().partition("://")[2] or server.strip()).lower()
        if bare:
            host, colon, port = bare.rpartition(":")
            if not colon or "]" in port:
                host, port = bare, "9092"
            host = host.removesuffix(".")  # a name that is written out to the root
            found.append(f"{'127.0.0.1' if host == 'localhost' else host}:{port}")
    return found


def check_copies(source: Source, root: dict[str, Any]) -> None:
    """Find copies of a topic onto itself, two copies in one partition, and loops."""
    copies = [copy for copy in _copies(root) if not source.is_broken(copy.path)]
    by_target: dict[_Topic, list[_Copy]] = defaultdict(list)
    by_origin: dict[_Topic, list[_Copy]] = defaultdict(list)
    for copy in copies:
        if copy.origin == copy.target:
            message = f"copies the topic {copy.target.name!r} onto itself"
            source.complain(copy.path, message, "name another cluster or another topic")
            continue
        for other in by_target[copy.target]:
            partition = shared_partition(copy.partitions, other.partitions)
            if partition is not None:
                message = f"{other.path} writes {copy.target.name}-{partition} of this cluster too"
                source.complain(copy.path, message, "choose another topic")
                break
        by_target[copy.target].append(copy)
        loop = _way_back(copy, by_origin)
        if loop:
            names = " to ".join(f"{one.mirror!r}" for one in [copy, *loop])
            message = f"closes a loop: what it copies comes back, from {names}"
            source.complain(copy.path, message, "keep one direction, or use two topics")
        else:
            by_origin[copy.origin].append(copy)


def _way_back(copy: _Copy, by_origin: dict[_Topic, list[_Copy]]) -> list[_Copy]:
    """Copies that lead from the target of `copy` to its origin, in order; empty if none do."""
    waiting: list[tuple[_Copy, frozenset[int] | None, list[_Copy]]] = [(copy, copy.partitions, [])]
    seen: set[tuple[_Topic, frozenset[int] | None]] = set()
    while waiting:
        last, carried, way = waiting.pop()
        for step in by_origin.get(last.target, ()):
            common = shared_partitions(carried, step.partitions)
            if (common is not None and not common) or (step.target, common) in seen:
                continue
            if step.target == copy.origin:
                return [*way, step]
            seen.add((step.target, common))
            waiting.append((step, common, [*way, step]))
    return []


def _copies(root: dict[str, Any]) -> Iterator[_Copy]:
    """Every copy of partitions into Kafka, with clusters under one name each."""
    shared = mapping(root, "destination")
    clusters = _Clusters()
    found = []
    for path, mirror in items(root, "mirrors", ""):
        origin = text(mapping(mirror, "source") or {}, "bootstrap-servers")
        topic = text(mirror, "topic")
        if origin is None or topic is None:
            continue
        clusters.add(origin)
        if shared is not None:
            name = text(mirror, "destination-name-override") or topic
            places = [(path, shared, name)]
        else:
            places = [
                (item_path, item, text(item, "topic") or topic)
                for item_path, item in items(mirror, "destinations", path)
            ]
        for place, destination, name in places:
            servers = text(destination, "bootstrap-servers")
            if text(destination, "type") == "kafka" and servers is not None:
                clusters.add(servers)
                found.append((place, path, mirror, (origin, topic), (servers, name)))
    for place, path, mirror, (origin, topic), (servers, name) in found:
        yield _Copy(
            place,
            text(mirror, "name") or path,
            _Topic(clusters.name_of(origin), topic),
            _Topic(clusters.name_of(servers), name),
            partitions(mirror),
        )
