"""The section of docs/bench.md about a log dir in a bucket."""

from __future__ import annotations

from statistics import median

from forward_report import table

COLD_GOAL = 0.5
OPEN_GOAL_S = 5


def load_table(found: dict) -> str:
    """Acknowledgements, from `bucket_load.py`."""
    titles = ["producers x records in flight, partitions", "acks/s", "p50, ms", "p99, ms"]
    titles += ["requests/s", "requests per 10,000 acks", "commit objects per 10,000 acks"]
    titles += ["Kafka on disk: acks/s", "p50, ms", "p99, ms"]
    rows = []
    for name, figures in found["bucket"].items():
        row = [name, *_acks(figures), f"{figures['requests_s']:.1f}"]
        row += [f"{figures['requests']:,.0f}", f"{figures['commits']:,.0f}"]
        rows.append([*row, *_acks(found["kafka"][name])])
    return table(titles, rows)


def _acks(figures: dict) -> list[str]:
    return [
        f"{figures['acks_s']:,.0f}",
        *(f"{figures[key]:,.1f}" for key in ("p50_ms", "p99_ms")),
    ]


def reading_table(rounds: list[dict]) -> str:
    """Catching up, from `bucket_load.py`."""
    rows = []
    for name, key in (
        ("a new machine, cold", "cold_mb_s"),
        ("its copies", "again_mb_s"),
        ("the S3 client alone", "client_mb_s"),
    ):
        values = [found[key] for found in rounds]
        ratio = median(found[key] / found["client_mb_s"] for found in rounds)
        goal = "-" if "cold" not in key else "reached" if ratio >= COLD_GOAL else "**no**"
        spread = f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"
        rows.append([name, spread, f"{ratio:.2f}", goal])
    return table(["read from", "MB/s", "part of the client's", f"goal {COLD_GOAL}"], rows)


def takeover_table(found: dict) -> str:
    """A standby takes over, from `broker_takeover.py`."""
    titles = ["the owner is", "the standby takes over, s", "it listens, s"]
    titles += ["the first record is acknowledged, s"]
    keys = ("noticed_s", "listening_s", "acknowledged_s")
    rows = [
        [title, *(_spread(found["summary"][end][key]) for key in keys)]
        for title, end in (("killed (`kill -9`)", "killed"), ("stopped (SIGTERM)", "stopped"))
    ]
    return table(titles, rows)


def start_table(found: dict) -> str:
    """Opening many segments, from `bucket_start.py`."""
    titles = ["sealed segments", "`listening` after, s", f"goal: at most {OPEN_GOAL_S}"]
    titles += ["oldest record after, s", "newest record after, s"]
    rows = []
    places = (1, "one partition"), (found["spread"], f"{found['spread']:,} partitions")
    for partitions, place in places:
        for how, after in (("stopped", ""), ("killed", ", after `kill -9`")):
            figures = found["medians"][f"{partitions} {how}"]
            reached = "reached" if figures["listening_s"] <= OPEN_GOAL_S else "**no**"
            row = [f"{found['segments']:,} in {place}{after}", f"{figures['listening_s']:.1f}"]
            row += [reached, *(f"{figures[key]:.1f}" for key in ("oldest_s", "newest_s"))]
            rows.append(row)
    return table(titles, rows)


def _spread(one: dict[str, float]) -> str:
    return f"{one['median']:.2f} ({one['lowest']:.2f} to {one['highest']:.2f})"


def bucket_section(found: dict, takeover: dict, start: dict) -> str:
    """The whole section, with its heading."""
    return (
        "## A log directory in a bucket\n\n"
        "Versity's S3 gateway on the same machine, the broker's defaults: a response to `acks=all` "
        "waits for a commit object, of which there is at most one every 100 ms. Records of 1 KiB. "
        "Apache Kafka on disk has no flush before its responses. There is no local write-ahead "
        "log: what it acknowledges would be lost with the machine. Requests are counted for some "
        "seconds, so what follows minutes later is not in them: one free deletion for each commit "
        "object, one bundle for 256 of them, and sealed segments. `--explain-cost` has these.\n\n"
        + load_table(found)
        + f"\n\n{found['megabytes']} MB of one partition, read with kcat; the client gets the same "
        f"objects one after the other. Medians and ranges of {len(found['catch_up'])} rounds, each "
        "with a new machine; its page cache is full of other files:\n\n"
        + reading_table(found["catch_up"])
        + "\n\nA standby takes over, after the signal to the owner; a producer sends a record "
        f"every 20 ms. Medians and ranges of {len(takeover['rounds']['killed'])} rounds each:\n\n"
        + takeover_table(takeover)
        + "\n\nA start on a machine that has nothing of the log directory:\n\n"
        + start_table(start)
    )
