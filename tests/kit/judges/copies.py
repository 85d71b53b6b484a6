"""Copies in clusters, judged: two topics side by side, each read by two stock clients.

Source and copy are read by kcat and by aiokafka, which must agree with each other; what they saw is
compared offset by offset.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from kit.judges.clients import CREATE_TIME
from kit.judges.truth import Source
from kit.runs.commands import wait_until
from kit.runs.inline_run import InlineRunner, config_text, copy_now
from logmirror.app.run import build_service
from logmirror.app.specs import mirror_specs
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.produce import ProducePipeline
from logmirror.config.settings import load_text
from logmirror.engine import executor
from logmirror.errors import LogmirrorError
from logmirror.testing import Anomaly, compare

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def anomalies(
    source: str, topic: str, destination: str, copy: str = "", *, partitions: Iterable[int] = (0,)
) -> list[Anomaly]:
    """Everything in which a copy differs from its source.

    Args:
        source: Bootstrap servers.
        topic: At the source.
        destination: Bootstrap servers.
        copy: The topic there; empty: the same name.
        partitions: To be compared.
    """
    numbers = tuple(partitions)
    truth = Source(source, topic, partitions=numbers)
    found = Source(destination, copy or topic, partitions=numbers)
    return [anomaly for number in numbers for anomaly in partition_anomalies(truth, found, number)]


def partition_anomalies(truth: Source, copy: Source, partition: int) -> list[Anomaly]:
    """The same for one partition of two topics that are read once, however often it is asked.

    A copy says CreateTime always: no client may send anything else.
    """
    expected = [row._replace(timestamp_type=CREATE_TIME) for row in truth.rows(partition)]
    bounds = truth.bounds(partition), copy.bounds(partition)
    ends = [] if bounds[0] == bounds[1] else [Anomaly(code="A2", count=1, example=f"{bounds}")]
    return [*ends, *compare(expected, copy.rows(partition))]


def copy(*mirrors: Mapping[str, object]) -> None:
    """Copy what is there now, in this process.

    Raises:
        LogmirrorError: A flow must not go on.
    """
    copy_now(load_text(config_text(*mirrors), environ={}))


def forget_connections() -> None:
    """Close what the executor of this process keeps open between slices."""
    for kept in gc.get_objects():
        if isinstance(kept, (ClusterClient, ProducePipeline)):
            kept.close()
    kept_by = ("_gap_writer", "_translation", "_sync_writer", "_pipeline", "_client")
    for name in kept_by:  # it has no end of its own but the process's
        getattr(executor, name).cache_clear()


@contextlib.contextmanager
def copying(*mirrors: Mapping[str, object]) -> Iterator[threading.Thread]:
    """Copy in a thread of this process until the block ends, then until the ends of the sources.

    Yields:
        The thread; it ends before the block when the copy must not go on.

    Raises:
        LogmirrorError: A flow must not go on.
    """
    failures: list[LogmirrorError] = []
    with contextlib.ExitStack() as stack:
        specs = mirror_specs(load_text(config_text(*mirrors), environ={}))
        runner = stack.enter_context(InlineRunner())
        service = build_service(specs, runner, stack)

        def run() -> None:
            try:
                service.run()
            except LogmirrorError as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield thread
        finally:
            service.stop()
            thread.join()
    if failures:
        raise failures[0]


def wait_for_end(bootstrap: str, topic: str, end: int, *, partition: int = 0) -> None:
    """Wait until a topic exists there and a partition of it has reached an offset."""
    wait_until(
        lambda: (_end_told(bootstrap, topic, partition) or 0) >= end,
        what=lambda: f"{topic}-{partition} to reach {end}",
    )


def end_of(bootstrap: str, topic: str, partition: int = 0) -> int:
    """Where a partition ends, as soon as it has a leader that tells."""
    found: list[int] = []

    def is_told() -> bool:
        told = _end_told(bootstrap, topic, partition)
        found.extend([] if told is None else [told])
        return bool(found)

    wait_until(is_told, what=lambda: f"the end of {topic}-{partition}")
    return found[0]


def _end_told(bootstrap: str, topic: str, partition: int) -> int | None:
    """None: there is no such topic yet, no leader, or one that has just begun to be it."""
    try:
        return Source(bootstrap, topic).bounds(partition)[1]
    except (KafkaException, TimeoutError):
        return None
