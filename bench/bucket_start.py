"""How fast a broker opens a log directory in a bucket that has many segments; JSON on stdout.

    python bench/bucket_start.py [--segments N] [--rounds N]

Versity's S3 gateway on the same machine. A producer fills as many segments of one record, of one
partition, and of 1,000. Before each start, everything is removed that the broker has on this
machine. Timed from the command to `listening`, and to the arrival of the oldest and of the newest
record of partition 0. After a clean stop, and after `kill -9`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "tests")]

from broker_start import (  # noqa: E402  # after the path is set
    SEGMENT_RECORD_BYTES,
    SPREAD,
    TIMEOUT_S,
    TOPIC,
    fill,
    record_read_s,
)

from kit.servers.bucket_broker import BucketBroker  # noqa: E402  # as above
from kit.servers.s3 import LogBucket, S3Server  # noqa: E402  # as above

UPLOADED_S = 300


def filled(folder: Path, server: S3Server, partitions: int, segments: int) -> BucketBroker:
    """Return a broker that was stopped, whose segments are all in the bucket."""
    bucket = server.new_bucket()
    broker = BucketBroker(folder, server, bucket)
    with broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        config = {"segment.bytes": str(SEGMENT_RECORD_BYTES + 1024)}
        topic = NewTopic(TOPIC, partitions, config=config)
        admin.create_topics([topic])[TOPIC].result(TIMEOUT_S)
        fill(broker.bootstrap, partitions, segments // partitions + 1)
        files = LogBucket(server, bucket).files
        deadline_s = time.monotonic() + UPLOADED_S
        while (found := sum(1 for _ in files.glob(f"{TOPIC}*/*/*.batches"))) < segments:
            if time.monotonic() > deadline_s:
                message = f"{found} of {segments} segments were uploaded in {UPLOADED_S} s"
                raise RuntimeError(message)
            time.sleep(1)
        broker.stop()
    return broker


def opened(broker: BucketBroker) -> dict[str, float]:
    """Start it on a new machine, and read; the caller ends it."""
    shutil.rmtree(broker.work_dir, ignore_errors=True)
    began_s = time.perf_counter()
    broker.start()
    found = {"listening_s": time.perf_counter() - began_s}
    found["oldest_s"] = record_read_s(broker.bootstrap, is_newest=False) - began_s
    found["newest_s"] = record_read_s(broker.bootstrap, is_newest=True) - began_s
    fill(broker.bootstrap, 1, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--segments", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name, S3Server(Path(name) / "s3") as server:
        for partitions in (1, SPREAD):
            broker = filled(Path(name) / str(partitions), server, partitions, options.segments)
            for _ in range(options.rounds):
                for how, end in (("stopped", broker.stop), ("killed", broker.kill)):
                    found.setdefault(f"{partitions} {how}", []).append(opened(broker))
                    print(how, json.dumps(found[f"{partitions} {how}"][-1]), file=sys.stderr)
                    end()
    medians = {
        title: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for title, rounds in found.items()
    }
    counts = {"segments": options.segments, "spread": SPREAD}
    print(json.dumps({"medians": medians, "rounds": found, **counts}))


if __name__ == "__main__":
    main()
