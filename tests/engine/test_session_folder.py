"""The directories of Spark sessions: those of ended sessions go, those of live ones stay.

The holders are other processes. What a sweep knows of them is their lock, never their process ID,
as if they ran in another container that shares the directory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from logmirror.engine.session_folder import SessionFolder

HOLDER = """
import sys, tempfile
from logmirror.engine.session_folder import SessionFolder
tempfile.tempdir = sys.argv[1]
folder = SessionFolder()
(folder.path / "blockmgr").mkdir()
(folder.path / "blockmgr" / "0").write_text("a block")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def holder(tmp_path):
    """A process with a session's directory, and its directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


def test_the_directory_of_a_live_process_is_kept_whatever_its_process_id(holder, monkeypatch):
    _, path = holder
    real = Path.exists
    # What a container with other process IDs sees of the owner: nothing.
    monkeypatch.setattr(
        Path, "exists", lambda self: not str(self).startswith("/proc/") and real(self)
    )

    SessionFolder().remove()

    assert (path / "blockmgr" / "0").read_text() == "a block"


def test_the_directory_of_a_killed_process_is_removed_at_the_next_start(holder):
    process, path = holder
    process.kill()
    process.wait()

    folder = SessionFolder()

    assert not path.exists()
    assert folder.path.exists()
    folder.remove()
    assert not folder.path.exists()


def test_the_directory_is_private_and_its_own(tmp_path):
    one, two = SessionFolder(), SessionFolder()

    assert one.path != two.path
    assert one.path.stat().st_mode & 0o777 == 0o700
    one.remove()
    assert two.path.exists()
    two.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_session_is_left_alone(tmp_path):
    """A directory whose owner is about to lock it, a link to another place, a file."""
    (tmp_path / "logmirror-spark-new").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (tmp_path / "logmirror-spark-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "logmirror-spark-file").touch()
    before = sorted(tmp_path.rglob("*"))

    SessionFolder().remove()

    assert sorted(tmp_path.rglob("*")) == before
