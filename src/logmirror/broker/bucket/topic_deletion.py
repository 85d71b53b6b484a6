"""Removes the objects of deleted topics, some at a time: what else is uploaded does not wait."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.broker.bucket.chain import PRODUCERS
from logmirror.broker.bucket.parts import INDEXES
from logmirror.broker.bucket.sealed_objects import folder_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.broker.bucket.uploads import Uploads
    from logmirror.broker.metadata import TopicRow
    from logmirror.stores.base import BlobStore

_STEP: Final = 100
"""Objects; each costs a request."""


class TopicDeletion:
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
        self._store, self._row, self._uploads = store, row, uploads
        self._when_done = when_done
        self._names = self._listed()
        self._key = row.topic_id.bytes
        uploads.drop(lambda key: isinstance(key, tuple) and self._key in key)
        uploads.submit(self._key, self._step)

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
        for number in range(self._row.partition_count):
            folder = folder_of(self._row.name, self._row.topic_id, number)
            for place in (f"{INDEXES}/{folder}", folder, f"{PRODUCERS}/{folder}"):
                for name in list(self._store.names(place)):
                    yield f"{place}/{name}"
