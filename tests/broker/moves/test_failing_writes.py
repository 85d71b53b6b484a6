"""Goal: writes that fail during a move leave the partition where it is, whole, and served.

Method: as in `test_failures`; calls of the copy, or of the system, fail as a disk does.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from broker.moves.test_failures import until_failed
from kit.runs.moving_log import KEY, Life, Rows, check, prepare, run
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.shadow import Shadow
from logmirror.broker.moves import copier, mover
from logmirror.broker.moves.copying import SegmentCopy
from logmirror.broker.moves.move import MoveState

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "_RETRY_S", 0)
    monkeypatch.setattr(copier, "_FIRST_S", 60)  # the model decides when a flush ends, not the time


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.move("E7", "E47", "E48", "E93")
@pytest.mark.parametrize(
    ("owner", "method"),
    [(SegmentCopy, "append"), (SegmentCopy, "finish"), (SegmentCopy, "sync"), (Shadow, "append")],
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_e47_a_target_that_fails_ends_the_move_which_can_be_requested_again(
    tmp_path, monkeypatch, owner, method, code
):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(3))

    async def work() -> None:
        await life.start()
        await life.write(9)
        with monkeypatch.context() as patch:
            if owner is Shadow:  # as `append` does when the disk fails
                failure = OSError(code, os.strerror(code))
                patch.setattr(Shadow, "append", lambda own, _: setattr(own, "failure", failure))
            else:
                patch.setattr(owner, method, failing(code))
            await life.move("b")
            for _ in range(200):
                await asyncio.sleep(0)  # slower than the copy
                if life.moves.all[0].state is MoveState.FOLLOWING:
                    await life.write(1)
        await until_failed(life)
        [failed] = life.moves.all
        assert failed.failure is not None
        assert str(tmp_path / "dirs" / "b") in str(failed.failure)
        assert life.place == "a"
        assert life.log.shadow is None
        assert life.log.failure is None
        await life.write(5)
        await life.move("b")
        await life.quiet()
        assert life.place == "b"
        await life.write(5)
        await life.commits.flushed(life.log, life.log.log_end)
        await life.moves.close()

    assert not run(life, work)
    check(life)
    assert life.acked == 2 * life.appended
    assert [path.name for path in (tmp_path / "dirs").glob("*/t/*")] == ["0"]


@pytest.mark.move("E48")
@pytest.mark.parametrize("code", [None, errno.ENOSPC, errno.EIO])
def test_e48_a_write_that_writes_less_is_continued_or_its_bytes_are_never_served(
    tmp_path, monkeypatch, code
):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(48))
    write, shortened = os.write, list[int]()

    def short(fd: int, data: memoryview) -> int:
        if "-future/" not in str(Path(f"/proc/self/fd/{fd}").readlink()):
            return write(fd, data)
        if code is not None and len(shortened) % 2:
            shortened.append(0)
            raise OSError(code, os.strerror(code))  # behind the first part of a batch
        shortened.append(len(data))
        return write(fd, data[: (len(data) + 1) // 2])

    async def work() -> None:
        await life.start()
        await life.write(30)
        await life.commits.flushed(life.log, life.log.log_end)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", short)
            await life.move("b")
            await (until_failed(life) if code is not None else life.quiet())
        if code is not None:
            assert life.place == "a"
            await life.move("b")
            await life.quiet()
        assert life.place == "b"
        await life.moves.close()

    assert not run(life, work)
    assert len(shortened) > 1
    check(life)
    assert life.acked == 2 * life.appended == life.log.log_end


@pytest.mark.move("E80", "E93")
@pytest.mark.parametrize("later", ["a", "c"])
@pytest.mark.parametrize("is_repaired", [True, False])
def test_an_old_folder_that_could_not_be_removed_is_removed_before_the_next_move(
    tmp_path, monkeypatch, later, is_repaired
):
    """Else the row of the next move replaces what says which of two folders is the partition."""
    root = prepare(tmp_path / "dirs")
    life, rename = Life(root, Rows(), random.Random(3)), Disk.rename

    async def work() -> None:
        await life.start()
        await life.write(9)

        def fails(disk: Disk, source: Path, target: Path) -> None:
            if target.name.endswith("-delete"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
            rename(disk, source, target)

        with monkeypatch.context() as patch:
            patch.setattr(Disk, "rename", fails)
            await life.move("b")
            await life.quiet()
            assert life.place == "b"
            assert (root / "a" / "t" / "0").is_dir()
            if not is_repaired:
                assert await life.moves.change([(KEY, life.log, root / later)]) == {life.log}
        if is_repaired:
            assert await life.moves.change([(KEY, life.log, root / later)]) == set()
            await life.write(5)
            await life.quiet()
        assert life.place == (later if is_repaired else "b")
        await life.commits.flushed(life.log, life.log.log_end)
        await life.moves.close()

    assert not run(life, work)
    check(life)
    left = tmp_path / "left"
    life.disk.after_power_loss(left, keep=lambda n: n, some=lambda: True)
    shutil.rmtree(root)
    left.rename(root)  # the row of a move names its target
    after = Life(root, life.rows, random.Random(3), appended=life.appended, acked=life.acked)

    async def start() -> None:
        await after.start()
        await after.quiet()
        assert after.place == life.place
        await after.moves.close()

    assert not run(after, start)
    check(after)
    assert [path.parts[-3] for path in root.glob("*/t/*")] == [life.place]
