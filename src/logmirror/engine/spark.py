"""Spark: the session, and the tick that runs slices on it. Alone imports pyspark.

A tick is one RDD job: one task per slot, each task a list of slices, and the results collected.
Bytes go from socket to file inside one Python worker and never cross to the JVM; Spark schedules,
retries, distributes and isolates. What is cancelled is not stopped, and a lost executor's task may
run on beside its retry: exactly-once comes from claims at the destination, never from here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

with warnings.catch_warnings():
    # PySpark warns of a pandas that it does not know; the mirror uses none.
    warnings.simplefilter("ignore", FutureWarning)
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException

from logmirror.errors import LogmirrorError, UnavailableError, UsageError
from logmirror.mirror.follow import StopChannel
from logmirror.mirror.ports import EngineLostError
from logmirror.mirror.units import units

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from logmirror.mirror.ports import SliceResult, Work

_PRIVATE: Final = (
    "(?i)secret|passw|passphrase|token|credential|(access|account|api|private)[._-]?key"
)
"""Names of properties whose values are nobody's business; Spark's own pattern knows fewer."""

SETTINGS: Final[Mapping[str, str]] = {
    # TCP sockets between JVM and worker lack TCP_NODELAY, which costs some 40 ms a task.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.worker.reuse": "true",
    "spark.python.task.killTimeout": "200ms",
    "spark.python.daemon.module": "logmirror.engine.executor",
    # A second copy of a running task could only meet the first one's claims.
    "spark.speculation": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # What Spark's pages and event logs show as stars.
    "spark.redaction.regex": _PRIVATE,
    # The driver only plans; its heap need not grow with the data.
    "spark.driver.memory": "512m",
}
"""Ours; `spark.properties` of the configuration overrides each."""

_AT_LAUNCH: Final = (
    *("spark.app.name", "spark.archives", "spark.driver.", "spark.files", "spark.jars"),
    *("spark.kerberos.", "spark.kubernetes.", "spark.local.dir", "spark.master", "spark.submit."),
    *("spark.yarn.",),
)
"""How properties begin that Spark's launcher must know, and that everybody on the machine can read
in its command line. The others are told to the JVM when it runs."""
_DAEMON: Final = "spark.python.daemon.module"
_DEFAULT_MASTER: Final = "local[*]"
"""Of a configuration that names none; it gives way to one that `spark-submit` was told."""

_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""In the environment of programs that `spark-submit` starts."""

_LOCAL: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
_LOCAL_JVM: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Halves start-up and tick. Slows data that crosses the JVM, of which the mirror has none."""

_LOG4J: Final = """\
rootLogger.level = error
rootLogger.appenderRef.err.ref = err
appender.err.type = Console
appender.err.name = err
appender.err.target = SYSTEM_ERR
appender.err.layout.type = PatternLayout
appender.err.layout.pattern = %d{ISO8601} %p %c: %m%n
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""

_JAVA_HOMES: Final = (
    "usr/lib/jvm/*",
    "opt/java/*",
    "opt/homebrew/opt/openjdk*",
    "Library/Java/JavaVirtualMachines/*/Contents/Home",
)
_FOLDER: Final = "logmirror-spark-"
_SOCKET_FOLDER_MAX: Final = 60
"""A socket's whole name has 103 bytes at most on macOS; Spark's takes 43 behind its folder's."""

_FREEZE_AFTER: Final = (1, 2, 10)
_tasks_done = 0


