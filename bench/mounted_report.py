"""The section of docs/bench.md about archives that the embedded broker mounts."""

from __future__ import annotations

from forward_report import table

GOAL_S = 5
NATIVE_GOAL = 1
RESTORE_GOAL = 5


def start_table(found: dict) -> str:
    """Starts, from `mounted_start.py`."""
    keys = ("listening_s", "cpu_s", "oldest_s", "newest_s", "by_time_s")
    titles = [f"{found['objects']:,} objects", "`listening` after, s", "CPU-s to it"]
    titles += ["oldest record after, s", "newest record after, s", "lookup by timestamp, s"]
    rows = []
    for name, figures in found["medians"].items():
        cells = [f"{figures[key]:.2f}" if key in figures else "-" for key in keys]
        cells.append(f"{figures['rss_mib']:.0f}")
        reached = "reached" if figures["listening_s"] <= GOAL_S else "**no**"
        rows.append([name, *cells, reached if "oldest_s" in figures else "-"])
    return table([*titles, "RSS, MiB", f"listens within {GOAL_S} s"], rows)


def restore_tables(found: dict) -> str:
    """Serving and restoring, from `restore.py`."""
    served, restored = [], []
    for name, figures in found["served"].items():
        cells = name, f"{figures['mb_s']:.0f}", f"{figures['cpu_s_per_gb']:.2f}"
        ratio = found["serving_ratios"].get(name)
        goal = "reached" if ratio and ratio["median"] >= NATIVE_GOAL else "**not reached**"
        served.append([*cells, _ratio(ratio), goal if name.startswith("native") else "-"])
    for name, figures in found["restored"].items():
        cells = name, f"{figures['mb_s']:.0f}", f"{figures['flow_cpu_s_per_gb']:.2f}"
        ratio = found["restoring_ratios"].get(name)
        goal = "reached" if ratio and ratio["median"] >= RESTORE_GOAL else "**not reached**"
        cells += f"{figures['start_s']:.1f}", _ratio(ratio), goal if ratio else "-"
        restored.append(list(cells))
    of_serving = ["served from", "MB/s to kcat", "CPU-s of the broker per GB", "part of Kafka's"]
    of_serving.append(f"goal {NATIVE_GOAL}")
    of_restore = ["restored by", "MB/s in the flow", "CPU-s per GB in the flow", "start, s"]
    of_restore += ["times MirrorMaker's rate", f"goal {RESTORE_GOAL}"]
    return table(of_serving, served) + "\n\n" + table(of_restore, restored)


def _ratio(found: dict | None) -> str:
    if found is None:
        return "-"
    return f"{found['median']:.2f} ({', '.join(f'{value:.2f}' for value in found['rounds'])})"


def mounted_section(start: dict, restore: dict) -> str:
    """The whole section, with its heading."""
    return (
        "## Archives as Kafka\n\n"
        "`logmirror broker --archive` with as many native objects, and their claims:\n\n"
        + start_table(start)
        + f"\n\n{restore['records']:,} records, {restore['shape']}. Each mounted broker is new, so "
        "its first read checks the objects, and converts those of Parquet and NDJSON. A restore "
        "copies from a mounted archive into Apache Kafka; MirrorMaker 2 is tuned and reads the "
        "native one. A warm-up run comes before all and does not count.\n\n"
        + restore_tables(restore)
    )
