"""A partition moved between log directories, beside Apache Kafka; JSON on stdout.

    python bench/moves.py [--megabytes N] [--rounds N]

One partition with segments of 16 MiB, 1 KiB records. In each round both brokers move it from one
directory to another: alone, beside a producer of 1,000 records per second (acks=all, idempotent),
and behind a limit, while its records are deleted. All directories are on one disk. Before each
move, a file of the same size is written, flushed and removed, twice: then the page cache holds
nothing to be written, and the next files get its blocks. On a virtual disk, blocks that were not
written for a while may take a third of the rate of others.

    mb_s        of the move, from the request until the broker shows the partition in the new place
    before      latencies of the producer in the 5 s before, ms
    during      the same during the move
    busy        the same after it, beside a process that only computes
    hold_ms     how long each swap held the event loop, of logmirror's metrics
    delete_ms   DeleteRecords during a limited move; error: its code, -1 without a response in 20 s
    resume_s    from the start after a kill -9 halfway until the move is complete
    limited     bytes per second of a move with a limit, over 30 s, part of the limit
    disk_mb_s   of the second of these files, in steps of 4 MiB, each flushed: the disk alone

Then a broker of logmirror moves such a partition into a bucket and back, beside the producer:
Versity's S3 gateway on the same machine, the broker's defaults.

    mb_s                 as above
    before, after        the producer's latencies in the old and in the new place, ms
    around_swap_ms       its highest from 0.3 s before to 0.5 s after the move
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka import Producer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from confluent_kafka.admin import (  # noqa: E402  # after the path is set
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from kit.judges.log_dirs_client import LogDirsClient  # noqa: E402  # as above
from kit.judges.partition_client import PartitionClient  # noqa: E402  # as above
from kit.judges.scrape import ask  # noqa: E402  # as above
from kit.servers.embedded import EmbeddedBroker  # noqa: E402  # as above
from kit.servers.kafka import ApacheKafka, create_topic  # noqa: E402  # as above
from kit.servers.machine import free_ports  # noqa: E402  # as above
from kit.servers.s3 import LogBucket, S3Server  # noqa: E402  # as above

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPIC = "t"
SWAP_SUM = "logmirror_broker_move_swap_seconds_sum "
RATE = 1_000
LIMIT, LIMITED_S = 10_000_000, 30
STEP_BYTES = 4 * 1024 * 1024
MOVE_RATE = "replica.alter.log.dirs.io.max.bytes.per.second"
SEGMENT_BYTES = 16 * 1024 * 1024
DEADLINE_S = 300
COMMIT_INTERVAL_MS = 100
"""The default of a broker; that of the tests is less."""


class Contestant:
    """A broker with two directories, and a partition in the first one."""

    def __init__(
        self, name: str, folder: Path, megabytes: int, place: LogBucket | None = None
    ) -> None:
        self.name, self.monitoring_port = name, 0
        self.places = [str(folder / one) for one in ("a", "b")]
        if place is not None:
            self.places[1] = place.url
            more = {"more_log_dirs": self.places[:1], "segment_bytes": SEGMENT_BYTES}
            self.broker: Any = EmbeddedBroker(
                folder, bucket=place, commit_interval_ms=COMMIT_INTERVAL_MS, **more
            )
        elif name == "Kafka":
            config = {
                "log.dirs": ",".join(self.places),
                "log.segment.bytes": SEGMENT_BYTES,
                "broker.session.timeout.ms": 1_500,
                "broker.heartbeat.interval.ms": 300,
            }
            self.broker = ApacheKafka("4.3.1", folder, config=config, jvm=(), heap="1g")
        else:
            more = {"more_log_dirs": self.places, "segment_bytes": SEGMENT_BYTES}
            [self.monitoring_port] = free_ports(1)
            self.broker = EmbeddedBroker(folder, monitoring_port=self.monitoring_port, **more)
        self.broker.start()
        create_topic(self.broker.bootstrap, TOPIC, 1, {})
        self._fill(megabytes)
        self.bytes = max(one.size_bytes for one in self.where().values())
        self.wait(self.places[0], self.request(self.places[0]))

    def _fill(self, megabytes: int) -> None:
        values = [random.Random(n).randbytes(1024) for n in range(1000)]
        settings = {"linger.ms": 5, "compression.type": "none", "queue.buffering.max.kbytes": 65536}
        producer = Producer({"bootstrap.servers": self.broker.bootstrap, **settings})
        for number in range(megabytes * 1000):
            while True:
                try:
                    producer.produce(TOPIC, values[number % 1000], partition=0)
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        assert producer.flush(120) == 0

    def client(self) -> LogDirsClient:
        return LogDirsClient(self.broker.bootstrap)

    def where(self) -> dict[str, Any]:
        with self.client() as client:
            return client.where(TOPIC)

    def request(self, target: str) -> float:
        began = time.monotonic()
        with self.client() as client:
            code = client.move_one(TOPIC, target)
            assert code == 0, code
        return began

    def wait(self, target: str, began: float) -> float:
        """Wait until the partition is there; returns the seconds."""
        with self.client() as client:
            while [*client.where(TOPIC)] != [target]:
                assert time.monotonic() - began < DEADLINE_S
                time.sleep(0.005)
        return time.monotonic() - began

    def limit(self, rate: int | None) -> None:
        kind = AlterConfigOpType.DELETE if rate is None else AlterConfigOpType.SET
        entry = ConfigEntry(MOVE_RATE, str(rate), incremental_operation=kind)
        resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        admin.incremental_alter_configs([resource])[resource].result(30)

    def held_ms(self) -> float:
        """How long the swaps since the start have held the event loop, all together; 0: unknown."""
        if not self.monitoring_port:
            return 0
        lines = ask(self.monitoring_port, "/metrics").text.splitlines()
        return 1000 * next(float(one.split()[1]) for one in lines if one.startswith(SWAP_SUM))

    def other(self) -> str:
        [now] = [place for place, one in self.where().items() if not one.is_future]
        return next(place for place in self.places if place != now)


class Load:
    """Records at a fixed rate, and when each was sent and acknowledged."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0}
        )
        self.latencies: list[tuple[float, float]] = []
        self.errors = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        value, due = random.Random(0).randbytes(1024), time.monotonic()
        while not self._done.is_set():
            sent = time.monotonic()

            def delivered(error: object, _: object, sent: float = sent) -> None:
                self.errors += error is not None
                self.latencies.append((sent, 1000 * (time.monotonic() - sent)))

            self._producer.produce(TOPIC, value, partition=0, on_delivery=delivered)
            due += 1 / RATE
            while (left := due - time.monotonic()) > 0:
                self._producer.poll(left)
        assert self._producer.flush(60) == 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> dict[str, float]:
        found = sorted(took for sent, took in self.latencies if begin <= sent < end)
        if not found:
            return {}
        at = lambda part: found[min(len(found) - 1, int(part * len(found)))]  # noqa: E731  # short
        return {"p50": at(0.5), "p99": at(0.99), "highest": found[-1], "count": len(found)}


