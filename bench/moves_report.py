"""The section of docs/bench.md about moves between log directories."""

from __future__ import annotations

import statistics
from typing import Any

from forward_report import table

MOVE_GOAL = 2
PRODUCER_GOAL = 2
DELETE_GOAL_MS = 100
HOLD_GOAL_MS = 10
BOTH = (("into the bucket", "into"), ("out of it", "out"))
BUCKET = (
    "Into a bucket and back, beside the same producer; Versity's S3 gateway on the same machine, "
    "the broker's defaults. One run:"
)
WAYS = ["", "MB/s", "producer before: p50, p99, highest ms", "during", "after"]
WAYS += ["highest ms around the swap"]
BEHIND = (
    "A move behind a limit of 10 MB/s, in which records are deleted, and which continues without "
    "the limit after a `kill -9`:"
)


def moves_section(found: dict) -> str:
    """The whole section, with its heading, from `moves.py`."""
    programs = [("logmirror", "logmirror"), ("Apache Kafka", "Kafka")]
    rows, limited = [], []
    for title, key in programs:
        rounds, last = found["rounds"][key], found["limited"][key]
        rows.append(
            [
                title,
                *(f"{_median(rounds, one):.0f}" for one in ("mb_s", "loaded_mb_s")),
                *(_latencies(rounds, when) for when in ("before", "during", "busy")),
                f"{_median(rounds, 'around_swap_ms'):.0f}",
            ]
        )
        limited.append([title, *_limited(last)])
    moving = ["", "MB/s alone", "MB/s beside the producer", "producer before: p50, p99, highest ms"]
    moving += ["during the move", "beside a busy process", "highest ms around the swap"]
    rate = "rate over 30 s, part of the limit"
    behind = ["", rate, "DeleteRecords, ms", "complete after a kill -9, s"]
    return "\n\n".join(
        [
            "## Moves between log directories",
            _setting(found["megabytes"]),
            table(moving, rows),
            _disk(found),
            _goals(found),
            BEHIND,
            table(behind, limited),
            BUCKET,
            table(WAYS, [_way(title, found["bucket"][key]) for title, key in BOTH]),
        ]
    )


def _way(title: str, found: dict[str, Any]) -> list[str]:
    times = [
        ", ".join(f"{found[when][key]:.0f}" for key in ("p50", "p99", "highest"))
        for when in ("before", "during", "after")
    ]
    return [title, f"{found['mb_s']:.0f}", *times, f"{found['around_swap_ms']:.0f}"]


def _setting(megabytes: int) -> str:
    return (
        f"One partition of {megabytes} MB with segments of 16 MiB, both directories on one disk, "
        "Apache Kafka 4.3.1 in the same run. The producer is idempotent and sends 1,000 records "
        "of 1 KiB per second. Before each move, a file of the same size is written, flushed and "
        "removed, twice. The *busy process* only computes, with the lowest priority (`nice -n "
        "19`), while nothing is moved: what a second busy thread alone costs the producer on this "
        "machine. Medians over the rounds."
    )


def _disk(found: dict) -> str:
    rates = [one["disk_mb_s"] for rounds in found["rounds"].values() for one in rounds]
    parts = [one["mb_s"] / one["disk_mb_s"] for one in found["rounds"]["logmirror"]]
    return (
        f"The disk alone: {statistics.median(rates):.0f} MB/s ({min(rates):.0f} to "
        f"{max(rates):.0f}) for the second of these files, in steps of 4 MiB, each flushed. "
        f"logmirror flushes every step of a copy, and moves {statistics.median(parts):.2f} of that "
        "per second. Apache Kafka flushes none of them before it shows the partition in the new "
        "place."
    )


def _median(rounds: list[dict], key: str) -> float:
    return statistics.median(one[key] for one in rounds)


def _latencies(rounds: list[dict], when: str) -> str:
    keys = ("p50", "p99", "highest")
    return ", ".join(f"{_median([one[when] for one in rounds], key):.1f}" for key in keys)


def _limited(last: dict[str, Any]) -> list[str]:
    if "failed" in last:
        return [last["failed"], "-", "-"]
    responded = last["delete_error"] == 0
    return [
        f"{last['limited']:.2f}",
        f"{last['delete_ms']:.0f}" if responded else "no response within 20 s",
        f"{last['resume_s']:.1f}",
    ]


def _goals(found: dict) -> str:
    rounds = found["rounds"]["logmirror"]
    slower = statistics.median(one["during"]["p99"] / one["before"]["p99"] for one in rounds)
    last = found["limited"]["logmirror"]
    delete_ms = last["delete_ms"] if last.get("delete_error") == 0 else float("inf")
    hold_ms = max(held for one in rounds for held in one["hold_ms"])
    rates = found["ratio"]
    each = ", ".join(f"{one:.2f}" for one in rates["rounds"])
    rows = [
        ["MB/s alone, times Kafka's", f"{rates['median']:.2f} ({each})", f"at least {MOVE_GOAL}"],
        [
            "p99 of the producer, during / before, median of the rounds",
            f"{slower:.1f}",
            f"at most {PRODUCER_GOAL}",
        ],
        ["DeleteRecords, ms", f"{delete_ms:.0f}", f"at most {DELETE_GOAL_MS}"],
        ["swap, highest of all, ms", f"{hold_ms:.1f}", f"at most {HOLD_GOAL_MS}"],
    ]
    reached = (
        rates["median"] >= MOVE_GOAL,
        slower <= PRODUCER_GOAL,
        delete_ms <= DELETE_GOAL_MS,
        hold_ms <= HOLD_GOAL_MS,
    )
    marks = ["reached" if one else "**not reached**" for one in reached]
    return table(
        ["goal", "measured", "goal is", ""],
        [[*row, mark] for row, mark in zip(rows, marks, strict=True)],
    )
