"""Which log directory holds which partition, and whether the directories belong together.

A new partition goes to the directory that was requested for it before it existed (KIP-113), or to
the one with the fewest partitions, as in Kafka; of several, to the one that was given first. At a
start a partition is found in whichever directory has its folder.

One of the directories may be in a bucket, beside those on disks. New partitions go there only if
that was requested. Which ones are there is in the database, which is in the bucket itself then.

Without a bucket the database is in one of the directories, at first in the one that was given
first. Each other one has a file with the cluster ID, `.logmirror/cluster-id`, so that directories
of two brokers cannot be mixed, and that a broker does not start empty without the directory of its
database.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.file_names import open_path
from logmirror.errors import CorruptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logmirror.errors import LogmirrorError

PRIVATE: Final = ".logmirror"
"""The broker's own folder in each log directory."""

_MAX_PREFERRED: Final = 100_000
_DATABASE: Final = "broker.sqlite"
_CLUSTER_ID: Final = "cluster-id"
_ENDS: Final = "durable-ends"


class PlaceError(CorruptionError):
    """Two log directories have the same partition, or none that was given has it."""


class LogDirs:
    """The log directories and the number of partitions in each.

    Args:
        paths: Those on disks.
        bucket: The name of the one in a bucket; empty: there is none.
        work_dir: The working folder of that.
    """

    def __init__(
        self, paths: Sequence[Path], *, bucket: str = "", work_dir: Path | None = None
    ) -> None:
        self.on_disk = tuple(paths)
        self.by_name = {absolute(path): path for path in paths}
        self.work_dir = work_dir if bucket else None
        self.bucket = bucket
        if self.work_dir is not None:
            self.by_name[bucket] = self.work_dir
        self.paths = tuple(self.by_name.values())
        self._names = {path: name for name, path in self.by_name.items()}
        self._counts = dict.fromkeys(self.paths, 0)
        self.offline: dict[Path, LogmirrorError] = {}
        """Those that failed at run time, see `failures`; until the next start."""

        self.cordoned: frozenset[str] = frozenset()
        """The names of directories that get no new partitions (KIP-1066)."""

        self.preferred: dict[tuple[str, int], Path] = {}
        """Where partitions go that do not exist yet, by topic and partition."""

    def name_of(self, path: Path) -> str:
        """Return the name of a log directory for clients."""
        return self._names[path]

    def is_in_bucket(self, folder: Path) -> bool:
        """Whether the folder of a partition is in the bucket's working folder."""
        return folder.parent.parent == self.work_dir

    def folders(self, topic: str) -> list[Path]:
        """Return the folders of a topic that exist, except in directories that are offline."""
        paths = [path for path in self.paths if path not in self.offline]
        return [path / topic for path in paths if (path / topic).exists()]

    def having(self, topic: str, partition: int) -> list[Path]:
        """Return the folders of a partition on disks, except in directories that are offline."""
        paths = [path for path in self.on_disk if path not in self.offline]
        found = [path / topic / str(partition) for path in paths]
        return [folder for folder in found if folder.is_dir()]

    def in_bucket(self, topic: str, partition: int) -> Path:
        """Return the folder of an existing partition that is in the bucket.

        Raises:
            PlaceError: The bucket is not one of the log directories.
        """
        if self.work_dir is None:
            raise _missing(topic, partition, "in a bucket")
        self._counts[self.work_dir] += 1
        return self.work_dir / topic / str(partition)

    def find(self, topic: str, partition: int) -> Path:
        """Return the folder of an existing partition on a disk; a new one, if it has no records.

        Of two, one without records does not count: its directory was not given when the partition,
        which was empty, was placed in another one.

        Raises:
            PlaceError: Two directories have records of it, or no directory is on a disk.
        """
        if not self.on_disk:
            raise _missing(topic, partition, "on a disk")
        found = self.having(topic, partition)
        if len(found) > 1:
            found = [folder for folder in found if has_records(folder)] or found[:1]
        if len(found) > 1:
            raise PlaceError(
                "a partition is in two log directories",
                hint="stop the broker, and move one of the two folders out of its log directory",
                partition=f"{topic}-{partition}",
                paths=[str(folder) for folder in found],
            )
        if not found:
            return self.place(topic, partition)
        self._counts[found[0].parent.parent] += 1
        return found[0]

    @property
    def _open(self) -> list[Path]:
        """The directories in which partitions are created, if no other was requested."""
        paths = self.on_disk or self.paths
        return [path for path in paths if self._is_open(path)]

    def _is_open(self, path: Path) -> bool:
        return self._names[path] not in self.cordoned and path not in self.offline

    @property
    def has_room(self) -> bool:
        """Whether a directory gets new partitions."""
        return bool(self._open)

    def place(self, topic: str, partition: int) -> Path:
        """Return the folder for a new partition; in a closed directory only if all are."""
        path = self.preferred.pop((topic, partition), None)
        if path is None or not self._is_open(path):
            path = min(self._open or self.on_disk or self.paths, key=self._counts.__getitem__)
        self._counts[path] += 1
        return path / topic / str(partition)

    def prefer(self, topic: str, partition: int, name: str) -> None:
        """Note the directory for a partition that does not exist yet; until the broker stops."""
        path = self.by_name.get(name)
        if path is not None and len(self.preferred) < _MAX_PREFERRED:
            self.preferred[topic, partition] = path

    def moved(self, old: Path, new: Path) -> None:
        """Count a partition that was moved."""
        self._counts[old.parent.parent] -= 1
        self._counts[new.parent.parent] += 1

    def remove(self, folders: Iterable[Path]) -> None:
        """Count partitions that were deleted."""
        for folder in folders:
            self._counts[folder.parent.parent] -= 1


