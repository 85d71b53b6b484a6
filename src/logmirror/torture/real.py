"""Fault injection into real processes on loopback: brokers, mirrors, an S3 server, files.

Each trial starts a mirror, injects one fault, and kills the mirror. The next trial starts from what
it left behind. At the end a run without faults copies the rest, and the checker compares each
replica with the source.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror.archive.naming import split_name
from logmirror.clock import SYSTEM_CLOCK, Chooser
from logmirror.simulation.matrix import simulated_points
from logmirror.testing.checker import Anomaly, History, Row, Truth
from logmirror.torture.feeder import Feeder, read_topic
from logmirror.torture.processes import PARTITIONS, wait
from logmirror.torture.testbed import TOPIC, Flow, Testbed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from logmirror.simulation.faults import Destination
    from logmirror.torture.processes import MirrorProcess

_AT_WORK_MS: Final = (100, 1500)
_FAULT_MS: Final = 1_500
_PAUSE_MS: Final = 4_000
_DIE_MS: Final = 20_000
_FINISH_MS: Final = 120_000
_TINY_BYTES: Final = 700

REAL_FAULTS: Final = {
    "kill": "kill -9 at a failpoint",
    "random-kill": "kill -9 at a random moment",
    "pause": "SIGSTOP until another mirror makes progress, then SIGCONT",
    "two-writers": "two mirrors run at once; one is killed",
    "stop": "SIGTERM",
    "source-down": "the source broker is killed (kill -9) and restarted",
    "flip": "a bit of the source broker's log is flipped, and later flipped back",
    "network": "connections to the source or the S3 server are reset, blocked or delayed",
    "refused": "the S3 server refuses writes (503), and no file can grow (full disk)",
    "lost-answer": "the S3 server performs a write, and the response is lost",
    "neighbour": "one destination halts (SIGSTOP) or drips; the others must make progress",
    "late": "the S3 server performs a write 2 s after it closed the connection",
}
"""Faults for real processes, by their names in `--faults`."""


FLOWS: Final = (
    Flow("files", "native"),
    Flow("files", "parquet"),
    Flow("files", "ndjson"),
    Flow("S3", "native"),
    Flow("S3", "parquet"),
    Flow("Kafka", "-"),
    Flow("Kafka", "translate"),
    Flow("files", "snapshots"),
)
"""The flows of a run without `-c`."""

SIMULATED_ONLY: Final = {
    "translate": "simulated only: `offsets: translate`",
    "snapshots": "simulated only: `compaction: log` (the topic has records without keys)",
}
"""Formats that the trials with real processes leave out, and why."""


@dataclass
class RealResult:
    """The result of all trials."""

    anomalies: list[tuple[str, Anomaly]] = field(default_factory=list)
    """Each with the replica in which it was found: `<mirror>/<partition>`, or `source`."""

    trials: int = 0
    kills: int = 0
    """Mirrors that ended by SIGKILL."""

    missed: int = 0
    """Trials whose mirror did not reach its failpoint in time."""

    records: int = 0
    """Records that the source broker acknowledged."""

    left_out: list[str] = field(default_factory=list)
    """Faults that this machine does not support."""

    seconds: float = 0


class RealTorture:
    """Runs the trials.

    Args:
        folder: An empty folder for all files.
        flows: The flows to run.
        faults: Names in `REAL_FAULTS`.
        trials: Number of trials.
        seed: Determines the order of faults, failpoints and delays; not the timing of the machine.
        report: Called with one line of progress.

    Attributes:
        result: The result so far.
    """

    def __init__(  # noqa: PLR0913  # the options of the command
        self,
        folder: Path,
        *,
        flows: Sequence[Flow],
        faults: Sequence[str],
        trials: int,
        seed: int,
        report: Callable[[str], None],
    ) -> None:
        self._folder, self._flows, self._faults = folder, flows, faults
        self._trials, self._seed, self._report = trials, seed, report
        self._chooser = Chooser(f"real {seed}")
        self._acknowledged: Mapping[int, Mapping[int, Row]] = {}
        self.result = RealResult()
        self._histories = {
            (flow.name, number): History() for flow in flows for number in range(PARTITIONS)
        }
        points = {
            point
            for flow in flows
            for point in simulated_points(flow.destination, flow.form)
            if not point.startswith(("head.", "hole."))  # the source has no offset gaps
        }
        self._points = sorted(points)
        self._chooser.shuffle(self._points)

    def run(self) -> RealResult:
        """Run all trials and a run without faults, then compare."""
        started_ms = SYSTEM_CLOCK.monotonic_ms()
        with contextlib.ExitStack() as stack:
            testbed = Testbed(self._folder, self._flows, stack)
            self.result.left_out += testbed.left_out
            feeder = stack.enter_context(Feeder(testbed.direct, TOPIC, PARTITIONS, self._seed))
            self._acknowledged = feeder.acknowledged
            for number in range(self._trials):
                fault = self._faults[number % len(self._faults)]
                self.result.trials += 1
                self._report(f"trial {number + 1} of {self._trials}: {REAL_FAULTS[fault]}")
                _TRIALS[fault](self, testbed)
            feeder.stop()
            self._finish(testbed)
            self.judge(testbed, feeder)
        self.result.seconds = (SYSTEM_CLOCK.monotonic_ms() - started_ms) / 1000
        return self.result

    def _wait(self) -> None:
        SYSTEM_CLOCK.sleep_ms(self._chooser.randint(*_AT_WORK_MS))

    # -- trials ----------------------------------------------------------------------------------

    def _kill_and_record(self, testbed: Testbed, *processes: MirrorProcess) -> None:
        """Kill the mirrors, and record the positions that they reported."""
        for process in processes:
            if process.is_alive:
                process.kill()
            if process.child.returncode == -signal.SIGKILL:
                self.result.kills += 1
            elif process.child.returncode:
                self._report(f"  mirror exited with {process.child.returncode}: {_last(process)}")
        for process in processes:
            for mirror, partition, position in process.reported():
                history = self._histories[mirror, partition]
                flow = next(flow for flow in self._flows if flow.name == mirror)
                history.reported(
                    process.name,
                    position,
                    at_ms=SYSTEM_CLOCK.monotonic_ms(),
                    began_ms=process.started_ms,
                    durable=_chain_end(testbed.names(flow, partition)),
                )
        for flow in self._flows:
            for partition in range(PARTITIONS):
                names = testbed.names(flow, partition)
                if names is not None:
                    self._histories[flow.name, partition].listed(names)

    def _kill_at_point(self, testbed: Testbed) -> None:
        point = self._points[self.result.trials % len(self._points)]
        mirror = testbed.start(crash_at=f"{point}#{self._chooser.randint(1, 6)}")
        if mirror.end(_DIE_MS) is None:
            self.result.missed += 1
        self._kill_and_record(testbed, mirror)

    def _kill_at_random(self, testbed: Testbed) -> None:
        mirror = testbed.start()
        if self._chooser.random() < 0.8:  # noqa: PLR2004  # else killed during its start
            mirror.await_progress()
        self._wait()
        self._kill_and_record(testbed, mirror)

    def _stop(self, testbed: Testbed) -> None:
        mirror = testbed.start()
        mirror.await_progress()
        self._wait()
        mirror.signal(signal.SIGTERM)
        mirror.end()
        self._kill_and_record(testbed, mirror)

    def _pause_mirror(self, testbed: Testbed) -> None:
        first = testbed.start()
        first.await_progress()
        self._wait()
        first.signal(signal.SIGSTOP)
        second = testbed.start()
        second.await_progress(_PAUSE_MS + _DIE_MS)
        first.signal(signal.SIGCONT)
        self._wait()
        self._kill_and_record(testbed, first, second)

    def _run_two(self, testbed: Testbed) -> None:
        both = (testbed.start(), testbed.start())
        for mirror in both:
            mirror.await_progress()
        self._wait()
        both[0].kill()
        self._wait()
        self._kill_and_record(testbed, *both)

    def _restart_source(self, testbed: Testbed) -> None:
        mirror = testbed.start()
        mirror.await_progress()
        testbed.source.kill()
        self._wait()
        testbed.source.start()
        self._wait()
        self._kill_and_record(testbed, mirror)

    def _flip_bit(self, testbed: Testbed) -> None:
        """The broker must refuse the whole partition; otherwise the judge finds what is wrong."""
        mirror = testbed.start()
        mirror.await_progress()
        testbed.source.kill()
        partition = self._chooser.randrange(PARTITIONS)
        end = max(self._acknowledged.get(partition, ()), default=-1) + 1
        acknowledged = testbed.source.bytes_before(TOPIC, partition, end)
        path = testbed.source.open_segment(TOPIC, partition)
        if not acknowledged:
            self.result.missed += 1
        else:
            whole = path.read_bytes()
            data = bytearray(whole)
            place = self._chooser.choice((self._chooser.randrange(acknowledged), acknowledged - 1))
            data[place] ^= 1 << self._chooser.randrange(8)
            path.write_bytes(data)
            testbed.source.start()
            SYSTEM_CLOCK.sleep_ms(_FAULT_MS)
            testbed.source.kill()
            path.write_bytes(whole)
        testbed.source.start()
        self._wait()
        self._kill_and_record(testbed, mirror)

    def _disturb_network(self, testbed: Testbed) -> None:
        mirror = testbed.start()
        mirror.await_progress()
        network = self._chooser.choice((testbed.network or testbed.s3_network, testbed.s3_network))
        kind = self._chooser.choice(("reset", "silence", "delay"))
        if kind == "reset":
            network.cut()
        network.is_silent = kind == "silence"
        network.delay_ms = 100 if kind == "delay" else 0
        SYSTEM_CLOCK.sleep_ms(_FAULT_MS)
        network.is_silent, network.delay_ms = False, 0
        self._wait()
        self._kill_and_record(testbed, mirror)

    def _stall_neighbour(self, testbed: Testbed) -> None:
        """While one destination halts or drips, every flow to another one must make progress."""
        mirror = testbed.start()
        mirror.await_progress()
        stalled: Destination = self._chooser.choice(("Kafka", "S3"))
        others = [flow for flow in self._flows if flow.destination != stalled]
        testbed.stall(stalled)
        try:
            before = {flow: testbed.extent(flow) for flow in others}

            def is_held_up(flow: Flow) -> bool:
                return testbed.extent(flow) == before[flow]

            wait(lambda: not any(map(is_held_up, others)) or not mirror.is_alive, _DIE_MS)
            for flow in others if mirror.is_alive else []:
                if is_held_up(flow):
                    why = f"no progress within {_DIE_MS} ms while {stalled} was stalled"
                    self._histories[flow.name, 0].stuck(why)
        finally:
            testbed.resume()
        self._wait()
        self._kill_and_record(testbed, mirror)

    def _refuse_writes(self, testbed: Testbed) -> None:
        mirror = testbed.start()
        mirror.await_progress()
        testbed.s3.faults.extend(["refused"] * 3)
        if not mirror.limit_files(_TINY_BYTES):
            self.result.left_out.append(
                "full disk: this system cannot limit the files of another process"
            )
        SYSTEM_CLOCK.sleep_ms(_FAULT_MS)
        if mirror.is_alive:
            mirror.limit_files(-1)
        self._wait()
        self._kill_and_record(testbed, mirror)

    def _lose_responses(self, testbed: Testbed) -> None:
        self._inject_into_s3(testbed, "lost-answer")

    def _delay_responses(self, testbed: Testbed) -> None:
        self._inject_into_s3(testbed, "late")

    def _inject_into_s3(self, testbed: Testbed, fault: str) -> None:
        mirror = testbed.start()
        mirror.await_progress()
        for _ in range(4):
            testbed.s3.faults.append(fault)
            self._wait()
        self._kill_and_record(testbed, mirror)

    # -- the end ---------------------------------------------------------------------------------

    def _finish(self, testbed: Testbed) -> None:
        self._report("final run without faults")
        testbed.s3.faults.clear()
        mirror = testbed.start("--until-now")
        code = mirror.end(_FINISH_MS)
        self._kill_and_record(testbed, mirror)
        if code != 0:
            why = f"the final run exited with {code}: {_last(mirror)}"
            for history in self._histories.values():
                history.stuck(why)

    def judge(self, testbed: Testbed, feeder: Feeder) -> None:
        """Compare each replica with the source, and the source with its acknowledgements."""
        self.result.records = feeder.count
        for partition in range(PARTITIONS):
            rows = read_topic(testbed.direct, TOPIC, partition)
            written = feeder.acknowledged[partition]
            at_source = History().judge(
                Truth(rows=[written[at] for at in sorted(written)]),
                [row for row in rows if row.offset in written],
            )
            self.result.anomalies += [("source", anomaly) for anomaly in at_source]
            truth = Truth(rows=rows, end=rows[-1].offset + 1 if rows else 0)
            for flow in self._flows:
                found = self._histories[flow.name, partition].judge(
                    truth, testbed.rows(flow, partition), names=testbed.names(flow, partition)
                )
                self.result.anomalies += [(f"{flow.name}/{partition}", each) for each in found]


def _last(mirror: MirrorProcess) -> str:
    lines = mirror.log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else ""


def _chain_end(names: list[str] | None) -> int | None:
    """Return the end of the chain that starts at offset 0; None for a cluster."""
    if names is None:
        return None
    end = 0
    for name in names:
        parts = split_name(name)
        if parts is None or parts[0] != end:
            break
        end = parts[1] + 1
    return end


_TRIALS: Final[dict[str, Callable[[RealTorture, Testbed], None]]] = {
    "kill": RealTorture._kill_at_point,  # noqa: SLF001  # its own table
    "random-kill": RealTorture._kill_at_random,  # noqa: SLF001  # the same
    "pause": RealTorture._pause_mirror,  # noqa: SLF001  # the same
    "two-writers": RealTorture._run_two,  # noqa: SLF001  # the same
    "stop": RealTorture._stop,  # noqa: SLF001  # the same
    "source-down": RealTorture._restart_source,  # noqa: SLF001  # the same
    "flip": RealTorture._flip_bit,  # noqa: SLF001  # the same
    "network": RealTorture._disturb_network,  # noqa: SLF001  # the same
    "refused": RealTorture._refuse_writes,  # noqa: SLF001  # the same
    "lost-answer": RealTorture._lose_responses,  # noqa: SLF001  # the same
    "neighbour": RealTorture._stall_neighbour,  # noqa: SLF001  # the same
    "late": RealTorture._delay_responses,  # noqa: SLF001  # the same
}
