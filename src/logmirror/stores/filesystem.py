"""BlobStore on a directory.

    <root>/<name>                               objects, immutable
    <root>/.logmirror/staged/<writer>/<label>   objects under construction
    <root>/.logmirror/writers/<writer>          held (flock) while that writer lives

1. An object is written under `staged`, its bytes are made durable, it is linked to its name, and
   the folder is made durable; only then is the staged name removed. Linking, not renaming: a
   rename replaces, so of two writers both would succeed and the second would silently win.
2. A crash leaves at worst a staged file, which no listing shows. `sweep` removes those of writers
   that are gone.
3. A name that is taken is made durable before `AlreadyExistsError` is raised: its writer may have
   died between linking and syncing, and the caller may go on as if it had written it. For the same
   reason `tail`, from which positions are read, makes durable what it names.
4. Reading creates nothing.

Every system call on the way to a durable name goes through `Syscalls`, so that a test can die
before each of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK, Clock, new_nonce
from logmirror.errors import (
    CorruptionError,
    InternalError,
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
    UsageError,
)
from logmirror.stores.base import AlreadyExistsError, Tail
from logmirror.stores.blocks import BlockWriter
from logmirror.stores.locks import open_lock, try_lock
from logmirror.stores.syscalls import Syscalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from logmirror.stores.base import BlobStore, Buffer, StagedObject

    def _is_a_blob_store(store: FilesystemStore) -> BlobStore:
        return store

    def _is_a_staged_object(staged: StagedFile) -> StagedObject:
        return staged


_Result = TypeVar("_Result")

PRIVATE_FOLDER: Final = ".logmirror"
"""What is not an object lives under this name in the root; listings never show dot-names."""

FOREIGN_LEFTOVER_AGE_MS: Final = 7 * 24 * 3600 * 1000
"""Staged files of other hosts are left alone this long: a lock may not be visible across hosts.
As long as claims are kept, because that is how long a process may sleep and wake."""

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
_MISPLACED: Final = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL})


class FilesystemStore:
    """A directory as a BlobStore. All of it must be on one filesystem that has hard links.

    Cheap to make and holds no open file, so every process makes its own.

    Args:
        root: The directory; made when first written to.
        writer_id: Whose staged objects these are; all processes of one run share one. Stage only
            while the run holds `hold_writer_lock`, else another run may sweep the object away.
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
        self._root = root
        self._writer_id = _checked_part(writer_id)
        self._sys = syscalls or Syscalls()
        self._clock = clock
        self._known_folders: set[Path] = set()

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
        readable = "".join(c if c.isalnum() or c in "-_" else "-" for c in label)[:80]
        token = f"{self._writer_id}/{readable}.{new_nonce()}"
        path = self._staged_path(token)
        with _translated("stage an object", path):
            descriptor = self._in_folder(path.parent, lambda: self._sys.open_new(path))
        return StagedFile(path, token, descriptor, self._sys, reach)

    def _publish(self, token: str, name: str, reach: Callable[[str], None]) -> None:
        source, target = self._staged_path(token), self._path(name)
        is_taken = False
        with _translated("publish an object", target):
            try:
                self._in_folder(target.parent, lambda: self._link(source, target, token))
            except FileExistsError:
                is_taken = True
        if not is_taken:
            reach("publish.linked")
        try:
            self._sys.sync_directory(target.parent)
        except OSError as error:
            raise OutcomeUnknownError(
                "the object is visible but its folder could not be made durable",
                hint="look at the disk; the next start lists the folder again",
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
                hint="another run took this writer for dead and swept it; stage again",
                token=token,
            ) from None
        except OSError as error:
            if error.errno not in {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}:
                raise
            raise UsageError(
                "the filesystem cannot link a staged object to its name",
                hint="the root must be one filesystem with hard links, without mounts inside",
                path=str(target),
                reason=error.strerror,
            ) from error

    def discard(self, token: str) -> None:
        """See `BlobStore.discard`."""
        path = self._staged_path(token)
        # A leftover is only a leftover: whatever is wrong, the object's fate is already decided.
        with contextlib.suppress(OSError):
            self._sys.unlink(path)

    def names(self, folder: str) -> Iterator[str]:
        """See `BlobStore.names`.

        Raises:
            CorruptionError: Something that is no regular file lies among the objects.
        """
        return iter(sorted(entry.name for entry in self._entries(folder)))

    def sizes(self, folder: str) -> dict[str, int]:
        """See `BlobStore.sizes`; raises as `names` does."""
        found: dict[str, int] = {}
        for entry in sorted(self._entries(folder), key=lambda entry: entry.name):
            with (
                _translated("look at an object", self._path(folder)),
                contextlib.suppress(FileNotFoundError),
            ):
                found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        path = self._path(folder)
        found: list[os.DirEntry[str]] = []
        with _translated("list a folder", path):
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
                    found.append(entry)
        return found

    def folders(self, folder: str) -> Iterator[str]:
        """See `BlobStore.folders`."""
        path = self._path(folder) if folder else self._root
        with _translated("list a folder", path):
            try:
                entries = [entry for entry in path.iterdir() if entry.is_dir()]
            except FileNotFoundError:
                return iter(())
        return iter(sorted(entry.name for entry in entries if entry.name[0] != "."))

    def tail(self, folder: str, after: str = "") -> Tail:
        """See `BlobStore.tail`: names are listed, then made durable.

        Their writer may have died, or its flush failed, between linking and syncing; whoever goes
        on behind them would report what a loss of power takes back.
        """
        names = [name for name in self.names(folder) if name > after]
        if names:
            path = self._path(folder)
            with _translated("make names durable", path):
                self._sys.sync_directory(path)
        return Tail(names, is_whole=not after)

    def read(self, name: str) -> bytes:
        """See `BlobStore.read`."""
        with self.open(name) as file, _translated("read an object", self._path(name)):
            return file.read()

    def open(self, name: str) -> BinaryIO:
        """See `BlobStore.open`.

        Raises:
            CorruptionError: The name belongs to something that is no regular file.
        """
        path = self._path(name)
        with _translated("open an object", path):
            try:
                # Without O_NONBLOCK a pipe of that name would block us here forever.
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                raise KeyError(name) from None
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise _not_a_file(name)
            return os.fdopen(descriptor, "rb")

    def delete(self, name: str) -> None:
        """See `BlobStore.delete`."""
        path = self._path(name)
        with _translated("delete an object", path), contextlib.suppress(FileNotFoundError):
            self._sys.unlink(path)

    @contextlib.contextmanager
    def hold_writer_lock(self) -> Iterator[None]:
        """Be a live writer until the block ends; the system lets go if the process dies.

        Raises:
            UsageError: Another process of this writer id is alive already.
        """
        path = self._root / PRIVATE_FOLDER / "writers" / self._writer_id
        with _translated("lock a writer's name", path):
            descriptor = self._in_folder(path.parent, lambda: open_lock(path))
            if not try_lock(descriptor):
                os.close(descriptor)
                raise UsageError("this writer is already running", writer=self._writer_id)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)

    def sweep(self) -> int:
        """Remove the staged objects of writers that are gone; returns how many.

        A writer of this host is gone when its lock can be taken. One of another host must also
        have touched nothing for `FOREIGN_LEFTOVER_AGE_MS`.
        """
        staged = self._root / PRIVATE_FOLDER / "staged"
        count = 0
        with _translated("sweep leftovers", staged):
            try:
                folders = sorted(staged.iterdir())
            except FileNotFoundError:
                return 0
            for folder in folders:
                if folder.name != self._writer_id and self._may_sweep(folder):
                    count += self._sweep_writer(folder)
        return count

    def _may_sweep(self, folder: Path) -> bool:
        if folder.name.partition(".")[0] == self._writer_id.partition(".")[0]:
            return True
        try:
            age_ms = self._clock.now_ms() - folder.stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return False
        return age_ms > FOREIGN_LEFTOVER_AGE_MS

    def _sweep_writer(self, folder: Path) -> int:
        lock = self._root / PRIVATE_FOLDER / "writers" / folder.name
        descriptor = self._in_folder(lock.parent, lambda: open_lock(lock))
        count = 0
        try:
            if not try_lock(descriptor):
                return 0
            # Another sweeper may be at work on the same folder: what is gone is gone.
            with contextlib.suppress(FileNotFoundError):
                for path in folder.iterdir():
                    path.unlink(missing_ok=True)
                    count += 1
                if not _remove_if_empty(folder):
                    return count
            lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
        return count

    def _path(self, name: str) -> Path:
        return self._root.joinpath(*(_checked_part(part) for part in name.split("/")))

    def _staged_path(self, token: str) -> Path:
        return self._path(f"{PRIVATE_FOLDER}/staged/{token}")

    def _in_folder(self, folder: Path, action: Callable[[], _Result]) -> _Result:
        """Do what needs the folder, making the folder where it is missing."""
        if folder in self._known_folders:
            try:
                return action()
            except FileNotFoundError:
                self._known_folders.clear()  # swept, or removed by somebody: make it again
        self._make_folder(folder)
        return action()

    def _make_folder(self, folder: Path) -> None:
        """Let a folder be there, durably: who made it may have died before its name was."""
        if folder in self._known_folders:
            return
        is_there = folder.is_dir()
        if not is_there or self._root in folder.parents:  # what was there above is not ours
            self._make_folder(folder.parent)
            if not is_there:
                with contextlib.suppress(FileExistsError):  # another process made it just now
                    self._sys.make_directory(folder)
            self._sys.sync_directory(folder.parent)
        self._known_folders.add(folder)


