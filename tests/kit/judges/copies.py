"""Comparison of a replica with its source, each read by two standard clients.

Source and replica are read by kcat and by aiokafka, which must agree; their rows are compared
offset by offset.
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
from logmirror.mirror.lane import lanes_of, seat_count
from logmirror.testing import Anomaly, compare

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def anomalies(
    source: str, topic: str, destination: str, copy: str = "", *, partitions: Iterable[int] = (0,)
) -> list[Anomaly]:
    """Return all differences between a replica and its source.

    Args:
        source: Bootstrap servers.
        topic: The source topic.
        destination: Bootstrap servers.
        copy: The destination topic; empty: the same name.
        partitions: The partitions to compare.
    """
    numbers = tuple(partitions)
    truth = Source(source, topic, partitions=numbers)
    found = Source(destination, copy or topic, partitions=numbers)
    return [anomaly for number in numbers for anomaly in partition_anomalies(truth, found, number)]


def partition_anomalies(truth: Source, copy: Source, partition: int) -> list[Anomaly]:
    """Return the differences of one partition; each topic is read once and cached.

    A replica always has CreateTime, because clients cannot send another type.
    """
    expected = [row._replace(timestamp_type=CREATE_TIME) for row in truth.rows(partition)]
    bounds = truth.bounds(partition), copy.bounds(partition)
    ends = [] if bounds[0] == bounds[1] else [Anomaly(code="A2", count=1, example=f"{bounds}")]
    return [*ends, *compare(expected, copy.rows(partition))]


def copy(*mirrors: Mapping[str, object]) -> None:
    """Copy up to the current end of the source, in this process.

    Raises:
        LogmirrorError: A flow must not continue.
    """
    copy_now(load_text(config_text(*mirrors), environ={}))


def forget_connections() -> None:
    """Close the connections that this process's executor keeps between slices."""
    for kept in gc.get_objects():
        if isinstance(kept, (ClusterClient, ProducePipeline)):
            kept.close()
    kept_by = ("_gap_writer", "_translation", "_sync_writer", "_pipeline", "_client")
    for name in kept_by:  # it has no end of its own but the process's
        getattr(executor, name).cache_clear()


@contextlib.contextmanager
def copying(*mirrors: Mapping[str, object]) -> Iterator[threading.Thread]:
    """Copy in a thread of this process during the block, then up to the ends of the sources.

    Yields:
        The thread; it ends early if the mirror must not continue.

    Raises:
        LogmirrorError: A flow must not continue.
    """
    failures: list[LogmirrorError] = []
    with contextlib.ExitStack() as stack:
        specs = mirror_specs(load_text(config_text(*mirrors), environ={}))
        runner = stack.enter_context(
            InlineRunner(more_slots=seat_count(lanes_of(specs, shares_reads=False)) - 1)
        )
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


def wait_for_end(
    bootstrap: str, topic: str, end: int, *, partition: int = 0, timeout_s: float = 180
) -> None:
    """Wait until a topic exists there and a partition of it has reached an offset."""
    wait_until(
        lambda: (_reported_end(bootstrap, topic, partition) or 0) >= end,
        what=lambda: f"{topic}-{partition} to reach {end}",
        timeout_s=timeout_s,
    )


def end_of(bootstrap: str, topic: str, partition: int = 0) -> int:
    """Return the end of a partition, as soon as a leader reports it."""
    found: list[int] = []

    def is_reported() -> bool:
        end = _reported_end(bootstrap, topic, partition)
        found.extend([] if end is None else [end])
        return bool(found)

    wait_until(is_reported, what=lambda: f"the end of {topic}-{partition}")
    return found[0]


def _reported_end(bootstrap: str, topic: str, partition: int) -> int | None:
    """None: the topic does not exist yet, or it has no leader, or a new one that is not ready."""
    try:
        return Source(bootstrap, topic).bounds(partition)[1]
    except (KafkaException, TimeoutError):
        return None
