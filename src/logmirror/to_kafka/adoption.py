"""Driver: the first progress of a flow that continues the copy of another program.

    init (fences other instances) -> owner and progress are read again -> check -> transaction

Invariants:
1. The progress is written by the flow's transactional producer, after everything that it depends on
   was checked. A process that acquires the transactional ID later aborts it or finds it committed.
   So of two instances one adopts the copy, and the other one reads its progress.
2. A process that dies before the commit leaves no progress: the next one compares again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror import failpoints
from logmirror.errors import FencedError
from logmirror.to_kafka.producer_sessions import ProducerSessions
from logmirror.to_kafka.translate_progress import PROGRESS, encode_progress
from logmirror.wire.rebatch import stamp

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.to_kafka.producer_sessions import ProducerSession
    from logmirror.to_kafka.translate_progress import FlowKey, Progress, ProgressReader


def adopt(  # noqa: PLR0913, PLR0917  # where, whose, what, and the clusters
    client: ClusterClient,
    reader: ProgressReader,
    key: FlowKey,
    progress: Progress,
    check: Callable[[], None],
    clock: Clock,
) -> bool:
    """Write the first progress of a flow, unless it has some; return whether it was written.

    Args:
        client: The destination cluster.
        reader: Its progress topic.
        key: The flow.
        progress: Its first progress; `writer` is this run.
        check: Raises if the copy is not what was compared; called when other instances are fenced.
        clock: Time.

    Raises:
        FencedError: Another run has fenced this one.
        LogmirrorError: The error of `check`; or it may have been written: read the position again.
    """
    sessions = ProducerSessions(client)
    try:
        session = sessions.open(key.transactional_id)
        failpoints.reach("takeover.fenced")
        reader.refresh()
        if reader.progress(key) is not None:
            return False
        if reader.owner(key) != progress.writer:
            raise FencedError("another run of this mirror has taken over the flow")
        check()
        _write(session, key, progress, clock)
    finally:
        sessions.discard(key.transactional_id)
    failpoints.reach("takeover.adopted")
    reader.refresh()
    return True


def _write(session: ProducerSession, key: FlowKey, progress: Progress, clock: Clock) -> None:
    producer = session.producer
    producer.add_partitions([PROGRESS])
    batch = memoryview(encode_progress(key, progress, clock.now_ms()))
    stamp(batch, **producer.identity._asdict(), sequence=0, transactional=True)
    session.pipeline.send([(PROGRESS, batch)])
    while session.pipeline.in_flight():
        for response in session.pipeline.collect(block=True):
            if response.error is not None:
                raise response.error
    failpoints.reach("takeover.noted")
    producer.end(commit=True)
    producer.await_markers()
