"""Copies in clusters, judged: two topics side by side, each read by two stock clients.

Source and copy are read by kcat and by aiokafka, which must agree with each other; what they saw is
compared offset by offset.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from kit.clients import CREATE_TIME
from kit.inline_run import InlineRunner, config_text, copy_now
from kit.truth import Source
from logmirror import wiring
from logmirror.config import load_text
from logmirror.errors import LogmirrorError
from logmirror.testing import Anomaly, compare

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from logmirror.mirror.service import Service


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


@contextlib.contextmanager
def copying(*mirrors: Mapping[str, object]) -> Iterator[Service]:
    """Copy in a thread of this process until the block ends, then until the ends of the sources.

    Raises:
        LogmirrorError: A flow must not go on.
    """
    failures: list[LogmirrorError] = []
    with contextlib.ExitStack() as stack:
        specs = wiring.mirror_specs(load_text(config_text(*mirrors), environ={}))
        service = wiring.build_service(specs, InlineRunner(), stack)

        def run() -> None:
            try:
                service.run()
            except LogmirrorError as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield service
        finally:
            service.stop()
            thread.join()
    if failures:
        raise failures[0]
