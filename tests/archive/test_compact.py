"""A merge that is stopped or overtaken at any point leaves one valid cover of the same content.

Method: a compaction in memory is stopped before each of its operations in turn; after every single
operation the names must have a valid cover of the same rows. Then another compaction finishes.
Instead of a crash, another compaction, a late mirror or a reader runs to its end before the first
one continues.
"""

import dataclasses

import pytest

from kit.runs.objects import (
    FOLDER,
    OBJECTS,
    PER_OBJECT,
    TOPIC,
    make_object,
    new_chain,
    odd_records,
    records_for,
)
from kit.tiers import all_but
from logmirror.archive.claims import Claim, claim_name, publish_object
from logmirror.archive.compact import Limits, compact, plan
from logmirror.archive.compactions import (
    objects_from,
    read_cover,
)
from logmirror.archive.merge import Archive
from logmirror.archive.naming import format_name, parse_name
from logmirror.archive.object_check import check_object
from logmirror.archive.reader import iterate
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import CorruptionError, UnavailableError, UsageError
from logmirror.model import GapCause, OffsetRange
from logmirror.testing import MemoryStore
from logmirror.wire.columns import ContentDigest

FORMATS = ["batches", "parquet", "ndjson"]
SWEPT = all_but(FORMATS, "ndjson", reason="a minute of sweeps; one format in `make test`")
LIMITS = Limits(target_bytes=1 << 20, min_objects=2)


class Stopped(BaseException):
    """Like `kill -9`: no handler of the product catches it."""


def archive(store, extension):
    return Archive(
        store=store,
        folder=FOLDER,
        topic=TOPIC,
        extension=extension,
        compression="zstd-1",
        utf8=False,
    )


def run(store, extension, limits=LIMITS, writer="compact"):
    return compact(archive(store, extension), limits, start=0, writer_id=writer, clock=SYSTEM_CLOCK)


def quietly(store):
    """The same objects, without what the test has hung in."""
    copy = MemoryStore()
    copy.objects = store.objects
    return copy


_known = {}


def content(store, extension):
    """The digest of all rows of the cover, in its order."""
    state = frozenset((name, data) for name, data in store.objects.items() if FOLDER in name)
    if state not in _known:
        _known[state] = read_content(quietly(store), extension)
    return _known[state]


def read_content(store, extension):
    digest = ContentDigest()
    for obj in read_cover(store, FOLDER, extension=extension, start=0).objects:
        for batch in iterate(store, FOLDER, obj.name, topic=TOPIC):
            digest.update_arrow(batch)
    return digest.hexdigest()


def objects(store):
    return [name for name in store.objects if name.startswith(FOLDER)]


def operations(extension, limits=LIMITS):
    """How many a compact of the chain takes."""
    store, _ = new_chain(extension)
    seen = []
    store.before = lambda operation, name: seen.append((operation, name))
    run(store, extension, limits)
    return seen


@pytest.mark.parametrize("extension", FORMATS)
def test_small_objects_become_few_large_ones_with_the_same_rows(extension):
    store, _ = new_chain(extension)
    before = content(store, extension)

    outcome = run(store, extension)

    assert content(store, extension) == before
    found = read_cover(store, FOLDER, extension=extension, start=0)
    assert not found.replaced
    assert len(found.objects) == outcome.objects_after == len(objects(store)) < 6
    assert found.next_offset == OBJECTS * PER_OBJECT
    assert outcome.objects_before == OBJECTS
    for obj in found.objects:
        check_object(store, FOLDER, obj.name, deep=True)
    assert not store.staged


@pytest.mark.parametrize("extension", FORMATS)
def test_a_second_compact_changes_nothing(extension):
    store, _ = new_chain(extension)
    run(store, extension)
    before = dict(store.objects)

    outcome = run(store, extension)

    assert store.objects == before
    assert (outcome.merged, outcome.finished) == (0, 0)


def test_native_objects_are_their_parts_one_after_another():
    store, made = new_chain("batches")
    run(store, "batches")

    joined = b"".join(store.objects[name] for name in sorted(objects(store)))
    assert joined == b"".join(made.values())


@pytest.mark.parametrize("extension", SWEPT)
def test_after_a_stop_before_any_operation_the_next_compact_finishes(extension):
    truth = content(new_chain(extension)[0], extension)
    whole = new_chain(extension)[0]
    run(whole, extension)
    for last in range(len(operations(extension))):
        store, _ = new_chain(extension)
        left = iter(range(last))

        def stop(_operation, _name, left=left, store=store):
            assert content(store, extension) == truth
            if next(left, None) is None:
                raise Stopped

        store.before = stop
        with pytest.raises(Stopped):
            run(store, extension)
        store.before = lambda *_: None
        assert content(store, extension) == truth

        run(store, extension)

        assert content(store, extension) == truth
        assert sorted(objects(store)) == sorted(objects(whole))
        assert not read_cover(store, FOLDER, extension=extension, start=0).replaced


