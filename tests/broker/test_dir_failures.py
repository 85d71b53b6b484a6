"""Goal: exactly a log directory that cannot be written is taken offline.

Method: the real probe, on a disk whose calls fail or hang.
"""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from logmirror.broker import dir_failures
from logmirror.broker.dir_failures import DirFailures, StopLimit
from logmirror.broker.log.disk import Disk
from logmirror.broker.log_dirs.failures import LogDirError, end_of_broker, suggests_failure
from logmirror.broker.log_dirs.placement import PRIVATE, LogDirs
from logmirror.broker.state_store import Change, StateStore
from logmirror.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@pytest.fixture
def dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogDirs:
    monkeypatch.setattr(dir_failures, "PAUSE_S", 0)
    monkeypatch.setattr(dir_failures, "DEADLINE_S", 1)
    for name in ("a", "b"):
        (tmp_path / name / PRIVATE).mkdir(parents=True)
    return LogDirs([tmp_path / "a", tmp_path / "b"])


class BadDisk(Disk):
    """Its calls fail below some folders, if they have an error, or hang."""

    def __init__(self, *folders: Path, code: int = 0) -> None:
        super().__init__()
        self.folders, self.code, self.calls = folders, code, 0
        self.hangs = threading.Event()

    def write_synced(self, path: Path, parts: Iterable[bytes]) -> None:
        self.calls += 1
        if any(path.is_relative_to(folder) for folder in self.folders):
            if self.code:
                raise failure(self.code)
            self.hangs.wait(60)
        super().write_synced(path, parts)


def failure(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def found(
    dirs: LogDirs, disk: Disk, *paths: Path, code: int = errno.EIO, count: int = 1
) -> tuple[list[Path], DirFailures]:
    """Return what an error takes offline."""
    lost: list[Path] = []

    async def run() -> DirFailures:
        failures = DirFailures(
            dirs, disk, [dirs.on_disk[0]], lambda path, _: lost.append(path), StopLimit()
        )
        for _ in range(count):
            failures.suspect(failure(code), *paths)
        await asyncio.sleep(0)
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        return failures

    return lost, asyncio.run(run())


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE])
def test_a_directory_whose_probe_fails_is_offline_and_no_other(dirs, code):
    a, b = dirs.on_disk
    lost, failures = found(dirs, BadDisk(b, code=code), b / "t" / "0")

    assert lost == list(dirs.offline) == [b]
    assert not failures.fatal.done()
    assert dirs.place("t", 0).is_relative_to(a)
    assert dirs.place("t", 1).is_relative_to(a)


def test_a_directory_whose_probe_passes_stays_online(dirs):
    lost, _ = found(dirs, Disk(), dirs.on_disk[1] / "t" / "0")

    assert lost == []
    assert [*(dirs.on_disk[1] / PRIVATE).iterdir()] == []


def test_a_directory_that_is_missing_is_offline_and_not_created(dirs, tmp_path):
    b = dirs.on_disk[1]
    b.rename(tmp_path / "away")

    assert found(dirs, Disk(), b / "t" / "0")[0] == [b]
    with pytest.raises(FileNotFoundError):
        Disk().make_folder(b / "t" / "0")
    assert not b.exists()


def test_a_probe_that_hangs_has_failed_at_its_deadline(dirs):
    b = dirs.on_disk[1]
    disk = BadDisk(b)

    assert found(dirs, disk, b / "t" / "0")[0] == [b]
    assert "no response within 1 s" in str(dirs.offline[b])
    disk.hangs.set()


@pytest.mark.move("E47")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE])
def test_e47_a_full_disk_is_no_failure_of_its_directory(dirs, code):
    b = dirs.on_disk[1]
    disk = BadDisk(b, code=errno.EIO)
    assert found(dirs, disk, b / "t" / "0", code=code)[0] == []
    assert disk.calls == 0
    assert found(dirs, BadDisk(b, code=code), b / "t" / "0")[0] == []


def test_errors_at_the_same_time_are_one_probe(dirs):
    disk = BadDisk()
    found(dirs, disk, dirs.on_disk[1] / "t" / "0", count=100)

    assert disk.calls == 1


def test_an_error_of_an_unknown_file_probes_all_directories(dirs):
    a, b = dirs.on_disk

    assert found(dirs, BadDisk(b, code=errno.EIO))[0] == [b]
    assert found(dirs, BadDisk(a, code=errno.EIO))[0] == [a]


def test_the_broker_stops_without_a_vital_directory_or_without_any(dirs):
    a, b = dirs.on_disk
    _, failures = found(dirs, BadDisk(a, code=errno.EIO), a / "t" / "0")
    assert isinstance(failures.fatal.result(), LogDirError)
    assert "with its database or durable ends" in str(failures.fatal.result())

    dirs.offline[b] = dirs.offline.pop(a)
    assert end_of_broker(dirs, [a]) is None
    dirs.offline[a] = dirs.offline[b]
    assert "all its log directories" in str(end_of_broker(dirs, []))


def test_an_error_of_the_database_stops_the_broker(dirs):
    place = dirs.on_disk[0]

    async def run() -> LogDirError:
        store = StateStore(place / PRIVATE / "state.sqlite")
        disk = BadDisk(place, code=errno.EIO)
        failures = DirFailures(dirs, disk, [place], lambda *_: None, StopLimit())
        store.watch(failures.suspect)
        store._database._connection.execute("PRAGMA query_only=ON")  # noqa: SLF001  # as a disk that fails
        with pytest.raises(UnavailableError):
            await store.write([Change("group", b"a", b"1")])
        end = await asyncio.wait_for(failures.fatal, 10)
        store.close()
        return end

    assert "with its database or durable ends" in str(asyncio.run(run()))


def test_a_stop_that_hangs_ends_with_the_exit_code_of_a_failed_directory():
    code = """
import time
from logmirror.broker import dir_failures
dir_failures.STOP_S = 0.1
dir_failures.StopLimit().begin()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert done.returncode == 75
    assert b"holds up the stop" in done.stderr


def test_only_an_error_of_the_disk_suggests_a_failure():
    error = UnavailableError("record batch could not be written")
    assert not suggests_failure(error)
    error.__cause__ = failure(errno.EIO)
    assert suggests_failure(error)
    assert not suggests_failure(OSError("no number"))
    assert not suggests_failure(None)
