"""A simulated disk under `FilesystemStore`: real files, and a record of what a power loss leaves.

After a power loss, a file has its bytes as of its last fsync, and a folder its names as of its last
fsync. Any subset of the later changes to a folder can survive. No real fsync is called, so runs are
fast.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from logmirror.stores.syscalls import Syscalls

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.clock import Chooser
    from logmirror.simulation.world import Process

_TORN_BYTES = 100


class _File:
    """One file, with any number of names."""

    def __init__(self) -> None:
        self.durable: bytes | None = None


class _Folder:
    """One folder: its current names, those as of the last fsync, and the changes since."""

    def __init__(self) -> None:
        self.durable: dict[str, _File | _Folder] = {}
        self.now: dict[str, _File | _Folder] = {}
        self.changes: list[tuple[str, _File | _Folder | None]] = []

    def bind(self, name: str, found: _File | _Folder | None) -> None:
        self.changes.append((name, found))
        if found is None:
            self.now.pop(name, None)
        else:
            self.now[name] = found


class Disk:
    """One machine's disk.

    Args:
        base: An empty folder for all files.
        chooser: Draws what a power loss leaves.

    Attributes:
        root: The root of the store. A power loss moves it.
    """

    def __init__(self, base: Path, chooser: Chooser) -> None:
        self._base, self._chooser = base, chooser
        self._losses = 0
        self.root = base / "0"
        self.root.mkdir()
        self._folders: dict[Path, _Folder] = {self.root: _Folder()}
        self._files: dict[int, tuple[_File, Path]] = {}

    def lose_power(self) -> None:
        """Move `root` to a new folder with what a power loss leaves."""
        before, self._losses = self.root, self._losses + 1
        self.root = self._base / str(self._losses)
        top = self._folders[before]
        self._folders, self._files = {}, {}
        self._leave(top, self.root)
        shutil.rmtree(before)

    def _leave(self, folder: _Folder, target: Path) -> None:
        target.mkdir()
        left = dict(folder.durable)
        for name, found in folder.changes:
            if self._chooser.random() < 0.5:  # noqa: PLR2004  # each change independently
                if found is None:
                    left.pop(name, None)
                else:
                    left[name] = found
        kept = self._folders[target] = _Folder()
        for name, found in left.items():
            if isinstance(found, _Folder):
                self._leave(found, target / name)
                kept.durable[name] = kept.now[name] = self._folders[target / name]
                continue
            if found.durable is None:
                size = self._chooser.choice((0, _TORN_BYTES))
                found.durable = b"\0" * size
            (target / name).write_bytes(found.durable)
            kept.durable[name] = kept.now[name] = found

    def durable_names(self, folder: str) -> list[str]:
        """Return the names of files in a folder below the root that survive every power loss."""
        found: _File | _Folder | None = self._folders[self.root]
        for part in folder.split("/"):
            found = found.durable.get(part) if isinstance(found, _Folder) else None
        if not isinstance(found, _Folder):
            return []
        return sorted(
            name
            for name, file in found.durable.items()
            if isinstance(file, _File) and file.durable is not None
        )

    # -- recorded system calls --------------------------------------------------------------------

    def folder(self, path: Path) -> _Folder:
        """Return the record of a folder. If `DiskCalls` did not create it, it is durable."""
        if path not in self._folders:
            self._folders[path] = created = _Folder()
            if path.parent != path and self._base in path.parents and path != self.root:
                parent = self.folder(path.parent)
                parent.now[path.name] = parent.durable[path.name] = created
        return self._folders[path]

    def created(self, path: Path) -> None:
        """Record a mkdir."""
        self._folders[path] = _Folder()
        self.folder(path.parent).bind(path.name, self._folders[path])

    def opened(self, descriptor: int, path: Path) -> None:
        """Record a new, empty file."""
        file = _File()
        self._files[descriptor] = (file, path)
        self.folder(path.parent).bind(path.name, file)

    def flushed(self, descriptor: int) -> None:
        """Record an fdatasync of a file."""
        file, path = self._files[descriptor]
        file.durable = path.read_bytes()

    def linked(self, source: Path, target: Path) -> None:
        """Record a link."""
        found = self.folder(source.parent).now[source.name]
        self.folder(target.parent).bind(target.name, found)

    def unlinked(self, path: Path) -> None:
        """Record an unlink."""
        self.folder(path.parent).bind(path.name, None)

    def folder_flushed(self, path: Path) -> None:
        """Record an fsync of a folder."""
        folder = self.folder(path)
        folder.durable, folder.changes = dict(folder.now), []


class DiskCalls(Syscalls):
    """The system calls of one process on a disk."""

    def __init__(self, process: Process, disk: Disk) -> None:
        self._process, self._world, self._disk = process, process.world, disk

    def make_directory(self, path: Path) -> None:
        """See `Syscalls.make_directory`."""
        self._process.touch(f"mkdir {path.name}")
        super().make_directory(path)
        self._disk.created(path)

    def open_new(self, path: Path) -> int:
        """See `Syscalls.open_new`."""
        self._process.touch(f"open {path.name}")
        self._world.raise_if_full()
        descriptor = super().open_new(path)
        self._process.descriptors.add(descriptor)
        self._disk.opened(descriptor, path)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        """See `Syscalls.write`. Sometimes writes only a part, as on a disk that is nearly full."""
        self._process.touch(f"write {len(data)}")
        self._world.raise_if_full()
        if len(data) > 1 and self._world.chooser.random() < 0.1:  # noqa: PLR2004  # probability
            data = data[: len(data) // 2]
        return super().write(descriptor, data)

    def sync_data(self, descriptor: int) -> None:
        """See `Syscalls.sync_data`."""
        self._process.touch("fdatasync")
        self._world.raise_if_io_error()
        self._disk.flushed(descriptor)

    def close(self, descriptor: int) -> None:
        """See `Syscalls.close`. Works for dead processes too: the system closes their files."""
        self._process.descriptors.discard(descriptor)
        os.close(descriptor)

    def link(self, source: Path, target: Path) -> None:
        """See `Syscalls.link`."""
        self._process.touch(f"link {target.name}")
        self._world.raise_if_full()
        super().link(source, target)
        self._disk.linked(source, target)

    def unlink(self, path: Path) -> None:
        """See `Syscalls.unlink`."""
        self._process.touch(f"unlink {path.name}")
        super().unlink(path)
        self._disk.unlinked(path)

    def sync_directory(self, path: Path) -> None:
        """See `Syscalls.sync_directory`."""
        self._process.touch(f"fsync {path.name}")
        self._world.raise_if_io_error()
        self._disk.folder_flushed(path)
