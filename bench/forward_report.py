"""The sections of docs/bench.md about replication to other clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusters import BATCH_BYTES, VERSION
from forward import DEFAULTS, LOOP, OURS, TUNED
from forward_delay import RECORD_BYTES, RECORDS_S, WARM_UP_S
from forward_groups import INTERVAL_S
from forward_memory import RECORDS_EACH
from mirrormaker import JVM
from mirrormaker import TUNED as SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GOALS = {  # title, peer, which ratio, goal
    "records/s, logmirror to MirrorMaker 2, tuned": (TUNED, "rate", 5.0),
    "CPU in the flow, MirrorMaker 2, tuned, to logmirror": (TUNED, "cpu", 20.0),
    "CPU with start, MirrorMaker 2, tuned, to logmirror": (TUNED, "life_cpu", None),
    "records/s, logmirror to MirrorMaker 2, defaults": (DEFAULTS, "rate", None),
    "CPU in the flow, MirrorMaker 2, defaults, to logmirror": (DEFAULTS, "cpu", None),
    "records/s, logmirror to the plain loop": (LOOP, "rate", None),
    "CPU in the flow, the plain loop to logmirror": (LOOP, "cpu", None),
}
CALM_GOAL_MS = 100
NEIGHBOUR_GOAL = 2
NEIGHBOUR_STATES = {
    "alone": "none",
    "calm": "calm",
    "halted": "halted",
    "after": "just resumed",
    "dripping": "drips",
}
GROUPS_GOAL = 1.5
GROUPS_RATIOS = {"p50_ms": "p50", "p99_ms": "p99"}
DELAY_GOAL_MS = 100
TRIP_GOAL = 0.8


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def verdict(*, reached: bool) -> str:
    return "reached" if reached else "**not reached**"


def sections(found: Mapping[str, Any]) -> str:
    """Return the sections of the parts that were run."""
    parts = {
        "copy": copies,
        "trip": trip,
        "delay": delays,
        "calm": calm,
        "neighbours": neighbours,
        "groups": groups,
        "memory": memory,
    }
    written = [write(found[name]) for name, write in parts.items() if name in found]
    load = (
        f"Load of the machine before the first of these runs: {found['load_before']:.1f}; after "
        f"the last: {found['load_after']:.1f}."
    )
    return "\n\n".join([*written, load])


def copies(results: Sequence[Mapping[str, Any]]) -> str:
    return f"""## Replication to another cluster

From one Apache Kafka {VERSION} to another, one broker each, everything on the same machine, \
page cache warm, no compression, acks=all. The source's batches are of {BATCH_BYTES // 1024} KiB, \
the default of the Java producer; records are minutes old. Each round runs every contestant once, \
in a different order, after a warm-up run that does not count. The records of each replica are \
counted at its end.

{_ratio_table(results)}

{_figure_table(results)}

