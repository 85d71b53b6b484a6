"""Starts and stops the embedded broker."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import uvloop

from logmirror.broker.adoption import adopt
from logmirror.broker.broker import Broker
from logmirror.broker.bucket.commits import BucketCommit
from logmirror.broker.bucket.replacing import InBucket
from logmirror.broker.bucket_opening import open_bucket
from logmirror.broker.changes import Changes
from logmirror.broker.compaction import ByPlace, Compactor, OnDisk
from logmirror.broker.dir_failures import DirFailures, StopLimit
from logmirror.broker.dynamic_configs import MOVE_RATE, DynamicConfigs
from logmirror.broker.group_service import GroupService
from logmirror.broker.groups.consumer_state import TopicInfo
from logmirror.broker.groups.values import GroupSettings
from logmirror.broker.handlers.client_quotas import stored_quotas
from logmirror.broker.housekeeping import Housekeeping
from logmirror.broker.log.batch_check import RECORD_CHECK
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.flush_threads import FlushThreads
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.segment_cache import AHEAD, DEFAULT_LOADED_SEGMENTS, SegmentCache
from logmirror.broker.log_dirs.holding import held_dir
from logmirror.broker.log_dirs.placement import (
    PRIVATE,
    check_different,
    cluster_id_files,
    database_path,
)
from logmirror.broker.memory import keep_memory
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.moves.bucket_routes import BucketRoutes
from logmirror.broker.moves.mover import Moves
from logmirror.broker.moves.routes import Routes
from logmirror.broker.moves.throttle import Throttle
from logmirror.broker.protocol.connections import Connections
from logmirror.broker.protocol.listening import (
    Accepting,
    Bound,
    accept,
    bound_listeners,
    close_removed,
)
from logmirror.broker.security.authorization import Authorizer
from logmirror.broker.security.store import FILE_NAME, SecurityStore
from logmirror.broker.state_store import StateStore
from logmirror.broker.topic_configs import check_overrides
from logmirror.broker.topics import Topics
from logmirror.broker.transaction_offsets import TransactionOffsets
from logmirror.broker.transaction_service import TransactionService
from logmirror.broker.transactions.coordinator import Coordinator, Limits
from logmirror.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from logmirror.broker.archives.copies import LocalCopies
    from logmirror.broker.bucket.logs import BucketLogs
    from logmirror.broker.compaction import Replacing
    from logmirror.broker.options import BrokerOptions
    from logmirror.stores.base import BlobStore

    _Stores = tuple[MetadataStore, StateStore, SecurityStore]

_LOG: Final = logging.getLogger(__name__)
_OTHER_THREADS: Final = 4
_CHANGE_THREADS: Final = 2
_MOVE_THREADS: Final = 4  # two steps, and what makes the steps before them durable
_CHECK_THREADS: Final = 2
_SWEEP_S: Final = 1.0
_KEEPING_S: Final = 1.0
"""How long a stop waits for what runs in the background, which may wait for a bucket."""

_FILES_FOR_US: Final = 128
"""Descriptors reserved for the database, flushes and Python."""

_MANY_FILES: Final = 2**20
_STDIN: Final = 0


def serve(
    options: BrokerOptions,
    *,
    on_ready: Callable[[str, int], None],
    store: BlobStore | None = None,
    on_standby: Callable[[], None] = lambda: None,
) -> None:
    """Run a broker until SIGTERM or SIGINT, then stop it cleanly.

    Blocks. Outside the main thread it receives no signals and runs until the process ends.

    Args:
        options: The broker's settings.
        on_ready: Called once with host and port of the first listener, when the broker accepts
            connections.
        store: The log dir, if it is in a bucket (`BrokerOptions.bucket`).
        on_standby: Called once before a standby waits for the owner of the log dir.

    Raises:
        FencedError: Another broker took over the log dir in the bucket.
        LogDirError: The directory of the broker's database failed, or all log directories on disks.
        UsageError: The log directory is not writable or in use by another broker, or a listener
            cannot be bound or would not authenticate clients of other hosts.
        UnavailableError: The broker's database is not usable, or its copy of one in a bucket.
        CorruptionError: The broker's database is damaged.
    """
    check_overrides(options.overrides)
    with bound_listeners(options) as bound, contextlib.ExitStack() as held:
        check_different(options.log_dirs)
        for path in options.log_dirs:
            held.enter_context(held_dir(path))
        bucket = None
        if store is not None:
            bucket = open_bucket(options, store, on_standby)
            if bucket is None:
                return
            held.callback(bucket.close)
            _LOG.info("%s: taken over, epoch %d", options.bucket, bucket.epoch)
        database = database_path(options.log_dirs if bucket is None else options.log_dirs[:1])
        paths = database, database.with_name("state.sqlite"), database.with_name(FILE_NAME)
        if bucket is not None:
            adopt(bucket, options.disk_dirs, paths)
        shipping = [None if bucket is None else bucket.restored(path) for path in paths]
        metadata = held.enter_context(contextlib.closing(MetadataStore(paths[0], shipping[0])))
        state = held.enter_context(contextlib.closing(StateStore(paths[1], shipping[1])))
        security = held.enter_context(contextlib.closing(SecurityStore(paths[2], shipping[2])))
        if bucket is not None:
            makers = metadata.snapshot, state.snapshot, security.snapshot
            for path, make in zip(paths, makers, strict=True):
                bucket.snapshots.add(path.stem, make)
        for file in cluster_id_files(options.log_dirs, metadata.cluster_id):
            Disk().write_synced(file, [metadata.cluster_id.encode()])
            Disk().sync_folder(file.parent)
        limit = StopLimit()
        held.callback(limit.cancel)
        stores = metadata, state, security
        uvloop.run(_serve(options, stores, bound, on_ready, bucket, limit))


async def _serve(  # noqa: PLR0913, PLR0917  # the broker's parts
    options: BrokerOptions,
    stores: _Stores,
    bound: list[Bound],
    on_ready: Callable[[str, int], None],
    bucket: BucketLogs | None,
    limit: StopLimit,
) -> None:
    store, state, security = stores
    max_connections, max_files = _share_files(options.max_connections)
    disk, cache = _disk(max_files, bucket)
    with (
        FlushThreads() as flushers,
        ThreadPoolExecutor(_OTHER_THREADS, "logmirror-broker") as others,
        ThreadPoolExecutor(_CHANGE_THREADS, "logmirror-change") as changers,
        ThreadPoolExecutor(_CHECK_THREADS, "logmirror-check") as checkers,
        ThreadPoolExecutor(1, "logmirror-clean") as cleaners,
        ThreadPoolExecutor(_MOVE_THREADS, "logmirror-move") as movers,
        contextlib.ExitStack() as monitored,
    ):
        commits = _commits(options, flushers, disk, bucket)
        topics = Topics(options, store, others, disk, cache, commits, bucket)
        configs = _configs(options, store, topics, throttle := Throttle(SYSTEM_CLOCK))
        failures = _dir_failures(topics, disk, stores, limit)
        topics.load()
        commits.opened()
        await topics.create_missing()
        if options.disk_dirs:
            topics.follow(_moves(topics, disk, commits, store, (movers, changers), throttle))
        copies, unmount = await _mount(options, topics, disk, cache)
        groups = _groups(options, state, topics)
        transactions = _transactions(options, groups, state, store, topics, commits, changers)
        broker = Broker(
            options=options,
            store=store,
            state=state,
            security=security,
            authorizer=Authorizer(options.super_users, security.acls()),
            quotas=stored_quotas(store),
            groups=groups,
            transactions=transactions,
            topics=topics,
            cache=cache,
            commits=commits,
            executor=others,
            changers=changers,
            changes=Changes(options.change_timeout_s),
            checkers=checkers,
            port=bound[0].port,
            copies=copies,
            configs=configs,
        )
        connections = Connections(broker, max_connections)
        servers = [await accept(one, connections) for one in bound]
        housekeeping, compactor = _background(broker, disk, cleaners)
        keeping = asyncio.gather(housekeeping.run(), compactor.run(), return_exceptions=True)
        stop = _stop_when(commits.fenced, failures.fatal, with_stdin=options.stop_with_stdin)
        keep_memory()
        _announce(options, bound)
        monitored.enter_context(_monitored(broker, connections))
        on_ready(bound[0].host, bound[0].port)
        await _sweep_until(stop, connections, transactions)
        _begin_stop(bucket, servers, failures, housekeeping, compactor)
        await asyncio.wait([keeping], timeout=None if bucket is None else _KEEPING_S)
        await connections.stop()
        await transactions.stop()
        groups.stop()
        await unmount()
        await topics.close()
        _check_end(commits, failures)


def _check_end(commits: GroupCommit, failures: DirFailures) -> None:
    """Raise what ended the broker, or what it could not make durable."""
    if commits.fenced.done():
        raise commits.fenced.result()
    if failures.fatal.done():
        raise failures.fatal.result()
    commits.check_drained()


def _begin_stop(
    bucket: BucketLogs | None,
    servers: list[Accepting],
    failures: DirFailures,
    housekeeping: Housekeeping,
    compactor: Compactor,
) -> None:
    """Bound the stop, accept no more connections, and end what runs in the background."""
    _LOG.info("stopping")
    if bucket is not None:
        bucket.begin_stop()
    failures.begin_stop()
    housekeeping.stop()
    compactor.stop()
    for server in servers:
        server.close()


def _disk(max_files: int, bucket: BucketLogs | None) -> tuple[Disk, SegmentCache]:
    max_loaded = min(DEFAULT_LOADED_SEGMENTS, max_files // 2)
    if bucket is None:
        disk = Disk(max_files=max_files)
        return disk, SegmentCache(disk, max_loaded=max_loaded, ahead=AHEAD)
    bucket.disk.max_files = max_files
    disk = bucket.disk
    room, part = disk.has_room, disk.part
    cache = SegmentCache(disk, max_loaded=max_loaded, parts=part, ahead=AHEAD, has_room=room)
    disk.when_evicted = cache.let_go
    return disk, cache


def _commits(
    options: BrokerOptions, threads: FlushThreads, disk: Disk, bucket: BucketLogs | None
) -> GroupCommit:
    """Return what makes the logs durable, on the disk or in a bucket."""
    limit = options.max_unflushed_bytes
    if bucket is None:
        return GroupCommit(threads.of, disk, max_unflushed_bytes=limit)
    return BucketCommit(
        threads.of,
        bucket,
        interval_ms=options.commit_interval_ms,
        timeout_ms=options.commit_timeout_ms,
        max_unflushed_bytes=limit,
        tail_age_ms=options.commit_age_ms,
        max_commits=options.max_commits,
        max_seals_per_s=options.max_seals_per_s,
    )


def _dir_failures(topics: Topics, disk: Disk, stores: _Stores, limit: StopLimit) -> DirFailures:
    """Return what takes log directories offline, and let what meets their errors report them."""
    vital = {path.parent.parent for path in (stores[0].path, topics.partitions.ends.path)}
    failures = DirFailures(topics.dirs, disk, vital, topics.lose, limit)
    topics.watch(failures.suspect)
    for one in stores:
        one.watch(failures.database_failed)
    return failures


def _moves(  # noqa: PLR0913, PLR0917  # the broker's parts
    topics: Topics,
    disk: Disk,
    commits: GroupCommit,
    store: MetadataStore,
    threads: tuple[Executor, Executor],
    throttle: Throttle,
) -> Moves:
    """Return what moves partitions; the threads are for copying and for the database."""
    movers, changers = threads
    routes = Routes(disk)
    if isinstance(commits, BucketCommit):
        places = topics.dirs, topics.partitions.ends
        remove = topics.removal.remove_residence
        routes = BucketRoutes(disk, *places, commits, store, changers, remove)
    return Moves(store, commits, disk, movers, changers, throttle, routes)


def _configs(
    options: BrokerOptions, store: MetadataStore, topics: Topics, throttle: Throttle
) -> DynamicConfigs:
    """Return the settings that may change, and let what follows them follow."""
    dirs = topics.dirs
    configs = DynamicConfigs(options.node_id, store.broker_configs(), list(dirs.by_name))

    def apply() -> None:
        throttle.rate = configs.rate(MOVE_RATE)
        dirs.cordoned = frozenset(configs.cordoned())

    configs.when_changed = apply
    apply()
    return configs


async def _mount(
    options: BrokerOptions, topics: Topics, disk: Disk, cache: SegmentCache
) -> tuple[LocalCopies | None, Callable[[], Awaitable[None]]]:
    """Mount the archives; returns their copies, and what stops following them."""
    if not options.archives:
        return None, functools.partial(asyncio.sleep, 0)
    from logmirror.broker.archives import copies as local  # noqa: PLC0415  # only for archives
    from logmirror.broker.archives.mounts import Mounts  # noqa: PLC0415  # the same

    folder = options.log_dir / PRIVATE / "archive-copies"
    copies = local.LocalCopies(folder, cache, options.archive_cache_bytes)
    mounts = Mounts(options.archives, topics, disk, cache, copies=copies)
    await mounts.open()
    return copies, mounts.close


def _background(broker: Broker, disk: Disk, cleaners: Executor) -> tuple[Housekeeping, Compactor]:
    """Return what deletes and what compacts."""
    topics, commits, cache, others = broker.topics, broker.commits, broker.cache, broker.executor
    replacing: Replacing = OnDisk(disk, cleaners)
    if isinstance(commits, BucketCommit):
        in_bucket = InBucket(commits, broker.store, cleaners)
        replacing = ByPlace(commits, commits.bucket.is_open, in_bucket, replacing)
    housekeeping = Housekeeping(topics, commits, cache, disk, others, broker.clock)
    housekeeping.compactor = compactor = Compactor(
        *(topics, commits, cache, disk, broker.store, cleaners, others, broker.clock),
        *(housekeeping.reconsider, replacing),
    )
    return housekeeping, compactor


def _announce(options: BrokerOptions, bound: list[Bound]) -> None:
    dirs = ", ".join(map(str, (options.bucket or options.log_dir, *options.more_log_dirs)))
    for host, port, _, endpoint in bound:
        _LOG.info("listening on %s:%d (%s), log directories: %s", host, port, endpoint.name, dirs)
    if not options.flush_on_ack:
        _LOG.warning(
            "records are acknowledged before they are flushed: a power loss can take away "
            "those of the last %d ms",
            options.flush_ms,
        )


def _transactions(  # noqa: PLR0913, PLR0917  # the broker's parts
    options: BrokerOptions,
    groups: GroupService,
    state: StateStore,
    store: MetadataStore,
    topics: Topics,
    commits: GroupCommit,
    executor: Executor,
) -> TransactionService:
    """Restore the transactions. Blocks."""
    coordinator = _coordinator(options)
    found = TransactionService(coordinator, state, store, topics, commits, executor, SYSTEM_CLOCK)
    found.groups = TransactionOffsets(groups, topics)
    found.timeout_s = options.change_timeout_s
    found.load()
    return found


def _coordinator(options: BrokerOptions) -> Coordinator:
    limits = Limits(
        options.max_transaction_timeout_ms,
        options.transactional_id_expiration_ms,
        options.max_transactional_ids,
    )
    return Coordinator(limits)


def _groups(options: BrokerOptions, state: StateStore, topics: Topics) -> GroupService:
    """Restore the groups. Blocks."""
    settings = GroupSettings(
        initial_rebalance_delay_ms=options.group_initial_rebalance_delay_ms,
        min_session_timeout_ms=options.group_min_session_timeout_ms,
        max_session_timeout_ms=options.group_max_session_timeout_ms,
        max_members=options.group_max_size,
        max_groups=options.max_groups,
        offsets_retention_ms=options.offsets_retention_minutes * 60_000,
        offsets_check_ms=options.offsets_retention_check_interval_ms,
    )

    def find_topic(name: str) -> TopicInfo | None:
        topic = topics.by_name.get(name)
        return None if topic is None else TopicInfo(topic.topic_id.bytes, len(topic.logs))

    groups = GroupService(settings, state, SYSTEM_CLOCK, find_topic)
    groups.timeout_s = options.change_timeout_s
    groups.load({topic.name: topic.topic_id.bytes for topic in topics.by_name.values()})
    topics.when_deleted, topics.when_added = groups.topic_deleted, groups.topic_added
    return groups


def _monitored(
    broker: Broker, connections: Connections
) -> contextlib.AbstractContextManager[object]:
    if not broker.options.monitoring_port:
        return contextlib.nullcontext()
    from logmirror.broker.monitoring import endpoint  # noqa: PLC0415  # loads Prometheus's client

    return endpoint(broker, connections)


def _share_files(wanted: int) -> tuple[int, int]:
    """Raise the limit of open files if permitted, and share it out.

    Args:
        wanted: The configured limit of connections.

    Returns:
        The limit of connections, and that of the log's files: one for each partition that was
        written to, and those of the segment cache.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        soft = _MANY_FILES
    files = max(2, soft - _FILES_FOR_US)
    connections = min(wanted, files // 2)
    if connections < wanted:
        _LOG.warning("at most %d connections: the limit of open files is %d", connections, soft)
    return connections, files - connections


def _stop_when(*ends: asyncio.Future[Any], with_stdin: bool) -> asyncio.Event:
    """Return what is set when one of these futures completes, or a signal arrives."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for end in ends:
        end.add_done_callback(lambda _: stop.set())
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
    if with_stdin:
        loop.add_reader(_STDIN, _read_stdin, loop, stop)
    return stop


def _read_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if not os.read(_STDIN, 4096):
        loop.remove_reader(_STDIN)
        stop.set()


async def _sweep_until(
    stop: asyncio.Event, connections: Connections, transactions: TransactionService
) -> None:
    loop = asyncio.get_running_loop()
    transactions.sweep()
    checkers = connections.broker.checkers
    RECORD_CHECK.on_busy = lambda: checkers.submit(RECORD_CHECK.compile)
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _SWEEP_S)
        connections.sweep(loop.time() * 1000)
        await close_removed(connections)
        RECORD_CHECK.begin_second()
        transactions.sweep()
    RECORD_CHECK.on_busy = None
