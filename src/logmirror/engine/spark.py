"""Spark: the session, and the jobs that run the slices of ticks.

A tick of a lane is one RDD job: one task per slot, a list of slices per task, and the results are
collected. Jobs of several lanes run side by side, each submitted by its lane's thread. The lanes
never submit more tasks than there are slots, so no task waits for another lane's.

A slot needs no core: most slices wait for the network. On a local master there are more slots than
cores, one for each further seat (`mirror.slots`).

Data goes from socket to file inside one Python worker and never enters the JVM. Spark schedules,
retries, distributes and isolates. A cancelled task may continue, and the task of a lost executor
may run in parallel with its retry: exactly-once is ensured at the destination, not here.
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
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

with warnings.catch_warnings():
    # PySpark warns about unknown versions of pandas, which the mirror does not use.
    warnings.simplefilter("ignore", FutureWarning)
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException

from logmirror.engine.local_master import with_retries, with_slots
from logmirror.errors import LogmirrorError, UnavailableError, UsageError
from logmirror.mirror.ports import EngineLostError
from logmirror.mirror.stop_channel import StopChannel
from logmirror.mirror.units import units

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from logmirror.mirror.follow import JobAddress
    from logmirror.mirror.ports import Job, SliceResult, Work

_PRIVATE: Final = (
    "(?i)secret|passw|passphrase|token|credential|(access|account|api|private)[._-]?key"
)
"""Pattern of property names whose values are secret. Spark's default pattern covers fewer."""

SETTINGS: Final[Mapping[str, str]] = {
    # TCP sockets between JVM and worker lack TCP_NODELAY, which costs about 40 ms per task.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.worker.reuse": "true",
    "spark.python.task.killTimeout": "200ms",
    "spark.python.daemon.module": "logmirror.engine.executor",
    # A speculative task would only conflict with the claims of the first one.
    "spark.speculation": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Redacted in Spark's UI and event logs.
    "spark.redaction.regex": _PRIVATE,
    # The driver only plans; its heap does not depend on the amount of data.
    "spark.driver.memory": "512m",
}
"""Defaults. `spark.properties` of the configuration overrides each."""

_AT_LAUNCH: Final = (
    *("spark.app.name", "spark.archives", "spark.driver.", "spark.files", "spark.jars"),
    *("spark.kerberos.", "spark.kubernetes.", "spark.local.dir", "spark.master", "spark.submit."),
    *("spark.yarn.",),
)
"""Prefixes of the properties that Spark's launcher needs. They are in the JVM's command line, which
all users of the machine can read. The others are sent to the JVM after its start."""

_DAEMON: Final = "spark.python.daemon.module"
_DEFAULT_MASTER: Final = "local[*]"
"""Master if the configuration has none. The one of `spark-submit` takes precedence over it."""

_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""Environment variable of programs that `spark-submit` starts."""

_LOCAL: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
_LOCAL_JVM: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Halves the time of start-up and of a tick. Slows down data in the JVM; the mirror has none."""

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
"""Limit in bytes. A socket's path has at most 103 on macOS, of which Spark's file name takes 43."""

_FREEZE_AFTER: Final = (1, 2, 10)
_tasks_done = 0


class SparkRunner:
    """Runs slices on a Spark cluster or on this machine. Use as a context manager.

    Args:
        master: A Spark master URL. `local[N]` becomes `local[N,4]`, so that a lost worker's slices
            are retried.
        properties: Spark properties that override `SETTINGS`.
        execute: The executor's function that runs works, as `module:function`; the driver never
            imports it. Takes the works of one slot and the address of the stop channel; yields a
            SliceResult for each work.
        warm_up: A function that a new executor runs before the first works, in the same form.
        more_slots: How many slots a local master gets in addition to its own number.
        slots_max: Limit for the number of slots, at least 1. None: all slots of the cluster.
        log: File for the JVM's own output. None: a file that is deleted with the session.

    Raises:
        UnavailableError: Spark did not start.
        UsageError: There is no Java, or the master is invalid.
    """

    def __init__(  # noqa: PLR0913  # the composition root passes each once
        self,
        *,
        master: str,
        properties: Mapping[str, str],
        execute: str,
        warm_up: str,
        more_slots: int = 0,
        slots_max: int | None = None,
        log: Path | None = None,
    ) -> None:
        self._execute, self._slots_max = execute, slots_max
        master = with_slots(master, more_slots)
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
        gateway = self._context._gateway  # noqa: SLF001  # otherwise the JVM survives stop()
        if gateway is not None:
            gateway.shutdown()
        # SparkContext would hand the next one in this process a JVM that is gone.
        SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001  # it offers no other way
        self._folder.cleanup()

    @property
    def slots(self) -> int:
        """How many tasks run in parallel. On a cluster it grows while executors start."""
        try:
            slots = max(self._context.defaultParallelism, 1)
        except Exception as error:
            raise self._engine_failed(error) from error
        return min(slots, self._slots_max or slots)

    def run(self, works: Sequence[Work], slots: int, job: Job) -> list[SliceResult]:
        """See `Runner.run`."""
        bins = pack(works, slots)
        try:
            with self._stop_channel.job(job, len(bins)) as address:
                task = _Task(self._execute, address)
                return self._context.parallelize(bins, len(bins)).mapPartitions(task).collect()
        except (PySparkException, OSError) as error:
            raise self._engine_failed(error) from error
        except Exception as error:
            if type(error).__module__.startswith("py4j"):
                raise self._engine_failed(error) from error
            raise

    def end_follow_windows(self, job: Job | None = None) -> None:
        """See `Runner.end_follow_windows`."""
        self._stop_channel.end(job)

    def _engine_failed(self, error: Exception) -> LogmirrorError:
        reason = _reason(error)
        if self._is_lost():
            return EngineLostError(
                "Spark has stopped and cannot be used any more",
                hint="start again: replication resumes from the position of each flow. If it "
                "happens again, check memory limits and the file of `--spark-log`",
                reason=reason,
            )
        return UnavailableError(
            "the Spark job failed",
            hint="published data is kept; the flows resume from their positions",
            reason=reason,
        )

    def _is_lost(self) -> bool:
        gateway = self._context._gateway  # noqa: SLF001  # only the gateway has the JVM's process
        process = None if gateway is None else gateway.proc  # None: spark-submit started the JVM
        if gateway is None or (process is not None and process.poll() is not None):
            return True
        try:
            return bool(self._context._jsc.sc().isStopped())  # noqa: SLF001  # there is no public API
        except Exception:  # noqa: BLE001  # any error means that the JVM does not respond
            return True


