"""Goal: a kill within a step of a move loses nothing, the move is completed, and nothing is left.

Method: a real broker, which ends itself by SIGKILL where a test wants it. What it has left on the
disk is looked at before the restart. The names of tests are those of the statements of moves.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, NONE, fill
from kit.judges.partition_client import EARLIEST, Appended
from kit.runs.commands import wait_until
from logmirror.broker.log.batch_scan import scan
from logmirror.broker.log.disk import Disk

if TYPE_CHECKING:
    from pathlib import Path

    from broker.moves.conftest import TwoDirs

SEGMENTS = 2
"""Of the copy, before records up to here are deleted."""

DELETED_TO = 5_150


def restart(dirs: TwoDirs, point: str = "") -> None:
    """Kill the broker, if it lives, and start it; the next one ends at a failpoint."""
    dirs.broker.kill()
    dirs.broker.crash_at = point
    dirs.broker.start()


def wait_killed(dirs: TwoDirs, point: str) -> None:
    wait_until(lambda: not dirs.broker.alive, what=lambda: f"a kill at {point}")


def move_until_killed(dirs: TwoDirs, point: str) -> None:
    with dirs.client() as client, contextlib.suppress(EOFError):  # killed before the response
        assert client.move_one("t", dirs.b) == NONE
    wait_killed(dirs, point)


def check_moved(dirs: TwoDirs, expected: list[tuple[int, bytes | None]]) -> None:
    """After the restart: all is there once, the move is completed, and nothing is left of it."""
    end = 6_000
    with dirs.partition("t") as partition:
        assert contents(partition) == expected
        assert partition.produce(BATCH) == Appended(0, end)
    dirs.wait_in("t", dirs.b)
    dirs.wait_clean("t", "b/0")
    with dirs.partition("t") as partition:
        found = contents(partition)
    assert found[:-100] == expected
    assert [offset for offset, _ in found[-100:]] == [*range(end, end + 100)]
    wait_until(lambda: not left(dirs), what=lambda: f"no other files: {left(dirs)}")


def left(dirs: TwoDirs) -> list[str]:
    """Files in the partition's folder that are not of the log."""
    names = [path.name for path in (dirs.b / "t/0").iterdir()]
    return [name for name in names if not name.endswith((".batches", ".open", ".producers"))]


def torn(path: Path) -> bool:
    """Whether a file ends within a batch."""
    file = Disk().open_for_reading(path)
    ends = [batch.end for batch in scan(file, 0, contiguous=False)]
    return max(ends, default=0) < path.stat().st_size


@pytest.fixture
def before(dirs: TwoDirs) -> list[tuple[int, bytes | None]]:
    """The records of a topic `t` in `a`."""
    dirs.create("t")
    fill(dirs, "t")
    with dirs.partition("t") as partition:
        return contents(partition)


@pytest.mark.slow
@pytest.mark.move("E68", "E85")
@pytest.mark.parametrize("nth", [1, 3])
def test_e68_a_kill_within_a_batch_of_the_copy_loses_nothing(dirs, before, nth):
    """The next start is killed, too: while it removes what the first one has not completed."""
    restart(dirs, f"move.torn#{nth}")
    move_until_killed(dirs, "move.torn")
    [future] = dirs.b.glob("t/*-future")
    parts = [*future.glob(".*.part")]
    assert [torn(path) for path in parts].count(True) == 1
    assert not any(torn(path) for path in future.glob("[0-9]*"))
    restart(dirs, "move.emptied")
    wait_killed(dirs, "move.emptied")
    restart(dirs)
    check_moved(dirs, before)


@pytest.mark.slow
@pytest.mark.move("E34", "E35", "E70", "E85")
@pytest.mark.parametrize("nth", [1, 2])
def test_e70_a_kill_within_the_reset_of_a_copy_loses_and_revives_nothing(dirs, before, nth):
    """Records are deleted up to an offset that the copy has not reached."""
    restart(dirs, f"move.dropped#{nth}")
    dirs.limit(1)
    with dirs.client() as client, dirs.partition("t") as partition:
        assert client.move_one("t", dirs.b) == NONE
        wait_until(lambda: len(dirs.names("t")) == 2, what=lambda: "the copy")
        for rate in range(2, 100):  # a batch of the next one is due in half an hour
            if len(copied := set(dirs.b.glob("t/*-future/[0-9]*"))) == SEGMENTS:
                break
            lag = client.where("t")[str(dirs.b)].lag
            dirs.limit(rate)
            wait_until(
                lambda lag=lag: client.where("t")[str(dirs.b)].lag < lag,  # type: ignore[misc]  # a default
                what=lambda: f"another batch: {client.where('t')}",
            )
        assert partition.delete_records(DELETED_TO) == (0, DELETED_TO)
        assert 6_000 - client.where("t")[str(dirs.b)].lag < DELETED_TO
        dirs.limit(None)
    wait_killed(dirs, "move.dropped")
    assert len(copied & set(dirs.b.glob("t/*-future/[0-9]*"))) == SEGMENTS - nth
    restart(dirs)
    check_moved(dirs, before[DELETED_TO:])
    with dirs.partition("t") as partition:
        assert partition.list_offset(EARLIEST)[2] == DELETED_TO
        assert partition.fetch(DELETED_TO - 1).error_code == 1


@pytest.mark.slow
@pytest.mark.move("E73", "E76", "E85")
@pytest.mark.parametrize("point", ["move.swapped", "move.done"])
def test_e76_a_kill_before_the_source_is_removed_leaves_no_mark(dirs, before, point):
    """The file that shows of which move the copy is, which has the partition's name by then."""
    restart(dirs, point)
    move_until_killed(dirs, point)
    assert "b/0" in dirs.names("t")
    assert len(dirs.names("t")) == 2
    restart(dirs)
    check_moved(dirs, before)


@pytest.mark.slow
@pytest.mark.move("E75", "E85")
@pytest.mark.parametrize("nth", [1, 4])
def test_e75_a_kill_while_the_source_is_removed_leaves_nothing_of_it(dirs, before, nth):
    restart(dirs, f"move.removed#{nth}")
    move_until_killed(dirs, "move.removed")
    rest = {path.name for path in dirs.a.glob("t/*-delete/*")}
    whole = {path.name for path in (dirs.b / "t/0").iterdir()}
    assert rest < whole
    assert len(rest) == len(whole) - nth
    assert not (dirs.a / "t/0").exists()
    restart(dirs)
    check_moved(dirs, before)
