"""A disk of whole folder trees that can lose power before any call, and records what is durable.

As `faulty_disk`, for several folders and folders within them: the bytes of each file up to its last
fsync, with or without each sector that was written again later, and any part of what was appended
later; and the names of each folder as of its last fsync, with or
without each later change. A change of one folder's names survives or not, independently of those of
other folders.

A failed fsync is as in `faulty_disk`: what it did not write stays readable, also for a process that
starts later, and no later fsync writes it, unless it is written again.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kit.fakes.faulty_disk import PowerLossError
from logmirror.broker.log.disk import Disk, OpenFile

_SECTOR = 512
_REMOVE_TREE = shutil.rmtree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Node = "_File | _Folder"

Doubtful = dict[int, tuple[bytes, frozenset[int]]]
"""By the number of a file: what is durable, and the positions of bytes that no fsync writes."""


@dataclass(eq=False)
class _File:
    durable: bytes = b""
    open: OpenFile | None = None
    """Keeps the bytes, whatever becomes of the names."""

    dropped: set[int] = field(default_factory=set)
    """Positions of bytes that an fsync failed to write."""

    def now(self) -> bytes:
        assert self.open is not None
        return os.pread(self.open.fd, os.fstat(self.open.fd).st_size, 0)

    def flushed(self) -> bytes:
        """What an fsync would make durable: all but what was dropped."""
        found = bytearray(self.now())
        for at in self.dropped:
            found[at : at + 1] = self.durable[at : at + 1] or b"\0"
        return bytes(found)

    def failed(self) -> None:
        """Drop what is not durable."""
        now, durable = self.now(), self.durable
        self.dropped |= {at for at, one in enumerate(now) if durable[at : at + 1] != bytes([one])}

    def written(self, start: int, end: int) -> None:
        """Note bytes that were written again."""
        if self.dropped:
            self.dropped -= set(range(start, end))

    def cut(self, size_bytes: int) -> None:
        """Note the new size."""
        self.dropped = {at for at in self.dropped if at < size_bytes}


@dataclass(eq=False)
class _Folder:
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    changes: list[tuple[tuple[str, _File | _Folder | None], ...]] = field(default_factory=list)

    def change(self, *names: tuple[str, _File | _Folder | None]) -> None:
        for name, node in names:
            if node is None:
                self.now.pop(name, None)
            else:
                self.now[name] = node
        self.changes.append(names)


class TreeDisk(Disk):
    """Counts its calls; `before` is called with each one, and may raise `PowerLossError`.

    Args:
        root: All folders are in it. It is empty, and exists.
        before: Gets the number and the name of the call.
        more: For another class of disk that is combined with this one.
    """

    def __init__(
        self,
        root: Path,
        before: Callable[[int, str], None] = lambda _n, _name: None,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.before = before
        self.count = 0
        self.is_off = False
        self._root, self._tree = root, _Folder()
        self._by_fd: dict[int, _File] = {}
        self._held: list[OpenFile] = []
        """So that no number of a file is used twice."""

    def _call(self, name: str) -> None:
        if self.is_off:
            raise PowerLossError
        self.count += 1
        self.before(self.count, name)
        if self.is_off:
            raise PowerLossError

    def _node(self, path: Path) -> _File | _Folder:
        node: _File | _Folder = self._tree
        for part in path.relative_to(self._root).parts:
            assert isinstance(node, _Folder)
            if part not in node.now and not path.exists():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            node = node.now[part]
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._node(path)
        assert isinstance(node, _Folder)
        return node

    def _file(self, path: Path) -> _File:
        node = self._node(path)
        assert isinstance(node, _File)
        return node

    def make_folder(self, path: Path) -> None:
        self._call("make_folder")
        missing = [one for one in (path, *path.parents) if not one.exists()]
        super().make_folder(path)
        for one in reversed(missing):
            self._folder(one.parent).change((one.name, _Folder()))

    def create(self, path: Path) -> OpenFile:
        self._call("create")
        file = super().create(path)
        self._by_fd[file.fd] = node = _File(open=file)
        self._held.append(file)
        self._folder(path.parent).change((path.name, node))
        return file

    def open_for_append(self, path: Path) -> OpenFile:
        file = super().open_for_append(path)
        self._by_fd[file.fd] = node = self._file(path)
        node.open = file
        self._held.append(file)
        return file

    def open_for_update(self, path: Path) -> OpenFile:
        file = super().open_for_update(path)
        self._by_fd[file.fd] = self._file(path)
        self._held.append(file)
        return file

    def write_at(self, file: OpenFile, position: int, data: bytes) -> None:
        self._call("write_at")
        super().write_at(file, position, data)
        self._by_fd[file.fd].written(position, position + len(data))

    def append(self, file: OpenFile, data: memoryview) -> None:
        self._call("append")
        super().append(file, data)

    def truncate(self, file: OpenFile, size_bytes: int) -> None:
        self._call("truncate")
        super().truncate(file, size_bytes)
        self._by_fd[file.fd].cut(size_bytes)

    def sync(self, file: OpenFile) -> None:
        self._call("sync")
        node = self._by_fd[file.fd]
        node.durable = node.flushed()

    def is_modelled(self, file: OpenFile) -> bool:
        """Whether it is known what is durable of a file."""
        return file.fd in self._by_fd

    def sync_failed(self, file: OpenFile) -> None:
        """Note that an fsync failed."""
        self._by_fd[file.fd].failed()

    def rewrite(self, path: Path, start: int, end: int) -> None:
        self._call("rewrite")
        node = self._file(path)
        node.written(start, end)
        node.durable = node.flushed()

    def write_synced(self, path: Path, parts: Iterable[bytes]) -> None:
        self._call("write_synced")
        data = b"".join(parts)
        super().write_synced(path, [data])
        node = _File(data, OpenFile(os.open(path, os.O_RDONLY)))
        self._folder(path.parent).change((path.name, node))

    def write_failed(self, path: Path, data: bytes) -> None:
        """Leave what `write_synced` may leave that failed."""
        super().write_synced(path, [data])
        node = _File(b"", OpenFile(os.open(path, os.O_RDONLY)))
        node.failed()
        self._folder(path.parent).change((path.name, node))

    def link(self, source: Path, target: Path) -> None:
        self._call("link")
        super().link(source, target)
        self._folder(target.parent).change((target.name, self._file(source)))

    def rename(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent, "two folders do not change together"
        self._call("rename")
        node = self._node(source)
        super().rename(source, target)
        self._folder(source.parent).change((source.name, None), (target.name, node))

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        is_there = path.exists()  # its folder may be gone, too
        super().unlink(path)
        if is_there:
            self._folder(path.parent).change((path.name, None))

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        self._call("remove_folder")
        path.rmdir()
        self._folder(path.parent).change((path.name, None))

    def _is_modelled(self, path: Path) -> bool:
        return path != self._root and path.is_relative_to(self._root)

    def remove_tree(self, path: Path, **how: object) -> None:
        """Stand in for `shutil.rmtree`: removes a folder and what is in it, a name at a time."""
        if not self._is_modelled(path):
            _REMOVE_TREE(path, **how)  # type: ignore[arg-type]  # its own arguments
            return
        for one in sorted(path.iterdir()):
            self.remove_tree(one) if one.is_dir() else self.unlink(one)
        self.remove_folder(path)

    def sync_folder(self, path: Path) -> None:
        self._call("sync_folder")
        if path == self._root.parent:
            return
        folder = self._folder(path)
        folder.durable = dict(folder.now)
        folder.changes.clear()

    def adopt(self, doubtful: Doubtful | None = None) -> None:
        """Take what is in the root as durable, except what is doubtful."""
        self._tree = self._adopted(self._root, {}, doubtful or {})

    def _adopted(self, path: Path, files: dict[int, _File], doubtful: Doubtful) -> _Folder:
        folder = _Folder()
        for one in path.iterdir():
            if one.is_dir():
                folder.durable[one.name] = self._adopted(one, files, doubtful)
                continue
            number = one.stat().st_ino  # of a file with two names
            if number not in files:
                files[number] = file = _File(open=OpenFile(os.open(one, os.O_RDWR)))
                if number in doubtful:
                    file.durable, dropped = doubtful[number]
                    file.dropped = set(dropped)
                else:
                    file.durable = file.now()
            folder.durable[one.name] = files[number]
        folder.now = dict(folder.durable)
        return folder

    def after_power_loss(
        self,
        target: Path,
        *,
        keep: Callable[[int], int],
        some: Callable[[], bool],
        is_cached: bool = False,
    ) -> Doubtful:
        """Write what a power loss leaves to another root, which must not exist.

        Returns what is doubtful there.

        Args:
            target: Created by this function.
            keep: Chooses how many of n unflushed bytes survive.
            some: Chooses whether an unflushed change of names survives.
            is_cached: Only the process has ended: what an fsync failed to write is readable.
        """
        made: dict[int, tuple[Path, _File]] = {}
        self._survive(self._tree, target, keep, some, made)
        doubtful: Doubtful = {}
        for path, file in made.values() if is_cached else ():
            if file.dropped:
                path.write_bytes(file.now())
                doubtful[path.stat().st_ino] = file.durable, frozenset(file.dropped)
        return doubtful

    def _survive(
        self,
        folder: _Folder,
        target: Path,
        keep: Callable[[int], int],
        some: Callable[[], bool],
        made: dict[int, tuple[Path, _File]],
    ) -> None:
        target.mkdir(parents=True)
        left = dict(folder.durable)
        for name, node in [one for change in folder.changes if some() for one in change]:
            if node is None:
                left.pop(name, None)
            else:
                left[name] = node
        for name, node in left.items():
            if isinstance(node, _Folder):
                self._survive(node, target / name, keep, some, made)
            elif id(node) in made:
                os.link(made[id(node)][0], target / name)
            else:
                (target / name).write_bytes(_survivors(node, keep, some))
                made[id(node)] = target / name, node


def _survivors(node: _File, keep: Callable[[int], int], some: Callable[[], bool]) -> bytes:
    """What is left of a file: each sector as it is or as it was, and a part of what is behind."""
    now, durable = node.flushed(), node.durable
    end = len(durable)
    if len(now) < end:
        return now
    sectors = [
        (durable[at : at + _SECTOR], now[at : min(end, at + _SECTOR)])
        for at in range(0, end, _SECTOR)
    ]
    # A file does not get longer behind what could not be written: what `open_segments` says of a
    # later batch that is on disk, with an earlier one that is not, is not what is tested here.
    known = min((at for at in node.dropped if at >= end), default=len(now))
    kept = b"".join(new if old != new and some() else old for old, new in sectors)
    return kept + now[end : end + keep(known - end)]
