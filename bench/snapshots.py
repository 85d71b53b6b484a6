"""Measure `compaction: log`: the first snapshot of a large table, and one after some updates.

    python bench/snapshots.py [--keys N] [--updates N]

The source is Apache Kafka 4.3.1: one partition, one record of 100 B for each of N keys in random
order, then updates of some. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from confluent_kafka import Producer  # noqa: E402  # after the path is set

from kit.servers.kafka import ApacheKafka  # noqa: E402  # after the path is set
from mirror import into_files, logmirror  # noqa: E402  # after the path is set

VALUE_BYTES = 100


def write(kafka: ApacheKafka, topic: str, keys: list[int], seed: int) -> None:
    properties = {"bootstrap.servers": kafka.bootstrap, "linger.ms": 20, "batch.size": 1 << 17}
    producer = Producer({**properties, "queue.buffering.max.messages": 1_000_000})
    chooser = random.Random(seed)
    noise = chooser.randbytes(8 << 20)
    for number, key in enumerate(keys):
        at = chooser.randrange(len(noise) - VALUE_BYTES)
        producer.produce(topic, noise[at : at + VALUE_BYTES], b"key-%012d" % key, partition=0)
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=10_000)
    options = parser.parse_args()
    keys = list(range(options.keys))
    random.Random(0).shuffle(keys)
    found = {"keys": options.keys, "updates": options.updates, "value_bytes": VALUE_BYTES}
    with tempfile.TemporaryDirectory(prefix="logmirror-bench-") as temporary:
        base = Path(temporary)
        kafka = ApacheKafka("4.3.1", base / "kafka")
        try:
            kafka.start()
            kafka.create_topic("bench", 1)
            copy = into_files(base, "parquet")._replace(more={"compaction": "log"})
            for name, changed in (("first", keys), ("next", keys[: options.updates])):
                write(kafka, "bench", changed, seed=len(changed))
                figures = logmirror(kafka, base, [copy])
                found[name] = {
                    key: figures[key] for key in ("flow_s", "flow_cpu_s", "peak_python_mib")
                }
                newest = max((copy.root / "bench-0" / "0").iterdir())
                found[name]["snapshot_mb"] = newest.stat().st_size / 1e6
        finally:
            kafka.remove()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
