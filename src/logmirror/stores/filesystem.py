"""BlobStore on a directory.

    <root>/<name>                               objects, immutable
    <root>/.logmirror/staged/<writer>/<label>   objects under construction
    <root>/.logmirror/writers/<writer>          locked (flock) while that writer is alive

1. An object is written under `staged`, its bytes are made durable, it is linked to its name, and
   the folder is made durable; only then is the staged name removed. Linking, not renaming: a
   rename replaces, so with two writers both would succeed and the second would silently win.
2. A crash leaves at worst a staged file, which no listing shows. `sweep` removes those of dead
   writers.
3. An existing name is made durable before `AlreadyExistsError` is raised: its writer may have died
   between linking and syncing, and the caller may continue as if it had written the object. For the
   same reason `tail`, from which positions are read, makes the names durable that it returns.
4. Reading creates nothing.

Every system call that matters for durability goes through `Syscalls`, so tests can crash before
each of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO, Final

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK, Clock, new_nonce
from logmirror.errors import (
    CorruptionError,
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
    UsageError,
)
from logmirror.stores.base import AlreadyExistsError, Tail
from logmirror.stores.directory import Directory, checked_part, os_errors
from logmirror.stores.staged_file import StagedFile
from logmirror.stores.syscalls import Syscalls
from logmirror.stores.writers import Writers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from logmirror.stores.base import BlobStore

    def _is_a_blob_store(store: FilesystemStore) -> BlobStore:
        return store


_UNLINKABLE: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}
)
"""Errors of a filesystem that has no hard links, or none between these two names."""

_SCANS_MAX: Final = 5
"""Further scans of a folder while names disappear. Each needs another compaction meanwhile."""


class FilesystemStore:
    """A directory as a BlobStore. All of it must be on one filesystem with hard links.

    A store is cheap to create and holds no open file, so every process creates its own.

    Args:
        root: The directory; created by the first write.
        writer_id: Owner of the staged objects; all processes of one run share one ID. Stage only
            while the run holds `hold_writer_lock`; otherwise another run may sweep the object.
        syscalls: For tests.
        clock: For tests.
    """

    def __init__(
        self,
        root: Path,
        *,
        writer_id: str,
        syscalls: Syscalls | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._writer_id = checked_part(writer_id)
        self._sys = syscalls or Syscalls()
        self._directory = Directory(root, self._sys)
        self._writers = Writers(self._directory, writer_id, clock)

    def create(self, name: str, data: bytes) -> None:
        """See `BlobStore.create`."""
        staged = self._stage("create", _silent)
        try:
            staged.write(data)
            token = staged.finish(name, travels=False)
        except LogmirrorError:
            staged.abort()
            raise
        try:
            self._publish(token, name, _silent)
        except LogmirrorError:
            self.discard(token)
            raise

    def stage(self, label: str) -> StagedFile:
        """See `BlobStore.stage`."""
        staged = self._stage(label, failpoints.reach)
        failpoints.reach("stage.opened")
        return staged

    def publish(self, token: str, name: str) -> None:
        """See `BlobStore.publish`."""
        self._publish(token, name, failpoints.reach)

    def _stage(self, label: str, reach: Callable[[str], None]) -> StagedFile:
        token = self._new_token(label)
        path = self._directory.staged(token)
        with os_errors("stage an object", path):
            descriptor = self._directory.in_folder(path.parent, lambda: self._sys.open_new(path))
        return StagedFile(path, token, descriptor, self._sys, reach)

    def _new_token(self, label: str) -> str:
        readable = "".join(c if c.isalnum() or c in "-_" else "-" for c in label)[:80]
        return f"{self._writer_id}/{readable}.{new_nonce()}"

    def prove_links(self) -> None:
        """Raise UsageError if the filesystem has no hard links, before anything is copied.

        Some FUSE filesystems have none. Every object would be written and could not be published.
        """
        staged = self._stage("probe", _silent)
        other = self._new_token("probe")
        token = staged.finish(other, travels=False)
        source, target = self._directory.staged(token), self._directory.staged(other)
        try:
            with os_errors("link a file", target):
                self._link(source, target, token)
        finally:
            self.discard(token)
            self.discard(other)

    def _publish(self, token: str, name: str, reach: Callable[[str], None]) -> None:
        source, target = self._directory.staged(token), self._directory.path(name)
        is_taken = False
        with os_errors("publish an object", target):
            try:
                self._directory.in_folder(target.parent, lambda: self._link(source, target, token))
            except FileExistsError:
                is_taken = True
        if not is_taken:
            reach("publish.linked")
        try:
            self._sys.sync_directory(target.parent)
        except OSError as error:
            raise OutcomeUnknownError(
                "the object is visible but its folder could not be made durable",
                hint="check the disk; the next start lists the folder again",
                name=name,
                reason=error.strerror,
            ) from error
        if is_taken:
            raise AlreadyExistsError("object exists", name=name)
        self.discard(token)
        reach("publish.done")

    def _link(self, source: Path, target: Path, token: str) -> None:
        try:
            self._sys.link(source, target)
        except FileNotFoundError:
            if os.path.lexists(source):
                raise  # the target's folder is missing
            raise UnavailableError(
                "the staged object is gone",
                hint="another run considered this writer dead and swept it; stage again",
                token=token,
            ) from None
        except OSError as error:
            if error.errno not in _UNLINKABLE:
                raise
            raise UsageError(
                "the filesystem cannot link a staged object to its name",
                hint="the root must be one filesystem with hard links, without mounts inside",
                path=str(target),
                reason=error.strerror,
            ) from error

    def discard(self, token: str) -> None:
        """See `BlobStore.discard`."""
        path = self._directory.staged(token)
        # Errors are ignored: a leftover file does no harm, and the object is published or not.
        with contextlib.suppress(OSError):
            self._sys.unlink(path)

    def names(self, folder: str, after: str = "") -> Iterator[str]:
        """See `BlobStore.names`.

        Raises:
            CorruptionError: The folder holds something other than regular files.
        """
        if after:  # one scan: the caller knows the name, and sees a gap behind it
            return iter(sorted(name for name in self._scanned(folder) if name > after))
        return iter(sorted(self._entries(folder)))

    def sizes(self, folder: str) -> dict[str, int]:
        """See `BlobStore.sizes`; raises as `names` does."""
        found: dict[str, int] = {}
        for name, entry in sorted(self._entries(folder).items()):
            with (
                os_errors("read the size of an object", self._directory.path(folder)),
                contextlib.suppress(FileNotFoundError),
            ):
                found[name] = entry.stat(follow_symlinks=False).st_size
        return found

    def below(self, folder: str) -> Iterator[tuple[str, int]]:
        """See `BlobStore.below`."""
        path = self._directory.path(folder)
        found = list[tuple[str, int]]()
        with os_errors("list a folder", path):
            for inner, _, names in os.walk(path, onerror=_unless_missing):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        size_bytes = os.lstat(f"{inner}/{name}").st_size
                        found.append((f"{inner}/{name}".removeprefix(f"{path}/"), size_bytes))
        return iter(sorted(found, key=lambda one: os.fsencode(one[0])))

    def _entries(self, folder: str) -> dict[str, os.DirEntry[str]]:
        """Scan a folder until no name of the last scan is missing in the next one.

        The system returns entries piece by piece, in an order of its own. A scan may miss a merged
        object that is created behind it, and the objects that it replaces, because they are deleted
        before it comes to them. At the beginning of a chain nothing would show that.
        """
        found = self._scanned(folder)
        for _ in range(_SCANS_MAX):
            before, found = found, self._scanned(folder)
            if before.keys() <= found.keys():
                break
        return found

    def _scanned(self, folder: str) -> dict[str, os.DirEntry[str]]:
        path = self._directory.path(folder)
        found: dict[str, os.DirEntry[str]] = {}
        with os_errors("list a folder", path):
            try:
                entries = os.scandir(path)
            except FileNotFoundError:
                return found
            with entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if not entry.is_file(follow_symlinks=False):
                        raise _not_a_file(f"{folder}/{entry.name}")
                    found[entry.name] = entry
        return found

    def folders(self, folder: str) -> Iterator[str]:
        """See `BlobStore.folders`."""
        path = self._directory.path(folder) if folder else self._directory.root
        with os_errors("list a folder", path):
            try:
                entries = [entry for entry in path.iterdir() if entry.is_dir()]
            except FileNotFoundError:
                return iter(())
        return iter(sorted(entry.name for entry in entries if entry.name[0] != "."))

    def tail(self, folder: str, after: str = "") -> Tail:
        """See `BlobStore.tail`: names are listed, then made durable.

        A writer may have died, or its sync failed, between linking and syncing. A caller that
        continues after such a name would report an object that a power loss can still remove.
        """
        names = list(self.names(folder, after))
        if names:
            path = self._directory.path(folder)
            with os_errors("make names durable", path):
                self._sys.sync_directory(path)
        return Tail(names, is_whole=not after)

    def read(self, name: str) -> bytes:
        """See `BlobStore.read`."""
        with self.open(name) as file, os_errors("read an object", self._directory.path(name)):
            return file.read()

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """See `BlobStore.read_range`."""
        with self.open(name) as file, os_errors("read an object", self._directory.path(name)):
            file.seek(start)
            return file.read(size_bytes)

    def open(self, name: str) -> BinaryIO:
        """See `BlobStore.open`.

        Raises:
            CorruptionError: The name is not that of a regular file.
        """
        path = self._directory.path(name)
        with os_errors("open an object", path):
            try:
                # Without O_NONBLOCK a pipe of that name would block forever.
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                raise KeyError(name) from None
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise _not_a_file(name)
            return os.fdopen(descriptor, "rb")

    def delete(self, name: str) -> None:
        """See `BlobStore.delete`."""
        path = self._directory.path(name)
        with os_errors("delete an object", path), contextlib.suppress(FileNotFoundError):
            self._sys.unlink(path)

    def hold_writer_lock(self) -> contextlib.AbstractContextManager[None]:
        """Hold this writer's lock; see `Writers.hold_lock`."""
        return self._writers.hold_lock()

    def sweep(self) -> int:
        """Remove the staged objects of dead writers; see `Writers.sweep`."""
        return self._writers.sweep()


def _silent(_point: str) -> None:
    """Replace `failpoints.reach` for claims: the failpoints are those of objects."""


def _not_a_file(name: str) -> CorruptionError:
    return CorruptionError(
        "the destination's folder holds something other than regular files",
        hint="move it out of the folder; only objects may be there",
        name=name,
    )


def _unless_missing(error: OSError) -> None:
    """Raise what `os.walk` passes over, so that no listing is cut short; a folder may be gone."""
    if not isinstance(error, FileNotFoundError):
        raise error
