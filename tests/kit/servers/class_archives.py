"""Class data sharing archives of Java programs, which halve the start of a JVM.

Tests start Spark, brokers and console tools hundreds of times. An archive (JDK 13 and later) is
created once per machine and kept beside the other downloads. A JVM that cannot use it starts
without it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pyspark

from kit.servers.machine import cache_folder, java, temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SPARK: Final = """
import sys
from logmirror.engine.spark import SparkRunner

options = "-XX:ArchiveClassesAtExit=" + sys.argv[1]
runner = SparkRunner(
    master="local[2]",
    properties={"spark.driver.extraJavaOptions": options},
    execute="logmirror.engine.executor:execute",
    warm_up="logmirror.engine.executor:warm_up",
)
with runner:
    pass  # at its end the JVM ends in order, and writes the archive
"""


@functools.cache
def spark_classes() -> Path:
    """Return the archive for this Java and this Spark; the first use on a machine creates it."""

    def make(path: Path) -> None:
        subprocess.run(
            [sys.executable, "-c", _SPARK, str(path)],
            env={**os.environ, "TMPDIR": str(temporary_folder())},
            check=True,
            timeout=240,
        )

    path = archive_of("spark", f"{pyspark.__file__} {pyspark.__version__}")
    make_once(path, make)
    return path


def archive_of(name: str, what: str) -> Path:
    """Return the path of an archive for this Java, whether it exists or not.

    Args:
        name: Prefix of the file name.
        what: Exact identity of the classes.
    """
    identity = _java() + what.encode()
    return cache_folder() / f"{name}-{hashlib.sha256(identity).hexdigest()[:16]}.jsa"


def make_once(path: Path, make: Callable[[Path], None]) -> None:
    """Create an archive unless it exists.

    Args:
        path: The path from `archive_of`.
        make: Creates it at a path; if it creates none, the JVM starts without one.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of one test run may begin at once
            if not path.exists():
                made = path.with_suffix(".new")
                make(made)
                if made.exists():
                    made.rename(path)


@functools.cache
def _java() -> bytes:
    return subprocess.run([java(), "-version"], capture_output=True, check=True).stderr
