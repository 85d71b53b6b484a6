"""Goal: what an owner of a bucket reports and serves is never taken back, by it or by the next one.

Method: readers read from several brokers at every turn, by seeds and by plans. `bucket_watch` has
the rules; for each of them a fault is planted that it must find.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, Final

import pytest

from kit.runs.bucket_calls import REFUSED, Crashed
from kit.runs.bucket_pairs import World, drawn, history, kinds_of
from kit.runs.bucket_plans import FIRST, SECOND, Decision, Plan
from kit.tiers import PLANTED, sized
from logmirror.broker.bucket import logs
from logmirror.broker.bucket.chain import Coverage
from logmirror.broker.bucket.chain_writer import ChainWriter
from logmirror.broker.bucket.commits import BucketCommit
from logmirror.broker.bucket.journal import Journal, Submission
from logmirror.broker.bucket.logs import BucketLogs
from logmirror.broker.bucket.merging import Merger
from logmirror.broker.bucket.opening import Opening
from logmirror.broker.bucket.replacing import InBucket
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.topics import Topics
from logmirror.errors import FencedError
from logmirror.wire.records import decode_reference, encode_reference

if TYPE_CHECKING:
    from pathlib import Path

    from kit.runs.bucket_pairs import Bucket

pytestmark = pytest.mark.slow
_THIRD: Final = 3
SEEDS: Final = sized(40, 300, 10_000)
_MEMORY: Final = "/dev/shm"  # a new folder is created there


@pytest.fixture
def before(folder: Path) -> Bucket:
    """A bucket with some history."""
    return history(folder / "history")


@pytest.mark.thinned
@pytest.mark.timeout(sized(600, 600, 3_600))
def test_no_seed_misleads_a_reader(folder, before):
    crashed = fenced = merged = compacted = reads = 0
    for seed in range(SEEDS):
        world = drawn(seed, folder / str(seed), before)
        assert world.run() == [], f"seed {seed}"
        owners = world.bucket.owners
        crashed += any(type(one.end) is Crashed for one in owners)
        fenced += any(type(one.end) is FencedError for one in owners)
        merged += sum(one.merged for one in owners)
        compacted += sum(one.compacted for one in owners)
        reads += world.bucket.watch.reads
        if seed % 50 == 0:
            gc.collect()  # open files, which cycles hold
    assert min(crashed, fenced, merged, compacted) > SEEDS / 4
    assert reads > 20 * SEEDS


def plain(folder: Path, before: Bucket) -> Bucket:
    """A run in which nothing happens."""
    world = World(folder / "plain", Plan(), before)
    assert world.run() == []
    return world.bucket


def number_of(bucket: Bucket, kind: str, owner: int = FIRST) -> int:
    """The first request of a kind."""
    return kinds_of(bucket, owner).index(kind)


@PLANTED
def test_a_watermark_that_is_late_is_found(folder, before, monkeypatch):
    """W1: its producers have their responses already."""
    advance, last = PartitionLog._advance, {}  # noqa: SLF001  # the planted bug calls it

    def late(self: Any, *place: Any) -> None:
        advance(self, *last.get(self, place))
        last[self] = place

    monkeypatch.setattr(PartitionLog, "_advance", late)
    problems = World(folder / "run", Plan(), before).run()
    assert any("was acknowledged, and is read as None" in one for one in problems)


@PLANTED
@pytest.mark.parametrize("name", ["high_watermark", "durable"])
def test_a_watermark_that_follows_the_uploads_is_found(folder, before, monkeypatch, name):
    """W2: an upload that is late or fails takes it back."""
    uploaded = BucketCommit._uploaded  # noqa: SLF001  # the planted bug calls it

    def follow(self: Any, key: Any) -> None:
        uploaded(self, key)
        log = self._bucket.log_of(key)
        setattr(log, name, self._bucket.uploaded_end(log))

    monkeypatch.setattr(BucketCommit, "_uploaded", follow)
    problems = World(folder / "run", Plan(), before).run()
    assert any("A19" in one and "owner 1 reported" in one for one in problems)


@PLANTED
def test_a_response_before_the_commit_is_stored_is_found(folder, before, monkeypatch):
    """W3: what is reported as durable is not in the bucket."""
    submit = Journal.submit

    def early(self: Any, submission: Submission) -> None:
        submission.done(0, None)
        submit(self, submission._replace(done=lambda *_: None))

    monkeypatch.setattr(Journal, "submit", early)
    problems = World(folder / "run", Plan(), before).run()
    assert any("A16" in one for one in problems)


@PLANTED
def test_a_log_start_that_is_visible_before_it_is_durable_is_found(folder, before, monkeypatch):
    """W3: the next owner has the one before it."""
    row = number_of(plain(folder, before), "row create")

    async def early(self: Any, topic: Any, starts: dict[int, int]) -> Any:
        logs = [topic.logs[number] for number in starts]
        for log, start in zip(logs, starts.values(), strict=True):
            log.advance_start(start)
        self._store.set_log_starts(topic.name, starts)
        for log in logs:
            self._commits.remove_deleted(log)
        return logs

    monkeypatch.setattr(Topics, "_delete_records", early)
    assert World(folder / "run", Plan(), before).run() == []
    problems = World(folder / "late", Plan(crash=(FIRST, row, "before")), before).run()
    assert any("A19" in one for one in problems)


@PLANTED
def test_a_record_that_changes_is_found(folder, before, monkeypatch):
    """W4: the compacted segment has another one in its place."""
    replace = InBucket.replace

    async def change(self: Any, log: Any, cleaned: Any) -> Any:
        old = decode_reference(cleaned.path.read_bytes())
        new = [one._replace(value=one.value[::-1]) for one in old]
        batches = [encode_reference(new[at : at + 2]) for at in range(0, len(new), 2)]
        cleaned.path.write_bytes(b"".join(batches))
        return await replace(self, log, cleaned)

    monkeypatch.setattr(InBucket, "replace", change)
    problems = World(folder / "run", Plan(), before).run()
    assert any("A4" in one for one in problems)


@PLANTED
def test_sources_that_are_deleted_before_the_log_is_switched_over_are_found(
    folder, before, monkeypatch
):
    """W5: a reader cannot fetch them meanwhile, and in the end nothing is wrong."""
    prove = Merger._prove  # noqa: SLF001  # the planted bug calls it

    async def early(self: Any, log: Any, first: int, after: int) -> None:
        names = [one.path.name for one in log.segments if first <= one.first < after]
        self._bucket._delete_all(self._bucket.folder_of(log), names)  # noqa: SLF001  # it too
        await prove(self, log, first, after)

    monkeypatch.setattr(Merger, "_prove", early)
    problems = World(folder / "run", Plan(), before).run()
    assert problems
    assert all("could not be fetched" in one for one in problems)


@PLANTED
def test_a_local_copy_that_is_removed_before_its_object_exists_is_found(
    folder, before, monkeypatch
):
    """W5: an upload that fails makes records unreadable, until the next start."""
    submit = BucketLogs._submit_upload  # noqa: SLF001  # the planted bug calls it
    upload = number_of(plain(folder, before), "segment upload")

    def early(self: Any, *arguments: Any) -> None:
        _, _, segment, path, _ = arguments
        self.disk.keep(path, segment.size_bytes)
        submit(self, *arguments)

    monkeypatch.setattr(BucketLogs, "_submit_upload", early)
    plan = Plan(faults={(FIRST, upload): REFUSED})
    problems = World(folder / "run", plan, before).run()
    assert any("could not be fetched" in one for one in problems)


@PLANTED
def test_a_log_start_beyond_the_requested_one_is_found(folder, before, monkeypatch):
    """W6."""
    advance = PartitionLog.advance_start
    monkeypatch.setattr(PartitionLog, "advance_start", lambda self, at: advance(self, at + 1))
    problems = World(folder / "run", Plan(), before).run()
    assert any("log start" in one and "requested was" in one for one in problems)


@PLANTED
def test_records_that_are_served_before_they_are_durable_are_found(folder, before, monkeypatch):
    """W7: with `flush-on-ack`."""

    def written(self: Any) -> None:
        self._advance(self._tail, self._tail.size_bytes, self.log_end)

    monkeypatch.setattr(PartitionLog, "_written", written)
    problems = World(folder / "run", Plan(), before).run()
    assert any("readable up to" in one for one in problems)


def _removed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coverage, "_missing", lambda *_: False)


def _all_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChainWriter, "_is_ours", lambda *_: True)


def _unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    async def prove(*_: object) -> None:
        """Write no commit."""

    monkeypatch.setattr(Merger, "_prove", prove)


def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    list_all = Opening.list_all

    def without_a_check(self: Any, partitions: Any) -> None:
        self._owner.check = lambda: None
        list_all(self, partitions)
        del self._owner.check

    monkeypatch.setattr(Opening, "list_all", without_a_check)


def _not_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "upload", lambda *_: None)


@pytest.mark.parametrize("plant", [_removed_early, _all_are_ours, _unchecked, _not_uploaded])
def test_every_kind_of_loss_is_found_at_some_point(folder, before, monkeypatch, plant):
    """A paused first owner, at one point after the other."""
    count = len(kinds_of(plain(folder, before), FIRST))
    plant(monkeypatch)
    for pause in range(count):
        if World(folder / str(pause), Plan(pause=pause), before).run():
            return
    pytest.fail("nothing was found")


def test_a_start_that_was_paused_deletes_nothing(folder, before):
    """It does not know the rows of compacted segments that the next owner has written."""
    pause = number_of(plain(folder, before), "object listing")
    world = World(folder / "run", Plan(pause=pause), before)
    assert world.run() == []
    first, second, _ = world.bucket.owners
    assert isinstance(first.end, FencedError)
    assert second.compacted == 1
    happened = [one for one in world.bucket.happened if one.owner == FIRST]
    assert not [one for one in happened if one.kind.endswith("delete")]


class Order:
    """Lets owners run up to a request, one after the other; nothing fails."""

    def __init__(self, *stretches: tuple[int, int]) -> None:
        self._stretches = stretches

    def chosen(self, live: list[Any], counts: Any) -> Any:
        """See `Director.chosen`."""
        for number, end in self._stretches:
            for owner in live:
                if owner.number == number and counts[number] < end:
                    return owner
        return live[0]

    def decided(self, *_: object) -> Decision:
        """See `Director.decided`."""
        return Decision()


def test_a_start_that_was_paused_does_not_take_removed_commits_for_damage(folder, before):
    """The snapshot of the database is removed before it is read, and a change behind it is not."""
    work = ("seal", 0), ("seal", 1), ("append", 0), ("rest",), ("delete", 0, 1)
    pause = 1 + number_of(plain(folder, before), "bundle listing", SECOND)
    order = Order((FIRST, 1_000), (SECOND, pause), (_THIRD, 1_000))
    world = World(folder / "run", order, before, (work, (), ()))
    assert world.run() == []
    first, second, third, _ = world.bucket.owners
    assert isinstance(second.end, FencedError)
    assert first.end is third.end is None


def test_segments_are_replaced_after_a_fetch_that_failed(folder, before):
    """What could not be fetched for a merge ends that merge only."""
    fetch = number_of(plain(folder, before), "object read")
    world = World(folder / "run", Plan(faults={(FIRST, fetch): REFUSED}), before)
    assert world.run() == []
    first = world.bucket.owners[0]
    assert first.compacted == 1
