"""Real processes under real faults: brokers, copiers, a bucket, files, on loopback.

Each trial starts a copier, harms it or what it works with, and leaves it dead; the next one meets
what it was in the middle of. In the end a clean run finishes, and the checker compares.
"""

from __future__ import annotations

import contextlib
import json
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror.archive.naming import split_name
from logmirror.clock import SYSTEM_CLOCK, Chooser
from logmirror.config.settings import load
from logmirror.simulation.matrix import simulated_points
from logmirror.simulation.reading import read_batches, read_rows
from logmirror.testing.checker import Anomaly, History, Truth
from logmirror.torture.feeder import Feeder, read_topic
from logmirror.torture.processes import PARTITIONS, Broker, Copier
from logmirror.torture.proxy import Proxy
from logmirror.torture.s3_server import BUCKET, HOST, S3Server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from logmirror.simulation.faults import Destination, Format
    from logmirror.testing.checker import Row

_BEHIND_PROXY: Final = "127.0.0.2"
"""Where a broker listens that clients are to reach through a proxy on 127.0.0.1 alone."""

_TOPIC: Final = "orders"
_EXTENSIONS: Final = {"native": "batches", "parquet": "parquet", "ndjson": "ndjson"}
_AT_WORK_MS: Final = (100, 1500)
_FAULT_MS: Final = 1_500
_PAUSE_MS: Final = 4_000
_DIE_MS: Final = 20_000
_FINISH_MS: Final = 120_000
_TINY_BYTES: Final = 700

REAL_FAULTS: Final = {
    "kill": "kill -9 at a named crash point",
    "random-kill": "kill -9 at a moment that is drawn",
    "pause": "SIGSTOP for 4 s while another process takes over, then SIGCONT",
    "two-writers": "two processes copy at once; one is killed",
    "stop": "SIGTERM",
    "source-down": "the source's broker is killed (kill -9) and started again",
    "network": "connections to the source or the bucket are reset, held up or slowed down",
    "refused": "the bucket refuses writes (503), and no file may grow (a full disk)",
    "lost-answer": "the bucket does a write, and its answer is lost",
    "late": "the bucket does a write 2 s after the connection is gone",
}
"""What is done to real processes, by the names of `--faults`."""


@dataclass(frozen=True, slots=True)
class Flow:
    """One mirror of the torture.

    Attributes:
        destination: Its kind.
        form: Of its objects; of a cluster `-`, or `translate` for new offsets.
        limits: Its `flush`.
    """

    destination: Destination
    form: Format
    limits: tuple[tuple[str, int], ...] = (
        ("max-time-ms", 200),
        ("max-bytes", 5_000),
        ("max-offsets", 500),
    )

    @property
    def name(self) -> str:
        """Of the mirror and of its folder or topic."""
        kind = self.destination.lower()
        return kind if self.form == "-" else f"{kind}-{self.form}"


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
"""What is copied where no configuration says otherwise."""

SIMULATED_ONLY: Final = {
    "translate": "simulated only: `offsets: translate` (the embedded broker has no transactions)",
    "snapshots": "simulated only: `compaction: log` (the topics here have records without keys)",
}
"""Forms of flows that real processes do not copy here, and why."""


@dataclass
class RealResult:
    """What became of it."""

    anomalies: list[tuple[str, Anomaly]] = field(default_factory=list)
    """With the copy in which each was found."""

    trials: int = 0
    kills: int = 0
    """Processes that ended by SIGKILL, at a point or at a moment."""

    missed: int = 0
    """Crash points that the killed process did not reach in time."""

    records: int = 0
    """Acknowledged by the source."""

    left_out: list[str] = field(default_factory=list)
    """What this machine cannot do."""

    seconds: float = 0


