"""Which log directory holds which partition, and whether the directories belong together.

A new partition goes to the directory with the fewest partitions, as in Kafka; of several, to the
one that was given first. At a start a partition is found in whichever directory has its folder.

The database is in one of the directories, at first in the one that was given first. Each other one
has a file with the cluster ID, `.logmirror/cluster-id`, so that directories of two brokers cannot
be mixed, and that a broker does not start empty without the directory of its database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.errors import CorruptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

PRIVATE: Final = ".logmirror"
"""The broker's own folder in each log directory."""

_DATABASE: Final = "broker.sqlite"
_CLUSTER_ID: Final = "cluster-id"


class LogDirs:
    """The log directories and the number of partitions in each.

    Args:
        paths: At least one.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._counts = dict.fromkeys(self.paths, 0)

    def folders(self, topic: str) -> list[Path]:
        """Return the folders of a topic that exist."""
        return [path / topic for path in self.paths if (path / topic).exists()]

    def find(self, topic: str, partition: int) -> Path:
        """Return the folder of an existing partition; a new one, if it has no records yet.

        Raises:
            CorruptionError: Two directories have one.
        """
        name = str(partition)
        found = [path for path in self.paths if (path / topic / name).is_dir()]
        if len(found) > 1:
            raise CorruptionError(
                "a partition is in two log directories",
                hint="stop the broker, and move one of the two folders out of its log directory",
                partition=f"{topic}-{partition}",
                paths=[str(path / topic / name) for path in found],
            )
        if not found:
            return self.place(topic, partition)
        self._counts[found[0]] += 1
        return found[0] / topic / name

    def place(self, topic: str, partition: int) -> Path:
        """Return the folder for a new partition."""
        path = min(self.paths, key=self._counts.__getitem__)
        self._counts[path] += 1
        return path / topic / str(partition)

    def remove(self, folders: Iterable[Path]) -> None:
        """Count partitions that were deleted."""
        for folder in folders:
            self._counts[folder.parent.parent] -= 1


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
            if (path / PRIVATE / _CLUSTER_ID).exists():
                raise UsageError(
                    "log directory without the one that has the broker's database",
                    hint=f"give that directory too; it has the file {PRIVATE}/{_DATABASE}",
                    path=str(path),
                )
    return (found or paths)[0] / PRIVATE / _DATABASE


def cluster_id_files(paths: Sequence[Path], cluster_id: str) -> list[Path]:
    """Return the files to write the cluster ID into, after a check of those that exist.

    Raises:
        UsageError: A directory belongs to another broker.
    """
    missing = []
    for path in paths:
        file = path / PRIVATE / _CLUSTER_ID
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