@pytest.mark.parametrize("extension", SWEPT)
@pytest.mark.parametrize("other", [LIMITS, Limits(target_bytes=1500, min_objects=3)])
def test_another_compact_may_overtake_at_any_operation(extension, other):
    truth = content(new_chain(extension)[0], extension)
    for mine, theirs in ((LIMITS, other), (other, LIMITS)):
        for at in range(len(operations(extension, mine))):
            store, _ = new_chain(extension)
            overtake_at(store, at, lambda s=store, theirs=theirs: run(s, extension, theirs, "peer"))

            run(store, extension, mine)

            assert content(store, extension) == truth
            assert not read_cover(store, FOLDER, extension=extension, start=0).replaced


def overtake_at(store, at, act):
    """Run `act` before the operation with this number, on a store without the hook."""
    left = iter(range(at))

    def before(_operation, _name):
        if next(left, None) is None:
            store.before = lambda *_: None
            act()

    store.before = before


@pytest.mark.parametrize("extension", SWEPT)
def test_an_object_that_a_paused_mirror_publishes_again_is_replaced_again(extension):
    truth = content(new_chain(extension)[0], extension)
    for at in range(0, len(operations(extension)), 2):
        store, made = new_chain(extension)

        def wake(store=store, made=made):
            for name, data in made.items():
                store.objects.setdefault(name, data)

        overtake_at(store, at, wake)
        run(store, extension)
        wake()
        assert content(store, extension) == truth

        outcome = run(store, extension)

        assert outcome.finished > 0
        assert content(store, extension) == truth
        assert not read_cover(store, FOLDER, extension=extension, start=0).replaced


def test_merged_objects_are_merged_again_when_the_chain_grows_and_may_come_back():
    store, made = new_chain("batches", objects=40)
    truth = content(store, "batches")
    small = Limits(target_bytes=2500, min_objects=2)
    run(store, "batches", small)
    middle = {name: store.objects[name] for name in objects(store)}
    run(store, "batches")
    store.objects |= middle | made

    assert content(store, "batches") == truth
    outcome = run(store, "batches")

    assert outcome.finished > 20
    assert content(store, "batches") == truth
    assert len(objects(store)) == outcome.objects_after


