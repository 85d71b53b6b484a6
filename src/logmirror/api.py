"""The functions behind `import logmirror`. The command line uses nothing else.

Each function loads what it needs when it is called, so importing this module is cheap: it starts no
JVM and compiles no kernel.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final, Literal

from logmirror.errors import UsageError

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from logmirror.app.moves import Moves as Moves  # noqa: PLC0414  # also the command line's type
    from logmirror.broker.options import Archive, BrokerOptions
    from logmirror.config.destinations import S3Destination
    from logmirror.config.settings import Settings
    from logmirror.reports import (
        CheckReport,
        ClusterAcls,
        CompactReport,
        CostReport,
        Event,
        GroupLinkStatus,
        GroupOutcome,
        GroupPlan,
        PartitionStatus,
        RunProgress,
        VerifyReport,
    )

TARGET_BYTES: Final = 256 << 20
"""Default size of merged objects, in bytes."""

MIN_OBJECTS: Final = 8
"""Default number of adjacent small objects below which they are not merged."""


def load(  # noqa: PLR0913  # three sources of a configuration, three ways to narrow it
    path: str | os.PathLike[str] | None = None,
    *,
    text: str | None = None,
    values: Mapping[str, object] | None = None,
    mirrors: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
    needs_variables: bool = True,
) -> Settings:
    """Load a configuration from a file, a text, or values.

    Args:
        path: A YAML file.
        text: YAML text, instead of a file.
        values: The same structure as mappings, lists, texts and numbers, instead of a file.
        mirrors: Names of the mirrors to keep. Empty: all.
        environ: What `${VAR}` refers to. None: the environment of this process.
        needs_variables: Whether variables that name credentials (`...-env`) must be set now. False
            suits callers that do not connect to anything.

    Returns:
        The settings: frozen, picklable, with every default filled in.

    Raises:
        ConfigError: The configuration is invalid; `problems` lists every problem with its line.
        UsageError: No such mirror, or not exactly one of path, text and values was given.
    """
    from logmirror.app.broker_section import check_overrides  # noqa: PLC0415  # see the module
    from logmirror.cluster.properties import property_problems  # noqa: PLC0415  # see the module
    from logmirror.config import settings as config  # noqa: PLC0415  # see the module

    def check_properties(properties: Mapping[str, str]) -> list[tuple[str, str, str]]:
        found = property_problems("localhost:9092", properties)
        return [(problem.name, problem.message, problem.suggestion) for problem in found]

    if sum(given is not None for given in (path, text, values)) != 1:
        raise UsageError("one of path, text and values is required")
    if path is not None:
        settings = config.load(
            str(path),
            environ=environ,
            check_properties=check_properties,
            needs_variables=needs_variables,
        )
    else:
        settings = config.load_text(
            text if text is not None else json.dumps(values),
            environ=environ,
            check_properties=check_properties,
            needs_variables=needs_variables,
        )
    check_overrides(settings)
    return _only(settings, mirrors)


def _only(settings: Settings, names: Collection[str]) -> Settings:
    if not names:
        return settings
    known = [mirror.name for mirror in settings.mirrors]
    for name in names:
        if name not in known:
            raise UsageError("no such mirror in the configuration", mirror=name, mirrors=known)
    chosen = tuple(mirror for mirror in settings.mirrors if mirror.name in names)
    return dataclasses.replace(settings, mirrors=chosen)


def open_archives(
    places: Iterable[str | S3Destination],
    environ: Mapping[str, str],
    *,
    utf8: bool | None = None,
) -> tuple[Archive, ...]:
    """Return archives for the embedded broker to mount; see `app.archives`."""
    from logmirror.app.archives import open_archives as opened  # noqa: PLC0415  # see the module

    return opened(places, environ, utf8=utf8)


def run(  # noqa: PLR0913  # one parameter for each thing a caller may set
    settings: Settings,
    *,
    until_now: bool = False,
    only: Literal["groups"] | None = None,
    stop: threading.Event | None = None,
    on_event: Callable[[Event], None] | None = None,
    on_progress: Callable[[RunProgress], None] | None = None,
    master: str | None = None,
    spark_log: Path | None = None,
    metrics_port: int = 0,
    metrics_port_required: bool = True,
    metrics_host: str = "127.0.0.1",
    metrics_partitions: bool = True,
    heartbeat_ms: int = 0,
    handles_signals: bool = False,
) -> None:
    """Run the mirrors of a configuration. Blocks until they end.

    Starts Spark in this process and stops it before returning. Run one at a time.

    Args:
        settings: The configuration, from `load`.
        until_now: Replicate what is at the sources now, then return. False: run until stopped.
        only: `groups`: only translate the groups of mirrors with `groups`, without Spark.
        stop: Set it from another thread to stop: what was seen is flushed, then `run` returns.
            Before replication has begun, it returns within seconds.
        on_event: Called with each event, in the thread in which it happens. Must return quickly:
            replication waits for it. What it raises is printed to stderr and ignored.
        on_progress: Called with the progress of all mirrors about twice a second, and at the end.
            Replication does not wait for it. What it raises is logged; it is not called again then.
        master: Spark master, instead of the configured one.
        spark_log: Write the output of Spark's JVM to this file.
        metrics_port: TCP port of `/metrics`, `/livez`, `/readyz` and `/status.json`, 1 to 65535.
            0: none.
        metrics_port_required: Whether a port that cannot be opened is an error, or only logged.
        metrics_host: IP address on which the port listens. "0.0.0.0": all of IPv4; "::": all.
        metrics_partitions: Whether there are metrics of single partitions, beside those of mirrors.
        heartbeat_ms: Interval of heartbeats in the log, level DEBUG, in milliseconds. 0: none.
        handles_signals: Whether SIGTERM and SIGINT stop the run, and a second one the process.
            Only in the main thread.

    Raises:
        UsageError: Every mirror is disabled, a permission is missing, the metrics port cannot be
            opened, or a Spark cluster is not protected.
        UnavailableError: Another process uses the metrics port.
        LogmirrorError: A mirror stopped for good; see `logmirror.errors` for the kinds.
    """
    from logmirror.app import run as app  # noqa: PLC0415  # see the module
    from logmirror.config.environment import ProcessEnvironment  # noqa: PLC0415  # see the module

    app.run(
        settings,
        until_now=until_now,
        only=only,
        master=master,
        spark_log=spark_log,
        environment=ProcessEnvironment(
            metrics_port=metrics_port,
            metrics_port_is_set=metrics_port_required,
            metrics_host=metrics_host,
            metrics_partitions=metrics_partitions,
            heartbeat_ms=heartbeat_ms,
        ),
        stop=stop,
        on_event=on_event,
        on_progress=on_progress,
        handles_signals=handles_signals,
    )


def status(settings: Settings) -> list[PartitionStatus]:
    """Return the position and the lag of every partition of every enabled mirror.

    Reads sources and destinations, but no records; changes nothing. A partition that cannot be
    read, or that `run` would refuse to continue, has an `error` in its row; nothing is raised for
    it.

    Args:
        settings: The configuration, from `load`.

    Returns:
        One row per partition and destination, in the order of the configuration.
    """
    from logmirror.app import status as app  # noqa: PLC0415  # see the module

    return app.status(settings)


def group_status(settings: Settings) -> list[GroupLinkStatus]:
    """Return how far the consumer groups of each source can continue at each destination.

    Only where `groups` is configured. Reads committed offsets, offset syncs and heartbeats; changes
    nothing. What cannot be read has an `error` in its row; nothing is raised for it.

    Args:
        settings: The configuration, from `load`.

    Returns:
        One row per source and destination, in the order of the configuration.
    """
    from logmirror.app import group_status as app  # noqa: PLC0415  # see the module

    return app.group_status(settings)


def verify(
    settings: Settings,
    *,
    deep: bool = False,
    against_source: bool = False,
    on_object: Callable[[], None] = lambda: None,
    on_report: Callable[[VerifyReport], None] = lambda _: None,
) -> list[VerifyReport]:
    """Verify the replicas of every enabled mirror. Changes nothing.

    Without options, an archive's names must form a chain without gaps and overlaps.

    Args:
        settings: The configuration, from `load`.
        deep: Also read every object or batch: checksums, order, counts, causes of offset gaps.
        against_source: Also compare with what the source serves now. Includes `deep`.
        on_object: Called after each object or partition, for a progress display.
        on_report: Called with each report, in order. What was found before an error is not lost.

    Returns:
        One report per partition and destination, in the order of the configuration.

    Raises:
        UnavailableError: A cluster or a store did not respond within its deadline.
        UsageError: A cluster or a store denied access.
    """
    from logmirror.app import verify as app  # noqa: PLC0415  # see the module

    return app.verify(
        settings,
        deep=deep,
        against_source=against_source,
        on_object=on_object,
        on_report=on_report,
    )


def compact(
    settings: Settings,
    *,
    target_bytes: int = TARGET_BYTES,
    min_objects: int = MIN_OBJECTS,
    dry_run: bool = False,
) -> list[CompactReport]:
    """Merge small objects of archives into larger ones, while mirrors and readers continue.

    Args:
        settings: The configuration, from `load`.
        target_bytes: Size limit of a merged object: the sum of the objects that it replaces, bytes.
        min_objects: Fewer adjacent small objects are left alone. 2 or more.
        dry_run: Change nothing; report what would be merged.

    Returns:
        One report per partition and archive. A partition that failed has an `error`.

    Raises:
        UsageError: The configuration has no archive that can be compacted.
    """
    from logmirror.app import compact as app  # noqa: PLC0415  # see the module

    return app.compact(
        settings, target_bytes=target_bytes, min_objects=min_objects, dry_run=dry_run
    )


def check(settings: Settings) -> list[CheckReport]:
    """Check what `run` needs: connections, permissions, settings of topics, stores, positions.

    Leaves everything as it was: probe objects and folders are removed.

    Args:
        settings: The configuration, from `load`.

    Returns:
        One row per check. Severity `error` means that `run` would fail.
    """
    from logmirror.app import preflight as app  # noqa: PLC0415  # see the module

    return app.check(settings)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the configuration file."""
    from logmirror.config.settings import json_schema as schema  # noqa: PLC0415  # see the module

    return schema()


