"""A deleted topic does not come back: not after a crash, nor with a directory that was away.

Method: the real removal over two log directories. It is ended at each of its calls in turn. The
next start lacks one of the directories, and creates a topic of the same name if that is allowed.
"""

from __future__ import annotations

import itertools
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from logmirror.broker import topic_removal
from logmirror.broker.log.disk import Disk
from logmirror.broker.log_dirs.placement import LogDirs
from logmirror.broker.metadata import MetadataStore, TopicRow
from logmirror.broker.topic_removal import TopicRemoval

if TYPE_CHECKING:
    from pathlib import Path

TOPIC = "orders"
DIRS = ("a", "b")


class _CrashError(BaseException):
    """The process ends here; nothing that follows it runs."""


class _Log:
    """What the removal sees of a log."""

    failure = end_slot = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder


class _Broker:
    """The removal of one start of a broker.

    Args:
        root: Has the directories and the database.
        names: The directories that are given.
        crash_at: The call at which it ends; it is not made.
    """

    def __init__(self, root: Path, *names: str, crash_at: int | None = None) -> None:
        self.root, self.crash_at, self.calls = root, crash_at, 0
        self.store = MetadataStore(root / "db")
        self.dirs = LogDirs([root / name for name in names])
        self.pool = ThreadPoolExecutor(1)
        made: Any = (self.store, self.pool, _Disk(self), self.dirs, None)
        self.removal = TopicRemoval(*made)

    def counted(self) -> None:
        if self.calls == self.crash_at:
            raise _CrashError
        self.calls += 1

    def start(self) -> None:
        for row in self.store.deleting():
            self.removal.remove(row)

    @property
    def is_free(self) -> bool:
        return TOPIC not in self.removal.left_behind and not self.dirs.folders(TOPIC)

    def close(self) -> None:
        self.pool.shutdown()
        self.store.close()


class _Disk(Disk):
    def __init__(self, broker: _Broker) -> None:
        super().__init__()
        self._broker = broker

    def rename(self, source: Path, target: Path) -> None:
        self._broker.counted()
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        self._broker.counted()
        super().sync_folder(path)


def crashed(root: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> bool:
    """Delete a topic with a partition in each directory; whether the crash came before its end."""
    for number, name in enumerate(DIRS):
        folder = root / name / TOPIC / str(number)
        folder.mkdir(parents=True)
        for file in ("1", "2"):
            (folder / file).write_text("old")
    broker = _Broker(root, *DIRS, crash_at=at)
    row = TopicRow(name=TOPIC, topic_id=uuid.uuid4(), partition_count=2, configs={})
    broker.store.create_topic(row)
    broker.store.note_several_dirs()
    logs: Any = [_Log(root / name / TOPIC / str(number)) for number, name in enumerate(DIRS)]

    remove, ended = topic_removal.remove_folder, False

    def removed(path: Path) -> None:
        broker.counted()
        remove(path)

    def changed(*arguments: Any) -> None:
        broker.counted()
        change(*arguments)

    change = broker.store.set_deleted_partitions
    with monkeypatch.context() as patch:
        patch.setattr(topic_removal, "remove_folder", removed)
        patch.setattr(broker.store, "set_deleted_partitions", changed)
        try:
            broker.removal.begin(TOPIC, row.topic_id, logs, ())
            broker.counted()
            broker.removal.remove(row, logs, [log.folder for log in logs])
        except _CrashError:
            ended = True
    broker.close()
    return ended


def old(root: Path) -> list[str]:
    """Files of the deleted topic where a start takes them for a partition's."""
    found = itertools.chain(*((root / name).glob(f"{TOPIC}/[0-9]/*") for name in DIRS))
    return [str(path) for path in found if path.read_text() == "old"]


def test_a_move_into_a_bucket_that_ends_within_the_deletion_does_not_block_the_name(tmp_path):
    """Its old folder is listed, and then removed by the move itself."""
    broker = _Broker(tmp_path, *DIRS)
    broker.dirs = LogDirs(broker.dirs.on_disk, bucket="s3://b/p", work_dir=tmp_path / "work")
    made: Any = (broker.store, broker.pool, _Disk(broker), broker.dirs, None)
    removal = TopicRemoval(*made)
    row = TopicRow(name=TOPIC, topic_id=uuid.uuid4(), partition_count=1, configs={})
    broker.store.create_topic(row)
    broker.store.note_several_dirs()
    log: Any = _Log(tmp_path / "a" / TOPIC / "0")
    log.folder.mkdir(parents=True)
    removal.begin(TOPIC, row.topic_id, [log], ())
    log.folder.rmdir()
    log.folder = tmp_path / "work" / TOPIC / "0"
    removal.remove(row, [log], [log.folder])
    assert removal.left_behind == set()
    assert broker.store.deleted_partitions(row.topic_id.bytes) == set()
    broker.close()


@pytest.mark.parametrize("given", DIRS)
def test_a_crash_at_any_call_and_a_start_without_a_directory_bring_nothing_back(
    tmp_path, monkeypatch, given
):
    created = refused = 0
    for at in itertools.count():
        root = tmp_path / str(at)
        if not crashed(root, monkeypatch, at):
            break
        alone = _Broker(root, given)
        was_deleted = not alone.store.topics()
        alone.start()
        if was_deleted and alone.is_free:
            created += 1
            folder = root / given / TOPIC / "0"
            folder.mkdir(parents=True)
            (folder / "1").write_text("new")
            row = TopicRow(name=TOPIC, topic_id=uuid.uuid4(), partition_count=2, configs={})
            alone.store.create_topic(row)
        refused += was_deleted and not alone.is_free
        alone.close()
        whole = _Broker(root, *DIRS)
        whole.start()
        assert not was_deleted or old(root) == [], at
        assert whole.removal.left_behind == set(), "no name is refused for ever"
        whole.close()
    assert at > 6
    assert created
    assert refused