class _Stage:
    """The processes around the copiers."""

    def __init__(self, folder: Path, flows: Sequence[Flow], stack: contextlib.ExitStack) -> None:
        self.folder, self.flows, self._stack = folder, flows, stack
        self.left_out: list[str] = []
        self.source = self._source(stack)
        self.target = stack.enter_context(Broker(folder / "target", HOST))
        self.s3 = stack.enter_context(S3Server())
        self.s3_network = stack.enter_context(Proxy((HOST, 0), (HOST, self.s3.port)))
        self.files = folder / "archive"
        self.config = folder / "config.json"
        self.config.write_text(json.dumps({"mirrors": [self._mirror(flow) for flow in flows]}))
        load(self.config)  # before every copier refuses it
        self._count = 0

    def _source(self, stack: contextlib.ExitStack) -> Broker:
        folder = self.folder / "source"
        self.network: Proxy | None = None
        try:
            broker = stack.enter_context(Broker(folder, _BEHIND_PROXY, HOST))
            self.network = stack.enter_context(
                Proxy((HOST, broker.port), (_BEHIND_PROXY, broker.port))
            )
        except OSError:
            self.left_out.append(f"network to the source: this machine has no {_BEHIND_PROXY}")
            return stack.enter_context(Broker(self.folder / "plain-source", HOST))
        return broker

    @property
    def direct(self) -> str:
        """The source's own address."""
        return f"{self.source.host}:{self.source.port}"

    def _mirror(self, flow: Flow) -> dict[str, object]:
        mirror: dict[str, object] = {
            "name": flow.name,
            "source": {"bootstrap-servers": f"{HOST}:{self.source.port}"},
            "topic": _TOPIC,
            "partitions": "all",
        }
        if flow.destination == "Kafka":
            bootstrap = f"{HOST}:{self.target.port}"
            to = {"type": "kafka", "bootstrap-servers": bootstrap, "name": flow.name}
            return mirror | {"destinations": [to]}
        mirror |= {"format": flow.form, "flush": dict(flow.limits)}
        if flow.destination == "files":
            to = {"type": "filesystem", "root": str(self.files), "name": flow.name}
            return mirror | {"destinations": [to]}
        bucket: dict[str, object] = {
            "type": "s3",
            "name": flow.name,
            "bucket": BUCKET,
            "region": "us-east-1",
            "endpoint": f"http://{HOST}:{self.s3_network.port}",
            "path-style": True,
            "checksums": "when-required",
            "credentials": {"access-key-id": "torture", "secret-access-key": "torture"},
        }
        return mirror | {"destinations": [bucket]}

    def start(self, *arguments: str, crash_at: str = "") -> Copier:
        """Start a copier."""
        self._count += 1
        log = self.folder / f"copier-{self._count}.log"
        return self._stack.enter_context(Copier(self.config, log, *arguments, crash_at=crash_at))

    # -- what is there ---------------------------------------------------------------------------

    def names(self, flow: Flow, partition: int) -> list[str] | None:
        """The objects of a copy; None: it has none."""
        if flow.destination == "Kafka":
            return None
        if flow.destination == "S3":
            return self.s3.names(f"{flow.name}/{partition}")
        folder = self.files / flow.name / str(partition)
        return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []

    def rows(self, flow: Flow, partition: int) -> list[Row]:
        """The records of a copy."""
        if flow.destination == "Kafka":
            return read_topic(f"{HOST}:{self.target.port}", _TOPIC, partition)
        contents = [self._read(flow, partition, name) for name in self.names(flow, partition) or ()]
        if flow.form == "native":
            return read_batches(contents)
        extension = _EXTENSIONS[flow.form]
        return [row for data in contents for row in read_rows(extension, data)]

    def _read(self, flow: Flow, partition: int, name: str) -> bytes:
        if flow.destination == "S3":
            return self.s3.read(f"{flow.name}/{partition}/{name}")
        return (self.files / flow.name / str(partition) / name).read_bytes()


