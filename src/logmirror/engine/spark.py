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

import gc
import importlib
import warnings
from typing import TYPE_CHECKING, Any, Final, Self

with warnings.catch_warnings():
    # PySpark warns about unknown versions of pandas, which the mirror does not use.
    warnings.simplefilter("ignore", FutureWarning)
    from pyspark import SparkContext
    from pyspark.errors import PySparkException

from logmirror.engine import first_tasks
from logmirror.engine.session import SessionStart
from logmirror.engine.session_folder import SessionFolder
from logmirror.errors import LogmirrorError, UnavailableError
from logmirror.mirror.ports import EngineLostError
from logmirror.mirror.stop_channel import StopChannel
from logmirror.mirror.units import units
from logmirror.stopping import LateError, StopRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from logmirror.mirror.follow import JobAddress
    from logmirror.mirror.ports import Job, SliceResult, Work

START_MAX_S: Final = 1800.0
"""Limit for a session's start, in seconds. A busy cluster may have to provide machines first."""

_FREEZE_AFTER: Final = (1, 2, 10)
_tasks_done = 0


class SparkRunner:
    """Runs slices on a Spark cluster or on this machine. Use as a context manager.

    Args:
        master: A Spark master URL. `local[N]` becomes `local[N,4]`, so that a lost worker's slices
            are retried.
        properties: Spark properties that override `session.SETTINGS`.
        execute: The executor's function that runs works, as `module:function`; the driver never
            imports it. Takes the works of one slot and the address of the stop channel; yields a
            SliceResult for each work.
        warm_up: A function that a new executor runs before the first works, in the same form.
        more_slots: How many slots a local master gets in addition to its own number.
        slots_max: Limit for the number of slots, at least 1. None: all slots of the cluster.
        log: File for the JVM's own output. None: a file that is deleted with the session.
        allow_plain: Whether tasks, which carry credentials, may go to a cluster in clear.
        stop: Ends the start early. None: nothing does.

    Raises:
        StoppedError: A stop was requested before the session was up. Nothing of it is left.
        UnavailableError: Spark did not start, or its cluster ran no task within 30 minutes.
        UsageError: There is no Java, or the master is invalid, or the cluster is not protected.
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
        allow_plain: bool = False,
        stop: StopRequest | None = None,
    ) -> None:
        self._execute, self._slots_max = execute, slots_max
        self._folder = SessionFolder()
        folder = self._folder.path
        start = self._start = SessionStart(
            master,
            properties,
            folder,
            log or folder / "spark.log",
            more_slots=more_slots,
            allow_plain=allow_plain,
        )

        def begin() -> SparkContext:
            self._context = start.begin()
            slots = range(self.slots)
            with first_tasks.reported(master):
                self._context.parallelize(slots, len(slots)).foreach(_WarmUp(warm_up))
            return self._context

        try:
            request = stop or StopRequest()
            self._context = request.unless_stopped(begin, start.abort, within_s=START_MAX_S)
            self._stop_channel = _stop_channel(self._context)
        except BaseException as error:
            start.abort()
            _forget_gateway()
            self._folder.remove()
            if isinstance(error, LateError):
                late = "Spark has not finished the first tasks in time"
                facts = {"master": master, "waited_s": round(START_MAX_S)}
                raise UnavailableError(late, hint=first_tasks.HINT, **facts) from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_channel.close()
        self._context.stop()
        gateway = self._context._gateway  # noqa: SLF001  # otherwise the JVM survives stop()
        if gateway is not None:
            gateway.shutdown()
        self._start.end_jvm()
        _forget_gateway()
        self._folder.remove()

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


def _forget_gateway() -> None:
    """Keep SparkContext from giving the next one in this process a JVM that is gone."""
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001  # it offers no other way


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


def _reason(error: Exception) -> str:
    try:
        lines = [line for line in str(error).splitlines() if line.strip()]
    except Exception:  # noqa: BLE001  # py4j requests the text from the JVM, which may have ended
        lines = []
    return lines[-1].strip() if lines else type(error).__name__
