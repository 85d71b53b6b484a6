"""The metrics of what costs money: requests to buckets, local copies, the chain of commits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.broker.bucket.commits import BucketCommit
from logmirror.monitoring import broker_metrics as catalogue
from logmirror.stores.request_counts import counts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logmirror.broker.archives.copies import LocalCopies
    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.options import Archive
    from logmirror.monitoring.metrics import Labels, Metric
    from logmirror.stores.request_counts import RequestCounts

    Numbers = list[tuple[Labels, float]]

_LOG, _ARCHIVES = "log", "archives"


class BucketValues:
    """The values of `catalogue.BUCKET_CATALOGUE`. Safe from any thread.

    Args:
        commits: What makes the logs durable; only that of a bucket has values.
        archives: The mounted archives.
        copies: Their local copies; None: there are no archives.
    """

    def __init__(
        self, commits: GroupCommit, archives: Iterable[Archive], copies: LocalCopies | None
    ) -> None:
        self._commits = commits if isinstance(commits, BucketCommit) else None
        self._of_archives = {id(one.store): counts_of(one.store) for one in archives}.values()
        self._copies = copies

    def numbers(self, metric: Metric) -> Numbers:
        """Return the values of a metric, by labels."""
        if metric is catalogue.BUCKET_REQUESTS:
            return self._counted(lambda counts: counts.requests)
        if metric is catalogue.BUCKET_BYTES:
            return self._counted(lambda counts: counts.bytes)
        if metric.labels == catalogue.COPIES:
            return self._of_copies(metric)
        return [] if self._commits is None else _of_chain(self._commits, metric)

    def _counted(self, values: Callable[[RequestCounts], dict[str, int]]) -> Numbers:
        found: dict[Labels, float] = {}
        logs = [] if self._commits is None else [self._commits.bucket.requests]
        for of, all_counts in ((_LOG, logs), (_ARCHIVES, self._of_archives)):
            for counts in all_counts:
                for kind, value in values(counts).items():
                    found[of, kind] = found.get((of, kind), 0) + value
        return list(found.items())

    def _of_copies(self, metric: Metric) -> Numbers:
        disk = None if self._commits is None else self._commits.bucket.disk
        name = {
            catalogue.COPIES_BYTES: "held_bytes",
            catalogue.COPIES_HITS: "hits",
            catalogue.COPIES_MISSES: "misses",
        }[metric]
        pairs = ((_LOG, disk), (_ARCHIVES, self._copies))
        return [((of,), getattr(one, name)) for of, one in pairs if one is not None]


def _of_chain(commits: BucketCommit, metric: Metric) -> Numbers:
    bucket = commits.bucket
    if metric is catalogue.COMMITS_SINCE_SNAPSHOT:
        return [((name,), count) for name, count in bucket.chain_state()[1].items()]
    values: dict[Metric, Callable[[], float]] = {
        catalogue.COMMIT_OBJECTS: lambda: bucket.journal.objects,
        catalogue.COMMIT_BYTES: lambda: bucket.journal.object_bytes,
        catalogue.COMMITS_HELD: lambda: bucket.chain_state()[0],
        catalogue.SEALED_OBJECTS: lambda: bucket.sealed_objects,
        catalogue.SEALED_BYTES: lambda: bucket.sealed_bytes,
        catalogue.UNFLUSHED_SECONDS: lambda: commits.oldest_unflushed_ms() / 1000,
    }
    return [((), values[metric]())]
