"""The directory of a filesystem store: paths of names, durable folders, errors of the system.

<root>/<name>                               objects, immutable
<root>/.logmirror/staged/<writer>/<label>   objects under construction
<root>/.logmirror/writers/<writer>          locked (flock) while that writer is alive
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Final, TypeVar

from logmirror.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from logmirror.stores.syscalls import Syscalls

_Result = TypeVar("_Result")

PRIVATE_FOLDER: Final = ".logmirror"
"""The folder in the root for everything that is not an object. Listings never show dot-names."""

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
_MISPLACED: Final = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL})


class Directory:
    """The directory tree of a store.

    Args:
        root: The directory; created by the first write.
        syscalls: The system calls that order durability.
    """

    def __init__(self, root: Path, syscalls: Syscalls) -> None:
        self.root = root
        self._sys = syscalls
        self._durable: set[Path] = set()
        """Folders that exist durably, as far as this process knows."""

    def path(self, name: str) -> Path:
        """Return the path of a name.

        Raises:
            UsageError: A part of the name cannot be the name of a file.
        """
        return self.root.joinpath(*(checked_part(part) for part in name.split("/")))

    def staged(self, token: str) -> Path:
        """Return the path of a staged object."""
        return self.path(f"{PRIVATE_FOLDER}/staged/{token}")

    @property
    def staged_root(self) -> Path:
        """The folder with one folder of staged objects for each writer."""
        return self.root / PRIVATE_FOLDER / "staged"

    def writer_lock(self, writer_id: str) -> Path:
        """Return the path of a writer's lock file."""
        return self.root / PRIVATE_FOLDER / "writers" / writer_id

    def in_folder(self, folder: Path, action: Callable[[], _Result]) -> _Result:
        """Run an action that needs the folder; creates the folder durably if it is missing."""
        if folder in self._durable:
            try:
                return action()
            except FileNotFoundError:
                self._durable.clear()  # swept, or removed by another program: create it again
        self._create(folder)
        return action()

    def _create(self, folder: Path) -> None:
        """Create a folder and make its name durable; an existing name may not be durable yet."""
        if folder in self._durable:
            return
        exists = folder.is_dir()
        if not exists or self.root in folder.parents:  # existing folders above the root are kept
            self._create(folder.parent)
            if not exists:
                with contextlib.suppress(FileExistsError):  # another process created it just now
                    self._sys.make_directory(folder)
            self._sys.sync_directory(folder.parent)
        self._durable.add(folder)


def checked_part(part: str) -> str:
    """Return a part of a name; UsageError if it cannot be the name of a file."""
    if part in {"", ".", ".."} or "/" in part or "\0" in part:
        raise UsageError("not a valid object name", name=part)
    return part


@contextlib.contextmanager
def os_errors(action: str, path: Path) -> Iterator[None]:
    """Convert the errors of the operating system, with the action and the path as facts."""
    try:
        yield
    except OSError as error:
        facts = {"path": str(path), "reason": error.strerror}
        if error.errno in _DENIED:
            raise UsageError(
                f"not allowed to {action}",
                hint="grant this user write permission there, or choose another root",
                **facts,
            ) from error
        if error.errno in _MISPLACED:
            raise UsageError(
                f"cannot {action} there", hint="choose another root or name", **facts
            ) from error
        raise UnavailableError(
            f"could not {action}", hint="check the disk and its free space", **facts
        ) from error
