"""The section of docs/bench.md about consumer groups of the source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints import DEADLINE_S, FAR_GROUPS, INTERVAL_S, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator


def checkpoint_section(found: dict) -> str:
    """Groups translated beside MirrorMaker, from `checkpoints.py`."""
    pairs, rounds = found["groups"] * found["partitions"], found["rounds"]
    idle = rounds["idle"]["cpu_seconds"] / INTERVAL_S
    moved_s, more_mib = rounds["moved"]["seconds"], rounds["peak_mib_more"]
    return "\n".join(
        [
            "## Consumer groups of the source, translated",
            "",
            (
                f"{found['groups']:,} groups with {found['partitions']} partitions each, new "
                f"offsets, {found['syncs']:,} offset syncs; a round every {INTERVAL_S} s. "
                "MirrorMaker is its checkpoint connector in a Connect worker, with the same topics "
                "and the same interval. Source and target are Apache Kafka "
                f"{VERSION} on the same machine. One run."
            ),
            "",
            *_program_rows(found["programs"]),
            "",
            (
                f"Records that a group reads again: {FAR_GROUPS:,} groups, evenly spread over a "
                f"topic of {found['history']:,} records, with MirrorMaker's spacing of offset "
                "syncs (`offset.lag.max` 100). With preserved offsets it is 0."
            ),
            "",
            *_distance_rows(found["distance"]),
            "",
            "Rounds of the same code without a process of its own; `idle` is the median of 5:",
            "",
            *_round_rows(rounds),
            "",
            (
                f"All groups moved: {pairs / moved_s:,.0f} offsets translated per second. An idle "
                f"service takes {idle:.1%} of a core. Memory of the process grew by "
                f"{more_mib:,.0f} MiB."
            ),
        ]
    )


def _program_rows(found: dict) -> Iterator[str]:
    ours, theirs = found["logmirror"], found["MirrorMaker"]

    def row(name: str, key: str, goal: tuple[float, str] | None = None, *, digits: int = 1) -> str:
        return _row(name, ours[key], theirs.get(key), goal, digits=digits)

    yield from _TABLE
    yield row("start to the last checkpoint, s", "start_s", (5, "5"))
    yield row("idle, cores", "idle_cores", (0.1, "0.1"), digits=3)
    yield row("last commit to the last checkpoint, s", "age_s")
    yield row("memory, MiB", "rss_mib", digits=0)
    if "written" in theirs:
        yield ""
        yield (
            f"MirrorMaker wrote {theirs['written']:,} checkpoints in its first {DEADLINE_S} s, "
            "then it was stopped: `-` was not measured."
        )


def _distance_rows(found: dict) -> Iterator[str]:
    near, far = found["logmirror"], found["MirrorMaker"]
    yield from _TABLE
    yield _row("median", near["median"], far["median"], (far["median"] / 10, "1/10"), digits=0)
    for name in ("p99", "highest"):
        yield _row(name, near[name], far[name], (far[name], "not more"), digits=0)


def _round_rows(rounds: dict) -> Iterator[str]:
    yield "| round | seconds | CPU seconds | checkpoints |"
    yield "|---|--:|--:|--:|"
    for name in ("first", "idle", "moved", "restart"):
        one = rounds[name]
        figures = f"{one['seconds']:.2f} | {one['cpu_seconds']:.2f} | {one['checkpoints']:,.0f}"
        yield f"| {name} | {figures} |"


_TABLE = ("| | logmirror | MirrorMaker 2 | goal | met |", "|---|--:|--:|--:|---|")


def _row(
    name: str,
    ours: float,
    theirs: float | None,
    goal: tuple[float, str] | None = None,
    *,
    digits: int = 1,
) -> str:
    most, shown = goal or (None, "-")
    met = "-" if most is None else "yes" if ours <= most else "**no**"
    other = "-" if theirs is None else f"{theirs:,.{digits}f}"
    return f"| {name} | {ours:,.{digits}f} | {other} | {shown} | {met} |"
