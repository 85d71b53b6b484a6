"""Committed offsets are stored once for each change, whole, in every store and by any writers.

Method: the groups of a source are scripted; the stores are a directory, a real S3 server, also
behind a proxy that loses responses, and one that replaces objects. What was stored is read back.
"""

import contextlib
import threading
from dataclasses import replace

import pytest

from kit.fakes.s3_proxy import Fault
from kit.fakes.scripted import SteppingClock
from kit.fakes.scripted_groups import ScriptedSource
from logmirror.archive.group_offsets import GROUPS_FOLDER
from logmirror.archive.group_snapshots import Snapshots
from logmirror.errors import OutcomeUnknownError, UnavailableError, UsageError
from logmirror.groups.archive_link import ArchiveLink
from logmirror.groups.archive_spec import ArchivedTopic, ArchiveLinkSpec
from logmirror.stores import s3_read_back
from logmirror.stores.filesystem import FilesystemStore
from logmirror.stores.s3 import S3Store
from logmirror.stores.s3_policy import policies
from logmirror.stores.s3_read_back import ReadBackStore
from logmirror.testing import MemoryStore

pytestmark = pytest.mark.xdist_group("s3")

FOLDER = ".logmirror/groups/files/orders"


@pytest.fixture(params=["filesystem", "s3", "s3 that replaces"])
def stores(request, tmp_path, monkeypatch):
    """Opens the same store again, for each writer."""
    if request.param == "filesystem":
        return lambda: FilesystemStore(tmp_path, writer_id="host.1.aa")
    server = request.getfixturevalue("s3_server")
    bucket = server.new_bucket()
    if request.param == "s3":
        return lambda: S3Store(server.location(bucket))
    proxy = request.getfixturevalue("proxy")
    proxy.forget_condition = True
    monkeypatch.setattr(s3_read_back, "QUIESCE_MS", 300)
    monkeypatch.setattr(s3_read_back, "PROMPT_MS", 60_000)  # the machine may be busy
    location = server.location(bucket, endpoint=proxy.endpoint)
    return lambda: ReadBackStore(location, clock=SteppingClock())


class Times:
    """A clock that moves by a second at each reading."""

    def __init__(self):
        self.ms = 0

    def now_ms(self):
        self.ms += 1000
        return self.ms


def spec_of(*, partitions=None, keep=100, exclude=("out.*",), topics=("orders",)):
    return ArchiveLinkSpec(
        source=None,
        source_alias="primary",
        location=None,
        destination="files",
        topics=tuple(ArchivedTopic(one, one, partitions, None, None) for one in topics),
        include=(".*",),
        exclude=exclude,
        interval_ms=1000,
        keep=keep,
    )


def link_of(source, store, *, writer="h.1.a", clock=None, position=lambda *_: 50, **more):
    clock = clock or Times()
    return ArchiveLink(spec_of(**more), source, store, position, clock=clock, writer=writer)


def source_of(**groups):
    source = ScriptedSource("orders")
    for group, offsets in groups.items():
        source.commit(group, *offsets)
    return source


def held(store):
    """The offsets of the newest snapshot by group, and how many snapshots there are."""
    found = Snapshots(store, "files", "orders").check(deep=True)
    assert found.problems == []
    offsets = {
        entry.group: {one.partition: one.offset for one in entry.offsets}
        for entry in found.newest.groups
    }
    return offsets, found.intact


def test_a_snapshot_is_written_for_each_change_and_a_restart_repeats_nothing(stores):
    source, store = source_of(billing=(10, 20), out_1=(5,)), stores()
    link = link_of(source, store)
    assert [link.round().written for _ in range(2)] == [1, 0]
    source.commit("billing", 11)
    assert link.round().written == 1
    source.commit("other", 9, topic="customers")
    assert link.round().written == 0

    again = link_of(source, stores(), writer="h.2.b")
    assert again.round().written == 0
    assert held(store) == ({"billing": {0: 11, 1: 20}}, 2)
    newest = Snapshots(store, "files", "orders").find()
    assert newest.header.positions == dict.fromkeys(range(4), 50)
    source.delete("billing")
    assert again.round().written == 1
    source.topic_id = b"t" * 16  # the topic was recreated
    assert again.round().written == 1
    assert held(store) == ({}, 4)
    assert Snapshots(store, "files", "orders").find().header.topic_id == b"t".hex() * 16