class RealTorture:
    """Trials against real processes.

    Args:
        folder: Empty; everything goes there.
        flows: What is copied.
        faults: Of `REAL_FAULTS`.
        trials: How many.
        seed: Decides the order of faults, points and moments; not what the machine makes of them.
        say: Is told of each trial.

    Attributes:
        result: What was found so far.
    """

    def __init__(  # noqa: PLR0913  # what the command was given
        self,
        folder: Path,
        *,
        flows: Sequence[Flow],
        faults: Sequence[str],
        trials: int,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._flows, self._faults = folder, flows, faults
        self._trials, self._seed, self._say = trials, seed, say
        self._chooser = Chooser(f"real {seed}")
        self.result = RealResult()
        self._histories = {
            (flow.name, number): History() for flow in flows for number in range(PARTITIONS)
        }
        points = {
            point
            for flow in flows
            for point in simulated_points(flow.destination, flow.form)
            if not point.startswith(("head.", "hole."))  # the source has all its records
        }
        self._points = sorted(points)
        self._chooser.shuffle(self._points)

    def run(self) -> RealResult:
        """All trials, a clean run, and the verdict."""
        began_ms = SYSTEM_CLOCK.monotonic_ms()
        with contextlib.ExitStack() as stack:
            stage = _Stage(self._folder, self._flows, stack)
            self.result.left_out += stage.left_out
            feeder = stack.enter_context(Feeder(stage.direct, _TOPIC, PARTITIONS, self._seed))
            for number in range(self._trials):
                fault = self._faults[number % len(self._faults)]
                self.result.trials += 1
                self._say(f"trial {number + 1} of {self._trials}: {REAL_FAULTS[fault]}")
                _TRIALS[fault](self, stage)
            feeder.stop()
            self._finish(stage)
            self.judge(stage, feeder)
        self.result.seconds = (SYSTEM_CLOCK.monotonic_ms() - began_ms) / 1000
        return self.result

    def _pause(self) -> None:
        SYSTEM_CLOCK.sleep_ms(self._chooser.randint(*_AT_WORK_MS))

    # -- trials ----------------------------------------------------------------------------------

    def _end(self, stage: _Stage, *copiers: Copier) -> None:
        """Kill them, and take in what they have reported: it must be there."""
        for copier in copiers:
            if copier.is_alive:
                copier.kill()
            if copier.child.returncode == -signal.SIGKILL:
                self.result.kills += 1
            elif copier.child.returncode:
                self._say(f"  a copier ended with {copier.child.returncode}: {_last(copier)}")
        for copier in copiers:
            for mirror, partition, position in copier.told():
                history = self._histories[mirror, partition]
                flow = next(flow for flow in self._flows if flow.name == mirror)
                history.reported(
                    copier.name,
                    position,
                    at_ms=SYSTEM_CLOCK.monotonic_ms(),
                    began_ms=copier.began_ms,
                    durable=_end_of(stage.names(flow, partition)),
                )
        for flow in self._flows:
            for partition in range(PARTITIONS):
                names = stage.names(flow, partition)
                if names is not None:
                    self._histories[flow.name, partition].listed(names)

    def _kill_at_point(self, stage: _Stage) -> None:
        point = self._points[self.result.trials % len(self._points)]
        copier = stage.start(crash_at=f"{point}#{self._chooser.randint(1, 6)}")
        if copier.end(_DIE_MS) is None:
            self.result.missed += 1
        self._end(stage, copier)

    def _kill_at_random(self, stage: _Stage) -> None:
        copier = stage.start()
        if self._chooser.random() < 0.8:  # noqa: PLR2004  # the others while it starts
            copier.await_progress()
        self._pause()
        self._end(stage, copier)

    def _stop(self, stage: _Stage) -> None:
        copier = stage.start()
        copier.await_progress()
        self._pause()
        copier.signal(signal.SIGTERM)
        copier.end()
        self._end(stage, copier)

    def _pause_one(self, stage: _Stage) -> None:
        first = stage.start()
        first.await_progress()
        self._pause()
        first.signal(signal.SIGSTOP)
        second = stage.start()
        second.await_progress(_PAUSE_MS + _DIE_MS)
        first.signal(signal.SIGCONT)
        self._pause()
        self._end(stage, first, second)

    def _run_two(self, stage: _Stage) -> None:
        both = (stage.start(), stage.start())
        for copier in both:
            copier.await_progress()
        self._pause()
        both[0].kill()
        self._pause()
        self._end(stage, *both)

    def _bounce_source(self, stage: _Stage) -> None:
        copier = stage.start()
        copier.await_progress()
        stage.source.kill()
        self._pause()
        stage.source.start()
        self._pause()
        self._end(stage, copier)

    def _trouble_network(self, stage: _Stage) -> None:
        copier = stage.start()
        copier.await_progress()
        network = self._chooser.choice((stage.network or stage.s3_network, stage.s3_network))
        kind = self._chooser.choice(("reset", "silence", "delay"))
        if kind == "reset":
            network.cut()
        network.is_silent = kind == "silence"
        network.delay_ms = 100 if kind == "delay" else 0
        SYSTEM_CLOCK.sleep_ms(_FAULT_MS)
        network.is_silent, network.delay_ms = False, 0
        self._pause()
        self._end(stage, copier)

    def _refuse(self, stage: _Stage) -> None:
        copier = stage.start()
        copier.await_progress()
        stage.s3.faults.extend(["refused"] * 3)
        if not copier.limit_files(_TINY_BYTES):
            self.result.left_out.append("full disk: this system cannot limit another process")
        SYSTEM_CLOCK.sleep_ms(_FAULT_MS)
        if copier.is_alive:
            copier.limit_files(-1)
        self._pause()
        self._end(stage, copier)

    def _lose_responses(self, stage: _Stage) -> None:
        self._spoil(stage, "lost-answer")

    def _response_late(self, stage: _Stage) -> None:
        self._spoil(stage, "late")

    def _spoil(self, stage: _Stage, fault: str) -> None:
        copier = stage.start()
        copier.await_progress()
        for _ in range(4):
            stage.s3.faults.append(fault)
            self._pause()
        self._end(stage, copier)

    # -- the end ---------------------------------------------------------------------------------

    def _finish(self, stage: _Stage) -> None:
        self._say("a clean run copies the rest")
        stage.s3.faults.clear()
        copier = stage.start("--until-now")
        code = copier.end(_FINISH_MS)
        self._end(stage, copier)
        if code != 0:
            why = f"the last run ended with {code}: {_last(copier)}"
            for history in self._histories.values():
                history.stuck(why)

    def judge(self, stage: _Stage, feeder: Feeder) -> None:
        """Compare every copy with its source, and the source with what it had acknowledged."""
        self.result.records = feeder.count
        for partition in range(PARTITIONS):
            rows = read_topic(stage.direct, _TOPIC, partition)
            written = feeder.acknowledged[partition]
            at_source = History().judge(
                Truth(rows=[written[at] for at in sorted(written)]),
                [row for row in rows if row.offset in written],
            )
            self.result.anomalies += [("source", anomaly) for anomaly in at_source]
            truth = Truth(rows=rows, end=rows[-1].offset + 1 if rows else 0)
            for flow in self._flows:
                found = self._histories[flow.name, partition].judge(
                    truth, stage.rows(flow, partition), names=stage.names(flow, partition)
                )
                self.result.anomalies += [(f"{flow.name}/{partition}", each) for each in found]


def _last(copier: Copier) -> str:
    lines = copier.log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else ""


def _end_of(names: list[str] | None) -> int | None:
    """How far an unbroken chain from 0 reaches."""
    if names is None:
        return None
    end = 0
    for name in names:
        parts = split_name(name)
        if parts is None or parts[0] != end:
            break
        end = parts[1] + 1
    return end


_TRIALS: Final[dict[str, Callable[[RealTorture, _Stage], None]]] = {
    "kill": RealTorture._kill_at_point,  # noqa: SLF001  # its own table
    "random-kill": RealTorture._kill_at_random,  # noqa: SLF001  # the same
    "pause": RealTorture._pause_one,  # noqa: SLF001  # the same
    "two-writers": RealTorture._run_two,  # noqa: SLF001  # the same
    "stop": RealTorture._stop,  # noqa: SLF001  # the same
    "source-down": RealTorture._bounce_source,  # noqa: SLF001  # the same
    "network": RealTorture._trouble_network,  # noqa: SLF001  # the same
    "refused": RealTorture._refuse,  # noqa: SLF001  # the same
    "lost-answer": RealTorture._lose_responses,  # noqa: SLF001  # the same
    "late": RealTorture._response_late,  # noqa: SLF001  # the same
}
