"""Rules for destinations in Kafka: settings without effect, topics with two writers, loops.

A file identifies clusters by their bootstrap servers. Two lists with a common server are one
cluster. Two lists without may still be one cluster; `run` compares the cluster IDs at the start.
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

_ARCHIVE_KEYS: Final = (
    *("format", "compression", "encoding", "compaction", "snapshots", "flush", "chain-start"),
)
"""Settings of a mirror that apply to archives."""

_ONLY_ARCHIVES: Final = "is only for destinations of type filesystem or s3"
_ONLY_KAFKA: Final = "is only for destinations of type kafka"


def types_of(mirror: dict[str, Any], shared: dict[str, Any] | None, path: str) -> set[object]:
    """Return the types of a mirror's destinations as written, valid or not."""
    if shared is not None:
        return {text(shared, "type")}
    return {text(item, "type") for _, item in items(mirror, "destinations", path)}


def refuse_misplaced(source: Source, path: str, destination: dict[str, Any]) -> None:
    """Refuse, and remove, keys of a Kafka destination that belong elsewhere."""
    for key in [key for key in _ARCHIVE_KEYS if key in destination]:
        source.add_problem(f"{path}.{key}", _ONLY_ARCHIVES, "remove it")
        del destination[key]
    for own_key in ("name", "topic"):
        if path == "destination" and own_key in destination:
            message = "is not allowed in a destination for all mirrors"
            suggestion = "write destination-name-override in the mirror"
            source.add_problem(f"{path}.{own_key}", message, suggestion)
            del destination[own_key]


def check_mirror(
    source: Source, path: str, mirror: dict[str, Any], shared: dict[str, Any] | None
) -> None:
    """Report settings of a mirror that none of its destinations uses."""
    types = types_of(mirror, shared, path)
    if types == {"kafka"}:
        for key in _ARCHIVE_KEYS:
            if mirror.get(key) is not None:
                reason = "a replica in Kafka has the batches of the source"
                if key == "chain-start":
                    reason = "a replica in Kafka starts where the source's log starts"
                source.add_problem(f"{path}.{key}", _ONLY_ARCHIVES, f"remove it: {reason}")
        override = text(mirror, "destination-name-override")
        if shared is not None and override is not None:
            _check_override(source, path, override)
    if types and types <= {"filesystem", "s3"} and text(mirror, "timestamp-mode") is not None:
        suggestion = "remove it: archives keep the timestamps of the source"
        source.add_problem(f"{path}.timestamp-mode", _ONLY_KAFKA, suggestion)
    _check_groups(source, f"{path}.groups", mapping(mirror, "groups") or {}, types)
    if shared is None:
        for item_path, item in items(mirror, "destinations", path):
            check_destination(source, item_path, item)
            _check_takeover(source, item_path, item, mirror)


def _check_groups(source: Source, path: str, groups: dict[str, Any], types: set[object]) -> None:
    for keys, others, message in (
        (("interval-ms", "sync-group-offsets"), {"filesystem", "s3"}, _ONLY_KAFKA),
        (("archive-interval-ms", "keep-archived"), {"kafka"}, _ONLY_ARCHIVES),
    ):
        for key in keys if types and types <= others else ():
            if groups.get(key) is not None:
                source.add_problem(f"{path}.{key}", message, "remove it")


def _check_override(source: Source, path: str, override: str) -> None:
    try:
        check_topic(override)
    except ValueError as error:
        source.add_problem(f"{path}.destination-name-override", str(error))


def check_destination(source: Source, path: str, destination: dict[str, Any]) -> None:
    """Report settings of one Kafka destination that have no effect because of another setting."""
    if text(destination, "type") != "kafka":
        return
    if destination.get("offsets") == "translate" and destination.get("holes") is not None:
        source.add_problem(f"{path}.holes", "is only for offsets: preserve", "remove it")
    creates = destination.get("topic-sync") in (None, "create")
    if not creates and destination.get("replication-factor") is not None:
        source.add_problem(
            f"{path}.replication-factor", "is only for topic-sync: create", "remove it"
        )


def replica_of_mirrormaker(source_alias: str, topic: str) -> str:
    """Return the name that MirrorMaker's DefaultReplicationPolicy gives to a replica."""
    return f"{source_alias}.{topic}"