- The *flow* of logmirror lasts from the first request to the source to the last response; \
Spark's start and the creation of the topic come before it. That of the plain loop lasts from its \
first poll to the end of its last flush. That of MirrorMaker lasts from the first record at the \
destination until all are there, so its start does not count. *With start* is the CPU from the \
start of the process until then.
- CPU is that of the contestant's own processes: for logmirror, Spark's JVM, driver and workers. \
That of the two brokers in the same time has columns of its own. Memory is counted likewise; pages \
that Spark's Python processes share count once for each process.
- `{LOOP}` is `bench/plain_loop.py`: confluent-kafka with an idempotent producer. It neither \
preserves offsets nor survives a crash without duplicates.
- `MirrorMaker 2` runs in dedicated mode on the JVM options of its own script \
(`{" ".join(JVM[:4])} ...`), with `IdentityReplicationPolicy`, without heartbeats, checkpoints and \
ACLs. With its defaults it has only the settings that clusters of one broker need, and runs in the \
first round only. *Tuned* has a task for each partition and: {_settings()}."""


def _settings() -> str:
    names = {"source": "", "target": ""}
    return ", ".join(f"`{key.format(**names)[1:]}={value}`" for key, value in SETTINGS.items())


def _ratio_table(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result in results:
        for title, (peer, what, goal) in GOALS.items():
            if peer not in result["ratios"]:
                continue
            ratio = result["ratios"][peer][what]
            rows.append(
                [
                    f"{result['shape']}: {title}",
                    f"{ratio['median']:.1f}",
                    ", ".join(f"{value:.1f}" for value in ratio["rounds"]),
                    "-" if goal is None else f"{goal:.0f}",
                    "" if goal is None else verdict(reached=ratio["median"] >= goal),
                ]
            )
    return table(["ratio", "median", "each round", "goal", ""], rows)


def _figure_table(results: Sequence[Mapping[str, Any]]) -> str:
    header = ["", "", "records/s", "MB/s", "CPU-s per GB in the flow", "with start"]
    header += ["source's broker", "destination's broker", "start, s", "peak RSS of all, MiB"]
    rows = []
    for result in results:
        for name, figures in result["medians"].items():
            cpu = f"{figures['flow_cpu_s_per_gb']:.2f}"
            if name == OURS:
                gigabytes = figures["cpu_s"] / figures["cpu_s_per_gb"]
                workers = figures.get("flow_cpu_s_worker", 0.0) / gigabytes
                cpu += f" ({workers:.2f} in workers)"
            rows.append(
                [
                    result["shape"],
                    name,
                    f"{figures['records_s']:,.0f}",
                    f"{figures['mb_s']:.0f}",
                    cpu,
                    f"{figures['cpu_s_per_gb']:.1f}",
                    f"{figures['source_cpu_s_per_gb']:.1f}",
                    f"{figures['target_cpu_s_per_gb']:.1f}",
                    f"{figures['start_s']:.1f}",
                    f"{figures['peak_mib']:,.0f}",
                ]
            )
    return table(header, rows)


def trip(result: Mapping[str, Any]) -> str:
    rows = [
        [way, f"{figures['mb_s']:.0f}", f"{figures['flow_s']:.1f}"]
        for way, figures in result["medians"].items()
    ]
    ratios = []
    for way, ratio in result["ratios"].items():
        is_goal = not way.endswith("direct")
        ratios.append(
            [
                way,
                f"{ratio['median']:.2f}",
                ", ".join(f"{value:.2f}" for value in ratio["rounds"]),
                f"{TRIP_GOAL}" if is_goal else "-",
                verdict(reached=ratio["median"] >= TRIP_GOAL) if is_goal else "",
            ]
        )
    return f"""### Latency to one of the clusters

The same run ({result["shape"]}, {result["records"]:,} records) with direct connections to both \
clusters, with a proxy in front of one, and with the same proxy delaying each byte by 25 ms each \
way. The proxy is a Python process on the same machine. It limits neither bandwidth nor bytes in \
flight. The ratio of 50 ms to 0 ms is the cost of latency; the ratio to direct connections \
includes the proxy. A real connection of that latency also needs larger socket buffers at the \
broker (`socket.receive.buffer.bytes=-1`), otherwise TCP is the limit.

{table(["ratio of MB/s", "median", "each round", "goal", ""], ratios)}

{table(["round trip", "MB/s", "flow, s"], rows)}"""


def delays(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            str(r["partitions"]),
            f"{r['p50_ms']:.1f}",
            f"{r['p99_ms']:.1f}",
            f"{r['max_ms']:.0f}",
            f"{r['source_p50_ms']:.1f}",
            f"{r['source_p99_ms']:.1f}",
            f"{r['cpu_s_per_s'] * 100:.0f} %",
            str(DELAY_GOAL_MS),
            verdict(reached=r["p99_ms"] <= DELAY_GOAL_MS),
        ]
        for r in results
    ]
    header = ["partitions", "p50, ms", "p99, ms", "highest, ms"]
    header += ["p50 at the source, ms", "p99 at the source, ms", "CPU of the service"]
    return f"""### End-to-end latency

The running service on Spark with {RECORDS_S} records of {RECORD_BYTES} B per second for \
{results[0]["seconds"]} s and no other load. The latency lasts from just before the call of the \
producer until a consumer of the destination has the record, by one clock. The latency of a \
consumer of the source is listed beside it.

{table([*header, "goal for p99, ms", ""], rows)}"""


def calm(results: Sequence[Mapping[str, Any]]) -> str:
    (result,) = results
    return f"""### The highest latency of {result["seconds"] // 60} minutes

