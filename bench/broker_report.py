"""The sections of docs/bench.md about the embedded broker."""

from __future__ import annotations

from forward_report import table

DELAY = "delay"


def start_section(found: dict) -> str:
    """Start and size, from `broker_start.py`."""
    medians, count = found["medians"], f"{found['partitions']:,}"
    logs = _segmented(found)
    ours, many, kafka = medians["empty"], medians["partitions"], medians["kafka"]
    of_start = ours["start_s"] / kafka["start_s"]
    of_size = ours["loaded_mib"] / kafka["loaded_mib"]
    goals = [
        ["`listening` after the command, s", ours["listening_s"], 0.5, ".2f"],
        [f"the same with {count} partitions, s", many["listening_s"], 2, ".2f"],
        *([f"the same with {title}, s", each["listening_s"], 5, ".2f"] for title, each in logs),
        ["RSS without clients, MiB", ours["idle_mib"], 64, ".0f"],
        ["start, part of Kafka's", of_start, 0.2, ".2f"],
        ["RSS after the load, part of Kafka's", of_size, 0.25, ".2f"],
    ]
    reached = [
        [title, format(value, form), f"at most {goal}", "reached" if value <= goal else "**no**"]
        for title, value, goal, form in goals
    ]
    rows = []
    for title, each in (
        ("embedded broker", ours),
        (f"embedded broker, {count} partitions", many),
        ("Apache Kafka 4.3.1, heap 1 GiB", kafka),
    ):
        loaded = f"{each['loaded_mib']:.0f}" if "loaded_mib" in each else "-"
        rows.append([title, f"{each['start_s']:.2f}", f"{each['idle_mib']:.0f}", loaded])
    titles = ["", "first response after, s", "RSS without clients, MiB", "RSS after the load, MiB"]
    return "\n\n".join(
        (table(["goal", "measured", "goal", ""], reached), table(titles, rows), _opened(logs))
    )


def _segmented(found: dict) -> list[tuple[str, dict]]:
    """Return title and medians of each start on a log of many segments."""
    count, spread = f"{found['segments']:,} segments", f"{found['spread']:,} partitions"
    places = ("segments", f"{count} in one partition"), ("spread segments", f"{count} in {spread}")
    return [
        (title + ending, found["medians"][key + way])
        for key, title in places
        for way, ending in (("", ""), (", killed", ", after `kill -9`"))
    ]


def _opened(logs: list[tuple[str, dict]]) -> str:
    """What a start on many sealed segments takes, and the first records of partition 0."""
    keys = ("listening_s", "oldest_s", "newest_s", "cpu_s")
    rows = [
        [title, *(f"{each[key]:.2f}" for key in keys), f"{each['idle_mib']:.0f}"]
        for title, each in logs
    ]
    titles = ["sealed segments", "`listening` after, s", "oldest record after, s"]
    return table([*titles, "newest record after, s", "CPU-s to `listening`", "RSS, MiB"], rows)


def groups_section(found: dict) -> str:
    """Rebalances, from `broker_groups.py`."""
    by_name = found["medians"]["rebalance"]
    ours, kafka = by_name["logmirror"], by_name["Kafka"]
    value = ours["all_s"] / kafka["all_s"]
    reached = "reached" if value <= 2 else "**no**"
    groups, members = found["groups"], found["members"]
    title = f"rebalance of {groups:,} groups of {members}, part of Kafka's time"
    goal = table(["goal", "measured", "goal", ""], [[title, f"{value:.2f}", "at most 2", reached]])
    keys = ("all_s", "median_s", "broker_cpu_s", "client_cpu_s")
    rows = [
        [name, *(f"{each[key]:.2f}" for key in keys), f"{each['rss_mib']:.0f}"]
        for name, each in by_name.items()
    ]
    titles = ["", "all groups after, s", "half of them after, s", "CPU-s of the broker"]
    return goal + "\n\n" + table([*titles, "CPU-s of the clients", "RSS, MiB"], rows)


def load_section(found: dict) -> str:
    """Throughput and delay, from `broker_load.py`."""
    medians = found["medians"]
    shapes = [shape for shape in medians if shape != DELAY]
    return "\n\n".join(
        [
            _goals(medians, shapes),
            *(_throughput(medians[shape], shape) for shape in shapes),
            _delays(medians[DELAY]),
        ]
    )


def _goals(medians: dict, shapes: list[str]) -> str:
    def ratio(shape: str, key: str, durability: str) -> float:
        both = medians[shape]
        return both[f"logmirror, {durability}"][key] / both[f"Kafka, {durability}"][key]

    rows = []
    for shape in shapes:
        for durability, goal in (("flushed", 5), ("background", 1)):
            value = ratio(shape, "produced_s", durability)
            is_goal = shape.startswith("1 KiB")
            reached = ("reached" if value >= goal else "**no**") if is_goal else ""
            wanted = f"at least {goal}" if is_goal else "-"
            title = f"{shape}, {durability}: records/s, part of Kafka's"
            rows.append([title, f"{value:.2f}", wanted, reached])
    for durability in ("flushed", "background"):
        value = ratio(DELAY, "p99_ms", durability)
        reached = "reached" if value <= 1 else "**no**"
        title = f"p99 delay, {durability}, part of Kafka's"
        rows.append([title, f"{value:.2f}", "at most 1", reached])
    return table(["goal", "measured", "goal", ""], rows)


def _throughput(by_name: dict, shape: str) -> str:
    keys = ("produce_cpu_s_per_gb", "consumed_s", "consume_cpu_s_per_gb", "rss_mib")
    titles = [shape, "produced, records/s", "CPU-s per GB", "consumed, records/s", "CPU-s per GB"]
    rows = [
        [name, f"{each['produced_s']:,.0f}", *(_figure(each[key]) for key in keys)]
        for name, each in by_name.items()
    ]
    return table([*titles, "RSS after it, MiB"], rows)


def _figure(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"  # three digits


def _delays(by_name: dict) -> str:
    keys = ("p50_ms", "p99_ms", "highest_ms")
    rows = [[name, *(f"{each[key]:.1f}" for key in keys)] for name, each in by_name.items()]
    return table(["1,000 records/s of 1 KiB", "p50, ms", "p99, ms", "highest, ms"], rows)
