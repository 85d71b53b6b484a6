"""A disk that can lose power before any call, or fail a call, and records what is durable.

It writes to the real disk and records what a power loss would leave: the bytes of each file up to
its last fsync and any part of the later ones, and the names of each folder as of its last fsync,
with or without each later change.

A failed fsync is modelled as Linux does it: the bytes stay readable, and no later fsync writes
them, unless they are written again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from logmirror.broker.log.disk import Disk, OpenFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


class PowerLossError(BaseException):
    """The power is gone; nothing after this call happened."""


@dataclass
class _Content:
    """The bytes of one file, shared by all its names."""

    durable: bytes = b""
    dropped: tuple[int, int] = (0, 0)
    """Start and end of bytes that an fsync failed to write."""

    def flushed(self, now: bytes) -> None:
        """Make the bytes of the file durable, except those that were dropped."""
        start, end = (min(len(now), at) for at in self.dropped)
        old = self.durable[start:end].ljust(end - start, b"\0")
        self.durable = now[:start] + old + now[end:]

    def failed(self, now: bytes) -> None:
        """Drop all bytes that are not durable."""
        if len(now) > len(self.durable):
            self.dropped = (len(self.durable), len(now))

    def rewritten(self, start: int, end: int) -> None:
        """Forget about dropped bytes that were written again."""
        first, last = self.dropped
        if start <= first:
            self.dropped = (0, 0) if end >= last else (max(first, end), last)
        elif start < last <= end:
            self.dropped = (first, start)


@dataclass
class _Names:
    """One folder's names and the files behind them."""

    durable: dict[str, _Content] = field(default_factory=dict)
    now: dict[str, _Content] = field(default_factory=dict)
    changes: list[tuple[tuple[str, _Content | None], ...]] = field(default_factory=list)
    """Each is one or, in a rename, two names, which survive a power loss together."""


class FaultyDisk(Disk):
    """Counts its calls. `fails_at[n]` is raised at call n, before anything happens.

    Args:
        power_until: Number of calls before the power loss.
    """

    def __init__(self, power_until: int | None = None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fail: Callable[[str], OSError | None] = lambda _: None
        self._power_until = power_until
        self._names: dict[Path, _Names] = {}
        self._contents: dict[int, _Content] = {}
        self._files: dict[int, OpenFile] = {}

    def _call(self, name: str) -> None:
        if self._power_until is not None and len(self.calls) >= self._power_until:
            raise PowerLossError
        self.calls.append(name)
        error = self.fail(name)
        if error is not None:
            raise error

    def _folder(self, path: Path) -> _Names:
        return self._names.setdefault(path, _Names())

    def _bind(self, path: Path, content: _Content | None) -> None:
        names = self._folder(path.parent)
        if content is None:
            names.now.pop(path.name, None)
        else:
            names.now[path.name] = content
        names.changes.append(((path.name, content),))

    def make_folder(self, path: Path) -> None:
        path.parent.parent.mkdir(parents=True, exist_ok=True)  # tests begin without a log directory
        super().make_folder(path)

    def create(self, path: Path) -> OpenFile:
        self._call("create")
        file = super().create(path)
        self._contents[file.fd] = _Content()
        self._files[file.fd] = file  # so that no number is used twice
        self._bind(path, self._contents[file.fd])
        return file

    def open_for_append(self, path: Path) -> OpenFile:
        file = super().open_for_append(path)
        self._contents[file.fd] = self._content(path)
        self._files[file.fd] = file
        return file

    def _content(self, path: Path) -> _Content:
        names = self._folder(path.parent)
        if path.name not in names.now:  # written by another disk: all of it is durable
            names.now[path.name] = names.durable[path.name] = _Content(path.read_bytes())
        return names.now[path.name]

    def append(self, file: OpenFile, data: memoryview) -> None:
        self._call("append")
        super().append(file, data)

    def truncate(self, file: OpenFile, size_bytes: int) -> None:
        self._call("truncate")
        super().truncate(file, size_bytes)

    def sync(self, file: OpenFile) -> None:
        now = os.pread(file.fd, os.fstat(file.fd).st_size, 0)
        self._flush("sync", self._contents[file.fd], now)

    def _flush(self, call: str, content: _Content, now: bytes) -> None:
        try:
            self._call(call)
        except OSError:
            content.failed(now)
            raise
        content.flushed(now)

    def rewrite(self, path: Path, start: int, end: int) -> None:
        content = self._content(path)
        content.rewritten(start, end)
        self._flush("rewrite", content, path.read_bytes())

    def write_synced(self, path: Path, parts: Iterable[bytes]) -> None:
        self._call("write_synced")
        data = b"".join(parts)
        super().write_synced(path, [data])
        self._bind(path, _Content(data))

    def link(self, source: Path, target: Path) -> None:
        self._call("link")
        super().link(source, target)
        self._bind(target, self._content(source))

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename")
        content = self._content(source)
        super().rename(source, target)
        names = self._folder(source.parent)
        names.now.pop(source.name)
        names.now[target.name] = content
        names.changes.append(((source.name, None), (target.name, content)))

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        super().unlink(path)
        self._bind(path, None)

    def sync_folder(self, path: Path) -> None:
        self._call("sync_folder")
        names = self._folder(path)
        names.durable = dict(names.now)
        names.changes.clear()

    def after_power_loss(
        self, folder: Path, target: Path, *, keep: Callable[[int], int], some: Callable[[], bool]
    ) -> None:
        """Write the state of `folder` after a power loss to the folder `target`.

        Args:
            folder: A folder that this disk wrote.
            target: Created by this function.
            keep: Chooses how many of n unflushed bytes survive.
            some: Chooses whether an unflushed change of names survives.
        """
        target.mkdir(parents=True)
        names = self._folder(folder)
        left = dict(names.durable)
        for name, content in [one for change in names.changes if some() for one in change]:
            if content is None:
                left.pop(name, None)
            else:
                left[name] = content
        inodes: dict[int, Path] = {}
        for name, content in left.items():
            if id(content) in inodes:
                os.link(inodes[id(content)], target / name)
                continue
            (target / name).write_bytes(self._survivors(content, keep))
            inodes[id(content)] = target / name

    def _survivors(self, content: _Content, keep: Callable[[int], int]) -> bytes:
        for fd, known in self._contents.items():
            if known is content:
                now = os.pread(fd, os.fstat(fd).st_size, 0)
                if len(now) < len(content.durable):  # cut back after the flush
                    return now
                extra = keep(len(now) - len(content.durable))
                return content.durable + now[len(content.durable) :][:extra]
        return content.durable
