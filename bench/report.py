"""Run every benchmark and write docs/bench.md: results, machine and goals.

    python bench/report.py [--records N] [--forward-records N] [--rounds N] [--resume]

`--resume` measures only the parts of which a run before, which failed, has left no figures.
The page contains only what this run measured, including goals that were not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from broker_report import groups_section, load_section, start_section  # noqa: E402  # after the path is set
from bucket_report import bucket_section  # noqa: E402  # as above
from checkpoints_report import checkpoint_section  # noqa: E402  # as above
from forward_report import sections, table  # noqa: E402  # as above
from mounted_report import mounted_section  # noqa: E402  # as above
from moves_report import moves_section  # noqa: E402  # as above

from mirror import CONNECTOR_SPARK  # noqa: E402  # after the path is set

PAGE = HERE.parent / "docs" / "bench.md"
KEPT = HERE.parent / "build" / "bench"
"""Figures of each part, so that they are not lost if a later part fails."""

PACKAGES = ("pyspark", "pyarrow", "numba", "numpy")
KERNEL_GOALS = (
    ("decode to columns, CRC checked, 1 KiB records, uncompressed", "MB/s", 5000),
    ("decode to columns, CRC checked, 100 B records, uncompressed", "M records/s", 30),
)


def run(script: str, *arguments: str) -> dict:
    kept = KEPT / f"{script}.json"
    if "--resume" in sys.argv and kept.exists():
        return json.loads(kept.read_bytes())
    command = [sys.executable, str(HERE / script), *arguments]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    KEPT.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(found)
    return json.loads(found)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def flow_table(medians: dict[str, dict]) -> str:
    def cell(figures: dict, key: str, form: str) -> str:
        return format(figures[key], form) if key in figures else "-"

    titles = [
        "",
        "MB/s in the flow",
        "CPU-s per GB in the flow",
        "with start",
        "start, s",
        "first object after, s",
    ]
    titles += ["peak RSS of a Python process, MiB", "objects", "bytes written, MB"]
    rows = []
    for name, figures in medians.items():
        written = figures.get("output_bytes")
        rows.append(
            [
                name,
                cell(figures, "mb_s", ".0f"),
                cell(figures, "flow_cpu_s_per_gb", ".2f"),
                cell(figures, "cpu_s_per_gb", ".2f"),
                cell(figures, "start_s", ".1f"),
                cell(figures, "first_object_s", ".1f"),
                cell(figures, "peak_python_mib", ".0f"),
                cell(figures, "objects", ".0f"),
                "-" if written is None else f"{written / 1e6:.0f}",
            ]
        )
    return table(titles, rows)


def ratio_table(ratios: dict[str, dict]) -> str:
    rows = [
        [
            title,
            f"{found['median']:.2f}",
            ", ".join(f"{value:.2f}" for value in found["rounds"]),
            f"{found['goal']:.1f}",
            "reached" if found["median"] >= found["goal"] else "**not reached**",
        ]
        for title, found in ratios.items()
    ]
    return table(["ratio of MB/s", "median", "each round", "goal", ""], rows)


def archive_section(found: dict) -> str:
    requests, restart, status = found["requests"], found["restart"], found["status"]
    kinds = sorted({*requests["start"], *requests["each"]})
    counts = [
        [kind, str(requests["start"].get(kind, 0)), f"{requests['each'].get(kind, 0):.2f}"]
        for kind in kinds
    ]
    restarts = [
        [title, f"{restart[key]:.2f}", str(goal), "reached" if restart[key] <= goal else "**no**"]
        for title, key, goal in (("files", "files_s", 5), ("S3", "s3_s", 15))
    ]
    places = [
        [title, f"{status[key]:.1f}"] for title, key in (("files", "files_s"), ("S3", "s3_s"))
    ]
    return (
        f"One partition, all records, {requests['objects']} objects; requests counted in "
        "front of the S3 server:\n\n"
        + table(["request", "at a start", "per object"], counts)
        + f"\n\nA restart with {restart['objects']:,} objects and as many claims, until every "
        "position is verified, without Spark's start:\n\n"
        + table(["archive", "s", "goal", ""], restarts)
        + f"\n\n`logmirror status` over {status['partitions']:,} partitions, including the "
        "command's start:\n\n" + table(["archive", "s"], places)
    )


def kernel_table(lines: list[dict]) -> str:
    rows = [
        [x["shape"], x["what"], f"{x['mb_per_s']:,}", f"{x['million_records_per_s']:.1f}"]
        for x in lines
    ]
    goals = [
        [what, unit, f"{measured:,.0f}", f"{goal:,}", "reached" if measured >= goal else "**no**"]
        for (what, unit, goal), measured in zip(KERNEL_GOALS, _kernel_figures(lines), strict=True)
    ]
    return (
        table(["goal", "unit", "measured", "goal", ""], goals)
        + "\n\nOne core, data in the cache, the best of many calls:\n\n"
        + table(["record", "work", "MB/s", "M records/s"], rows)
    )


def _kernel_figures(lines: list[dict]) -> tuple[float, float]:
    found = {(x["shape"], x["what"]): x for x in lines}
    decode = "scan, CRC, decode"
    large, small = found["1024 B, 0 headers", decode], found["100 B, 0 headers", decode]
    return large["mb_per_s"], small["million_records_per_s"]


def snapshot_table(found: dict) -> str:
    titles = {
        "first": f"the first, {found['keys']:,} keys",
        "next": f"the next, after {found['updates']:,} updates",
    }
    rows = [
        [title, *(f"{found[name][key]:.1f}" for key in ("flow_s", "flow_cpu_s"))]
        + [f"{found[name][key]:.0f}" for key in ("peak_python_mib", "snapshot_mb")]
        for name, title in titles.items()
    ]
    return table(["snapshot", "s", "CPU-s", "peak RSS of a Python process, MiB", "MB"], rows)


def archives_text(found: dict) -> str:
    mounted = mounted_section(found["mounted"], found["restore"])
    return f"{archive_section(found['archives'])}\n\n{mounted}"


def later_sections(found: dict) -> str:
    bucket = bucket_section(found["bucket"], found["takeover"], found["opening"])
    return "\n\n".join(
        [bucket, moves_section(found["moves"]), checkpoint_section(found["checkpoints"])]
    )


def page(found: dict[str, dict], load_before: float) -> str:
    mirror, snapshots = found["mirror"], found["snapshots"]
    now = datetime.now(UTC).date().isoformat()
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    notes = (HERE / "notes.md").read_text()
    return f"""# Benchmarks