def bucket_policies(settings: Settings, *, compacts: bool = False) -> dict[str, dict[str, object]]:
    """Return the least IAM policies for the buckets of a configuration, by identity.

    Args:
        settings: The configuration, from `load`.
        compacts: Whether `compact` runs with them, which deletes objects.
    """
    from logmirror.app.policy import bucket_policies as policies  # noqa: PLC0415  # see the module

    return policies(settings, compacts=compacts)


def conditional_write_policies(settings: Settings) -> dict[str, dict[str, object]]:
    """Return a bucket policy for each bucket, with which the store refuses to replace objects.

    Amazon S3 only: the policy denies writes without `If-None-Match`, also those of stolen keys.

    Args:
        settings: The configuration, from `load`.
    """
    from logmirror.app.policy import (  # noqa: PLC0415  # see the module
        conditional_write_policies as policies,
    )

    return policies(settings)


def kafka_acls(settings: Settings, *, principal: str | None = None) -> list[ClusterAcls]:
    """Return the Kafka ACLs that the enabled mirrors need, by cluster and principal.

    Args:
        settings: The configuration, from `load`.
        principal: Who needs them. None: the users that the connection properties name.

    Raises:
        UsageError: The principal of a cluster is not in the configuration.
    """
    from logmirror.app.acls import needed_acls  # noqa: PLC0415  # see the module

    return needed_acls(settings, principal)


