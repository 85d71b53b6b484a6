"""`logmirror acls print`: the Kafka ACLs that a configuration needs, and no others.

    operation        on            for
    Read             the topic     Fetch
    DescribeConfigs  the topic     DescribeConfigs: whether it is compacted

at the source, and with `offsets: translate` Create and Write on the topic of the offset syncs. At
the destination:

    Write            the topic     Produce
    Read             the topic     DescribeProducers and Fetch: the tail check (preserve)
    DescribeConfigs  the topic     DescribeConfigs: comparison with the source
    Create, Alter    the topic     CreateTopics, CreatePartitions (topic-sync: create)
    Delete           the topic     DeleteRecords: padding below the source's log start
    Write            ids           InitProducerId and transactions
    Read, Write,     the progress  Fetch, Produce, CreateTopics (translate)
    Create
    ClusterAction,   the cluster   WriteTxnMarkers, DescribeCluster: markers
    Describe
    DescribeConfigs  the cluster   DescribeConfigs: the brokers' settings

With `groups`, Describe on all groups of the source, and on the topic of the offset syncs Read
(translate) or Create, Read and Write (preserve: optional). At the destination:

    Read, Write,     checkpoints   Fetch, Produce, CreateTopics
    Create
    Write, Create    heartbeats    Produce, CreateTopics
    Write            ids           InitProducerId and transactions
    Read             all groups,   OffsetCommit (sync-group-offsets)
                     the topic

With `takeover`, at the destination:

    Read             the topic,    Fetch: the comparison with the source
                     mm2-offsets
    Describe         its group     DescribeGroups: whether MirrorMaker still runs

Read, Write, Delete and Alter include Describe. No consumer group is joined, and no right to
idempotent writes is used: producer ids are derived, or come with a transactional id.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from logmirror.app.specs import archive_link_specs, link_specs, mirror_specs
from logmirror.errors import UsageError
from logmirror.groups.link_spec import TRANSACTIONAL_ID_PREFIX
from logmirror.mirror.ports import KafkaSpec
from logmirror.reports import Acl, ClusterAcls
from logmirror.to_kafka.gap_writer import transactional_id_prefix
from logmirror.to_kafka.translate_progress import PROGRESS_TOPIC, FlowKey
from logmirror.wire.mirrormaker import offsets_topic, syncs_topic, workers_group
from logmirror.wire.replication_policy import HEARTBEATS, ReplicationPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.config.settings import Settings
    from logmirror.groups.link_spec import LinkSpec
    from logmirror.mirror.source_views import MirrorSpec

_CLUSTER: Final = "kafka-cluster"
"""What Kafka calls the resource that is the cluster itself."""

_SYNCS: Final = "offset syncs as MirrorMaker 2 writes them"
_SYNC_RIGHTS: Final = ("Create", "Read", "Write")
"""Of replicas that keep offsets: what the topic has is read before anything is written."""

_READING: Final = "reading the offsets that groups have committed"
_BY_CERTIFICATE: Final = "the principal is in a certificate or token, which only brokers map"


def needed_acls(settings: Settings, principal: str | None = None) -> list[ClusterAcls]:
    """Return the ACLs of the enabled mirrors, by cluster and principal; see `kafka_acls`."""
    found: dict[tuple[str, str], list[Acl]] = {}
    for spec in mirror_specs(settings):
        for _, cluster, acls in acls_of(spec):
            servers = ",".join(_address(*each) for each in cluster.bootstrap_servers)
            found.setdefault((servers, principal or _principal(cluster, servers)), []).extend(acls)
    for link in link_specs(settings):
        for cluster, acls in _of_groups(link):
            servers = ",".join(_address(*each) for each in cluster.bootstrap_servers)
            found.setdefault((servers, principal or _principal(cluster, servers)), []).extend(acls)
    for archived in archive_link_specs(settings):
        servers = ",".join(_address(*each) for each in archived.source.bootstrap_servers)
        who = principal or _principal(archived.source, servers)
        found.setdefault((servers, who), []).append(_group("Describe", _READING))
    return [
        ClusterAcls(bootstrap_servers=servers, principal=who, acls=_merged(acls))
        for (servers, who), acls in found.items()
    ]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _principal(cluster: ConnectionSettings, servers: str) -> str:
    if cluster.uses_sasl and cluster.sasl_username:
        return f"User:{cluster.sasl_username}"
    if cluster.uses_sasl or cluster.ssl_certificate_location or cluster.ssl_certificate_pem:
        raise UsageError(
            _BY_CERTIFICATE,
            hint="pass it: --principal User:CN=mirror,O=example",
            bootstrap_servers=servers,
        )
    return "User:ANONYMOUS"


def _merged(acls: Iterable[Acl]) -> tuple[Acl, ...]:
    """Return each ACL once; required if any mirror requires it."""
    found: dict[Acl, Acl] = {}
    for acl in acls:
        key = replace(acl, purpose="", is_optional=False)
        known = found.get(key)
        if known is None or (known.is_optional and not acl.is_optional):
            found[key] = acl
    return tuple(sorted(found.values()))


# -- requests and their ACLs -----------------------------------------------------------------------


def acls_of(spec: MirrorSpec) -> Iterator[tuple[str, ConnectionSettings, list[Acl]]]:
    """Yield destination (empty: the source), cluster and ACLs of a mirror."""
    read = _topic(spec.topic, "Read", "reading its records")
    describe = _topic(spec.topic, "DescribeConfigs", "finding out whether it is compacted")
    yield "", spec.source, [read, describe]
    for name, written in spec.destinations:
        if not isinstance(written, KafkaSpec):
            continue
        yield name, written.cluster, [*_of_topic(written), *_of_brokers(written)]
        if written.offsets == "translate":
            yield name, written.cluster, _of_progress(spec.name, written.topic)
            yield name, spec.source, _of_syncs(name)


def _of_topic(copy: KafkaSpec) -> Iterator[Acl]:
    yield _topic(copy.topic, "Write", "writing the replica")
    is_exact = copy.offsets == "preserve"
    purpose = "the tail check before anything is written" if is_exact else "`verify`"
    yield _topic(copy.topic, "Read", purpose, is_optional=not is_exact)
    is_compared = copy.topic_sync != "off"
    fitting = "comparing its settings" if is_compared else "finding its largest batch"
    yield _topic(copy.topic, "DescribeConfigs", fitting, is_optional=not is_compared)
    if copy.topic_sync == "create":
        yield _topic(copy.topic, "Create", "creating it if it is missing")
        yield _topic(copy.topic, "Alter", "adding partitions when the source does")
    if is_exact and copy.gaps == "markers":
        yield _topic(copy.topic, "Delete", "a source that begins above offset 0")
        yield _transactions(transactional_id_prefix(copy.topic), "offset gaps")


def _of_progress(mirror: str, target: str) -> list[Acl]:
    return [
        _topic(PROGRESS_TOPIC, "Create", "creating the progress topic, once"),
        _topic(PROGRESS_TOPIC, "Read", "reading how far the replica is"),
        _topic(PROGRESS_TOPIC, "Write", "recording how far the replica is"),
        _transactions(FlowKey.prefix(mirror, target), "writing records and progress together"),
    ]


def _of_syncs(destination: str) -> list[Acl]:
    syncs = syncs_topic(destination)
    if syncs is None:
        return []
    return [_topic(syncs, name, _SYNCS, is_optional=True) for name in ("Create", "Write")]


def _of_groups(link: LinkSpec) -> Iterator[tuple[ConnectionSettings, list[Acl]]]:
    """Yield cluster and ACLs of the groups of a link, beyond those of its mirrors."""
    found = [_group("Describe", _READING)]
    syncs = syncs_topic(link.destination)
    if syncs and any(one.written.offsets == "translate" for one in link.replicas):
        found.append(_topic(syncs, "Read", "translating committed offsets"))
    if syncs and any(one.written.offsets == "preserve" for one in link.replicas):
        found += [_topic(syncs, name, _SYNCS, is_optional=True) for name in _SYNC_RIGHTS]
    yield link.source, found
    policy, alias = ReplicationPolicy(), link.source_alias
    checkpoints, copied = policy.checkpoints_topic(alias), policy.remote_topic(alias, HEARTBEATS)
    purpose = "checkpoints of groups"
    found = [
        _topic(checkpoints or "", "Create", purpose),
        _topic(checkpoints or "", "Write", purpose),
        _topic(
            checkpoints or "",
            "Read",
            "checkpoints that never go back after a restart",
            is_optional=True,
        ),
        _transactions(f"{TRANSACTIONAL_ID_PREFIX}{alias}-", "one writer of checkpoints at a time"),
    ]
    for topic in (HEARTBEATS, copied or ""):
        shown = "heartbeats, which MirrorMaker's client lists"
        found += [_topic(topic, name, shown, is_optional=True) for name in ("Create", "Write")]
    if link.commits:
        purpose = "committing offsets of groups"
        found.append(_group("Read", purpose))
        found += [_topic(one.written.topic, "Read", purpose) for one in link.replicas]
    else:
        shown = "the lower bound of checkpoints that cannot be read"
        found.append(_group("Describe", shown, is_optional=True))
    for one in link.replicas:
        if one.written.takeover is not None:
            found += _of_takeover(one.written.topic, alias)
    yield link.target, found


def _of_takeover(topic: str, source_alias: str) -> list[Acl]:
    purpose = "taking over from MirrorMaker"
    return [
        _topic(topic, "Read", purpose),
        _topic(offsets_topic(source_alias), "Read", purpose),
        _group("Describe", "whether MirrorMaker still runs", workers_group(source_alias)),
    ]


def _of_brokers(copy: KafkaSpec) -> Iterator[Acl]:
    yield _cluster("DescribeConfigs", "checking the brokers' settings")
    if copy.offsets == "preserve" and copy.gaps == "markers":
        quick = "fast offset gaps, safe while leaders change"
        yield _cluster("ClusterAction", f"{quick}; nearly a broker's right")
        yield _cluster("Describe", quick)


def _topic(name: str, operation: str, purpose: str, *, is_optional: bool = False) -> Acl:
    return Acl(
        resource="topic", name=name, operation=operation, purpose=purpose, is_optional=is_optional
    )


def _group(operation: str, purpose: str, name: str = "*", *, is_optional: bool = False) -> Acl:
    return Acl(
        resource="group",
        name=name,
        operation=operation,
        purpose=purpose,
        is_optional=is_optional,
    )


def _transactions(prefix: str, purpose: str) -> Acl:
    return Acl(
        resource="transactional-id",
        name=prefix,
        is_prefix=True,
        operation="Write",
        purpose=purpose,
    )


def _cluster(operation: str, purpose: str) -> Acl:
    return Acl(
        resource="cluster", name=_CLUSTER, operation=operation, purpose=purpose, is_optional=True
    )
