"""Driver: which slice kills its worker, and what the error about it says.

If a worker process dies, Spark reports that the job failed, but not which slice the worker ran. All
slices of the job are suspects. From then on a suspect runs in a job of its own: either it finishes
and is cleared, or it fails again, and the error names its partition and offsets. The usual cause is
memory: a batch of a few kilobytes may unpack to gigabytes.

    works = deaths.next_job(works)
    try: results = runner.run(works)          -> deaths.finished(works)
    except UnavailableError as error:         -> errors = deaths.failed(works, error)
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from logmirror.errors import LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.mirror.ports import FlowId, Work

DEATHS_NAMED: Final = 2
"""The failure of a job from which on the error names the range."""


class WorkerDeaths:
    """Counts failed jobs by the flow and first offset of their slices."""

    def __init__(self) -> None:
        self._counts: dict[tuple[FlowId, int], int] = {}

    def next_job(self, works: Sequence[Work]) -> list[Work]:
        """Return the works to run in the next job: all of them, or those of one suspect flow.

        The flow of a suspect that failed backs off, so the others run in the meantime.
        """
        suspect = next((w.slice.flow for w in works if _key(w) in self._counts), None)
        return [w for w in works if suspect is None or w.slice.flow == suspect]

    def finished(self, works: Sequence[Work]) -> None:
        """Clear the slices of a job that ended, whatever their results."""
        for work in works:
            self._counts.pop(_key(work), None)

    def failed(self, works: Sequence[Work], error: LogmirrorError) -> dict[FlowId, LogmirrorError]:
        """Count a failed job; returns the error of each flow, a copy of the job's or a named one.

        Args:
            works: The works of the job.
            error: The job's error.
        """
        of: dict[FlowId, list[Work]] = defaultdict(list)
        for work in works:
            of[work.slice.flow].append(work)
            self._counts[_key(work)] = self._counts.get(_key(work), 0) + 1
        return {flow: self._error_of(flow, several, error) for flow, several in of.items()}

    def _error_of(
        self, flow: FlowId, works: Sequence[Work], error: LogmirrorError
    ) -> LogmirrorError:
        named = [work.slice for work in works if self._counts[_key(work)] >= DEATHS_NAMED]
        if not named:
            return error.copy(topic=flow.topic, partition=flow.partition)
        return UnavailableError(
            "the job failed each time it copied this range",
            hint="if the worker ran out of memory (`OOMKilled`, or the kernel's log), a batch in "
            "this range is probably larger than its memory when unpacked. Give the executors more "
            "memory, or lower `limits.max-batch-unpacked-bytes` and `limits.max-record-bytes`: the "
            "mirror then stops with the offset of the batch. It retries until then.",
            mirror=flow.mirror,
            destination=flow.destination,
            topic=flow.topic,
            partition=flow.partition,
            first_offset=min(slice_.first for slice_ in named),
            last_offset=max(slice_.end for slice_ in named) - 1,
            failed_jobs=max(self._counts[_key(work)] for work in works),
            reason=error.facts.get("reason", error.message),
        )


def _key(work: Work) -> tuple[FlowId, int]:
    return work.slice.flow, work.slice.first
