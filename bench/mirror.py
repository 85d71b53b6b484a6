"""Compare archives with other consumers: one topic, one machine, one run.

    python bench/mirror.py [--records N] [--rounds N] [--only native,parquet,...]

The source is Apache Kafka 4.3.1 from Maven's jars: 1 KiB records, 4 partitions, uncompressed. Each
round runs every contestant once, so that a change in the machine's speed affects all of them.
Ratios are taken within a round, and the median is reported. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import measured  # noqa: E402  # after the path is set
from reading import TO_THE_END  # noqa: E402  # as above

from kit.servers.kafka import ApacheKafka  # noqa: E402  # after the path is set
from kit.servers.machine import cache_folder, program  # noqa: E402  # after the path is set
from kit.servers.maven import maven_jars  # noqa: E402  # after the path is set
from kit.servers.s3 import S3Server  # noqa: E402  # after the path is set

TOPIC, PARTITIONS, RECORD_BYTES = "bench", 4, 1024
MASTER = "local[2]"
CONNECTOR_SPARK = "4.0.0"
"""The newest release available with its package, its connector and their dependencies."""

CONNECTOR_JARS = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", CONNECTOR_SPARK),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", CONNECTOR_SPARK),
    ("org.apache.kafka", "kafka-clients", "3.9.0"),
    ("org.apache.commons", "commons-pool2", "2.12.0"),
)
"""Listed one by one: the connector's POM names a repository that may be unreachable."""

FLUSH = {"max-time-ms": 60000, "max-bytes": 67108864, "max-offsets": 10000000}
_STAMP = re.compile(r"^(\S+Z) INFO (mirror starts|flushed)", re.MULTILINE)


def fill(kafka: ApacheKafka, records: int) -> None:
    kafka.create_topic(TOPIC, PARTITIONS)
    properties = [f"bootstrap.servers={kafka.bootstrap}", "batch.size=131072", "linger.ms=5"]
    arguments = ["--topic", TOPIC, "--num-records", str(records), "--throughput", "-1"]
    arguments += ["--record-size", str(RECORD_BYTES), "--producer-props", *properties]
    kafka.tool("kafka-producer-perf-test", *arguments, timeout_s=1200)


def kcat(kafka: ApacheKafka, _folder: Path, stdout: Path | None = None) -> dict:
    command = [program("kcat"), "-C", "-b", kafka.bootstrap, "-t", TOPIC, "-o", "beginning"]
    cost = measured.run([*command, *TO_THE_END], stdout=stdout)
    return {"flow_s": cost.wall_s, "wall_s": cost.wall_s, "cpu_s": cost.cpu_s}


def kcat_to_file(kafka: ApacheKafka, folder: Path) -> dict:
    return kcat(kafka, folder, stdout=folder / "kcat.out")


def to_files(kafka: ApacheKafka, folder: Path, *, kind: str) -> dict:
    return logmirror(kafka, folder, [into_files(folder, kind)])


def to_s3(kafka: ApacheKafka, folder: Path, *, kind: str) -> dict:
    """Run one format to S3; the CPU of the S3 server is not counted."""
    (folder / "s3").mkdir()
    with S3Server(folder / "s3") as server:
        return logmirror(kafka, folder, [into_bucket(server, kind)])


def to_three(kafka: ApacheKafka, folder: Path) -> dict:
    """Run three destinations in one process: two formats in files, one of them in a bucket."""
    (folder / "s3").mkdir()
    with S3Server(folder / "s3") as server:
        copies = [into_files(folder, "native"), into_files(folder, "parquet")]
        return logmirror(kafka, folder, [*copies, into_bucket(server, "parquet")])


class Copy(NamedTuple):
    """A format, its destination in the configuration, and the directory with its objects."""

    kind: str
    destination: dict
    root: Path
    more: dict | None = None
    """More keys of the mirror."""


def into_files(folder: Path, kind: str) -> Copy:
    root = folder / f"root-{kind}"
    return Copy(kind, {"type": "filesystem", "root": str(root)}, root)


def into_bucket(server: S3Server, kind: str) -> Copy:
    bucket = server.new_bucket()
    return Copy(kind, server.destination(bucket), server.files(bucket))


def logmirror(kafka: ApacheKafka, folder: Path, copies: list[Copy]) -> dict:
    """Return the figures; the flow lasts from the last `mirror starts` line to the last flush."""
    config = folder / "bench.yaml"
    mirrors = [
        {
            "name": f"bench-{number}",
            "source": {"bootstrap-servers": kafka.bootstrap},
            "topic": TOPIC,
            "partitions": "all",
            "destinations": [copy.destination],
            "format": copy.kind,
            "flush": FLUSH,
            **(copy.more or {}),
        }
        for number, copy in enumerate(copies)
    ]
    config.write_text(json.dumps({"spark": {"master": MASTER}, "mirrors": mirrors}))
    command = [sys.executable, "-m", "logmirror", "run", "--until-now", "-c", str(config)]
    began = datetime.now().astimezone()
    cost = measured.run(command)
    found = [(datetime.fromisoformat(at), what) for at, what in _STAMP.findall(cost.stderr)]
    started = max(at for at, what in found if what == "mirror starts")
    ended = max(at for at, _ in found)
    objects = [
        entry
        for number, copy in enumerate(copies)
        for entry in (copy.root / f"bench-{number}").rglob("0*")
    ]
    first = min(entry.stat().st_mtime for entry in objects)
    python = max((b for n, b in cost.rss_bytes.items() if n.startswith("python")), default=0)
    return {
        "flow_s": (ended - started).total_seconds(),
        "start_s": (started - began).total_seconds(),
        "first_object_s": first - began.timestamp(),
        "wall_s": cost.wall_s,
        "cpu_s": cost.cpu_s,
        "flow_cpu_s": cost.cpu_since(started.timestamp()),
        "peak_python_mib": python / 2**20,
        "objects": len(objects),
        "output_bytes": sum(entry.stat().st_size for entry in objects),
    }