class SparkRunner:
    """Runs slices on a Spark cluster or on this machine. Use as a context manager.

    Args:
        master: A Spark master URL. `local[N]` becomes `local[N,4]`, so that a lost worker's slices
            are tried again.
        properties: Spark properties that override `SETTINGS`.
        execute: What an executor does with pieces of work, as `module:function`; the driver
            never imports it. Takes the works of one slot and the address of the desk that ends
            leases; yields a SliceResult for each work.
        warm_up: What a new executor may do before the first piece, in the same form.
        slots_max: Use no more slots than this; None: all there are.
        log: Where the JVM's own output goes; None for a file that ends with the session.
    """

    def __init__(  # noqa: PLR0913  # the composition root passes each once
        self,
        *,
        master: str,
        properties: Mapping[str, str],
        execute: str,
        warm_up: str,
        slots_max: int | None = None,
        log: Path | None = None,
    ) -> None:
        self._execute, self._slots_max = execute, slots_max
        _sweep_folders()
        self._folder = tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{os.getpid()}-")
        try:
            folder = Path(self._folder.name)
            self._context = _start(master, properties, folder, log or folder / "spark.log")
            slots = range(self.slots)
            self._context.parallelize(slots, len(slots)).foreach(_WarmUp(warm_up))
            self._stop_channel = _stop_channel(self._context)
        except BaseException:
            self._folder.cleanup()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_channel.close()
        self._context.stop()
        gateway = self._context._gateway  # noqa: SLF001  # the JVM outlives stop() otherwise
        if gateway is not None:
            gateway.shutdown()
        self._folder.cleanup()

    @property
    def slots(self) -> int:
        """How many tasks run side by side; on a cluster, it grows as executors arrive."""
        try:
            slots = max(self._context.defaultParallelism, 1)
        except Exception as error:
            raise self._engine_failed(error) from error
        return min(slots, self._slots_max or slots)

    def run(self, works: Sequence[Work]) -> list[SliceResult]:
        """See `Runner.run`."""
        bins = pack(works, self.slots)
        task = _Task(self._execute, self._stop_channel.address)
        self._stop_channel.begin()
        try:
            return self._context.parallelize(bins, len(bins)).mapPartitions(task).collect()
        except (PySparkException, OSError) as error:
            raise self._engine_failed(error) from error
        except Exception as error:
            if type(error).__module__.startswith("py4j"):
                raise self._engine_failed(error) from error
            raise

    def end_follow_windows(self) -> None:
        """See `Runner.end_follow_windows`."""
        self._stop_channel.end()

    def _engine_failed(self, error: Exception) -> LogmirrorError:
        reason = _reason(error)
        if self._is_lost():
            return EngineLostError(
                "Spark has stopped and cannot be used any more",
                hint="start again: what was published stays, and the copy goes on from there. If "
                "it happens again, look at memory limits and at `--spark-log`",
                reason=reason,
            )
        return UnavailableError(
            "the Spark job failed",
            hint="what was published stays; the flows go on from their positions",
            reason=reason,
        )

    def _is_lost(self) -> bool:
        gateway = self._context._gateway  # noqa: SLF001  # it alone knows the JVM's process
        process = None if gateway is None else gateway.proc  # None: it is that of spark-submit
        if gateway is None or (process is not None and process.poll() is not None):
            return True
        try:
            return bool(self._context._jsc.sc().isStopped())  # noqa: SLF001  # no public way
        except Exception:  # noqa: BLE001  # whatever it says, it does not answer
            return True


def pack(works: Sequence[Work], slots: int) -> list[list[Work]]:
    """Spread work over at most `slots` bins of about equal weight, heaviest first.

    What reads the same stays together.
    """
    weighed = [(max(sum(w.estimated_bytes for w in unit), 1), unit) for unit in units(works)]
    bins: list[list[Work]] = [[] for _ in range(min(slots, len(weighed)))]
    weights = [0] * len(bins)
    for weight, unit in sorted(weighed, key=lambda item: -item[0]):
        lightest = weights.index(min(weights))
        bins[lightest] += unit
        weights[lightest] += weight
    return bins


