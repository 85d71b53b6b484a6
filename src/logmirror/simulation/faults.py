"""What can go wrong in a simulation: classes of faults, and the ones of a seed.

A fault is directed (at the n-th time that a process reaches a crash point) or drawn (at a moment of
the clock). Each class says where it can happen at all; `matrix` walks through all cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Destination = Literal["files", "S3", "Kafka"]
Format = Literal["native", "parquet", "ndjson", "snapshots", "-", "translate"]


@dataclass(frozen=True, slots=True)
class FaultClass:
    """One kind of fault.

    Attributes:
        name: For people and for `--faults`.
        meaning: What happens.
        where: Destinations at which it can happen.
        why_not: The reason where it cannot.
    """

    name: str
    meaning: str
    where: tuple[Destination, ...] = ("files", "S3", "Kafka")
    why_not: str = ""


FAULTS: Final = (
    FaultClass("kill", "the process dies (kill -9) and is started again"),
    FaultClass("kill-twice", "it dies there, is started again, and dies there again"),
    FaultClass("executor-lost", "the worker that carries the slice out dies; the driver lives on"),
    FaultClass("pause", "it stands still for 20 s and wakes up as a zombie; a second one goes on"),
    FaultClass("two-writers", "it dies while a second one copies the same partition"),
    FaultClass("stop", "it is asked to stop (SIGTERM), ends, and is started again"),
    FaultClass("source-down", "the source does not answer for 4 s"),
    FaultClass(
        "source-changes",
        "the source's leader moves, a transaction is aborted, the cleaner runs, and what every "
        "copy has is deleted",
    ),
    FaultClass("recreated", "the topic is deleted and made anew"),
    FaultClass("refused", "the next write is refused: ENOSPC, 409 or 503, NOT_LEADER_OR_FOLLOWER"),
    FaultClass(
        "lost-answer",
        "the next write is done and its answer lost",
        ("S3", "Kafka"),
        "a system call always returns; its process dies instead",
    ),
    FaultClass(
        "late",
        "the next write gets no answer and is done up to 2 s later",
        ("S3", "Kafka"),
        "a local disk does nothing behind the back of a call that has failed",
    ),
    FaultClass(
        "down",
        "the destination does not answer for 15 s",
        ("S3", "Kafka"),
        "a folder does not go away; `refused` and `io-error` are its troubles",
    ),
    FaultClass(
        "io-error",
        "the next flush of a file or folder fails with EIO",
        ("files",),
        "its disks are behind an API",
    ),
    FaultClass(
        "power",
        "the machine loses power: of what was not flushed any part is gone",
        ("files",),
        "what it has acknowledged is durable by contract",
    ),
)

BY_NAME: Final = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True, slots=True)
class Directive:
    """A fault that happens when a point is reached.

    Attributes:
        point: Of `failpoints.POINTS`.
        fault: Name of its class.
        nth: At which time the point is reached by anybody.
    """

    point: str
    fault: str
    nth: int = 1