def spark_connector(kafka: ApacheKafka, folder: Path) -> dict:
    jars = ",".join(str(jar) for jar in sorted(connector_jars().glob("*.jar")))
    script = str(HERE / "spark_connector.py")
    python = str(connector_python())
    command = [python, script, MASTER, jars, kafka.bootstrap, TOPIC, str(folder / "out")]
    out = folder / "out.json"
    cost = measured.run(command, stdout=out)
    files = list((folder / "out").glob("*.parquet"))
    return {
        **json.loads(out.read_text().splitlines()[-1]),
        "wall_s": cost.wall_s,
        "cpu_s": cost.cpu_s,
        "output_bytes": sum(entry.stat().st_size for entry in files),
    }


def connector_python() -> Path:
    """Return the Python of an environment with the connector's Spark release."""
    home = cache_folder() / f"pyspark-{CONNECTOR_SPARK}"
    python = home / "bin" / "python"
    if not (home / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        package = f"pyspark=={CONNECTOR_SPARK}"
        subprocess.run([str(python), "-m", "pip", "install", "-q", package], check=True)
        (home / "done").touch()
    return python


def connector_jars() -> Path:
    """Return the jars of the connector and its dependencies, from Maven."""
    return maven_jars(f"spark-sql-kafka-{CONNECTOR_SPARK}", CONNECTOR_JARS, alone=True)


CONTESTANTS = {
    "kcat": kcat,
    "kcat to file": kcat_to_file,
    "native": lambda k, f: to_files(k, f, kind="native"),
    "native to S3": lambda k, f: to_s3(k, f, kind="native"),
    "parquet": lambda k, f: to_files(k, f, kind="parquet"),
    "parquet to S3": lambda k, f: to_s3(k, f, kind="parquet"),
    "three at once": to_three,
    "spark connector": spark_connector,
    "ndjson": lambda k, f: to_files(k, f, kind="ndjson"),
}
RATIOS = {  # ours, theirs, goal
    "native vs kcat": ("native", "kcat", 0.8),
    "native vs kcat to file": ("native", "kcat to file", 2.0),
    "parquet vs spark connector": ("parquet", "spark connector", 2.0),
    "native to S3 vs to files": ("native to S3", "native", 0.7),
    "parquet to S3 vs to files": ("parquet to S3", "parquet", 0.7),
    "native, parquet and parquet to S3 at once vs parquet to S3": (
        "three at once",
        "parquet to S3",
        0.5,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    options = parser.parse_args()
    names = options.only.split(",")
    total_bytes = options.records * RECORD_BYTES
    found: dict[str, list[dict]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="logmirror-bench-") as temporary:
        base = Path(temporary)
        kafka = ApacheKafka("4.3.1", base / "kafka", config={"log.segment.bytes": 1 << 28})
        try:
            kafka.start()
            fill(kafka, options.records)
            for _ in range(options.rounds):
                for name in names:
                    folder = base / "round"
                    folder.mkdir()
                    figures = CONTESTANTS[name](kafka, folder)
                    figures["mb_s"] = total_bytes / figures["flow_s"] / 1e6
                    figures["cpu_s_per_gb"] = figures["cpu_s"] / total_bytes * 1e9
                    flow_cpu_s = figures.get("flow_cpu_s", figures["cpu_s"])
                    figures["flow_cpu_s_per_gb"] = flow_cpu_s / total_bytes * 1e9
                    found[name].append(figures)
                    print(name, json.dumps(figures), file=sys.stderr, flush=True)
                    shutil.rmtree(folder)
                    time.sleep(1)
        finally:
            kafka.remove()
    print(json.dumps(summary(found, options.records), indent=2))


def summary(found: dict[str, list[dict]], records: int) -> dict:
    """Return the medians of all figures, and the ratios of each round."""
    medians = {
        name: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
    ratios = {}
    for title, (ours, theirs, goal) in RATIOS.items():
        if ours in found and theirs in found:
            pairs = zip(found[ours], found[theirs], strict=True)
            values = [a["mb_s"] / b["mb_s"] for a, b in pairs]
            ratios[title] = {"goal": goal, "median": statistics.median(values), "rounds": values}
    return {
        "records": records,
        "record_bytes": RECORD_BYTES,
        "partitions": PARTITIONS,
        "cores": os.cpu_count(),
        "medians": medians,
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
