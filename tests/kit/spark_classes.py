"""Spark's classes in a form that a JVM maps instead of loading: half of its start.

Tests start Spark a hundred times. The archive (class data sharing, JDK 13 and later) is made once a
machine and kept beside the other downloads; a JVM that cannot use it starts as it would without.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pyspark

from kit.apache import cache_folder
from kit.machine import java

if TYPE_CHECKING:
    from pathlib import Path

_MAKE: Final = """
import sys
from logmirror.spark import SparkRunner

options = "-XX:ArchiveClassesAtExit=" + sys.argv[1]
runner = SparkRunner(
    master="local[2]",
    properties={"spark.driver.extraJavaOptions": options},
    execute="logmirror.executor:execute",
    warm_up="logmirror.executor:warm_up",
)
jvm = runner._context._gateway.proc
with runner:
    pass
jvm.stdin.close()  # its sign to end
jvm.wait(60)
"""


@functools.cache
def class_archive() -> Path:
    """Return the archive for this Java and this Spark; the first use on a machine makes it."""
    version = subprocess.run([java(), "-version"], capture_output=True, check=True).stderr
    identity = version + pyspark.__file__.encode() + pyspark.__version__.encode()
    path = cache_folder() / f"spark-{hashlib.sha256(identity).hexdigest()[:16]}.jsa"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "spark-lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of one test run may begin at once
            if not path.exists():
                made = path.with_suffix(".new")
                subprocess.run([sys.executable, "-c", _MAKE, str(made)], check=True, timeout=240)
                if made.exists():
                    made.rename(path)
    return path
