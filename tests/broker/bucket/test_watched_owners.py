"""Goal: what an owner of a bucket reports and serves is never taken back, by it or by the next one.

Method: readers read from several brokers at every turn, by seeds and by plans. `bucket_watch` has
the rules, and `bucket_clients` those of idempotent and transactional producers; for each of them a
fault is planted that it must find.
"""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pytest

from kit.runs import bucket_requests
from kit.runs.bucket_calls import REFUSED, Crashed
from kit.runs.bucket_pairs import World, drawn, history, kinds_of
from kit.runs.bucket_plans import FIRST, SECOND, Decision, Plan
from kit.tiers import PLANTED, sized
from logmirror.broker.bucket import logs, opening
from logmirror.broker.bucket.chain import Coverage
from logmirror.broker.bucket.chain_writer import ChainWriter
from logmirror.broker.bucket.commits import BucketCommit
from logmirror.broker.bucket.journal import Journal, Submission
from logmirror.broker.bucket.logs import BucketLogs
from logmirror.broker.bucket.merging import Merger
from logmirror.broker.bucket.opening import Opening
from logmirror.broker.bucket.replacing import InBucket
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.log.partition_transactions import Marker, PartitionTransactions
from logmirror.broker.log.producer_state import ProducerState
from logmirror.broker.topics import Topics
from logmirror.errors import FencedError
from logmirror.wire.records import decode_reference, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.runs.bucket_pairs import Bucket

pytestmark = pytest.mark.slow
_THIRD: Final = 3
SEEDS: Final = sized(40, 300, 10_000)
_PLANTED_SEEDS: Final = 100
_OFTEN: Final = ("duplicate", "duplicate of another owner", "committed", "aborted")
_SELDOM: Final = ("REQUEST_TIMED_OUT", "KAFKA_STORAGE_ERROR", "OUT_OF_ORDER_SEQUENCE_NUMBER")
"""What happens to idempotent producers. The last one comes from replaced owners, or without
flushes."""


@pytest.fixture
def before(folder: Path) -> Bucket:
    """A bucket with some history."""
    return history(folder / "history")


@pytest.mark.thinned
@pytest.mark.timeout(sized(600, 600, 3_600))
def test_no_seed_misleads_a_reader(folder, before):
    crashed = fenced = merged = compacted = reads = 0
    clients: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = drawn(seed, folder / str(seed), before)
        assert world.run() == [], f"seed {seed}"
        owners = world.bucket.owners
        crashed += any(type(one.end) is Crashed for one in owners)
        fenced += any(type(one.end) is FencedError for one in owners)
        merged += sum(one.merged for one in owners)
        compacted += sum(one.compacted for one in owners)
        reads += world.bucket.watch.reads
        clients += world.bucket.clients.happened
        if seed % 50 == 0:
            gc.collect()  # open files, which cycles hold
    assert min(crashed, fenced, merged, compacted) > SEEDS / 4
    assert reads > 20 * SEEDS
    assert min(clients[one] for one in _OFTEN) > SEEDS / 4
    assert min(clients[one] for one in _SELDOM) > 0


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

    async def early(self: Any, topic: Any, starts: dict[int, int], _: Any) -> Any:
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


def is_found(problem: str, folder: Path, before: Bucket) -> bool:
    """Whether some seed finds a problem."""
    return any(
        problem in one
        for seed in range(_PLANTED_SEEDS)
        for one in drawn(seed, folder / str(seed), before).run()
    )


def _after_a_start(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[PartitionLog], object]
) -> None:
    open_log = Opening.open_log

    def planted(self: Any, *arguments: Any) -> Any:
        opened = open_log(self, *arguments)
        plant(opened.log)
        return opened

    monkeypatch.setattr(Opening, "open_log", planted)


def _duplicates(monkeypatch: pytest.MonkeyPatch, **changed: Callable[[int], int]) -> None:
    find = ProducerState.find_duplicate

    def planted(self: Any, *arguments: Any, **more: Any) -> Any:
        known = find(self, *arguments, **more)
        if known is None:
            return None
        return known._replace(**{name: new(getattr(known, name)) for name, new in changed.items()})

    monkeypatch.setattr(ProducerState, "find_duplicate", planted)


def _none_after_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    _after_a_start(monkeypatch, lambda log: setattr(log, "producers", ProducerState()))


def _none_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProducerState, "from_bytes", lambda *_: ProducerState())


def _none_of_deleted_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "read_producers", lambda *_: None)


@PLANTED
@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (_none_after_a_start, "is behind"),
        (_none_stored, "is behind"),
        (_none_of_deleted_records, "another response had"),
    ],
)
def test_producers_that_a_takeover_does_not_restore_are_found(
    folder, before, monkeypatch, plant, problem
):
    """C1, C2: a duplicate is stored."""
    plant(monkeypatch)
    assert is_found(problem, folder, before)


@PLANTED
def test_producers_without_their_last_batch_are_found(folder, before, monkeypatch):
    """C3: the next batch is out of order for the next owner."""

    def forget(log: PartitionLog) -> None:
        for producer_id, known in log.producers.items():
            log.producers._producers[producer_id] = known._replace(batches=known.batches[:-1])  # noqa: SLF001  # the planted bug

    _after_a_start(monkeypatch, forget)
    assert is_found("out of order", folder, before)


@PLANTED
@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"base_offset": lambda at: at + 1}, "another response had"),
        ({"last_offset": lambda _: -1}, "is read as None"),
        ({"last_offset": lambda at: at + 1_000}, "is not finished"),
    ],
    ids=["of another offset", "before it is readable", "never"],
)
def test_a_wrong_response_for_a_duplicate_is_found(folder, before, monkeypatch, changed, problem):
    """C2, C4."""
    _duplicates(monkeypatch, **changed)
    assert is_found(problem, folder, before)


@PLANTED
def test_a_last_stable_offset_beyond_an_open_transaction_is_found(folder, before, monkeypatch):
    """C5."""
    monkeypatch.setattr(PartitionTransactions, "stable_end", lambda _, end, __: end)
    assert is_found("undecided", folder, before)


@PLANTED
@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (lambda log: log.producers.transactions.drop_ongoing(), "undecided"),
        (lambda log: log.producers.transactions.drop_before(1 << 60), "committed are"),
    ],
    ids=["open", "aborted"],
)
def test_transactions_that_a_takeover_does_not_restore_are_found(
    folder, before, monkeypatch, plant, problem
):
    """C5, C6."""
    _after_a_start(monkeypatch, plant)
    assert is_found(problem, folder, before)


@PLANTED
def test_markers_that_a_takeover_does_not_see_are_found(folder, before, monkeypatch):
    """C5: the last stable offset is before that of the owner before."""
    open_log = Opening.open_log

    def blind(self: Any, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(PartitionTransactions, "ended", lambda *_, **__: None)
            return open_log(self, *arguments)

    monkeypatch.setattr(Opening, "open_log", blind)
    assert is_found("last stable offset: A19", folder, before)


@PLANTED
def test_a_marker_that_is_not_written_is_found(folder, before, monkeypatch):
    """C5: in the end."""
    monkeypatch.setattr(bucket_requests, "marker_epoch", lambda *_: None)
    assert is_found("last stable offset: 1", folder, before)


@PLANTED
def test_a_commit_that_is_written_as_an_abort_is_found(folder, before, monkeypatch):
    """C6."""
    packed = Marker.packed
    monkeypatch.setattr(
        Marker, "packed", lambda self, at: packed(self._replace(is_commit=False), at)
    )
    assert is_found("committed are", folder, before)


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