def plan_groups(
    settings: Settings,
    groups: Collection[str] = (),
    *,
    offsets_from: str | None = None,
    at_ms: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[GroupPlan]:
    """Translate the source's consumer groups for every replica in another cluster. Only reads.

    Groups are those of consumers with committed offsets of mirrored partitions. Where a replica
    keeps its offsets, the translation is exact. Otherwise it is the last offset sync at or before
    the group's offset, so that records may be read again, but none is skipped.

    Args:
        settings: From `load`.
        groups: Only these. Empty: all.
        offsets_from: The name of an archive of the mirrors. The committed offsets are those of its
            newest snapshot, and the source is not contacted. None: those of the source now.
        at_ms: Use the newest snapshot at or before this time, in milliseconds since 1970.
        on_progress: Called after each step, with the steps done and their number: offsets of a
            group that were read, or planned for a destination.

    Raises:
        UsageError: A group of `groups` does not exist; no permission; no such archive or snapshot.
        UnavailableError: A cluster or a store did not respond.
        CorruptionError: The snapshot is damaged.
    """
    from logmirror.app import groups as app  # noqa: PLC0415  # see the module
    from logmirror.app.archived_offsets import OffsetsFrom  # noqa: PLC0415  # see the module

    if offsets_from is None:
        if at_ms is not None:
            raise UsageError("a time is only for offsets from an archive")
        return app.plan_groups(settings, groups, on_progress=on_progress)
    return app.plan_groups(settings, groups, OffsetsFrom(offsets_from, at_ms), on_progress)


def apply_groups(
    settings: Settings,
    plans: Iterable[GroupPlan],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[GroupOutcome]:
    """Commit the offsets of plans at the destinations, and read them back.

    An offset is only moved forward. A group with members at the destination, and one that has
    committed since the plan was made, is not touched. A refused partition does not affect others.

    Args:
        settings: From `load`.
        plans: From `plan_groups` or `read_plan`.
        on_progress: Called after each plan, with the plans done and their number.

    Raises:
        UsageError: A plan was made for another configuration or cluster.
        UnavailableError: A cluster did not respond.
    """
    from logmirror.app import groups as app  # noqa: PLC0415  # see the module

    return app.apply_groups(settings, plans, on_progress)


def rollback_groups(
    settings: Settings,
    plans: Iterable[GroupPlan],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[GroupOutcome]:
    """Restore the offsets that groups had before `apply_groups`, and read them back.

    Offsets that did not exist are deleted. A group that has committed since, or that has members,
    is not touched. Arguments and errors are those of `apply_groups`.
    """
    from logmirror.app import groups as app  # noqa: PLC0415  # see the module

    return app.rollback_groups(settings, plans, on_progress)


def plan_text(plans: Iterable[GroupPlan]) -> str:
    """Return plans as JSON text, for review and for `read_plan`."""
    from logmirror.groups import plan  # noqa: PLC0415  # see the module

    return plan.plan_text(plans)


def read_plan(text: str) -> list[GroupPlan]:
    """Read what `plan_text` returned.

    Raises:
        UsageError: It is not such a text, or of another version.
    """
    from logmirror.groups import plan  # noqa: PLC0415  # see the module

    return plan.read_plan(text)


def serve_bucket(
    options: BrokerOptions,
    work_dir: Path | None,
    on_ready: Callable[[str, int], None],
    on_standby: Callable[[], None] = lambda: None,
) -> None:
    """Run the embedded broker on a bucket; see `app.broker.serve_bucket`."""
    from logmirror.app import broker  # noqa: PLC0415  # see above

    broker.serve_bucket(options, work_dir, on_ready, on_standby)


def explain_cost(
    options: BrokerOptions,
    *,
    write_bytes_s: float,
    read_bytes_s: float,
    partitions: int,
    prices: Mapping[str, float],
) -> CostReport:
    """Return the requests of a month of a broker in a bucket; see `broker.bucket.costs`."""
    from logmirror.broker.bucket.costs import explain  # noqa: PLC0415  # see above

    return explain(
        options,
        write_bytes_s=write_bytes_s,
        read_bytes_s=read_bytes_s,
        partitions=partitions,
        prices=prices,
    )


def open_moves(bootstrap_servers: str, properties: Mapping[str, str]) -> Moves:
    """Return the log directories of a cluster, and what moves replicas between them.

    Raises:
        UsageError: A property is not valid.
    """
    from logmirror.app.moves import open_moves as opened  # noqa: PLC0415  # see the module

    return opened(bootstrap_servers, properties)
