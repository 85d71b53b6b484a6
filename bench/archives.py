"""Measure archives: requests per object, restarts, and the `status` command.

    python bench/archives.py [--objects N] [--names N] [--partitions N]

A proxy in front of the S3 server counts requests by kind while one partition is copied with all
records; requests of a start are reported separately. A restart is timed from the composition of the
driver to the end of a run with nothing to copy, so with every position verified and without Spark.
It has N objects and N claims of one partition, in a directory and in a bucket. `status` runs as a
command, with one object in each of N partitions. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from confluent_kafka import Producer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from kit.fakes.s3_proxy import S3Proxy  # noqa: E402  # after the path is set
from kit.judges.clients import odd_messages, produce  # noqa: E402  # after the path is set
from kit.judges.copies import copy  # noqa: E402  # after the path is set
from kit.runs.commands import BrokerCommand, logmirror_json, mirror, write_config  # noqa: E402  # after the path is set
from kit.servers.s3 import S3Server  # noqa: E402  # after the path is set
from logmirror.archive.claims import Claim, claim_name  # noqa: E402  # after the path is set
from logmirror.archive.naming import format_name  # noqa: E402  # after the path is set
from logmirror.model import OffsetRange, Trigger  # noqa: E402  # after the path is set

NAME = "bench"
ROUNDS = 3
RECORDS_EACH = 20
"""Records per object in the count of requests."""


def requests(broker: BrokerCommand, folder: Path, objects: int) -> dict:
    """Count the requests of each kind at a start and per object."""
    topic = broker.create_topic("bench-requests")
    with (
        S3Server(folder / "requests") as server,
        S3Proxy(server.endpoint, lambda _path: None) as proxy,
    ):
        bucket = server.new_bucket()
        destination = server.destination(bucket, name=NAME, endpoint=proxy.endpoint)
        limits = {"form": "native", "max_offsets": RECORDS_EACH, "destinations": [destination]}
        config = mirror(topic, broker.bootstrap, "", **limits)
        copy(config)
        proxy.asked.clear()
        copy(config)
        start = dict(proxy.asked)
        proxy.asked.clear()
        small_batches = {"batch.num.messages": RECORDS_EACH, "linger.ms": 5}
        messages = odd_messages(objects * RECORDS_EACH, seed=1)
        produce(broker.bootstrap, topic, messages, config=small_batches)
        copy(config)
        made = len(list((server.files(bucket) / NAME / "0").iterdir()))
        kinds = sorted({*start, *proxy.asked})
        return {
            "objects": made,
            "start": start,
            "each": {kind: (proxy.asked[kind] - start.get(kind, 0)) / made for kind in kinds},
        }


def restart(broker: BrokerCommand, folder: Path, names: int) -> dict:
    """Return the seconds until every position of an archive with `names` objects is verified."""
    topic = broker.create_topic("bench-restart")
    produce(broker.bootstrap, topic, odd_messages(names, seed=1))
    files = folder / "files"
    fill(files, topic, names)
    found = {"objects": names}
    here = {"type": "filesystem", "root": str(files), "name": NAME}
    found["files_s"] = restart_s(mirror(topic, broker.bootstrap, "", destinations=[here]))
    with S3Server(folder / "restart") as server:
        bucket = server.new_bucket()
        fill(server.files(bucket), topic, names)
        there = server.destination(bucket, name=NAME)
        found["s3_s"] = restart_s(mirror(topic, broker.bootstrap, "", destinations=[there]))
    return found


def fill(root: Path, topic: str, names: int) -> None:
    """Create empty objects, because positions are read from names, and their claims."""
    for offset in range(names):
        covered = OffsetRange(first=offset, last=offset)
        claim = Claim(
            covered=covered,
            digest=f"xxh3:{'0' * 32}",
            writer="bench",
            topic=topic,
            topic_id="",
            partition=0,
            created_ms=int(time.time() * 1000),
            record_count=1,
            trigger=Trigger.EXPLICIT,
        )
        for name, content in (
            (f"{NAME}/0/{format_name(covered, 'parquet')}", b""),
            (claim_name(NAME, 0, offset), claim.to_bytes()),
        ):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def restart_s(config: dict[str, object]) -> list[float]:
    """Return the seconds of each restart; the first run probes conditional writes."""
    copy(config)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        copy(config)
        seconds.append(time.perf_counter() - began)
    return seconds


def status(broker: BrokerCommand, folder: Path, partitions: int) -> dict:
    """Return the seconds of `logmirror status` over partitions with one object each."""
    topic = broker.create_topic("bench-status", partitions)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 200})
    for partition in range(partitions):
        for _ in range(10):
            producer.produce(topic, b"v", partition=partition)
    assert producer.flush(60) == 0  # an archive ahead of its source would be an error
    name = format_name(OffsetRange(first=0, last=9), "parquet")
    found = {"partitions": partitions}
    with S3Server(folder / "status") as server:
        bucket = server.new_bucket()
        places = {
            "files_s": ({"type": "filesystem", "root": str(folder / "one")}, folder / "one"),
            "s3_s": (server.destination(bucket), server.files(bucket)),
        }
        for where, (destination, root) in places.items():
            for partition in range(partitions):
                path = root / NAME / str(partition) / name
                path.parent.mkdir(parents=True)
                path.touch()
            one = mirror(topic, broker.bootstrap, "", destinations=[{**destination, "name": NAME}])
            config = write_config(folder / f"{where}.json", one)
            seconds = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                rows = logmirror_json("status", "-c", config)
                seconds.append(time.perf_counter() - began)
                assert {row["position"] for row in rows} == {10}
            found[where] = statistics.median(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=100)
    parser.add_argument("--names", type=int, default=10_000)
    parser.add_argument("--partitions", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="logmirror-bench-") as temporary:
        folder = Path(temporary)
        broker = BrokerCommand(folder / "broker")
        try:
            broker.start()
            found = {
                "requests": requests(broker, folder, options.objects),
                "restart": restart(broker, folder, options.names),
                "status": status(broker, folder, options.partitions),
            }
        finally:
            broker.remove()
    for where in ("files_s", "s3_s"):
        found["restart"][where] = statistics.median(found["restart"][where])
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
