"""The objects of a deleted topic are removed in the background, and nothing else waits for it."""

from __future__ import annotations

import contextlib
import threading
import uuid
from typing import TYPE_CHECKING

import pytest

from broker.bucket.test_statements_of_reads import BATCHES, append, expected, read_all, seal
from kit.fakes.s3_proxy import Fault
from kit.judges.partition_client import PartitionClient
from kit.runs.commands import wait_until
from kit.servers.kafka import create_topic, delete_topic
from logmirror.broker.bucket.sealed_objects import folder_of
from logmirror.broker.bucket.topic_deletion import TopicDeletion
from logmirror.broker.bucket.uploads import Uploads
from logmirror.broker.metadata import TopicRow
from logmirror.errors import UnavailableError
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator

ROW = TopicRow(name="t", topic_id=uuid.UUID(int=7), partition_count=3, configs={})


@contextlib.contextmanager
def uploads() -> Iterator[Uploads]:
    found = Uploads()
    try:
        yield found
    finally:
        found.close(10)


def filled(count: int) -> MemoryStore:
    store = MemoryStore()
    for number in range(count):
        store.create(f"{folder_of('t', ROW.topic_id, number % 3)}/{number:04d}.batches", b"x")
    store.create("other@1/0/0000.batches", b"x")
    return store


def test_uploads_of_others_do_not_wait_for_the_deletion_of_a_large_topic():
    store, done, may = filled(1_000), threading.Event(), threading.Event()
    left: list[int] = []
    with uploads() as thread:
        held = thread.submit("another", may.wait)
        TopicDeletion(store, ROW, thread, done.set)
        thread.submit("other", lambda: left.append(len(store.objects)))
        may.set()
        held.result(10)
        assert done.wait(10)
    assert 1 < left[0] < 1_001
    assert list(store.objects) == ["other@1/0/0000.batches"]


def test_a_deletion_that_fails_in_between_is_completed():
    store, done = filled(300), threading.Event()
    failures = iter([150, 5])
    countdown = [next(failures)]

    def before(operation: str, name: str) -> None:
        if operation == "delete":
            countdown[0] -= 1
            if countdown[0] == 0:
                countdown[0] = next(failures, -1)
                raise UnavailableError("unavailable", name=name)

    store.before = before
    with uploads() as thread:
        TopicDeletion(store, ROW, thread, done.set)
        assert done.wait(30)
    assert list(store.objects) == ["other@1/0/0000.batches"]


@pytest.mark.slow
def test_a_topic_can_be_deleted_and_made_again_while_its_objects_cannot_be_removed(proxied):
    found = proxied()
    bootstrap = found.broker.bootstrap
    seal(found, "t")
    old = set(found.matching("t@*/0/*"))
    assert len(old) >= 3
    found.proxy.spoil(Fault("503", "DeleteObject", times=1_000_000))

    delete_topic(bootstrap, "t")
    create_topic(bootstrap, "t", 1, {})
    with PartitionClient(bootstrap, "t") as partition:
        append(partition, range(4))
        assert read_all(partition) == expected("t", range(4))
    found.broker.kill()
    found.broker.start()
    with PartitionClient(bootstrap, "t") as partition:
        assert read_all(partition) == expected("t", range(4))
        assert old <= set(found.matching("t@*/0/*"))
        found.proxy.spoil()
        wait_until(
            lambda: not old & set(found.matching("t@*/0/*")),
            what=lambda: f"removed objects: {old}",
            timeout_s=60,
        )
        append(partition, range(4, BATCHES))
        assert read_all(partition) == expected("t", range(BATCHES))
