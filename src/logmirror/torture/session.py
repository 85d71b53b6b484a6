"""What the trials of one run share: testbed, feeder, random choices, observations, the result."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror.clock import SYSTEM_CLOCK, Chooser
from logmirror.testing.checker import Anomaly, History
from logmirror.torture.processes import PARTITIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logmirror.testing.checker import Row
    from logmirror.torture.feeder import Feeder
    from logmirror.torture.processes import MirrorProcess
    from logmirror.torture.testbed import Flow, Testbed

_AT_WORK_MS: Final = (100, 1500)


@dataclass
class RealResult:
    """The result of all trials."""

    anomalies: list[tuple[str, Anomaly]] = field(default_factory=list)
    """Each with the replica in which it was found: `<mirror>/<partition>`, or `source`."""

    trials: int = 0
    kills: int = 0
    """Mirrors that ended by SIGKILL."""

    missed: int = 0
    """Trials without effect: their failpoint, or what they wait for, was not reached in time."""

    records: int = 0
    """Records that the source broker acknowledged."""

    left_out: list[str] = field(default_factory=list)
    """Faults that this machine does not support."""

    seconds: float = 0


class Session:
    """One run: what its trials use, and what they have observed.

    Args:
        testbed: Brokers, S3 server, folders.
        feeder: The producer at the source.
        flows: The flows that run.
        seed: Determines the random choices.
        report: Called with one line of progress.

    Attributes:
        histories: What was observed of each replica, by mirror and partition.
        second: Records that only a second history of the source had, by partition and offset.
        result: The result so far.
    """

    def __init__(
        self,
        testbed: Testbed,
        feeder: Feeder,
        *,
        flows: Sequence[Flow],
        seed: int,
        report: Callable[[str], None],
    ) -> None:
        self.testbed, self.feeder, self.flows = testbed, feeder, flows
        self.seed, self.report = seed, report
        self.chooser = Chooser(f"real {seed}")
        self.result = RealResult()
        self.histories = {
            (flow.name, number): History() for flow in flows for number in range(PARTITIONS)
        }
        self.second: dict[int, dict[int, Row]] = {n: {} for n in range(PARTITIONS)}

    def pass_time(self) -> None:
        """Let the processes work for a random time."""
        SYSTEM_CLOCK.sleep_ms(self.chooser.randint(*_AT_WORK_MS))

    def missed(self, why: str) -> None:
        """Count the trial as one without effect."""
        self.result.missed += 1
        self.report(f"  without effect: {why}")

    def stuck(self, flows: Iterable[Flow], why: str) -> None:
        """Record an anomaly: flows that make no progress."""
        for flow in flows:
            self.histories[flow.name, 0].stuck(why)

    def kill_and_record(self, *processes: MirrorProcess, expects_refusal: bool = False) -> None:
        """Kill the mirrors, and record the positions that they reported.

        Args:
            processes: The mirrors. Those that have ended are not killed.
            expects_refusal: Whether they end by themselves, because the source is another one.
        """
        for process in processes:
            if process.is_alive:
                process.kill()
            if process.child.returncode == -signal.SIGKILL:
                self.result.kills += 1
            elif process.child.returncode and not expects_refusal:
                self.report(f"  mirror exited with {process.child.returncode}: {process.last_line}")
        for process in processes:
            for mirror, partition, position in process.reported():
                flow = next(flow for flow in self.flows if flow.name == mirror)
                self.histories[mirror, partition].reported(
                    process.name,
                    position,
                    at_ms=SYSTEM_CLOCK.monotonic_ms(),
                    began_ms=process.started_ms,
                    durable=self.testbed.position(flow, partition),
                )
        for flow in self.flows:
            for partition in range(PARTITIONS):
                names = self.testbed.names(flow, partition)
                if names is not None:
                    self.histories[flow.name, partition].listed(names)