def measured(one: Contestant) -> dict[str, Any]:
    disk_mb_s = disk_rate(one)
    target, held_ms = one.other(), [one.held_ms()]
    took = one.wait(target, one.request(target))
    held_ms.append(one.held_ms())
    found: dict[str, Any] = {"mb_s": one.bytes / 1e6 / took, "disk_mb_s": disk_mb_s}
    disk_rate(one)
    with Load(one.broker.bootstrap) as load:
        time.sleep(2)
        begin = time.monotonic()
        time.sleep(5)
        target = one.other()
        began = one.request(target)
        took = one.wait(target, began)
        end = time.monotonic()
        time.sleep(2)
        with busy_process():
            time.sleep(1)
            busy = time.monotonic()
            time.sleep(3)
            idle = time.monotonic()
    found["loaded_mb_s"] = one.bytes / 1e6 / took
    found["busy"] = load.between(busy, idle)
    found["before"], found["during"] = load.between(begin, began), load.between(began, end)
    found["around_swap_ms"] = load.between(end - 0.3, end + 0.1).get("highest")
    found["errors"] = load.errors
    held_ms.append(one.held_ms())
    found["hold_ms"] = [after - before for before, after in itertools.pairwise(held_ms)]
    return found


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """Run a process that only computes, with the lowest priority."""
    command = ["nice", "-n", "19", sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command) as process:
        try:
            yield
        finally:
            process.kill()


