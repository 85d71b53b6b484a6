"""A broker's mount of an archive, with readers, while the writers' changes happen at any request.

The mount is the product's, with its listings, its local copies, its cache of segments, and the
handlers of Fetch and ListOffsets. All of it runs in this thread. It polls when it should.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from unittest import mock

from kit.fakes.scripted import SteppingClock
from kit.runs.archive_history import FOLDER
from kit.runs.archive_views import Bucket, Directory
from kit.runs.bucket_inline import Inline, silent
from logmirror import clock as clocks
from logmirror.broker.archives import mounts as mounting
from logmirror.broker.archives.copies import LocalCopies
from logmirror.broker.broker import Caller, Load
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers import fetch, offsets
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.segment import FileRange
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.options import Archive
from logmirror.errors import UnavailableError
from logmirror.stores import filesystem
from logmirror.wire.frames import RequestHeader
from logmirror.wire.serve_fetch import FetchPartition, FetchRequest, FetchTopic

if TYPE_CHECKING:
    import uuid
    from pathlib import Path

    from kit.runs.archive_history import Extent, History
    from logmirror.broker.log.mounted_log import MountedLog
    from logmirror.wire.serve_fetch import Fetched

PLACES: Final = ("bucket", "directory")
_POLL_MS: Final = 20_000
"""Time between two polls: more than a pause after a failure."""

_VERSION: Final = 12
_COPIES_BYTES: Final = 400
_LOADED_MAX: Final = 3


class Response(NamedTuple):
    """The response for one partition, and its records."""

    fetched: Fetched
    data: bytes


class _Topics:
    """The topics of the broker."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        self.by_id: dict[bytes, Any] = {}

    def mount(self, name: str, topic_id: uuid.UUID, logs: tuple[MountedLog, ...]) -> None:
        topic = self.by_name.setdefault(name, SimpleNamespace(name=name, topic_id=topic_id))
        topic.logs = logs