class _Task:
    """What Spark pickles and runs in a worker for one bin."""

    def __init__(self, execute: str, stop_channel: tuple[str, int]) -> None:
        self._execute, self._stop_channel = execute, stop_channel

    def __call__(self, bins: Iterable[list[Work]]) -> Iterator[SliceResult]:
        # A worker whose input is left over is thrown away with all it has cached.
        works = [work for items in bins for work in items]
        execute = _named(self._execute)
        yield from execute(works, self._stop_channel)
        _freeze_after_task()


class _WarmUp:
    """The first task of every slot: as long as the loading takes, so that each gets a worker."""

    def __init__(self, warm_up: str) -> None:
        self._warm_up = warm_up

    def __call__(self, _slot: int) -> None:
        _named(self._warm_up)()


def _stop_channel(context: SparkContext) -> StopChannel:
    """Where executors reach the driver, as they reach its JVM."""
    conf = context.getConf()
    host = conf.get("spark.driver.host") or "127.0.0.1"
    try:
        return StopChannel(conf.get("spark.driver.bindAddress") or host, host)
    except OSError:  # an address that Java understands and we do not: leases are short then
        return StopChannel()


def _named(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _freeze_after_task() -> None:
    """Take what is loaded out of the collector's sight: Spark collects fully after every task.

    At the end of early tasks, because a freeze before the lazy imports is worth nothing.
    """
    global _tasks_done  # noqa: PLW0603  # one worker process, one counter
    _tasks_done += 1
    if _tasks_done in _FREEZE_AFTER:
        gc.collect()
        gc.freeze()


def _sweep_folders() -> None:
    """Remove the temporary folders of sessions that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if (
            owner.isdecimal()
            and not Path(f"/proc/{owner}").exists()
            and Path("/proc/self").exists()
        ):
            shutil.rmtree(folder, ignore_errors=True)


def _find_java() -> None:
    """Make sure that Spark's launcher finds a Java: in JAVA_HOME, on the PATH, or where they lie.

    Raises:
        UsageError: There is none.
    """
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        return
    for pattern in _JAVA_HOMES:
        for home in sorted(Path("/").glob(pattern), reverse=True):
            if (home / "bin" / "java").exists():
                os.environ["JAVA_HOME"] = str(home)
                return
    raise UsageError(
        "no Java found: Spark needs a runtime of version 17 or later",
        hint="install one (Debian: apt-get install openjdk-17-jre-headless; macOS: brew install "
        "openjdk@21) or name it in JAVA_HOME",
    )


def _start(master: str, properties: Mapping[str, str], folder: Path, log: Path) -> SparkContext:
    # Without this, workers take `python3` from the PATH, which may be another Python.
    python = properties.get("spark.pyspark.python", sys.executable)
    os.environ.setdefault("PYSPARK_PYTHON", python)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    begin = _join if _SUBMITTED in os.environ else _launch
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # as above: it looks for pandas late
            conf, gateway = begin(master, properties, folder, log)
            return SparkContext(conf=conf, gateway=gateway)
    except LogmirrorError:
        raise
    except Exception as error:
        raise UnavailableError(
            "Spark did not start",
            hint="Java 17 or later is needed (JAVA_HOME, or `java` on the PATH); "
            "try `java -version` and see the lines above",
            master=master,
            reason=str(error).strip().splitlines()[-1:],
            log=_last_lines(log),
        ) from error
    finally:
        # SparkContext replaces the SIGINT handler by one that kills the running tick.
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _join(
    master: str, properties: Mapping[str, str], folder: Path, _log: Path
) -> tuple[SparkConf, Any]:
    """For a program that `spark-submit` has started: its JVM, and what it was told.

    Its master gives way to one that we were told, its properties to those of our configuration.
    """
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415  # loads py4j only when used

    gateway = launch_gateway()  # type: ignore[no-untyped-call]  # py4j has no types
    conf = SparkConf(_jvm=gateway.jvm)
    told = conf.get("spark.master")
    master, is_local = _with_retries(told if told and master == _DEFAULT_MASTER else master)
    settings = {**SETTINGS, **(_LOCAL if is_local else {}), "spark.local.dir": str(folder)}
    for name, value in settings.items():
        conf.setIfMissing(name, value)
    conf.setMaster(master).set(_DAEMON, SETTINGS[_DAEMON])
    for name, value in properties.items():
        conf.set(name, value)
    return conf, gateway


def _launch(
    master: str, properties: Mapping[str, str], folder: Path, log: Path
) -> tuple[SparkConf, Any]:
    """A JVM of our own."""
    _find_java()
    settings = {**SETTINGS}
    master, is_local = _with_retries(master)
    # What a JVM puts down goes with the folder, also after `kill -9`: sockets, native libraries.
    temporary = f"-Djava.io.tmpdir={folder}"
    jvm_options = [f"-Dlog4j2.configurationFile=file:{_log4j_file(folder)}", temporary]
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= _LOCAL
        settings["spark.executor.extraJavaOptions"] = temporary
        if len(str(folder)) > _SOCKET_FOLDER_MAX:
            settings["spark.python.unix.domain.socket.dir"] = "/tmp"  # noqa: S108  # the shortest
        jvm_options.append(_LOCAL_JVM)
    settings["spark.local.dir"] = str(folder)
    settings |= properties
    given = settings.get("spark.driver.extraJavaOptions", "")
    settings["spark.driver.extraJavaOptions"] = " ".join([*jvm_options, given]).strip()
    conf = SparkConf(loadDefaults=True).setMaster(master).setAppName("logmirror")
    for name, value in settings.items():
        conf.set(name, value)
    return conf, _gateway(_launch_conf(conf), log)


def _launch_conf(conf: SparkConf) -> SparkConf:
    """What of a configuration stands in the command line of the JVM."""
    launch = SparkConf(loadDefaults=False)
    for name, value in conf.getAll():
        if name.startswith(_AT_LAUNCH) and not re.search(_PRIVATE, name):
            launch.set(name, value)
    return launch


def _last_lines(log: Path, count: int = 5) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _gateway(conf: SparkConf, log: Path) -> Any:  # noqa: ANN401  # py4j has no types
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415  # loads py4j only when used

    with log.open("ab") as output, _children_that_ignore(signal.SIGTERM):
        return launch_gateway(  # type: ignore[no-untyped-call]  # py4j has no types
            conf=conf, popen_kwargs={"stdout": output, "stderr": output}
        )


@contextlib.contextmanager
def _children_that_ignore(number: signal.Signals) -> Iterator[None]:
    """Let the JVM outlive a signal that is sent to all processes of a service, as systemd does.

    We need it for the last flush. It ends with us in any case: when its standard input closes.
    """
    is_inside = True

    def after_fork() -> None:
        if is_inside:
            signal.signal(number, signal.SIG_IGN)  # which a program keeps that is executed next

    os.register_at_fork(after_in_child=after_fork)
    try:
        yield
    finally:
        is_inside = False


def _with_retries(master: str) -> tuple[str, bool]:
    """`local[N]` as `local[N,4]`: Spark ignores spark.task.maxFailures there."""
    if not master.startswith("local"):
        return master, False
    if master.startswith("local-cluster"):
        return master, True
    inside = master.removeprefix("local").strip("[]") or "1"
    if "," in inside:
        return master, True
    if inside != "*" and not inside.isdecimal():
        raise UsageError(
            "not a Spark master",
            hint="use local[2], local[*], spark://host:port or another URL that Spark knows",
            master=master,
        )
    return f"local[{inside},4]", True


def _log4j_file(folder: Path) -> Path:
    path = folder / "log4j2.properties"
    path.write_text(_LOG4J)
    return path


def _reason(error: Exception) -> str:
    try:
        lines = [line for line in str(error).splitlines() if line.strip()]
    except Exception:  # noqa: BLE001  # py4j asks the JVM for the text, which may be gone
        lines = []
    return lines[-1].strip() if lines else type(error).__name__