The same with one partition for {result["seconds"]} s: p50 {result["p50_ms"]:.1f} ms, p99 \
{result["p99_ms"]:.1f} ms, highest {result["max_ms"]:.0f} ms (at the source p99 \
{result["source_p99_ms"]:.1f} ms, highest {result["source_max_ms"]:.0f} ms). Goal for the highest: \
{CALM_GOAL_MS} ms, {verdict(reached=result["max_ms"] <= CALM_GOAL_MS)}."""


def neighbours(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result in results:
        calm_ms = result["calm"]["p99_ms"]
        for state in ("alone", "calm", "halted", "after", "dripping"):
            row = result[state]
            is_disturbed = state in {"halted", "after", "dripping"}
            ratio = row["p99_ms"] / calm_ms
            rows.append(
                [
                    str(result["partitions"]),
                    NEIGHBOUR_STATES[state],
                    *(f"{row[key]:.1f}" for key in ("p50_ms", "p99_ms", "max_ms")),
                    f"{row['source_p99_ms']:.1f}",
                    f"{ratio:.1f}" if is_disturbed else "-",
                    str(NEIGHBOUR_GOAL) if is_disturbed else "-",
                    verdict(reached=ratio <= NEIGHBOUR_GOAL) if is_disturbed else "",
                ]
            )
    header = ["partitions", "the other destination", "p50, ms", "p99, ms", "highest, ms"]
    header += ["p99 at the source, ms", "p99 to that with a calm one", "goal", ""]
    return f"""### Neighbours

The same latency, of one destination, while another destination of the same process is disturbed. \
Each row is {results[0]["seconds"]} s. Halted: the other broker is stopped by SIGSTOP. Dripping: a \
proxy passes one byte of its responses per second.

{table(header, rows)}"""


def groups(result: Mapping[str, Any]) -> str:
    rows = []
    for state, figures in result["medians"].items():
        highest = max(each["max_ms"] for each in result["rounds"][state])
        rows.append(
            [
                state,
                *(f"{figures[key]:.1f}" for key in ("p50_ms", "p99_ms")),
                f"{highest:.0f}",
                f"{figures['source_p99_ms']:.1f}",
                f"{figures['cpu_s_per_s'] * 100:.0f} %",
                f"{figures['checkpoints_s']:,.0f}",
            ]
        )
    ratios = [
        [
            GROUPS_RATIOS[key],
            f"{ratio['median']:.2f}",
            ", ".join(f"{value:.2f}" for value in ratio["rounds"]),
            f"{GROUPS_GOAL}",
            verdict(reached=ratio["median"] <= GROUPS_GOAL),
        ]
        for key, ratio in result["ratios"].items()
    ]
    header = ["groups", "p50, ms", "p99, ms", "highest, ms", "p99 at the source, ms"]
    header += ["CPU of the service", "checkpoints/s"]
    return f"""### Consumer groups in the same process

The same latency, with {result["partitions"]} partitions, of a service that translates \
{result["groups"]:,} consumer groups with {result["partitions"]} partitions each every \
{INTERVAL_S} s, and of one that translates none. Translated offsets are also committed at the \
destination (`sync-group-offsets`). In both states a third of the groups commits every \
{INTERVAL_S} s, {result["commits_s"]:.0f} commits per second. The states take turns; for each turn \
the service is started again, runs for {WARM_UP_S} s, and is measured for {result["seconds"]} s. \
Figures are medians over the rounds, except the highest latency.

{table(header, rows)}

{table(["translated to not translated", "median", "each round", "goal", ""], ratios)}"""


def memory(results: Sequence[Mapping[str, Any]]) -> str:
    header = ["partitions", "driver", "Spark's JVM", "Spark's Python daemon", "a worker"]
    header += ["first pass, s", "CPU-s", "second pass, s", "CPU-s"]
    rows = [
        [
            f"{r['partitions']:,}",
            *(f"{r[key]:.0f}" for key in ("driver_mib", "jvm_mib", "daemon_mib", "worker_mib")),
            f"{r['first_pass_s']:.1f}",
            f"{r['first_pass_cpu_s']:.1f}",
            f"{r['second_pass_s']:.1f}",
            f"{r['second_pass_cpu_s']:.1f}",
        ]
        for r in results
    ]
    return f"""### Memory and many partitions

Peak RSS in MiB of the largest process of each kind, in one mirror of that many partitions with \
{RECORDS_EACH} records each. Workers share most of their memory with the daemon that forks them. A \
pass lasts from the first request to the source to the last response. The first pass fills new \
partitions; the second pass checks that each replica continues its source, and resumes.

{table(header, rows)}"""