class Mount:
    """A broker that serves an archive, from one start to the next.

    Args:
        history: What happens to the archive.
        place: One of `PLACES`.
        folder: It is created.
        seed: Decides the order of a directory's entries.

    Attributes:
        view: The archive.
        asked: Kinds of requests, since the last poll or start.
        plan: How many changes happen before a request, by its number since the last poll or start.
        chance: Draws changes and failures before requests; None: there are none but those planned.
        moved: Before how many requests there were changes, since the last poll or start.
        failed: How many requests failed, since the last poll or start.
    """

    def __init__(self, history: History, place: str, folder: Path, seed: int = 0) -> None:
        folder.mkdir()
        self.history, self.place, self._folder = history, place, folder
        self.asked: list[str] = []
        self.plan: dict[int, int] = {}
        self.chance: random.Random | None = None
        self.moved = self.failed = 0
        self.view = (
            Bucket(history.changes, self._ask)
            if place == "bucket"
            else Directory(folder / "archive", history.changes, self._ask, seed)
        )
        self._clock = SteppingClock()
        self._stack = contextlib.ExitStack()
        self._mounts: mounting.Mounts | None = None

    def _ask(self, kind: str, name: str) -> None:
        self.asked.append(kind)
        count = self.plan.get(len(self.asked), 0)
        if self.chance is not None and self.chance.random() < 0.1:
            count = self.chance.choice((1, 1, 2, 3, 5))
        if count:
            self.moved += self.view.at < len(self.history.changes)
            self.view.advance(count)
        if self.chance is not None and self.chance.random() < 0.02:
            self.failed += 1
            raise UnavailableError("the store is not reachable", name=name)

    @property
    def extents(self) -> tuple[Extent | None, ...]:
        """What each partition covers now."""
        return self.history.extents[self.view.at]

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._stack.callback(self._loop.close)
        self._stack.enter_context(silent())
        self._stack.enter_context(clocks.driven(self._clock, random.Random(0)))
        self._stack.enter_context(mock.patch.object(asyncio, "sleep", self._sleep))
        self._stack.enter_context(
            mock.patch.multiple(mounting, ThreadPoolExecutor=Inline, _FOLDERS_EVERY=1)
        )
        self._stack.enter_context(mock.patch.object(fetch, "pack_fetch_response", self._packed))
        if isinstance(self.view, Directory):
            self._stack.enter_context(mock.patch.object(filesystem, "os", self.view.system))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._stack.close()
        shutil.rmtree(self._folder)

    # -- the broker's life ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the broker again: it knows nothing of what it knew."""
        self.stop()
        self._begin()
        cache = SegmentCache(Disk(), max_loaded=_LOADED_MAX)
        self.topics = _Topics()
        self._caller = Caller(local_host="")
        copies = LocalCopies(self._folder / "copies", cache, _COPIES_BYTES)
        local = self.view.path if isinstance(self.view, Directory) else None
        archive = Archive(root="/archive", store=self.view, local=local, utf8=False)  # type: ignore[arg-type]  # what readers use
        self._broker: Any = SimpleNamespace(
            topics=self.topics,
            cache=cache,
            options=SimpleNamespace(
                max_fetch_bytes=1 << 20, max_fetch_wait_ms=0, max_waiting_partitions=100
            ),
            authorizer=SimpleNamespace(refusal=lambda *_: ErrorCode.NONE),
            load=Load(),
            traffic=SimpleNamespace(errors=mock.MagicMock()),
            executor=Inline(),
        )
        self._go, self._is_idle = asyncio.Event(), asyncio.Event()
        self._mounts = mounting.Mounts((archive,), self.topics, Disk(), cache, copies=copies)  # type: ignore[arg-type]  # in its place
        self._run(self._opened(self._mounts))

    async def _opened(self, mounts: mounting.Mounts) -> None:
        self._broker.commits = GroupCommit(lambda _: self._broker.executor, Disk())
        await mounts.open()
        await self._is_idle.wait()

    def stop(self) -> None:
        """Stop the broker."""
        if self._mounts is not None:
            self._run(self._mounts.close())
            self._mounts = None

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    async def _sleep(self, delay_s: float) -> None:
        """What `asyncio.sleep` is: the mount waits for its next poll."""
        if delay_s > 0:
            self._is_idle.set()
            await self._go.wait()
            self._go.clear()

    def _begin(self) -> None:
        self.asked.clear()
        self.moved = self.failed = 0

    def poll(self) -> None:
        """Let the mount list the archive again."""
        self._begin()
        self._clock.ms += _POLL_MS
        self._run(self._polled())

    async def _polled(self) -> None:
        self._is_idle.clear()
        self._go.set()
        await self._is_idle.wait()

    # -- requests of clients ----------------------------------------------------------------------

    def log(self, number: int) -> MountedLog | None:
        """Return the log of a partition, if there is one."""
        topic = self.topics.by_name.get(FOLDER)
        return topic.logs[number] if topic is not None and number < len(topic.logs) else None

    def _packed(self, _version: int, _id: int, topics: Any, **_: object) -> list[bytearray]:
        self._topics = topics
        return [bytearray()] * (
            1 + sum(one.records_bytes > 0 for _, some in topics for one in some)
        )

    def fetch(self, number: int, offset: int, max_bytes: int, *, committed: bool) -> Response:
        """Fetch from one partition."""
        wanted = FetchTopic(FOLDER, [FetchPartition(number, -1, offset, max_bytes)])
        request = FetchRequest(0, 0, max_bytes, 0, -1, [wanted], committed)
        parts = self._run(self._fetched(request))
        data = b"".join(
            os.pread(part.file.fd, part.size_bytes, part.position)
            for part in parts
            if isinstance(part, FileRange)
        )
        ((_, (fetched,)),) = self._topics
        return Response(fetched, data)

    async def _fetched(self, request: FetchRequest) -> list[fetch.Part]:
        found = fetch.fetch(self._broker, RequestHeader(1, _VERSION, 0), request, self._caller)
        return found if isinstance(found, list) else await found

    def offset_at(self, number: int, time_ms: int, *, committed: bool) -> tuple[int, int]:
        """Return error code and offset of a lookup by timestamp."""
        wanted: Any = SimpleNamespace(
            partition_index=number, timestamp=time_ms, current_leader_epoch=-1
        )
        work = offsets._response(  # noqa: SLF001  # without the encoding of messages
            self._broker, FOLDER, wanted, committed=committed
        )
        code, _, offset = self._run(work)
        return code, offset