def _missing(topic: str, partition: int, where: str) -> PlaceError:
    return PlaceError(
        "a partition is in a log directory that was not given",
        hint=f"start the broker with its log directory {where} too",
        partition=f"{topic}-{partition}",
    )


def absolute(path: Path) -> str:
    """Return the name of a log directory for clients: absolute, symbolic links not resolved."""
    return str(Path.cwd() / path)


def check_different(paths: Sequence[Path]) -> None:
    """Check that no log directory is another one, or in another one.

    Raises:
        UsageError: One is.
    """
    resolved = [path.resolve() for path in paths]
    for number, path in enumerate(resolved):
        for other in resolved[number + 1 :]:
            if path.is_relative_to(other) or other.is_relative_to(path):
                raise UsageError(
                    "a log directory is given twice, or is in another one",
                    paths=[str(path), str(other)],
                )


def database_path(paths: Sequence[Path]) -> Path:
    """Return the path of the database: an existing one, or a new one in the first directory.

    Raises:
        UsageError: Two directories have one, or the directory that has it was not given.
    """
    found = [path for path in paths if (path / PRIVATE / _DATABASE).exists()]
    if len(found) > 1:
        raise UsageError(
            "two log directories have a database: they belong to two brokers",
            paths=[str(path) for path in found],
        )
    if not found:
        for path in paths:
            if cluster_id_file(path).exists():
                raise UsageError(
                    "log directory without the one that has the broker's database",
                    hint="give that directory too; it is in a bucket, or has the file "
                    f"{PRIVATE}/{_DATABASE}",
                    path=str(path),
                )
    return (found or paths)[0] / PRIVATE / _DATABASE


def cluster_id_file(path: Path) -> Path:
    """Return the file with the cluster ID, of a directory that has no database."""
    return path / PRIVATE / _CLUSTER_ID


def ends_path(paths: Sequence[Path]) -> Path:
    """Return the path of the durable ends: an existing one, or a new one in the first directory."""
    first = sorted(paths, key=lambda path: not (path / PRIVATE / _DATABASE).exists())
    found = [path / PRIVATE / _ENDS for path in first]
    return next((path for path in found if path.exists()), found[0])


def cluster_id_files(paths: Sequence[Path], cluster_id: str) -> list[Path]:
    """Return the files to write the cluster ID into, after a check of those that exist.

    Raises:
        UsageError: A directory belongs to another broker.
    """
    missing = []
    for path in paths:
        file = cluster_id_file(path)
        if (path / PRIVATE / _DATABASE).exists():
            continue
        found = file.read_text(encoding="ascii", errors="replace") if file.exists() else ""
        if not found:  # also after a crash while it was written
            missing.append(file)
        elif found != cluster_id:
            raise UsageError(
                "log directory belongs to another broker",
                path=str(path),
                expected=cluster_id,
                found=found,
            )
    return missing


def has_records(folder: Path) -> bool:
    """Whether a partition's folder may have, or have had, records.

    The mark of a move is none, and neither is an open segment at offset 0 that is empty. Blocks.
    """
    empty = open_path(folder, 0)
    return any(
        path.suffix != ".move" and (path != empty or path.stat().st_size > 0)
        for path in folder.iterdir()
    )