class StagedFile:
    """An object under construction; see `StagedObject`."""

    def __init__(
        self,
        path: Path,
        token: str,
        descriptor: int,
        syscalls: Syscalls,
        reach: Callable[[str], None],
    ) -> None:
        self._reach = reach
        self._path = path
        self._token = token
        self._descriptor: int | None = descriptor
        self._sys = syscalls
        self._blocks = BlockWriter(descriptor, self._put)

    def write(self, data: Buffer) -> int:
        """See `StagedObject.write`."""
        self._open_descriptor()
        with memoryview(data) as view, view.cast("B") as rest, _translated("write", self._path):
            size_bytes = len(rest)
            self._blocks.write(rest)
        return size_bytes

    def _put(self, descriptor: int, data: memoryview) -> int:
        written = self._sys.write(descriptor, data)
        self._reach("stage.written")
        return written

    def finish(self, name: str, *, travels: bool) -> str:
        """See `StagedObject.finish`: a file that is linked to any name, by anybody."""
        del name, travels
        descriptor = self._open_descriptor()
        try:
            with _translated("write", self._path):
                self._blocks.finish()
            with _translated("make an object durable", self._path):
                self._sys.sync_data(descriptor)
        except LogmirrorError:
            # After a failed sync the kernel may have dropped the pages and forgotten the error,
            # so a second attempt would succeed without the bytes. Only new bytes can be trusted.
            self.abort()
            raise
        self._close()
        self._reach("stage.finished")
        return self._token

    def abort(self) -> None:
        """See `StagedObject.abort`."""
        if self._descriptor is not None:
            self._close()
            with contextlib.suppress(OSError):
                self._sys.unlink(self._path)

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise InternalError("the staged object is finished or aborted", token=self._token)
        return self._descriptor

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self._blocks.close()
            # What matters was said by fdatasync; an error of close has nothing to add.
            with contextlib.suppress(OSError):
                self._sys.close(descriptor)


