"""A disk under `FilesystemStore`: real files, and an account of what a loss of power would leave.

Of each file its bytes as of the last flush count, of each folder its names as of the last flush; of
what came after, any part may be there. Nothing is really flushed, which makes it quick.
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
    """One file, under however many names."""

    def __init__(self) -> None:
        self.durable: bytes | None = None


class _Folder:
    """One folder: its names now, as of the last flush, and what changed in between."""

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
        base: An empty folder for all that is kept.
        chooser: Draws what a loss of power leaves.

    Attributes:
        root: The store's root. A loss of power moves it.
    """

    def __init__(self, base: Path, chooser: Chooser) -> None:
        self._base, self._chooser = base, chooser
        self._losses = 0
        self.root = base / "0"
        self.root.mkdir()
        self._folders: dict[Path, _Folder] = {self.root: _Folder()}
        self._files: dict[int, tuple[_File, Path]] = {}

    def lose_power(self) -> None:
        """Make `root` what is left after a loss of power."""
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
            if self._chooser.random() < 0.5:  # noqa: PLR2004  # each change by itself
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
        """The names of files in a folder below the root that survive any loss of power."""
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

    # -- the account of system calls -------------------------------------------------------------

    def folder(self, path: Path) -> _Folder:
        """The account of a folder; one that was made past us counts as durable."""
        if path not in self._folders:
            self._folders[path] = made = _Folder()
            if path.parent != path and self._base in path.parents and path != self.root:
                parent = self.folder(path.parent)
                parent.now[path.name] = parent.durable[path.name] = made
        return self._folders[path]

    def made(self, path: Path) -> None:
        """A folder was made."""
        self._folders[path] = _Folder()
        self.folder(path.parent).bind(path.name, self._folders[path])

    def opened(self, descriptor: int, path: Path) -> None:
        """A new file is there, empty."""
        file = _File()
        self._files[descriptor] = (file, path)
        self.folder(path.parent).bind(path.name, file)

    def flushed(self, descriptor: int) -> None:
        """A file's bytes are durable."""
        file, path = self._files[descriptor]
        file.durable = path.read_bytes()

    def linked(self, source: Path, target: Path) -> None:
        """A file has a second name."""
        found = self.folder(source.parent).now[source.name]
        self.folder(target.parent).bind(target.name, found)

    def unlinked(self, path: Path) -> None:
        """A name is gone."""
        self.folder(path.parent).bind(path.name, None)

    def folder_flushed(self, path: Path) -> None:
        """A folder's names are durable."""
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
        self._disk.made(path)

    def open_new(self, path: Path) -> int:
        """See `Syscalls.open_new`."""
        self._process.touch(f"open {path.name}")
        self._world.maybe_full()
        descriptor = super().open_new(path)
        self._process.descriptors.add(descriptor)
        self._disk.opened(descriptor, path)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        """See `Syscalls.write`; takes a part now and then, as a disk that fills up does."""
        self._process.touch(f"write {len(data)}")
        self._world.maybe_full()
        if len(data) > 1 and self._world.chooser.random() < 0.1:  # noqa: PLR2004  # how often
            data = data[: len(data) // 2]
        return super().write(descriptor, data)

    def sync_data(self, descriptor: int) -> None:
        """See `Syscalls.sync_data`."""
        self._process.touch("fdatasync")
        self._world.maybe_io_error()
        self._disk.flushed(descriptor)

    def close(self, descriptor: int) -> None:
        """See `Syscalls.close`; the system does it for the dead, too."""
        self._process.descriptors.discard(descriptor)
        os.close(descriptor)

    def link(self, source: Path, target: Path) -> None:
        """See `Syscalls.link`."""
        self._process.touch(f"link {target.name}")
        self._world.maybe_full()
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
        self._world.maybe_io_error()
        self._disk.folder_flushed(path)