def pack(works: Sequence[Work], slots: int) -> list[list[Work]]:
    """Distribute works over at most `slots` bins of about equal weight, heaviest first.

    Works that read the same bytes stay together.
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

    def __init__(self, execute: str, job: JobAddress) -> None:
        self._execute, self._job = execute, job

    def __call__(self, bins: Iterable[list[Work]]) -> Iterator[SliceResult]:
        # Spark discards a worker that has not consumed its input, with all its caches.
        works = [work for items in bins for work in items]
        execute = _named(self._execute)
        yield from execute(works, self._job)
        _freeze_after_task()


class _WarmUp:
    """The first task of each slot. It takes as long as loading, so each slot starts a worker."""

    def __init__(self, warm_up: str) -> None:
        self._warm_up = warm_up

    def __call__(self, _slot: int) -> None:
        _named(self._warm_up)()


def _stop_channel(context: SparkContext) -> StopChannel:
    """Listen on the address under which executors reach the driver's JVM."""
    conf = context.getConf()
    host = conf.get("spark.driver.host") or "127.0.0.1"
    try:
        return StopChannel(conf.get("spark.driver.bindAddress") or host, host)
    except OSError:  # an address that only Java can bind: windows are short then
        return StopChannel()


def _named(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _freeze_after_task() -> None:
    """Exempt loaded objects from garbage collection: Spark runs a full one after each task.

    Called after some of the first tasks, because a freeze before lazy imports has no effect on
    them.
    """
    global _tasks_done  # noqa: PLW0603  # one worker process, one counter
    _tasks_done += 1
    if _tasks_done in _FREEZE_AFTER:
        gc.collect()
        gc.freeze()


def _sweep_folders() -> None:
    """Remove the temporary directories of sessions that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if (
            owner.isdecimal()
            and not Path(f"/proc/{owner}").exists()
            and Path("/proc/self").exists()
        ):
            shutil.rmtree(folder, ignore_errors=True)


def _find_java() -> None:
    """Set JAVA_HOME unless Spark's launcher finds Java in JAVA_HOME or on the PATH.

    Raises:
        UsageError: Java is not in the usual directories either.
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
            warnings.simplefilter("ignore", FutureWarning)  # as above: pandas is checked late
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
        # SparkContext replaces the SIGINT handler by one that kills the running tick. Only the main
        # thread may set handlers, here as there.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _join(
    master: str, properties: Mapping[str, str], folder: Path, _log: Path
) -> tuple[SparkConf, Any]:
    """Use the JVM and the configuration of `spark-submit`, which has started this program.

    The master and the properties of logmirror's configuration take precedence over them.
    """
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415  # loads py4j only when used

    gateway = launch_gateway()  # type: ignore[no-untyped-call]  # py4j has no types
    conf = SparkConf(_jvm=gateway.jvm)
    submitted = conf.get("spark.master")
    master, is_local = with_retries(
        submitted if submitted and master == _DEFAULT_MASTER else master
    )
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
    """Start a JVM."""
    _find_java()
    settings = {**SETTINGS}
    master, is_local = with_retries(master)
    # Sockets and native libraries of the JVM are deleted with this directory, also after `kill -9`.
    temporary = f"-Djava.io.tmpdir={folder}"
    jvm_options = [f"-Dlog4j2.configurationFile=file:{_log4j_file(folder)}", temporary]
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= _LOCAL
        settings["spark.executor.extraJavaOptions"] = temporary
        if len(str(folder)) > _SOCKET_FOLDER_MAX:
            settings["spark.python.unix.domain.socket.dir"] = "/tmp"  # noqa: S108  # the shortest path
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
    """Return the part of a configuration that goes into the JVM's command line."""
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
    """Start children that ignore a signal, which systemd sends to all processes of a service.

    The last flush needs the JVM. The JVM ends with this process in any case: when its standard
    input closes.
    """
    is_inside = True

    def after_fork() -> None:
        if is_inside:
            signal.signal(number, signal.SIG_IGN)  # exec() keeps SIG_IGN

    os.register_at_fork(after_in_child=after_fork)
    try:
        yield
    finally:
        is_inside = False


def _log4j_file(folder: Path) -> Path:
    path = folder / "log4j2.properties"
    path.write_text(_LOG4J)
    return path


def _reason(error: Exception) -> str:
    try:
        lines = [line for line in str(error).splitlines() if line.strip()]
    except Exception:  # noqa: BLE001  # py4j requests the text from the JVM, which may have ended
        lines = []
    return lines[-1].strip() if lines else type(error).__name__
