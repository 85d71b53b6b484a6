"""How fast `logmirror broker --archive` opens archives of many objects; JSON on stdout.

    python bench/mounted_start.py [--objects N] [--rounds N]

The same number of native objects with their claims, in one partition, in 1,000 partitions, and each
in a partition of its own; in a directory and in a bucket. Timed from the command to `listening`, to
the oldest and to the newest record of partition 0, and one lookup by timestamp after that. A broker
without an archive shows what the machine gives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import xxhash

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "tests")]

from broker_start import MIB, QUIET, TIMEOUT_S, TOPIC, record_read_s  # noqa: E402  # after the path
from confluent_kafka import Consumer, TopicPartition  # noqa: E402  # as above

from kit.servers.s3 import S3Server  # noqa: E402  # as above
from logmirror.archive.claims import Claim, claim_name  # noqa: E402  # as above
from logmirror.archive.naming import NATIVE, format_name  # noqa: E402  # as above
from logmirror.model import OffsetRange, TimestampType, Trigger  # noqa: E402  # as above
from logmirror.wire.compression import Codec  # noqa: E402  # as above
from logmirror.wire.records import Record, encode_reference  # noqa: E402  # as above

if TYPE_CHECKING:
    from collections.abc import Mapping

SPREAD = 1000
FIRST_MS = 1_700_000_000_000
EACH_MS = 60_000


def fill(root: Path, partitions: int, objects: int) -> None:
    """Write as many objects of one record into each partition, with their claims."""
    for partition in range(partitions):
        (root / TOPIC / str(partition)).mkdir(parents=True)
        (root / claim_name(TOPIC, partition, 0)).parent.mkdir(parents=True)
        for offset in range(objects):
            record = Record(
                offset, FIRST_MS + offset * EACH_MS, TimestampType.CREATE_TIME, None, b"value", ()
            )
            data = encode_reference([record], codec=Codec.NONE)
            covered = OffsetRange(first=offset, last=offset)
            name = f"{TOPIC}/{partition}/{format_name(covered, NATIVE)}"
            (root / name).write_bytes(data)
            claim = Claim(
                covered=covered,
                digest=f"xxh3:{xxhash.xxh3_128(data).hexdigest()}",
                writer="bench",
                topic=TOPIC,
                topic_id="",
                partition=partition,
                created_ms=record.timestamp_ms,
                record_count=1,
                trigger=Trigger.EXPLICIT,
            )
            (root / claim_name(TOPIC, partition, offset)).write_bytes(claim.to_bytes())


def opened(archive: str, folder: Path, objects: int, environ: Mapping[str, str]) -> dict:
    """One start, in an empty log directory; without an archive, of an empty broker."""
    command = [sys.executable, "-m", "logmirror", "broker", "--listen", "127.0.0.1:0"]
    command += ["--log-dir", str(folder), "--log-level", "error"]
    command += ["--archive", archive] if archive else []
    began_s = time.perf_counter()
    environment = {**os.environ, **environ}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as broker:
        try:
            bootstrap = broker.stdout.readline().split()[-1]
            found = {"listening_s": time.perf_counter() - began_s}
            process = psutil.Process(broker.pid)
            found["cpu_s"] = sum(process.cpu_times()[:2])
            found["rss_mib"] = process.memory_info().rss / MIB
            if not archive:
                return found
            found["oldest_s"] = record_read_s(bootstrap, is_newest=False) - began_s
            found["newest_s"] = record_read_s(bootstrap, is_newest=True) - began_s
            found["by_time_s"] = looked_up_s(bootstrap, objects // 3)
            return found
        finally:
            broker.terminate()


def looked_up_s(bootstrap: str, offset: int) -> float:
    """Look up the timestamp of a record; returns how long it took."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench", **QUIET})
    try:
        began_s = time.perf_counter()
        wanted = TopicPartition(TOPIC, 0, FIRST_MS + offset * EACH_MS)
        (found,) = consumer.offsets_for_times([wanted], timeout=TIMEOUT_S)
        if found.offset != offset:
            raise RuntimeError(found)
        return time.perf_counter() - began_s
    finally:
        consumer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="logmirror-bench-") as name:
        folder = Path(name)
        with S3Server(folder / "s3") as server:
            location = server.location("any")
            access = {
                "AWS_ENDPOINT_URL": server.endpoint,
                "AWS_ACCESS_KEY_ID": location.write.access_key_id,
                "AWS_SECRET_ACCESS_KEY": location.write.secret_access_key,
                "AWS_REGION": location.region,
            }
            places = {"no archive": ("", 0)}
            for partitions in (1, SPREAD, options.objects):
                bucket, each = server.new_bucket(), options.objects // partitions
                here = server.files(bucket)
                fill(here, partitions, each)
                title = f"{partitions:,} partition" + "s" * (partitions > 1)
                places[f"{title}, directory"] = str(here), each
                places[f"{title}, S3"] = f"s3://{bucket}", each
            for number in range(options.rounds):
                for at, (title, (archive, each)) in enumerate(places.items()):
                    figures = opened(archive, folder / f"log-{number}-{at}", each, access)
                    for key, value in figures.items():
                        found.setdefault(title, {}).setdefault(key, []).append(value)
    medians = {
        title: {key: statistics.median(values) for key, values in figures.items()}
        for title, figures in found.items()
    }
    print(json.dumps({"medians": medians, "rounds": found, "objects": options.objects}))


if __name__ == "__main__":
    main()
