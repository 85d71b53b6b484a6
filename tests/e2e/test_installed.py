"""deploy/install.sh: the installed program copies on Spark, as a user without other rights.

Everything is downloaded, built and installed, which takes minutes: at night only.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import pytest

from kit.judges.clients import Message, produce
from kit.runs.commands import QUIET, mirror, write_config
from kit.servers.machine import program

pytestmark = [pytest.mark.timeout(1500)]

SCRIPT: Final = Path(__file__).resolve().parents[2] / "deploy" / "install.sh"
UNPRIVILEGED: Final = 65534


def allow_writing(folder: Path, *, is_allowed: bool) -> None:
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | stat.S_IWUSR if is_allowed else mode & ~0o222)


def another_user() -> list[str]:
    """The prefix that runs a command as an unprivileged user, if permitted."""
    if os.getuid() != 0:
        return []
    ids = [f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups"]
    return [program("setpriv"), *ids, "--no-new-privs"]


def python_for(as_other: list[str]) -> str:
    """A Python that this user may start; ours may lie in a home that is closed."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        # By way of a shell: what `setpriv` itself starts, it starts with the rights of root.
        start = [*as_other, "sh", "-c", 'exec "$0" -c "" 2>/dev/null', python]
        if subprocess.run(start, check=False).returncode == 0:
            return python
    message = "no Python that another user may start"
    raise RuntimeError(message)


def test_what_the_script_installs_runs_on_spark_as_another_user(kafka_431):
    as_other = another_user()
    topic = kafka_431.create_topic("installed")
    produce(kafka_431.bootstrap, topic, [Message(None, b"one"), Message(None, b"two")])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        installed, own = folder / "logmirror", folder / "own"
        subprocess.run(
            [SCRIPT, installed],
            env={**os.environ, "PYTHON": python_for(as_other)},
            check=True,
            timeout=1200,
        )
        jars = {path.name for path in installed.glob("lib/python3*/site-packages/pyspark/jars/*")}
        assert any(name.startswith("spark-core") for name in jars)
        assert not any(name.startswith(("hive-", "derby", "rocksdbjni")) for name in jars)
        allow_writing(installed, is_allowed=False)
        own.mkdir()
        config = write_config(
            folder / "mirror.yaml", mirror(topic, kafka_431.bootstrap, own / "archive")
        )
        if as_other:
            os.chown(own, UNPRIVILEGED, UNPRIVILEGED)
        done = subprocess.run(
            [*as_other, installed / "bin/logmirror", "run", "--until-now", "-c", config],
            env={
                **QUIET,
                "PATH": os.environ["PATH"],
                "JAVA_HOME": os.environ["JAVA_HOME"],
                "TMPDIR": str(own),
                "NUMBA_CACHE_DIR": str(own / "kernels"),
            },
            cwd=own,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        status = subprocess.run(
            [*as_other, installed / "bin/logmirror", "status", "-c", config],
            env={"PATH": os.environ["PATH"], "NUMBA_CACHE_DIR": str(own / "kernels")},
            cwd=own,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        allow_writing(installed, is_allowed=True)

        assert done.returncode == 0, done.stderr
        assert status.returncode == 0, status.stderr
        assert topic in status.stdout
        assert len(list(own.glob("archive/*/0/*.parquet"))) == 1
        assert list(installed.glob("bin/pip*")) == []
