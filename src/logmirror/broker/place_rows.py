"""Where partitions are, in the broker's database: moves between log directories, and the bucket.

Its tables are described in `metadata`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Mapping

    from logmirror.broker.database import Database

PLACED_VERSION: Final = "3"
"""Of the schema, once a partition is in the bucket only if it has a residence."""

PLACES_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS moves (
    topic_id BLOB NOT NULL, partition INTEGER NOT NULL, target TEXT NOT NULL, nonce TEXT NOT NULL,
    PRIMARY KEY (topic_id, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS bucket_partitions (
    topic_id BLOB NOT NULL, partition INTEGER NOT NULL, residence BLOB NOT NULL,
    PRIMARY KEY (topic_id, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS left_partitions (
    residence BLOB NOT NULL, name TEXT NOT NULL, partition INTEGER NOT NULL,
    PRIMARY KEY (residence, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deleted_partitions (
    topic_id BLOB NOT NULL, partition INTEGER NOT NULL, PRIMARY KEY (topic_id, partition)
) WITHOUT ROWID;
"""
_INSERT_LEFT: Final = "INSERT OR REPLACE INTO left_partitions VALUES (?, ?, ?)"


class Compacted(NamedTuple):
    """An object of a bucket that replaced others."""

    first: int
    next: int
    version: str


class Residence(NamedTuple):
    """A partition in a bucket, from when it was created there, or came there, until it leaves."""

    id: bytes
    """16 bytes, see `bucket.residences`."""

    topic: str
    """The name of its topic."""

    partition: int

    @property
    def key(self) -> tuple[bytes, int]:
        """What its commits have in the place of topic ID and partition."""
        return self.id, self.partition


class MoveRow(NamedTuple):
    """A move of a partition to another log directory that is not complete."""

    topic_id: bytes
    partition: int
    target: str
    """The log directory."""

    nonce: str
    """32 hexadecimal digits, in the name of its folder."""

    @property
    def residence(self) -> bytes:
        """The ID of its residence in the bucket, if it moves there."""
        return bytes.fromhex(self.nonce)

    @property
    def is_into_bucket(self) -> bool:
        """Whether the target is in a bucket."""
        return self.target.startswith("s3://")


