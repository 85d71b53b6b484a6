"""Starts and stops the embedded broker."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import os
import resource
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import uvloop

from logmirror.broker.broker import Broker
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.segment_cache import DEFAULT_LOADED_SEGMENTS, SegmentCache
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.protocol.connection import Connection, Connections
from logmirror.broker.topics import Topics
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from logmirror.broker.options import BrokerOptions

_LOG: Final = logging.getLogger(__name__)
_FLUSH_THREADS: Final = 4
_OTHER_THREADS: Final = 4
_CHECK_THREADS: Final = 2
_SWEEP_S: Final = 1.0
_BACKLOG: Final = 512
_FILES_FOR_US: Final = 128
"""Descriptors reserved for the database, flushes and Python."""

_MANY_FILES: Final = 2**20


def serve(options: BrokerOptions, *, on_ready: Callable[[str, int], None]) -> None:
    """Run a broker until SIGTERM or SIGINT, then stop it cleanly.

    Blocks. Outside the main thread it receives no signals and runs until the process ends.

    Args:
        options: The broker's settings.
        on_ready: Called once with host and port, when the broker accepts connections.

    Raises:
        UsageError: The log directory is not writable or in use by another broker, or the address
            cannot be bound.
        UnavailableError: The broker's database is not usable.
        CorruptionError: The broker's database is damaged.
    """
    with _listener(options.host, options.port) as listener, _held(options.log_dir) as private:
        store = MetadataStore(private / "broker.sqlite")
        try:
            uvloop.run(_serve(options, store, listener, on_ready))
        finally:
            store.close()


@contextlib.contextmanager
def _held(log_dir: Path) -> Iterator[Path]:
    """Create and lock the log directory; yields the broker's private folder in it."""
    private = log_dir / ".logmirror"
    try:
        _make_durable(private)
        lock = os.open(private / "broker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(
            "log directory is not writable",
            hint="give a writable directory with --log-dir",
            path=str(log_dir),
            cause=str(error),
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(
                "log directory is in use by another broker",
                hint="stop that broker, or give another directory with --log-dir",
                path=str(log_dir),
            ) from error
        yield private
    finally:
        os.close(lock)


def _make_durable(folder: Path) -> None:
    """Create a folder and its parents, and make their names durable."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # The last two also if they exist: a crash may have prevented it before.
    for parent in dict.fromkeys((*(path.parent for path in missing), *folder.parents[:2])):
        try:
            Disk().sync_folder(parent)
        except PermissionError as error:
            _LOG.warning("%s: could not be made durable: %s", parent, error)


@contextlib.contextmanager
def _listener(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UsageError(
            "cannot listen on this address",
            hint="give another address with --listen; port 0 lets the system choose",
            host=host,
            port=port,
            cause=str(error),
        ) from error
    with listener:
        yield listener


async def _serve(
    options: BrokerOptions,
    store: MetadataStore,
    listener: socket.socket,
    on_ready: Callable[[str, int], None],
) -> None:
    loop = asyncio.get_running_loop()
    max_connections, max_files = _share_files(options.max_connections)
    disk = Disk(max_files=max_files)
    cache = SegmentCache(disk, max_loaded=min(DEFAULT_LOADED_SEGMENTS, max_files // 2))
    with (
        ThreadPoolExecutor(_FLUSH_THREADS, "logmirror-flush") as flushers,
        ThreadPoolExecutor(_OTHER_THREADS, "logmirror-broker") as others,
        ThreadPoolExecutor(_CHECK_THREADS, "logmirror-check") as checkers,
    ):
        commits = GroupCommit(flushers, disk)
        topics = Topics(options, store, others, disk, cache, commits)
        topics.load()
        host, port = listener.getsockname()[:2]
        broker = Broker(
            options=options,
            store=store,
            topics=topics,
            cache=cache,
            commits=commits,
            executor=others,
            checkers=checkers,
            port=port,
        )
        connections = Connections(broker, max_connections)
        server = await loop.create_server(
            lambda: Connection(connections), sock=listener, backlog=_BACKLOG
        )
        stop = _stop_on_signals(loop)
        _LOG.info("listening on %s:%d, log directory %s", host, port, options.log_dir)
        if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            _LOG.warning(
                "clients are not authenticated: every host that reaches %s:%d can read, write and "
                "delete all topics",
                host,
                port,
            )
        on_ready(host, port)
        await _sweep_until(stop, connections, topics)
        _LOG.info("stopping")
        server.close()
        await connections.stop()
        await topics.record_durable_ends()


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
    return connections, files - connections


def _stop_on_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    stop = asyncio.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
    return stop


async def _sweep_until(stop: asyncio.Event, connections: Connections, topics: Topics) -> None:
    loop = asyncio.get_running_loop()
    recording = loop.create_task(topics.record_durable_ends())
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _SWEEP_S)
        connections.sweep(loop.time() * 1000)
        if recording.done():
            recording = loop.create_task(topics.record_durable_ends())
    await recording