def _check_takeover(
    source: Source, path: str, destination: dict[str, Any], mirror: dict[str, Any]
) -> None:
    """Report a take-over that could not find what MirrorMaker has left."""
    if text(destination, "type") != "kafka" or destination.get("takeover") is None:
        return
    where = f"{path}.takeover"
    if destination.get("offsets") != "translate":
        source.add_problem(where, "is only for offsets: translate", "add offsets: translate")
    if text(destination, "timestamp-mode") == "destination" or (
        destination.get("timestamp-mode") is None
        and text(mirror, "timestamp-mode") == "destination"
    ):
        message = "is only for timestamp-mode: source, because timestamps are compared"
        source.add_problem(where, message, "remove timestamp-mode")
    if destination.get("name") is None:
        message = "needs the name of the destination: MirrorMaker's alias of the target"
        source.add_problem(where, message, "add name")
    alias, topic = text(mapping(mirror, "groups") or {}, "source-alias"), text(mirror, "topic")
    if alias is None:
        message = "needs groups.source-alias of the mirror: MirrorMaker's alias of the source"
        source.add_problem(where, message, "add groups with source-alias")
    elif topic is not None and destination.get("topic") is None:
        try:
            check_topic(replica_of_mirrormaker(alias, topic))
        except ValueError as error:
            source.add_problem(f"{path}.topic", str(error), "name the topic")


def _topic_of(destination: dict[str, Any], mirror: dict[str, Any], topic: str) -> str:
    """Return the name of a mirror's topic at a destination of its own."""
    alias = text(mapping(mirror, "groups") or {}, "source-alias")
    if destination.get("takeover") is not None and alias is not None:
        topic = replica_of_mirrormaker(alias, topic)
    return text(destination, "topic") or topic


# Rules across mirrors.


class _Topic(NamedTuple):
    """One topic of one cluster."""

    cluster: str
    """One of its servers, the same for all lists that have a server in common."""

    name: str


@dataclass(frozen=True, slots=True)
class _Replica:
    """Partitions of a source topic and the topic to which they are replicated."""

    path: str
    mirror: str
    source: _Topic
    target: _Topic
    partitions: frozenset[int] | None


class _Clusters:
    """Which servers form one cluster, as far as the file shows (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def add(self, servers: str) -> None:
        """Record that these servers, as written in the file, are one cluster."""
        first, *others = _endpoints(servers) or [""]
        for other in others:
            self._parent[self._root(other)] = self._root(first)

    def name_of(self, servers: str) -> str:
        """Return the name of their cluster."""
        return self._root((_endpoints(servers) or [""])[0])

    def _root(self, server: str) -> str:
        while (above := self._parent.get(server, server)) != server:
            server = above
        return server


def _endpoints(servers: str) -> list[str]:
    """Return each server as `host:port` in a normal form."""
    found = []
    for server in servers.split(","):
        bare = (server.strip().partition("://")[2] or server.strip()).lower()
        if bare:
            host, colon, port = bare.rpartition(":")
            if not colon or "]" in port:
                host, port = bare, "9092"
            host = host.removesuffix(".")  # a fully qualified name
            found.append(f"{'127.0.0.1' if host == 'localhost' else host}:{port}")
    return found


def check_aliases(source: Source, root: dict[str, Any]) -> None:
    """Refuse an alias that names two source clusters, or a source and a destination."""
    clusters = _Clusters()
    names: dict[str, tuple[str, str]] = {}
    mirrors = list(items(root, "mirrors", ""))
    for _, mirror in mirrors:
        if servers := text(mapping(mirror, "source") or {}, "bootstrap-servers"):
            clusters.add(servers)
    for path, mirror in mirrors:
        alias = text(mapping(mirror, "groups") or {}, "source-alias")
        servers = text(mapping(mirror, "source") or {}, "bootstrap-servers")
        if alias is None or servers is None:
            continue
        first, cluster = names.setdefault(alias, (path, clusters.name_of(servers)))
        where = f"{path}.groups.source-alias"
        if cluster != clusters.name_of(servers):
            source.add_problem(where, f"{first} uses it for another source cluster")
        if alias in {text(item, "name") for _, item in items(mirror, "destinations", path)}:
            source.add_problem(where, "is the name of a destination too", "choose another name")


def is_cycle(topic: str, destination: str) -> bool:
    """Whether a topic came from a cluster, directly or not, by MirrorMaker's default names."""
    return destination in topic.rstrip(".").split(".")[:-1]