class PlaceRows:
    """The rows; a part of `metadata.MetadataStore`."""

    _database: Database

    def moves(self) -> dict[tuple[bytes, int], MoveRow]:
        """Return the moves that are not complete, by topic ID and partition."""
        with self._database.transaction() as database:
            rows = database.execute("SELECT * FROM moves").fetchall()
        return {(row[0], row[1]): MoveRow(*row) for row in rows}

    def change_moves(
        self,
        begun: Collection[MoveRow],
        ended: Collection[tuple[bytes, int]],
        left: Collection[Residence] = (),
    ) -> None:
        """Store moves; one of a partition replaces another. Forget those of other partitions.

        Store also what is to be removed from the bucket.
        """
        with self._database.transaction() as database:
            delete = "DELETE FROM moves WHERE topic_id = ? AND partition = ?"
            database.executemany(delete, ended)
            insert = (
                "INSERT OR REPLACE INTO moves SELECT ?1, ?2, ?3, ?4 "
                "WHERE EXISTS (SELECT 1 FROM topics WHERE id = ?1)"
            )
            database.executemany(insert, begun)
            database.executemany(_INSERT_LEFT, left)

    def place_explicitly(self) -> None:
        """From now on, a partition is in the bucket only if it has a residence.

        Those that there are have been created in the bucket.
        """
        with self._database.transaction() as database:
            select = "SELECT 1 FROM settings WHERE name = 'placement'"
            if database.execute(select).fetchone():
                return
            _place(database)
            topics = database.execute("SELECT id, partitions FROM topics").fetchall()
            for topic_id, count in topics:
                insert_residences(database, topic_id, dict.fromkeys(range(count), topic_id))

    def place_on_disks(self) -> None:
        """The same; all partitions that there are have been created on disks."""
        with self._database.transaction() as database:
            _place(database)
        self.note_disks()

    @property
    def has_disks(self) -> bool:
        """Whether the broker had log directories on disks beside the bucket."""
        return self._has_setting("disks")

    def note_disks(self) -> None:
        """Store that it has."""
        self._database.setting("disks", "used")

    @property
    def has_several_dirs(self) -> bool:
        """Whether the broker had more than one log directory."""
        return self._has_setting("several_dirs")

    def note_several_dirs(self) -> None:
        """Store that it has."""
        self._database.setting("several_dirs", "used")

    def deleted_partitions(self, topic_id: bytes) -> set[int]:
        """Return the partitions of a deleted topic with a folder that is away.

        It is in a log directory that failed, or was not given.
        """
        with self._database.transaction() as database:
            select = "SELECT partition FROM deleted_partitions WHERE topic_id = ?"
            return {number for (number,) in database.execute(select, (topic_id,))}

    def set_deleted_partitions(self, topic_id: bytes, partitions: Collection[int]) -> None:
        """Store that, also before the deletion itself."""
        with self._database.transaction() as database:
            database.execute("DELETE FROM deleted_partitions WHERE topic_id = ?", (topic_id,))
            insert = "INSERT INTO deleted_partitions VALUES (?, ?)"
            database.executemany(insert, [(topic_id, number) for number in partitions])

    @property
    def is_placed_explicitly(self) -> bool:
        """Whether `place_explicitly` was called, in this or in an earlier run."""
        return self._has_setting("placement")

    def _has_setting(self, name: str) -> bool:
        with self._database.transaction() as database:
            select = "SELECT 1 FROM settings WHERE name = ?"
            return database.execute(select, (name,)).fetchone() is not None

    def enter_bucket(
        self, topic_id: bytes, partition: int, residence: bytes, compacted: Collection[Compacted]
    ) -> None:
        """Store that a partition is in the bucket, and which of its objects have a version."""
        with self._database.transaction() as database:
            delete = "DELETE FROM compacted_objects WHERE topic_id = ? AND partition = ?"
            database.execute(delete, (topic_id, partition))
            insert_residences(database, topic_id, {partition: residence})
            database.executemany(
                "INSERT INTO compacted_objects SELECT ?1, ?2, ?3, ?4, ?5 "
                "WHERE EXISTS (SELECT 1 FROM topics WHERE id = ?1)",
                [(topic_id, partition, *one) for one in compacted],
            )

    def leave_bucket(self, topic_id: bytes, left: Residence) -> None:
        """Store that a partition is on a disk, and that its objects are to be removed."""
        key = topic_id, left.partition
        with self._database.transaction() as database:
            for table in ("bucket_partitions", "compacted_objects"):
                delete = f"DELETE FROM {table} WHERE topic_id = ? AND partition = ?"  # noqa: S608  # constants
                database.execute(delete, key)
            database.execute(_INSERT_LEFT, left)

    def left_partitions(self) -> list[Residence]:
        """Return the partitions that have left the bucket and have objects there."""
        with self._database.transaction() as database:
            rows = database.execute("SELECT * FROM left_partitions").fetchall()
        return [Residence(*row) for row in rows]

    def end_removal(self, left: Residence) -> None:
        """Forget such a partition, once its objects are removed."""
        with self._database.transaction() as database:
            delete = "DELETE FROM left_partitions WHERE residence = ? AND partition = ?"
            database.execute(delete, (left.id, left.partition))


def _place(database: sqlite3.Connection) -> None:
    insert = "INSERT INTO settings VALUES ('placement', 'explicit') ON CONFLICT DO NOTHING"
    database.execute(insert)
    database.execute("UPDATE settings SET value = ? WHERE name = 'schema'", (PLACED_VERSION,))


def insert_residences(
    database: sqlite3.Connection, topic_id: bytes, residences: Mapping[int, bytes]
) -> None:
    """Store that partitions of a topic are in the bucket, and where there."""
    database.executemany(
        "INSERT INTO bucket_partitions SELECT ?1, ?2, ?3 "
        "WHERE EXISTS (SELECT 1 FROM topics WHERE id = ?1)",
        [(topic_id, partition, residence) for partition, residence in residences.items()],
    )


def forget_places(database: sqlite3.Connection, name: str) -> None:
    """Forget where the partitions of a deleted topic are; what they have in a bucket is removed.

    Not what is in the bucket under the ID of the topic.
    """
    of_topic = "WHERE topic_id IN (SELECT id FROM topics WHERE name = ?)"
    residences = database.execute(f"SELECT * FROM bucket_partitions {of_topic}", (name,)).fetchall()  # noqa: S608  # constants
    moves = database.execute(f"SELECT * FROM moves {of_topic}", (name,)).fetchall()  # noqa: S608  # the same
    left = [
        Residence(residence, name, partition)
        for topic_id, partition, residence in residences
        if residence != topic_id
    ]
    left += [
        Residence(move.residence, name, move.partition)
        for move in (MoveRow(*row) for row in moves)
        if move.is_into_bucket
    ]
    database.executemany(_INSERT_LEFT, left)
    for table in ("moves", "bucket_partitions"):
        database.execute(f"DELETE FROM {table} {of_topic}", (name,))  # noqa: S608  # the same
