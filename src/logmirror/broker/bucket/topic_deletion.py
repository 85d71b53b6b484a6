"""Removes the objects of deleted topics and of partitions that have left (`residences`).

Some at a time: what else is uploaded does not wait.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.broker.bucket.chain import PRODUCERS
from logmirror.broker.bucket.parts import INDEXES
from logmirror.broker.bucket.sealed_objects import folder_at, folder_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from logmirror.broker.bucket.uploads import Uploads
    from logmirror.broker.metadata import TopicRow
    from logmirror.broker.place_rows import Residence
    from logmirror.stores.base import BlobStore

_STEP: Final = 100
"""Objects; each costs a request."""


class _Removal:
    """Removes all objects of some folders, in the thread of `uploads`.

    Args:
        store: The log dir in the bucket.
        key: Of this work in `uploads`.
        folders: Of partitions.
        uploads: What runs it.
        when_done: Called in its thread.
    """

    def __init__(
        self,
        store: BlobStore,
        key: Hashable,
        folders: Sequence[str],
        uploads: Uploads,
        when_done: Callable[[], None],
    ) -> None:
        self._store, self._key, self._folders = store, key, folders
        self._uploads, self._when_done = uploads, when_done
        self._names = self._listed()
        uploads.submit(key, self._step)

    def _step(self) -> None:
        deleted = 0
        try:
            for name in islice(self._names, _STEP):
                self._store.delete(name)
                failpoints.reach("bucket.deleted")
                deleted += 1
        except BaseException:
            self._names = self._listed()
            raise
        if deleted == _STEP:
            self._uploads.submit(self._key, self._step)
        else:
            self._when_done()

    def _listed(self) -> Iterator[str]:
        for folder in self._folders:
            for place in (f"{INDEXES}/{folder}", folder, f"{PRODUCERS}/{folder}"):
                for name in list(self._store.names(place)):
                    yield f"{place}/{name}"


class TopicDeletion(_Removal):
    """The deletion of a topic's objects. The deletion of the topic is in the chain.

    Args:
        store: The log dir in the bucket.
        row: The topic.
        uploads: What runs it; what waits there for the topic is forgotten.
        when_done: Called in the thread of `uploads`.
    """

    def __init__(
        self, store: BlobStore, row: TopicRow, uploads: Uploads, when_done: Callable[[], None]
    ) -> None:
        topic_id = row.topic_id.bytes
        numbers = range(row.partition_count)
        folders = [folder_of(row.name, row.topic_id, number) for number in numbers]
        uploads.drop(lambda key: isinstance(key, tuple) and topic_id in key)
        super().__init__(store, topic_id, folders, uploads, when_done)


class ResidenceRemoval(_Removal):
    """The removal of the objects of a partition that has left. That it has is in the chain.

    Args:
        store: The log dir in the bucket.
        residence: What the partition had there.
        uploads: What runs it; what waits there for the partition is forgotten.
        when_done: Called in the thread of `uploads`.
    """

    def __init__(
        self,
        store: BlobStore,
        residence: Residence,
        uploads: Uploads,
        when_done: Callable[[], None],
    ) -> None:
        key = residence.key
        uploads.drop(lambda other: isinstance(other, tuple) and other[-len(key) :] == key)
        super().__init__(store, ("left", *key), [folder_at(residence)], uploads, when_done)
