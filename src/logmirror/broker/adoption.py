"""Takes the databases of a broker into the bucket that it gets as a further log directory.

    state, security shipped -> the file of the database renamed -> the database shipped

The bucket is the broker's when the database is in the chain. Before, a start takes it from the
file, under either name. With the new name, a start without the bucket is refused.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.disk import Disk
from logmirror.broker.log_dirs.placement import PRIVATE, cluster_id_file
from logmirror.broker.metadata import MetadataStore
from logmirror.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from logmirror.broker.bucket.logs import BucketLogs

_LOG: Final = logging.getLogger(__name__)
IN_BUCKET: Final = ".in-bucket"
"""At the end of the name of a database that is in a bucket now."""


def adopt(bucket: BucketLogs, paths: Sequence[Path], databases: Sequence[Path]) -> None:
    """Take over what a broker without the bucket has left in its log directories. Blocks.

    Args:
        bucket: The bucket.
        paths: The log directories on disks.
        databases: Where the databases will be; the metadata first.

    Raises:
        UsageError: Two directories have a database, or one has and the bucket has another.
        UnavailableError: A database cannot be read, or is too large for a snapshot.
    """
    metadata, others = databases[0].name, [path.name for path in databases[1:]]
    places = {path: path / PRIVATE / metadata for path in paths}
    found = {path: file for path, file in places.items() if file.exists()}
    if bucket.has_database(databases[0].stem):
        if found:
            raise UsageError(
                "the log directory and the bucket have databases: they belong to two brokers",
                path=str(next(iter(found))),
            )
        return
    moved = {path: file.with_name(f"{metadata}{IN_BUCKET}") for path, file in places.items()}
    found |= {path: file for path, file in moved.items() if file.exists()}
    if len(found) > 1:
        raise UsageError(
            "two log directories have a database: they belong to two brokers",
            paths=[str(path) for path in found],
        )
    for path, file in found.items():
        for name in others:
            if (file.parent / name).exists():
                bucket.adopt(name.partition(".")[0], _serialized(file.parent / name))
        with contextlib.closing(MetadataStore(file)) as store:
            store.place_on_disks()
            cluster_id = store.cluster_id
        whole, disk, mark = _serialized(file), Disk(), cluster_id_file(path)
        disk.write_synced(mark, [cluster_id.encode()])
        if file != moved[path]:
            disk.rename(file, moved[path])
        disk.sync_folder(file.parent)
        bucket.adopt(databases[0].stem, whole)
        _LOG.info("%s: the broker's database is in the bucket now", path)


def _serialized(path: Path) -> bytes:
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            return connection.serialize()
    except sqlite3.Error as error:
        raise UnavailableError(
            "a database of the broker cannot be read", path=str(path), cause=str(error)
        ) from error