def check_cycles(source: Source, root: dict[str, Any]) -> None:
    """Refuse topics that came from their destination, as their names show: MirrorMaker's rule.

    Only of mirrors with `groups`: there names of clusters are parts of topic names.
    """
    for path, mirror in items(root, "mirrors", ""):
        topic = text(mirror, "topic")
        if topic is None or mapping(mirror, "groups") is None:
            continue
        for item_path, item in items(mirror, "destinations", path):
            name = text(item, "name")
            if name is not None and is_cycle(topic, name):
                message = f"the topic {topic!r} came from {name!r} by its name: a cycle"
                suggestion = "name another topic, or rename the destination if the name is its own"
                source.add_problem(f"{item_path}.name", message, suggestion)


def check_replicas(source: Source, root: dict[str, Any]) -> None:
    """Report topics replicated onto themselves, partitions with two writers, and loops."""
    replicas = [replica for replica in _replicas(root) if not source.is_broken(replica.path)]
    by_target: dict[_Topic, list[_Replica]] = defaultdict(list)
    by_source: dict[_Topic, list[_Replica]] = defaultdict(list)
    for replica in replicas:
        if replica.source == replica.target:
            message = f"replicates the topic {replica.target.name!r} onto itself"
            source.add_problem(replica.path, message, "name another cluster or another topic")
            continue
        for other in by_target[replica.target]:
            partition = shared_partition(replica.partitions, other.partitions)
            if partition is not None:
                target = f"{replica.target.name}-{partition}"
                message = f"{other.path} also writes {target} of this cluster"
                source.add_problem(replica.path, message, "choose another topic")
                break
        by_target[replica.target].append(replica)
        loop = _way_back(replica, by_source)
        if loop:
            names = " to ".join(f"{one.mirror!r}" for one in [replica, *loop])
            message = f"closes a loop: records return to their topic, from {names}"
            source.add_problem(replica.path, message, "keep one direction, or use two topics")
        else:
            by_source[replica.source].append(replica)


def _way_back(replica: _Replica, by_source: dict[_Topic, list[_Replica]]) -> list[_Replica]:
    """Return the replicas that lead from the target of `replica` to its source; empty if none."""
    pending: list[tuple[_Replica, frozenset[int] | None, list[_Replica]]]
    pending = [(replica, replica.partitions, [])]
    visited: set[tuple[_Topic, frozenset[int] | None]] = set()
    while pending:
        last, carried, way = pending.pop()
        for step in by_source.get(last.target, ()):
            common = shared_partitions(carried, step.partitions)
            if (common is not None and not common) or (step.target, common) in visited:
                continue
            if step.target == replica.source:
                return [*way, step]
            visited.add((step.target, common))
            pending.append((step, common, [*way, step]))
    return []


def _replicas(root: dict[str, Any]) -> Iterator[_Replica]:
    """Yield every replication into Kafka, with one name per cluster."""
    shared = mapping(root, "destination")
    clusters = _Clusters()
    found = []
    for path, mirror in items(root, "mirrors", ""):
        source = text(mapping(mirror, "source") or {}, "bootstrap-servers")
        topic = text(mirror, "topic")
        if source is None or topic is None:
            continue
        clusters.add(source)
        if shared is not None:
            name = text(mirror, "destination-name-override") or topic
            places = [(path, shared, name)]
        else:
            places = [
                (item_path, item, _topic_of(item, mirror, topic))
                for item_path, item in items(mirror, "destinations", path)
            ]
        for place, destination, name in places:
            servers = text(destination, "bootstrap-servers")
            if text(destination, "type") == "kafka" and servers is not None:
                clusters.add(servers)
                found.append((place, path, mirror, (source, topic), (servers, name)))
    for place, path, mirror, (source, topic), (servers, name) in found:
        yield _Replica(
            place,
            text(mirror, "name") or path,
            _Topic(clusters.name_of(source), topic),
            _Topic(clusters.name_of(servers), name),
            partitions(mirror),
        )
