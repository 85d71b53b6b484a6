"""The faults of a simulation.

A directed fault happens when a process reaches a failpoint for the nth time. A drawn fault happens
at a random moment. `matrix` combines failpoints, faults, destinations and formats.
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
        name: Its name in `--faults`.
        meaning: What happens, in words.
        where: The destinations at which it can happen.
        why_not: The reason why it cannot happen at the other destinations.
    """

    name: str
    meaning: str
    where: tuple[Destination, ...] = ("files", "S3", "Kafka")
    why_not: str = ""


FAULTS: Final = (
    FaultClass("kill", "the process is killed (`kill -9`) and restarted"),
    FaultClass(
        "kill-twice", "the process is killed, restarted, and killed at the same failpoint again"
    ),
    FaultClass("executor-lost", "the worker that runs the slice is killed; the driver continues"),
    FaultClass(
        "pause", "the process stops for 20 s and continues as a zombie; a second mirror takes over"
    ),
    FaultClass(
        "two-writers", "the process is killed while a second mirror copies the same partition"
    ),
    FaultClass("stop", "the process receives SIGTERM, exits, and is restarted"),
    FaultClass("source-down", "the source does not respond for 4 s"),
    FaultClass(
        "source-changes",
        "the source's leader changes, its application writes, the log cleaner runs, and records "
        "that were copied are deleted",
    ),
    FaultClass("recreated", "the source topic is deleted and recreated"),
    FaultClass(
        "regrown",
        "the source loses records that were copied, and others are written at their offsets until "
        "its log is longer; the mirror must stop",
    ),
    FaultClass(
        "refused",
        "the next write is refused: ENOSPC, an S3 error such as 409 or 503, NOT_LEADER_OR_FOLLOWER",
    ),
    FaultClass(
        "lost-answer",
        "the next write is performed, and its response is lost",
        ("S3", "Kafka"),
        "a system call loses no response; `kill` covers a process that dies during one",
    ),
    FaultClass(
        "late",
        "the next write gets no response, and is performed up to 2 s later",
        ("S3", "Kafka"),
        "a local disk performs nothing after a call has failed",
    ),
    FaultClass(
        "down",
        "the destination does not respond for 15 s",
        ("S3", "Kafka"),
        "a local folder stays reachable; `refused` and `io-error` cover its failures",
    ),
    FaultClass(
        "io-error",
        "the next fsync of a file or folder fails with EIO",
        ("files",),
        "its disks are behind an API",
    ),
    FaultClass(
        "power",
        "the machine loses power: any part of what was not flushed is gone",
        ("files",),
        "acknowledged writes are durable by contract",
    ),
)

BY_NAME: Final = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True, slots=True)
class Directive:
    """A directed fault.

    Attributes:
        point: A name in `failpoints.POINTS`.
        fault: The name of a fault.
        nth: It happens when processes have reached the point this many times in total.
    """

    point: str
    fault: str
    nth: int = 1
