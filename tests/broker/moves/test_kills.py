"""Goal: a kill within a step of a move loses nothing, the move is completed, and nothing is left.

Method: a real broker, which ends itself by SIGKILL where a test wants it. What it has left on the
disk is looked at before the restart. The names of tests are those of the statements of moves.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from broker.moves.conftest import TwoDirs
from broker.moves.test_monitoring import shown
from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, NONE
from kit.judges.partition_client import EARLIEST, Appended, data_batch
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.machine import free_ports
from logmirror.broker.log.batch_scan import scan
from logmirror.broker.log.disk import Disk
from logmirror.failpoints import MOVE_POINTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

END = 6_000
OUT_OF_ORDER = 45
SEGMENTS = 2
"""Of the copy, before records up to here are deleted."""

DELETED_TO = 5_150


def of_producer(producer_id: int, sequence: int) -> bytes:
    """A batch of an idempotent producer, as large as `BATCH`."""
    return data_batch(100, producer_id=producer_id, epoch=0, sequence=sequence)


FIRST, LAST = of_producer(76, 0), of_producer(77, 0)
"""At the beginning and at the end of the partition."""


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
    following = of_producer(77, 100)
    with dirs.partition("t") as partition:
        assert contents(partition) == expected
        assert partition.produce(FIRST) == Appended(0, 0), "a duplicate"
        assert partition.produce(LAST) == Appended(0, END - 100), "a duplicate"
        assert partition.produce(of_producer(77, 101)).error == OUT_OF_ORDER
        assert partition.produce(following) == Appended(0, END)
    dirs.wait_in("t", dirs.b)
    dirs.wait_clean("t", "b/0")
    with dirs.partition("t") as partition:
        assert partition.produce(FIRST) == Appended(0, 0), "a duplicate"
        assert partition.produce(following) == Appended(0, END), "a duplicate"
        assert partition.produce(of_producer(77, 200)) == Appended(0, END + 100)
        found = contents(partition)
    assert found[:-200] == expected
    assert [offset for offset, _ in found[-200:]] == [*range(END, END + 200)]
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
def port() -> int:
    """Of the broker's metrics."""
    [found] = free_ports(1)
    return found


@pytest.fixture
def dirs(tmp_path: Path, port: int) -> Iterator[TwoDirs]:
    b = tmp_path / "b"
    with EmbeddedBroker(
        tmp_path / "broker", more_log_dirs=[str(b)], segment_bytes=20_000, monitoring_port=port
    ) as broker:
        yield TwoDirs(broker, broker.log_dir, b)


@pytest.fixture
def before(dirs: TwoDirs) -> list[tuple[int, bytes | None]]:
    """The records of a topic `t` in `a`."""
    dirs.create("t")
    with dirs.partition("t") as partition:
        for number, batch in enumerate([FIRST, *[BATCH] * 58, LAST]):
            assert partition.produce(batch) == Appended(0, 100 * number)
        return contents(partition)


@pytest.mark.slow
@pytest.mark.move("E67", "E69", "E71", "E72", "E73", "E74", "E76", "E85")
@pytest.mark.parametrize("point", MOVE_POINTS)
def test_e72_a_kill_at_each_step_loses_nothing_and_the_move_is_completed(dirs, before, point):
    restart(dirs, point)
    move_until_killed(dirs, point)
    restart(dirs)
    check_moved(dirs, before)


@pytest.mark.slow
@pytest.mark.move("E69", "E85")
@pytest.mark.parametrize("nth", [2, 4])
def test_e69_after_a_kill_only_what_is_not_complete_is_copied(dirs, port, before, nth):
    """What is copied is counted in bytes, and the complete files stay the same ones."""
    restart(dirs, f"move.copied#{nth}")
    move_until_killed(dirs, "move.copied")
    whole = {path.name: path.stat() for path in dirs.b.glob("t/*-future/[0-9]*")}
    assert len(whole) >= nth
    rest = 60 * len(BATCH) - sum(one.st_size for one in whole.values())
    assert 0 < rest < 60 * len(BATCH) - nth * 18_000
    restart(dirs)
    wait_until(lambda: shown(port)["_swaps_total"] == 1, what=lambda: str(shown(port)))
    assert shown(port)["_bytes_copied_total"] == rest
    kept = {name: (dirs.b / "t/0" / name).stat().st_ino for name in whole}
    assert kept == {name: one.st_ino for name, one in whole.items()}
    check_moved(dirs, before)


@pytest.mark.slow
@pytest.mark.move("E73", "E80", "E81", "E85")
@pytest.mark.parametrize("target", ["b", "a"])
@pytest.mark.parametrize("point", ["move.swapped", "move.named"])
def test_e81_the_order_of_the_directories_decides_nothing(dirs, before, point, target):
    """Killed while both have the partition's name; the next start has them in the other order."""
    old, new = (dirs.a, dirs.b) if target == "b" else (dirs.b, dirs.a)
    dirs.move("t", old)
    dirs.wait_clean("t", f"{old.name}/0")
    restart(dirs, point)
    with dirs.client() as client, contextlib.suppress(EOFError):  # killed before the response
        assert client.move_one("t", new) == NONE
    wait_killed(dirs, point)
    assert (old / "t/0").is_dir()
    assert (new / "t/0").is_dir()
    dirs.broker.kill()
    other = EmbeddedBroker(dirs.broker.folder, segment_bytes=20_000, more_log_dirs=[str(dirs.a)])
    other.log_dir = dirs.b
    with other:
        check_served(TwoDirs(other, dirs.a, dirs.b), new, before, END)
    dirs.broker.start()
    check_served(dirs, new, before, END + 100)


@pytest.mark.slow
@pytest.mark.move("E73", "E82", "E85")
def test_e73_without_its_old_directory_a_move_is_completed_by_the_start_that_has_it(dirs, before):
    """Killed at the swap. The start without the directory does not forget the old folder."""
    dirs.move("t", dirs.b)
    dirs.wait_clean("t", "b/0")
    restart(dirs, "move.swapped")
    with dirs.client() as client, contextlib.suppress(EOFError):  # killed before the response
        assert client.move_one("t", dirs.a) == NONE
    wait_killed(dirs, "move.swapped")
    dirs.broker.kill()
    away = dirs.b.with_name("away")
    dirs.b.rename(away)
    with EmbeddedBroker(dirs.broker.folder, segment_bytes=20_000) as alone:
        check_served(TwoDirs(alone, dirs.a, dirs.b), dirs.a, before, END)
    away.rename(dirs.b)
    assert dirs.names("t") == ["b/0", f"{dirs.a.name}/0"]
    dirs.broker.start()
    check_served(dirs, dirs.a, before, END + 100)


def check_served(
    dirs: TwoDirs, place: Path, expected: list[tuple[int, bytes | None]], end: int
) -> None:
    """A partition is in one place, with these records first, and its next offset is `end`."""
    with dirs.client() as client, dirs.partition("t") as partition:
        assert [*client.where("t")] == [str(place)]
        assert contents(partition)[: len(expected)] == expected
        assert partition.produce(BATCH) == Appended(0, end)
    dirs.wait_clean("t", f"{place.name}/0")


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
    restart(dirs)
    with dirs.partition("t") as partition:
        assert partition.produce(FIRST) == Appended(0, 0), "a duplicate, of deleted records"
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