def disk_rate(one: Contestant) -> float:
    """Write a file as large as the partition in steps, each flushed, twice; returns MB/s."""
    data, count = random.Random(1).randbytes(STEP_BYTES), one.bytes // STEP_BYTES
    path, took = Path(one.places[0]).parent / "disk", 0.0
    for _ in range(2):
        os.sync()
        began = time.monotonic()
        with path.open("wb", buffering=0) as file:
            for _ in range(count):
                file.write(data)
                os.fdatasync(file.fileno())
        took = time.monotonic() - began
        path.unlink()
    os.sync()  # its blocks are free
    return count * STEP_BYTES / 1e6 / took


def with_bucket(folder: Path, megabytes: int) -> dict[str, Any]:
    """A move into a bucket, and one back."""
    found: dict[str, Any] = {}
    with S3Server(folder / "s3") as server:
        place = LogBucket(server, server.new_bucket())
        one = Contestant("logmirror", folder / "mixed", megabytes, place)
        try:
            for way in ("into", "out"):
                with Load(one.broker.bootstrap) as load:
                    time.sleep(6)
                    target, began = one.other(), time.monotonic()
                    took = one.wait(target, one.request(target))
                    end = time.monotonic()
                    time.sleep(6)
                found[way] = {
                    "mb_s": one.bytes / 1e6 / took,
                    "before": load.between(began - 5, began),
                    "during": load.between(began, end),
                    "after": load.between(end + 1, end + 5),
                    "around_swap_ms": load.between(end - 0.3, end + 0.5).get("highest"),
                    "errors": load.errors,
                }
                print(way, json.dumps(found[way]), file=sys.stderr)
        finally:
            one.broker.kill()
    return found


def limited(one: Contestant) -> dict[str, Any]:
    """A move with a limit, and the deletion of records meanwhile; then a kill, and the rest."""
    found: dict[str, Any] = {}
    target = one.other()
    one.limit(LIMIT)
    one.request(target)
    sizes = []
    for _ in range(2 + LIMITED_S):  # the first second is not counted
        shown = one.where().get(target)
        sizes.append((time.monotonic(), shown.size_bytes if shown else 0))
        time.sleep(1)
    (began, first), (ended, last) = sizes[1], sizes[-1]
    found["limited"] = (last - first) / (ended - began) / LIMIT
    with PartitionClient(one.broker.bootstrap, TOPIC) as partition:
        began, found["delete_error"] = time.monotonic(), -1
        with contextlib.suppress(TimeoutError):  # the client's, of 20 s
            found["delete_error"] = int(partition.delete_records(1_000)[0])
        found["delete_ms"] = 1000 * (time.monotonic() - began)
    one.limit(None)
    time.sleep(0.3)
    one.broker.kill()
    began = time.monotonic()
    one.broker.start()
    found["start_s"] = time.monotonic() - began
    found["resume_s"] = one.wait(target, began)
    return found


def limited_or_failed(one: Contestant) -> dict[str, Any]:
    """The same; a broker that does not respond in time is a result, too."""
    try:
        return limited(one)
    except TimeoutError:
        return {"failed": "no response within 30 s"}


def rounds(contestants: list[Contestant], count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for number in range(count):
        for one in contestants if number % 2 else contestants[::-1]:
            found = measured(one)
            print(one.name, json.dumps(found), file=sys.stderr)
            yield one.name, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        contestants = [
            Contestant(name, Path(folder) / name, options.megabytes)
            for name in ("logmirror", "Kafka")
        ]
        try:
            found: dict[str, list[Any]] = {one.name: [] for one in contestants}
            for name, figures in rounds(contestants, options.rounds):
                found[name].append(figures)
            last = {one.name: limited_or_failed(one) for one in contestants}
            bucket = with_bucket(Path(folder), options.megabytes)
            ratios = [
                ours["mb_s"] / theirs["mb_s"]
                for ours, theirs in zip(found["logmirror"], found["Kafka"], strict=True)
            ]
        finally:
            for one in contestants:
                one.broker.kill()
    json.dump(
        {
            "megabytes": options.megabytes,
            "rounds": found,
            "limited": last,
            "bucket": bucket,
            "ratio": {"median": statistics.median(ratios), "rounds": ratios},
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
