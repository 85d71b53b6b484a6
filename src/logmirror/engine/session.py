"""The Spark session: which properties it has, where it comes from, and how its start is ended.

`logmirror run` starts a JVM. Under `spark-submit` the JVM has started this program, and its master
and properties apply.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import warnings
from typing import TYPE_CHECKING, Any, Final

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway

from logmirror.engine.jvm import PORT, Jvm, find_java
from logmirror.engine.local_master import with_retries, with_slots
from logmirror.errors import LogmirrorError, UnavailableError, UsageError
from logmirror.stopping import StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

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

_LOCAL: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Every user of the machine can connect to the JVM's ports; Spark makes a secret for itself.
    "spark.authenticate": "true",
}
_CLUSTER_GRACE_S: Final = 5.0
"""How long a JVM whose start is ended has to leave its cluster in order, in seconds."""

_EXIT_S: Final = 30.0
"""Limit for the JVM to end after its session was stopped, in seconds. It takes 0.2 s."""

_AUTHENTICATION: Final = "spark.authenticate"
_ENCRYPTION: Final = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled")
"""Properties of which a cluster needs the first one, and one of the others."""

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

_SOCKET_FOLDER_MAX: Final = 60
"""Limit in bytes. A socket's path has at most 103 on macOS, of which Spark's file name takes 43."""


class SessionStart:
    """The start of a session. Use once.

    Args:
        master: A Spark master URL. `local[N]` becomes `local[N,4]`.
        properties: Spark properties that override `SETTINGS`.
        folder: A private directory.
        log: File for the JVM's own output.
        more_slots: How many slots a local master gets in addition to its own number.
        allow_plain: Whether a cluster may receive tasks in clear.

    Raises:
        UsageError: The master is invalid.
    """

    def __init__(  # noqa: PLR0913  # the runner passes each once
        self,
        master: str,
        properties: Mapping[str, str],
        folder: Path,
        log: Path,
        *,
        more_slots: int = 0,
        allow_plain: bool = False,
    ) -> None:
        self._more_slots = more_slots
        self._master, self._is_local = with_retries(with_slots(master, more_slots))
        self._is_default = master == _DEFAULT_MASTER
        self._properties, self._folder, self._log = properties, folder, log
        self._allow_plain = allow_plain
        self._jvm = Jvm()
        self._is_aborted = False

    def begin(self) -> SparkContext:
        """Start the session.

        Raises:
            StoppedError: `abort` was called first.
            UnavailableError: Spark did not start.
            UsageError: There is no Java, or the cluster would receive tasks in clear.
        """
        # Without this, workers take `python3` from the PATH, which may be another Python.
        python = self._properties.get("spark.pyspark.python", sys.executable)
        os.environ.setdefault("PYSPARK_PYTHON", python)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        connect = self._join if PORT in os.environ else self._launch
        try:
            with warnings.catch_warnings():
                # PySpark warns about unknown versions of pandas, which the mirror does not use.
                warnings.simplefilter("ignore", FutureWarning)
                conf, gateway = connect()
                if not self._is_local and not self._allow_plain:
                    check_protected(conf.get)
                context = SparkContext(conf=conf, gateway=gateway)
        except (LogmirrorError, StoppedError):
            raise
        except Exception as error:
            raise UnavailableError(
                "Spark did not start",
                hint="Java 17 or later is needed (JAVA_HOME, or `java` on the PATH); "
                "try `java -version` and see the lines above",
                master=self._master,
                reason=str(error).strip().splitlines()[-1:],
                log=_last_lines(self._log),
            ) from error
        if self._is_aborted:  # in a JVM of `spark-submit`, which waits for the end of its session
            context.stop()
            raise StoppedError
        return context

    def abort(self) -> None:
        """End the start: its JVM is gone afterwards, unless `spark-submit` has started it."""
        self._is_aborted = True
        self._jvm.end(0 if self._is_local else _CLUSTER_GRACE_S)

    def end_jvm(self) -> None:
        """Wait until the JVM of a session that was stopped has ended."""
        self._jvm.end(_EXIT_S)

    def _join(self) -> tuple[SparkConf, Any]:
        """Use the JVM and the configuration of `spark-submit`, which has started this program.

        The master and the properties of logmirror's configuration take precedence over them.
        """
        gateway = launch_gateway()  # type: ignore[no-untyped-call]  # py4j has no types
        conf = SparkConf(_jvm=gateway.jvm)
        submitted = conf.get("spark.master")
        if submitted and self._is_default:
            master = with_slots(submitted, self._more_slots)
            self._master, self._is_local = with_retries(master)
        settings = {**SETTINGS, **self._local(), "spark.local.dir": str(self._folder)}
        for name, value in settings.items():
            conf.setIfMissing(name, value)
        conf.setMaster(self._master).set(_DAEMON, SETTINGS[_DAEMON])
        for name, value in self._properties.items():
            conf.set(name, value)
        return conf, gateway

    def _launch(self) -> tuple[SparkConf, Any]:
        """Start a JVM."""
        find_java()
        settings = {**SETTINGS, **self._local()}
        # Sockets and native libraries of the JVM are deleted with this directory.
        temporary = f"-Djava.io.tmpdir={self._folder}"
        jvm_options = [f"-Dlog4j2.configurationFile=file:{_log4j_file(self._folder)}", temporary]
        if self._is_local:
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            settings["spark.executor.extraJavaOptions"] = temporary
            if len(str(self._folder)) > _SOCKET_FOLDER_MAX:
                settings["spark.python.unix.domain.socket.dir"] = "/tmp"  # noqa: S108  # the shortest path
            jvm_options.append(_LOCAL_JVM)
        settings |= {"spark.local.dir": str(self._folder), "spark.app.name": "logmirror"}
        settings |= {"spark.master": self._master, **self._properties}
        given = settings.get("spark.driver.extraJavaOptions", "")
        settings["spark.driver.extraJavaOptions"] = " ".join([*jvm_options, given]).strip()
        gateway = self._jvm.start(_at_launch(settings), self._folder, self._log)
        conf = SparkConf(_jvm=gateway.jvm)  # with those of `spark-defaults.conf`
        for name, value in settings.items():
            conf.set(name, value)
        return conf, gateway

    def _local(self) -> dict[str, str]:
        if not self._is_local:
            return {}
        if self._master.startswith("local-cluster"):  # for which Spark makes no secret
            return {**_LOCAL, "spark.authenticate.secret": secrets.token_hex(32)}
        return dict(_LOCAL)


def check_protected(get: Callable[[str], str | None]) -> None:
    """Raise unless a cluster authenticates its processes, and encrypts what they exchange.

    Each task carries the credentials of its clusters and buckets, unless executors resolve them.
    Without authentication, whatever reaches a port of the driver can run code in it.

    Args:
        get: Returns the value of a Spark property. None: it is not set.

    Raises:
        UsageError: A property is missing.
    """

    def is_true(name: str) -> bool:
        return (get(name) or "").lower() == "true"

    missing = [] if is_true(_AUTHENTICATION) else [_AUTHENTICATION]
    missing += [] if any(map(is_true, _ENCRYPTION)) else [_ENCRYPTION[0]]
    if missing:
        raise UsageError(
            "the Spark cluster is not protected: others could read tasks and the credentials in "
            "them, or run code in the driver",
            hint="set the missing properties to true, here and on the cluster: "
            "docs/deploy/spark-submit.md#security. In a network that only you can read, "
            "`spark: {allow-plain: true}` consents",
            master=get("spark.master"),
            missing=missing,
        )


def _at_launch(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the properties that go into the JVM's command line."""
    return {
        name: value
        for name, value in settings.items()
        if name.startswith(_AT_LAUNCH) and not re.search(_PRIVATE, name)
    }


def _last_lines(log: Path, count: int = 5) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _log4j_file(folder: Path) -> Path:
    path = folder / "log4j2.properties"
    path.write_text(_LOG4J)
    return path