def test_of_two_writers_each_number_has_one_and_the_newest_is_never_older(stores):
    source = source_of(billing=(10,))
    first, second = link_of(source, stores()), link_of(source, stores(), writer="h.2.b")
    first.round()
    second.round()
    source.commit("billing", 20)
    is_paused = []

    def others_write(_group):
        if not is_paused:
            is_paused.append(True)
            source.commit("billing", 30)
            assert first.round().written == 1
            source.commit("billing", 20)

    source.before_read = others_write
    second.round()
    source.before_read = lambda _group: None
    source.commit("billing", 40)
    second.round()
    offsets, count = held(stores())
    assert offsets == {"billing": {0: 40}}
    assert count == 4


def test_what_a_paused_writer_has_read_does_not_become_the_newest():
    store, source = MemoryStore(), source_of(billing=(10,))
    first, paused = link_of(source, store), link_of(source, store, writer="h.2.b")
    first.round()
    paused.round()
    source.commit("billing", 20)

    def others_write(operation, _name):
        if operation == "create":
            store.before = lambda *_: None
            source.commit("billing", 30)
            first.round()

    store.before = others_write
    assert paused.round().written == 0
    assert held(store) == ({"billing": {0: 30}}, 2)


def test_writers_at_once_lose_nothing(stores):
    source = source_of(billing=(0,))
    links = [link_of(source, stores(), writer=f"h.{n}.a") for n in range(3)]
    written = []

    def write(link):
        for _ in range(4):
            with contextlib.suppress(UnavailableError):
                written.append(link.round().written)

    threads = [threading.Thread(target=write, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for offset in range(1, 20):
        source.commit("billing", offset)
    for thread in threads:
        thread.join()
    links[0].round()
    offsets, count = held(stores())
    assert offsets == {"billing": {0: 19}}
    assert 1 <= count <= sum(written) + 1


@pytest.mark.parametrize("kind", ["lose-response", "cut-response", "reset"])
def test_a_lost_response_leaves_one_snapshot(s3_server, proxy, kind):
    bucket = s3_server.new_bucket()
    source = source_of(billing=(10,))
    store = S3Store(s3_server.location(bucket, endpoint=proxy.endpoint))
    link = link_of(source, store)
    proxy.spoil(Fault(kind, method="PutObject"))
    link.round()
    assert proxy.spoiled == 1
    source.commit("billing", 20)
    link.round()
    assert held(S3Store(s3_server.location(bucket))) == ({"billing": {0: 20}}, 2)


def test_after_an_unknown_outcome_the_newest_is_read_before_another_is_written():
    store, source = MemoryStore(), source_of(billing=(10,))
    create, outcomes = store.create, ["lost", "not written"]

    def failing(name, data):
        outcome = outcomes.pop(0) if outcomes else ""
        if outcome != "not written":
            create(name, data)
        if outcome:
            raise OutcomeUnknownError("the response was lost", name=name)

    store.create = failing
    link = link_of(source, store)
    link.round()
    assert held(store) == ({"billing": {0: 10}}, 1)
    source.commit("billing", 20)
    link.round()
    assert held(store) == ({"billing": {0: 20}}, 2)
    outcomes[:] = ["not written"] * 3
    source.commit("billing", 30)
    with pytest.raises(UnavailableError, match="was not written"):
        link.round()
    assert link.round().written == 1
    assert held(store) == ({"billing": {0: 30}}, 3)


def test_the_time_is_read_after_the_offsets_and_the_positions_after_it():
    steps, source, clock = [], source_of(billing=(10,)), Times()
    source.before_read = steps.append
    now_ms, clock.now_ms = clock.now_ms, lambda: steps.append("time") or now_ms()

    def position(_topic, partition):
        steps.append(partition)

    link_of(source, MemoryStore(), clock=clock, position=position, partitions=(2,)).round()
    assert steps == ["billing", "time", 2]


def test_a_group_that_cannot_be_read_keeps_its_offsets_and_is_stale():
    store, source = MemoryStore(), source_of(billing=(10, 20), shipping=(1,))
    link = link_of(source, store)
    link.round()
    source.unreadable, source.unread = {"shipping"}, {("billing", 0)}
    source.commit("billing", 11, 21)
    done = link.round()
    assert sorted(done.failed) == ["billing", "shipping"]
    assert held(store) == ({"billing": {0: 10, 1: 21}, "shipping": {0: 1}}, 2)
    newest = Snapshots(store, "files", "orders").find()
    assert all(entry.is_stale for entry in newest.groups)

    again = link_of(source, store)  # also a new process has the earlier ones
    assert again.round().written == 0
    source.unreadable, source.unread = set(), set()
    again.round()
    assert held(store) == ({"billing": {0: 11, 1: 21}, "shipping": {0: 1}}, 3)
    assert not any(one.is_stale for one in Snapshots(store, "files", "orders").find().groups)


def test_only_mirrored_partitions_and_included_groups_are_stored():
    store, source = MemoryStore(), source_of(billing=(1, 2, 3), out_of_it=(1,), none=())
    source.commit("customers", 7, topic="customers")
    assert link_of(source, store, partitions=(0, 2)).round().groups == 1
    assert held(store)[0] == {"billing": {0: 1, 2: 3}}


def test_a_damaged_newest_snapshot_is_followed_by_a_whole_one():
    store, source = MemoryStore(), source_of(billing=(1,))
    link_of(source, store).round()
    [name] = store.objects
    store.objects[name] = store.objects[name][:-5]
    assert link_of(source, store).round().written == 1
    assert Snapshots(store, "files", "orders").find().header.sequence == 2


def test_older_snapshots_are_pruned_the_oldest_first_and_a_refusal_stops_nothing():
    deleted = []
    store, source = MemoryStore(), source_of(billing=(0,))
    store.before = lambda operation, name: operation == "delete" and deleted.append(int(name[-20:]))
    link = link_of(source, store, keep=3)
    for offset in range(1, 71):
        source.commit("billing", offset)
        assert link.round().not_pruned is None
    kept = sorted(int(name[-20:]) for name in store.objects)
    assert kept == [60, 68, 69, 70]
    assert deleted == sorted(deleted)

    def refuse(operation, _name):
        if operation == "delete":
            raise UsageError("no permission to delete")

    store.before = refuse
    source.commit("billing", 100)
    assert isinstance(link.round().not_pruned, UsageError)
    source.commit("billing", 101)
    done = link.round()
    assert (done.written, done.not_pruned) == (1, None)  # logged once, and not tried again
    assert held(store)[0] == {"billing": {0: 101}}


def test_the_printed_policies_allow_what_writing_and_pruning_needs(s3_server):
    bucket, writer, reader = s3_server.new_bucket(), s3_server.new_user(), s3_server.new_user()
    location = replace(s3_server.location(bucket, "p"), write=writer, read=reader)
    printed = policies([(location, "files")], [(location, f"{GROUPS_FOLDER}/files")])
    statements = [(writer, printed["writer"]), (reader, printed["reader"])]
    s3_server.allow(bucket, *((user, one["Statement"]) for user, one in statements))
    source, store = source_of(billing=(0,)), S3Store(location)
    link = link_of(source, store, keep=1)
    for offset in range(1, 4):
        source.commit("billing", offset)
        done = link.round()
        assert (done.written, done.not_pruned) == (1, None)
    assert held(store) == ({"billing": {0: 3}}, 1)