@pytest.mark.parametrize("extension", FORMATS)
def test_a_damaged_part_is_refused_and_nothing_is_deleted(extension):
    store, made = new_chain(extension)
    victim = sorted(made)[2]
    damaged = bytearray(store.objects[victim])
    damaged[len(damaged) // 2] ^= 4
    store.objects[victim] = bytes(damaged)
    before = dict(store.objects)

    with pytest.raises(CorruptionError) as caught:
        run(store, extension)

    assert caught.value.facts["name"] == victim.rpartition("/")[2]
    assert store.objects == before
    assert not store.staged


@pytest.mark.parametrize("extension", FORMATS)
def test_a_part_with_other_rows_than_were_claimed_is_refused(extension):
    store, made = new_chain(extension)
    victim = sorted(made)[1]
    covered = parse_name(victim.rpartition("/")[2])[0]
    records = records_for(covered, seed=77)
    store.objects[victim] = make_object(extension, records, covered=covered)[1]

    with pytest.raises(CorruptionError, match=r"claimed|digest"):
        run(store, extension)

    assert set(made) <= set(store.objects)


@pytest.mark.parametrize("extension", FORMATS)
def test_a_merged_object_that_reads_back_otherwise_keeps_its_parts(extension):
    store, made = new_chain(extension)
    published = []

    def damage(operation, name):
        if operation == "publish":
            published.append(name)
        elif operation == "open" and published and name == published[0]:
            store.objects[name] = store.objects[name][:-1]

    store.before = damage

    with pytest.raises(CorruptionError):
        run(store, extension)

    assert set(made) <= set(store.objects)


def test_a_foreign_object_inside_another_one_is_named():
    store, _ = new_chain("batches")
    run(store, "batches")
    largest = read_cover(store, FOLDER, extension="batches", start=0).objects[0]
    foreign = OffsetRange(first=largest.first + 1, last=largest.first + 2)
    name = format_name(foreign, "batches")
    store.objects[f"{FOLDER}/{name}"] = b"?"
    before = dict(store.objects)

    with pytest.raises(CorruptionError, match="inside another one") as caught:
        run(store, "batches")

    assert caught.value.facts["name"] == name
    assert caught.value.facts["inside"] == largest.name
    assert store.objects == before


def test_an_overlap_without_a_record_is_damage_as_before():
    store, made = new_chain("batches")
    pair = b"".join(list(made.values())[:2])
    whole = format_name(OffsetRange(first=0, last=2 * PER_OBJECT - 1), "batches")
    store.objects[f"{FOLDER}/{whole}"] = pair

    with pytest.raises(CorruptionError, match="inside another one"):
        read_cover(store, FOLDER, extension="batches", start=0)


@pytest.mark.parametrize("extension", FORMATS)
def test_other_content_under_the_name_of_a_part_is_not_deleted(extension):
    store, made = new_chain(extension)
    run(store, extension)
    victim = sorted(made)[1]
    covered = parse_name(victim.rpartition("/")[2])[0]
    records = records_for(covered, seed=77)
    store.objects[victim] = make_object(extension, records, covered=covered)[1]

    with pytest.raises(CorruptionError, match=r"other content than the part|digest"):
        run(store, extension)

    assert victim in store.objects


@pytest.mark.parametrize("extension", FORMATS)
def test_a_mirror_that_wakes_up_late_and_finds_less_at_a_cleaned_source_is_replaced(extension):
    """It finds the range claimed and no object: what is left of it is said, then written."""
    store, made = new_chain(extension)
    victim = sorted(made)[1]
    covered = parse_name(victim.rpartition("/")[2])[0]
    name = claim_name("orders", 3, covered.first)
    claim = dataclasses.replace(
        Claim.from_bytes(store.objects[name], name=name), writer="late", rewritable=True
    )
    store.objects[name] = claim.to_bytes()
    truth = content(store, extension)
    run(store, extension)
    records = records_for(covered, seed=77)[1:]
    _, data, digest = make_object(extension, records, covered=covered)
    late = dataclasses.replace(claim, digest=digest, record_count=len(records))
    staged = store.stage("late")
    staged.write(data)
    token = staged.finish(victim, travels=False)
    publish_object(store, token=token, folder=FOLDER, extension=extension, claim=late)
    assert store.objects[victim] == data
    assert content(store, extension) == truth

    outcome = run(store, extension)

    assert outcome.finished == 1
    assert victim not in store.objects
    assert content(store, extension) == truth


def test_parts_that_differ_from_what_was_merged_before_are_not_merged():
    store, made = new_chain("parquet", claims=False)
    copy = dict(store.objects)
    run(store, "parquet")
    records = {n: d for n, d in store.objects.items() if "compactions" in n}
    first = parse_name(min(made).rpartition("/")[2])[0]
    other = make_object("parquet", records_for(first, seed=77), covered=first)[1]
    store.objects = copy | records | {min(made): other}

    with pytest.raises(CorruptionError, match="merged before with other content"):
        run(store, "parquet")

    assert set(made) <= set(store.objects)
    assert not store.staged


def test_objects_whose_gaps_nothing_explains_are_not_merged():
    store, _ = new_chain("ndjson")
    del store.objects[claim_name("orders", 3, PER_OBJECT)]
    with pytest.raises(UsageError, match="unexplained offset gaps"):
        run(store, "ndjson")
    assert len(objects(store)) == OBJECTS


def test_objects_of_two_topics_of_one_name_are_not_merged():
    store, made = new_chain("batches", topic_ids=("aa" * 16, "bb" * 16))

    with pytest.raises(CorruptionError, match="different topics with the same name"):
        run(store, "batches")

    assert set(made) <= set(store.objects)


def test_a_store_that_fails_at_any_operation_loses_nothing():
    truth = content(new_chain("parquet")[0], "parquet")
    for at in range(len(operations("parquet"))):
        store, _ = new_chain("parquet")

        def fail():
            raise UnavailableError("no response")

        overtake_at(store, at, fail)
        with pytest.raises(UnavailableError):
            run(store, "parquet")
        assert content(store, "parquet") == truth
        assert not store.staged


def test_gaps_are_added_up_and_keep_their_causes():
    store = MemoryStore()
    for number in range(6):
        first = number * 10
        records = odd_records(4, first=first, seed=number)
        covered = OffsetRange(first=first, last=first + 9)
        name, data, _ = make_object("parquet", records, covered=covered)
        store.objects[f"{FOLDER}/{name}"] = data
    run(store, "parquet")

    merged = read_cover(store, FOLDER, extension="parquet", start=0).objects[0]
    report = check_object(store, FOLDER, merged.name, deep=True)

    assert report.metadata.covered == merged.covered
    missing = merged.covered.offset_count - report.metadata.record_count
    assert report.metadata.gap_counts == {GapCause.COMPACTED: missing}
    assert report.metadata.topic_id == "ab" * 16


def test_a_reader_whose_object_is_gone_finds_what_replaces_it():
    store, _ = new_chain("batches")
    old = read_cover(store, FOLDER, extension="batches", start=0).objects
    run(store, "batches")
    rest = objects_from(store, FOLDER, old[1], "batches")
    assert rest[0].first <= old[1].first <= rest[0].last
    assert rest[-1] == old[-1]
    del store.objects[f"{FOLDER}/{rest[0].name}"]
    with pytest.raises(CorruptionError, match="nothing replaces it"):
        objects_from(store, FOLDER, old[1], "batches")


def test_a_plan_changes_nothing():
    store, _ = new_chain("ndjson")
    before = dict(store.objects)
    assert plan(archive(store, "ndjson"), LIMITS, start=0).groups
    assert store.objects == before
