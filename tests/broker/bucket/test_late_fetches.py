"""A fetch that ends when its topic was deleted and created again."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO

import pytest

from logmirror.broker.bucket.files import BucketDisk
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

FILE = "00000000000000000000-00000000000000000000.batches"


class Slow(MemoryStore):
    """A store whose response comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.released = threading.Event(), threading.Event()

    def open(self, name: str) -> BinaryIO:
        found = super().open(name)
        self.asked.set()
        assert self.released.wait(20)
        return found


def test_what_is_fetched_of_a_deleted_topic_is_not_served_as_the_one_created_again(
    tmp_path: Path,
) -> None:
    store, folder = Slow(), tmp_path / "t" / "0"
    store.objects[f"t@old/0/{FILE}"] = b"deleted"
    disk = BucketDisk(store, cache_bytes=1 << 20)
    disk.connect(folder, "t@old/0")
    with ThreadPoolExecutor(1) as reader:
        late = reader.submit(disk.open_for_reading, folder / FILE)
        assert store.asked.wait(20)
        disk.disconnect(folder)
        shutil.rmtree(folder)
        disk.connect(folder, "t@new/0")
        folder.mkdir(parents=True)
        (folder / FILE).write_bytes(b"current")
        store.released.set()
        with pytest.raises(FileNotFoundError):
            late.result(20)
    found = disk.open_for_reading(folder / FILE)
    assert os.pread(found.fd, 10, 0) == b"current"
    assert [one.name for one in folder.iterdir()] == [FILE]
