"""Snapshots of group offsets: their bytes, what is refused, which are kept, which is found."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.archive.group_offsets import (
    MAX_BYTES,
    SPACING,
    CommittedOffset,
    GroupEntry,
    Header,
    Snapshot,
    decode,
    encode,
    encoded_group,
    sequence_of,
    snapshot_name,
    snapshots_folder,
    to_delete,
)
from logmirror.archive.group_snapshots import Snapshots, timestamp
from logmirror.errors import CorruptionError, UsageError
from logmirror.model import OFFSET_MAX
from logmirror.testing import MemoryStore

PAGE = Path(__file__).parents[2] / "docs" / "formats" / "group-offsets.md"
FOLDER = ".logmirror/groups/files/orders"
HEADER = Header(
    sequence=7,
    time_ms=1_700_000_000_123,
    writer="h.1.a",
    source_alias="primary",
    cluster_id="c1",
    mirror="orders",
    destination="files",
    topic="orders",
    topic_id="ab" * 16,
    positions={0: 40, 1: None},
)
GROUPS = (
    GroupEntry("billing", (CommittedOffset(0, 40), CommittedOffset(1, 7, "é"))),
    GroupEntry("shipping", (CommittedOffset(1, 0),), is_stale=True),
)
VECTOR = (
    '{"version":1,"sequence":7,"time_ms":1700000000123,"writer":"h.1.a","source_alias":"primary",'
    '"cluster_id":"c1","mirror":"orders","destination":"files","topic":"orders",'
    '"topic_id":"abababababababababababababababab","positions":[[0,40],[1,null]],'
    '"groups":[{"group":"billing","offsets":[[0,40],[1,7,"é"]]},'
    '{"group":"shipping","offsets":[[1,0]],"stale":true}],'
    '"sha256":"a1285a804d6e76e77cdefff9d4dd004a5fa779f58096a2787f7fc46d261d0fbb"}\n'
)
NAME = f"{FOLDER}/00000000000000000007"

offsets = st.integers(0, OFFSET_MAX)
entries = st.builds(
    lambda group, found, stale: GroupEntry(
        group, tuple(CommittedOffset(n, *of) for n, of in sorted(found.items())), stale
    ),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.dictionaries(st.integers(0, 2**31), st.tuples(offsets, st.text('aé"\\\0')), min_size=1),
    st.booleans(),
)
group_lists = st.lists(entries, unique_by=lambda one: one.group).map(
    lambda found: tuple(sorted(found))
)


def encoded(header=HEADER, groups=GROUPS):
    return encode(header, map(encoded_group, groups))


def test_the_bytes_are_those_of_the_page():
    assert f"```json\n{VECTOR}```" in PAGE.read_text(encoding="utf-8")
    assert encoded().decode() == VECTOR
    assert decode(VECTOR.encode(), name=NAME) == Snapshot(header=HEADER, groups=GROUPS)
    assert snapshot_name(snapshots_folder("files", "orders"), 7) == NAME


@given(group_lists)
def test_what_was_written_is_read_back(groups):
    assert decode(encoded(groups=groups), name=NAME).groups == groups


@given(st.data())
def test_a_changed_byte_and_a_lost_end_are_refused(data):
    written = bytearray(encoded())
    at = data.draw(st.integers(0, len(written) - 1))
    if data.draw(st.booleans()):
        written[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del written[at:]
    with pytest.raises(CorruptionError) as caught:
        decode(bytes(written), name=NAME)
    assert caught.value.facts["name"] == NAME


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sequence": -1}, "ValueError"),
        ({"sequence": 8}, "another name"),
        ({"mirror": "other"}, "another name"),
        ({"time_ms": 1.5}, "TypeError"),
        ({"positions": [[0, -1]]}, "ValueError"),
        ({"groups": [{"group": "g", "offsets": []}]}, "ValueError"),
        ({"groups": [{"group": "g", "offsets": [[1, 1], [0, 1]]}]}, "ValueError"),
        ({"groups": [{"group": "g", "offsets": [[0, 2**63]]}]}, "ValueError"),
        (
            {"groups": [{"group": "b", "offsets": [[0, 1]]}, {"group": "a", "offsets": [[0, 1]]}]},
            "V",
        ),
    ],
)
def test_content_that_makes_no_sense_is_refused_although_its_digest_matches(change, reason):
    with pytest.raises(CorruptionError) as caught:
        decode(_with(change), name=NAME)
    assert reason in caught.value.facts["reason"]


def test_fields_of_later_versions_are_ignored_and_a_higher_version_is_refused():
    assert decode(_with({"more": [1]}), name=NAME).groups == GROUPS
    with pytest.raises(UsageError, match="newer version"):
        decode(_with({"version": 2}), name=NAME)


def _with(change):
    content = json.loads(VECTOR) | change
    content.pop("sha256")
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()[:-1]
    return body + f',"sha256":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def test_a_snapshot_that_is_too_large_is_refused_with_its_size():
    text = encoded_group(GroupEntry("g" * 1000, (CommittedOffset(0, 1),)))
    count = MAX_BYTES // len(text) + 1
    with pytest.raises(UsageError, match="too many for one snapshot") as caught:
        encode(HEADER, [text] * count)
    assert caught.value.facts["size_bytes"] > MAX_BYTES


def test_ten_thousand_groups_of_a_hundred_partitions_fit():
    group = GroupEntry("g" * 30, tuple(CommittedOffset(n, 10**9 + n) for n in range(100)))
    size = len(encode(HEADER, [encoded_group(group)] * 10_000))
    assert 15 << 20 < size < 16 << 20


@pytest.mark.parametrize(
    "name", ["7", "0" * 19, "0" * 21, "-" + "0" * 19, "\u0660" * 20, "9" * 20, "0" * 20 + ".json"]
)
def test_other_names_are_not_those_of_snapshots(name):
    assert sequence_of(name) is None


# ---- which are kept ------------------------------------------------------------------------------


@given(st.sets(st.integers(1, 1000)), st.integers(1, 20))
def test_the_newest_are_kept_and_of_the_older_ones_every_sixtieth(numbers, keep):
    gone = to_delete(numbers, keep)
    kept = sorted(numbers - {*gone})
    assert gone == sorted(gone)
    assert kept[-keep:] == sorted(numbers)[-keep:]
    older = sorted(numbers)[:-keep]
    assert kept[:-keep] == [n for n in older if n % SPACING == 0][-keep:]


@given(st.integers(1, 400), st.integers(1, 3))
def test_pruning_after_each_keeps_what_pruning_at_the_end_keeps(last, keep):
    held = set()
    for number in range(1, last + 1):
        held.add(number)
        held -= {*to_delete(held, keep)}
    assert held == {*range(1, last + 1)} - {*to_delete(range(1, last + 1), keep)}


# ---- which is found ------------------------------------------------------------------------------


def written(store, *times_ms):
    """The snapshots of these times, numbered from 1."""
    snapshots = Snapshots(store, "files", "orders")
    for number, time_ms in enumerate(times_ms, 1):
        header = dataclasses.replace(HEADER, sequence=number, time_ms=time_ms)
        snapshots.create(header, map(encoded_group, GROUPS))
    return snapshots


def damage(store, number):
    name = snapshot_name(FOLDER, number)
    store.objects[name] = store.objects[name].replace(b"[[0,40]", b"[[0,41]")


def test_the_newest_is_found_or_the_newest_at_a_time():
    snapshots = written(MemoryStore(), 1000, 2000, 3000)
    assert snapshots.find().header.sequence == 3
    assert snapshots.find(2999).header.sequence == 2
    assert snapshots.find(2000).header.sequence == 2
    assert snapshots.find(9000).header.sequence == 3
    with pytest.raises(UsageError, match="at or before this time") as caught:
        snapshots.find(999)
    assert caught.value.facts["oldest"] == "1970-01-01T00:00:01.000Z"
    with pytest.raises(UsageError, match="has no snapshot"):
        Snapshots(MemoryStore(), "files", "orders").find()


def test_numbers_and_not_times_are_the_order():
    snapshots = written(MemoryStore(), 3000, 1000, 2000)  # the clock was set back
    assert snapshots.find().header.sequence == 3
    assert snapshots.find(1500).header.sequence == 2


def test_a_damaged_one_is_refused_and_an_earlier_one_named_that_its_time_finds():
    store = MemoryStore()
    snapshots = written(store, 1000, 2000, 3000, 4000)
    damage(store, 4)
    damage(store, 3)
    with pytest.raises(CorruptionError) as caught:
        snapshots.find()
    error = caught.value
    assert error.facts["name"] == snapshot_name(FOLDER, 4)
    assert error.facts["intact"] == snapshot_name(FOLDER, 2)
    assert error.facts["intact_time"] == "1970-01-01T00:00:02.000Z"
    assert "--at 1970-01-01T00:00:02.000Z" in error.hint
    assert snapshots.find(2000).header.sequence == 2
    assert snapshots.find(1999).header.sequence == 1  # both damaged ones are later
    with pytest.raises(CorruptionError):
        snapshots.find(3500)  # the damaged third one is the one of this time


def test_if_none_is_intact_that_is_said():
    store = MemoryStore()
    snapshots = written(store, 1000)
    damage(store, 1)
    with pytest.raises(CorruptionError) as caught:
        snapshots.find()
    assert caught.value.facts["intact"] == "none"


def test_every_snapshot_is_checked_and_each_damaged_one_named():
    store = MemoryStore()
    snapshots = written(store, 1000, 2000, 3000)
    damage(store, 2)
    store.create(f"{FOLDER}/notes.txt", b"")
    found = snapshots.check(deep=True)
    assert (found.intact, found.newest.header.sequence) == (2, 3)
    names = sorted(str(problem.facts["name"]) for problem in found.problems)
    assert names == [snapshot_name(FOLDER, 2), f"{FOLDER}/notes.txt"]


def test_a_time_has_milliseconds():
    assert timestamp(1_700_000_000_007) == "2023-11-14T22:13:20.007Z"
