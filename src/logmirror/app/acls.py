"""The Kafka ACLs that a configuration needs: what `run` asks brokers for, and nothing else.

    operation        on            for
    Read             the topic     Fetch
    DescribeConfigs  the topic     DescribeConfigs: is it compacted?

at the source, and with `offsets: translate` Create and Write on the topic of the offset syncs. At
the destination:

    Write            the topic     Produce
    Read             the topic     DescribeProducers and Fetch: what is there (preserve)
    DescribeConfigs  the topic     DescribeConfigs: does it fit?
    Create, Alter    the topic     CreateTopics, CreatePartitions (topic-sync: create)
    Delete           the topic     DeleteRecords: a head that the source no longer has
    Write            ids           InitProducerId and what follows: transactions
    Read, Write,     the progress  Fetch, Produce, CreateTopics (translate)
    Create
    ClusterAction,   the cluster   WriteTxnMarkers, DescribeCluster: markers
    Describe
    DescribeConfigs  the cluster   DescribeConfigs: the brokers' settings

Read, Write, Delete and Alter include Describe. No consumer group is used, nor a right to idempotent
writes: producer ids are derived, or come with a transactional id.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from logmirror.app.run import mirror_specs
from logmirror.errors import UsageError
from logmirror.mirror.ports import KafkaSpec
from logmirror.to_kafka.gap_writer import transactional_id_prefix
from logmirror.to_kafka.offset_syncs import topic_of
from logmirror.to_kafka.translate_progress import PROGRESS_TOPIC, FlowKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.config.settings import Settings
    from logmirror.mirror.source_views import MirrorSpec

_CLUSTER: Final = "kafka-cluster"
"""What Kafka calls the resource that is the cluster itself."""

_BY_CERTIFICATE: Final = "the principal is in a certificate or a token, which only brokers read"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Acl:
    """One operation on one resource that a principal must be allowed."""

    resource: Literal["cluster", "topic", "transactional-id"]
    name: str
    is_prefix: bool = False
    """Whether it is for all resources whose names begin so."""

    operation: str
    """As Kafka's own tool writes it: `DescribeConfigs`."""

    is_optional: bool = False
    """The copies are made without it, too; `purpose` says what is lost."""

    purpose: str
    """What it is for, and when: lower case, no full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAcls:
    """What one principal needs at one cluster."""

    bootstrap_servers: str
    principal: str
    """`User:mirror`."""

    acls: tuple[Acl, ...]
    """In the order of resources and operations; none twice."""


def needed_acls(settings: Settings, principal: str | None = None) -> list[ClusterAcls]:
    """What the enabled mirrors of a configuration need, for each cluster and principal.

    Args:
        settings: The configuration.
        principal: Who is to be allowed; None: whom the connection properties name.

    Raises:
        UsageError: The properties of a cluster do not tell.
    """
    found: dict[tuple[str, str], list[Acl]] = {}
    for spec in mirror_specs(settings):
        for _, cluster, acls in acls_of(spec):
            servers = ",".join(_address(*each) for each in cluster.bootstrap_servers)
            found.setdefault((servers, principal or _principal(cluster, servers)), []).extend(acls)
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
            hint="name it: --principal User:CN=mirror,O=example",
            bootstrap_servers=servers,
        )
    return "User:ANONYMOUS"


def _merged(acls: Iterable[Acl]) -> tuple[Acl, ...]:
    """Each once; what somebody needs is needed, whoever could do without."""
    found: dict[Acl, Acl] = {}
    for acl in acls:
        key = replace(acl, purpose="", is_optional=False)
        known = found.get(key)
        if known is None or (known.is_optional and not acl.is_optional):
            found[key] = acl
    return tuple(sorted(found.values()))


# -- what the code asks for ------------------------------------------------------------------------


def acls_of(spec: MirrorSpec) -> Iterator[tuple[str, ConnectionSettings, list[Acl]]]:
    """What a mirror needs: for which destination (empty: for the source), at which cluster."""
    reading = _topic(spec.topic, "Read", "reading its records")
    knowing = _topic(spec.topic, "DescribeConfigs", "knowing whether it is compacted")
    yield "", spec.source, [reading, knowing]
    for name, written in spec.destinations:
        if not isinstance(written, KafkaSpec):
            continue
        yield name, written.cluster, [*_of_topic(written), *_of_brokers(written)]
        if written.offsets == "translate":
            yield name, written.cluster, _of_progress(spec.name, written.topic)
            yield name, spec.source, _of_syncs(name)


def _of_topic(copy: KafkaSpec) -> Iterator[Acl]:
    yield _topic(copy.topic, "Write", "writing the copy")
    is_exact = copy.offsets == "preserve"
    looking = "looking at what is there before anything is written" if is_exact else "`verify`"
    yield _topic(copy.topic, "Read", looking, is_optional=not is_exact)
    is_looked_at = copy.topic_sync != "off"
    fitting = "comparing its settings" if is_looked_at else "knowing its largest batch"
    yield _topic(copy.topic, "DescribeConfigs", fitting, is_optional=not is_looked_at)
    if copy.topic_sync == "create":
        yield _topic(copy.topic, "Create", "making it where it is not there")
        yield _topic(copy.topic, "Alter", "adding partitions that the source has got")
    if is_exact and copy.gaps == "markers":
        yield _topic(copy.topic, "Delete", "a source that begins above offset 0")
        yield _transactions(transactional_id_prefix(copy.topic), "offsets without a record")


def _of_progress(mirror: str, target: str) -> list[Acl]:
    return [
        _topic(PROGRESS_TOPIC, "Create", "making the topic of the progress, once"),
        _topic(PROGRESS_TOPIC, "Read", "knowing how far the copy is"),
        _topic(PROGRESS_TOPIC, "Write", "saying how far the copy is"),
        _transactions(FlowKey.prefix(mirror, target), "writing records and progress together"),
    ]


def _of_syncs(destination: str) -> list[Acl]:
    syncs = topic_of(destination)
    if syncs is None:
        return []
    lost = "offset syncs as MirrorMaker 2 writes them"
    return [_topic(syncs, operation, lost, is_optional=True) for operation in ("Create", "Write")]


def _of_brokers(copy: KafkaSpec) -> Iterator[Acl]:
    yield _cluster("DescribeConfigs", "checking the brokers' settings")
    if copy.offsets == "preserve" and copy.gaps == "markers":
        quick = "filling offsets without a record quickly, and safely while leaders change"
        yield _cluster("ClusterAction", quick)
        yield _cluster("Describe", quick)


def _topic(name: str, operation: str, purpose: str, *, is_optional: bool = False) -> Acl:
    return Acl(
        resource="topic", name=name, operation=operation, purpose=purpose, is_optional=is_optional
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


# -- as people and programs read it ----------------------------------------------------------------

_HEAD: Final = """\
# What each principal must be allowed, as commands of Kafka's own tool. Where the cluster asks who
# you are, add --command-config with the properties of an administrator.
"""


def acls_text(clusters: Iterable[ClusterAcls]) -> str:
    """Commands of `kafka-acls.sh`, with what they are for; as comments if they can be left out."""
    return "\n".join([_HEAD, *(_cluster_text(cluster) for cluster in clusters)])


def _cluster_text(cluster: ClusterAcls) -> str:
    lines = [f"# -- {cluster.principal} at {cluster.bootstrap_servers}"]
    for is_optional in (False, True):
        chosen = [acl for acl in cluster.acls if acl.is_optional is is_optional]
        if chosen and is_optional:
            lines.append("# These can be left out; what is lost without them stands above each.")
        for resource in dict.fromkeys((a.resource, a.name, a.is_prefix) for a in chosen):
            of_it = [acl for acl in chosen if (acl.resource, acl.name, acl.is_prefix) == resource]
            lines += [f"#   {acl.operation}: {acl.purpose}" for acl in of_it]
            command = _command(cluster, of_it)
            lines += [f"# {line}" if is_optional else line for line in command]
    return "\n".join(lines) + "\n"


def _command(cluster: ClusterAcls, acls: list[Acl]) -> list[str]:
    first = acls[0]
    words = ["--cluster"] if first.resource == "cluster" else [f"--{first.resource}", first.name]
    words += ["--resource-pattern-type", "prefixed"] if first.is_prefix else []
    for acl in acls:
        words += ["--operation", acl.operation]
    servers = ["kafka-acls.sh", "--bootstrap-server", cluster.bootstrap_servers, "--add"]
    return [
        f"{shlex.join([*servers, '--allow-principal', cluster.principal])} \\",
        f"  {shlex.join(words)}",
    ]


def acls_json(clusters: Iterable[ClusterAcls]) -> list[dict[str, object]]:
    """The same as JSON knows it."""
    return [
        {
            "bootstrap_servers": cluster.bootstrap_servers,
            "principal": cluster.principal,
            "acls": [
                {
                    "resource_type": acl.resource,
                    "name": acl.name,
                    "pattern_type": "prefixed" if acl.is_prefix else "literal",
                    "operation": acl.operation,
                    "optional": acl.is_optional,
                    "purpose": acl.purpose,
                }
                for acl in cluster.acls
            ],
        }
        for cluster in clusters
    ]