`make bench` wrote this page on {now}: {processor()}, {mirror["cores"]} cores, \
Python {platform.python_version()}, {versions}, load before {load_before:.1f}. \
Compare ratios, not absolute figures: machines differ, and each differs from hour to hour.

## Archives and other consumers

The source is one topic on Apache Kafka 4.3.1 on the same machine: {mirror["records"]:,} records \
of {mirror["record_bytes"]} B, uncompressed, {mirror["partitions"]} partitions. Each round runs \
all contestants. Ratios are taken within a round; figures are medians over the rounds.

{ratio_table(mirror["ratios"])}

{flow_table(mirror["medians"])}

The *flow* lasts from the first request to the source to the last durable object. Spark's start \
comes before it and is reported separately. CPU is that of all processes of the contestant, with \
Spark's JVM and without the broker. The connector's start cannot be separated from its flow. The \
connector runs on Spark {CONNECTOR_SPARK}, the newest release available with all its packages.

## Archives: requests and restarts

{archives_text(found)}

## Snapshots of a compacted topic

`compaction: log`, one partition, values of {snapshots["value_bytes"]} B, without Spark's start.

{snapshot_table(snapshots)}

{sections(found["forward"])}

## Embedded broker: start and size

From the command to the first response to a client, page cache warm; Apache Kafka's folder is \
formatted before, and its classes are in an archive. The load is 200,000 records of 1 KiB.

{start_section(found["broker"])}

## Embedded broker: throughput and delay

Apache Kafka's perf producer (64 KiB batches, `linger.ms=5`) and perf consumer against one \
partition. Durability is equal on both sides of a ratio: `flushed` means before each response \
(`flush.messages=1` on Apache Kafka), `background` means afterwards. The delay is that of \
librdkafka, from the send to the arrival. Medians over the rounds.

{load_section(found["load"])}

## Embedded broker: consumer groups

Every member of every group joins again with a changed subscription, at the same time, until the \
last one has its assignment (classic protocol). Each member has a connection of its own, so the \
number of groups depends on the limit of open files. Both brokers have \
`group.initial.rebalance.delay.ms=0`, and defaults otherwise. Medians over the rounds.

{groups_section(found["groups"])}

{later_sections(found)}

## Kernels

{kernel_table(found["kernels"]["lines"])}

{notes}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", default="2000000")
    parser.add_argument("--forward-records", default="1000000")
    parser.add_argument("--rounds", default="3")
    parser.add_argument("--resume", action="store_true", help="only the parts without a figure")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    forward_records = options.forward_records
    found = {
        "kernels": run("kernels.py", "--json"),
        "mirror": run("mirror.py", "--records", options.records, "--rounds", options.rounds),
        "archives": run("archives.py"),
        "mounted": run("mounted_start.py", "--rounds", options.rounds),
        "restore": run("restore.py"),
        "snapshots": run("snapshots.py"),
        "broker": run("broker_start.py", "--rounds", options.rounds),
        "load": run("broker_load.py", "--rounds", options.rounds),
        "groups": run("broker_groups.py"),
        "bucket": run("bucket_load.py"),
        "takeover": run("broker_takeover.py"),
        "opening": run("bucket_start.py"),
        "moves": run("moves.py"),
        "checkpoints": run("checkpoints.py"),
        "forward": run("forward.py", "--records", forward_records, "--rounds", options.rounds),
    }
    PAGE.write_text(page(found, load_before))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