def _remove_if_empty(folder: Path) -> bool:
    """Remove a folder; False: a worker that has outlived its driver still stages there."""
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _silent(_point: str) -> None:
    """Stand in for `failpoints.reach` where a claim is made: the points are those of objects."""


def _checked_part(part: str) -> str:
    if part in {"", ".", ".."} or "/" in part or "\0" in part:
        raise UsageError("not a name that can be stored", name=part)
    return part


def _not_a_file(name: str) -> CorruptionError:
    return CorruptionError(
        "something that is no regular file lies among the objects",
        hint="move it out of the destination's folder; nothing else may lie there",
        name=name,
    )


@contextlib.contextmanager
def _translated(action: str, path: Path) -> Iterator[None]:
    """The one seam between the operating system's errors and ours."""
    try:
        yield
    except OSError as error:
        facts = {"path": str(path), "reason": error.strerror}
        if error.errno in _DENIED:
            raise UsageError(
                f"not allowed to {action}",
                hint="give this user the right to write there, or choose another root",
                **facts,
            ) from error
        if error.errno in _MISPLACED:
            raise UsageError(
                f"cannot {action} there", hint="choose another root or name", **facts
            ) from error
        raise UnavailableError(
            f"could not {action}", hint="check the disk and its free space", **facts
        ) from error
