"""Every BlobStore fulfils the same contract. A new adapter is one line in `STORES`.

Method: one suite of small scenes, run against every adapter, those of S3 against two real servers
and a fake. What the fake lacks (one winner of concurrently completed uploads, checksums,
signatures) is tested with the first real server alone, in test_s3.py. `ReadBackStore` fulfils the
contract too if no writer is slower than its pause.
"""

import pytest

from kit.fakes.scripted import SteppingClock
from logmirror.errors import InternalError, OutcomeUnknownError, UnavailableError
from logmirror.stores import s3_calls, s3_read_back
from logmirror.stores.base import AlreadyExistsError, Tail
from logmirror.stores.filesystem import FilesystemStore
from logmirror.stores.s3 import S3Store
from logmirror.stores.s3_read_back import ReadBackStore
from logmirror.testing import MemoryStore

STORES = (
    *("memory", "filesystem", "s3", "s3 below a prefix", "fake s3", "s3 that replaces"),
    pytest.param("second s3", marks=pytest.mark.gate("a second S3 server")),
)

pytestmark = pytest.mark.xdist_group("s3")


@pytest.fixture(params=STORES)
def store(request, tmp_path, monkeypatch):
    if request.param == "memory":
        return MemoryStore()
    if request.param == "filesystem":
        return FilesystemStore(tmp_path / "not" / "yet", writer_id="host.1.aa")
    if request.param == "fake s3":
        fake = request.getfixturevalue("fake_s3")
        return S3Store(fake.location(fake.new_bucket()))
    is_second = request.param == "second s3"
    server = request.getfixturevalue("second_s3_server" if is_second else "s3_server")
    if request.param == "s3 that replaces":
        proxy = request.getfixturevalue("proxy")
        proxy.forget_condition = True
        monkeypatch.setattr(s3_read_back, "QUIESCE_MS", 300)
        monkeypatch.setattr(s3_read_back, "PROMPT_MS", 60_000)  # the machine may be busy
        clock = SteppingClock()
        return ReadBackStore(
            server.location(server.new_bucket(), endpoint=proxy.endpoint), clock=clock
        )
    prefix = "a/prefix" if "prefix" in request.param else ""
    return S3Store(server.location(server.new_bucket(), prefix))


def staged(store, data, name="f/a", *, travels=False):
    staged_object = store.stage("an object")
    assert staged_object.write(data) == len(data)
    return staged_object.finish(name, travels=travels)


def test_what_was_created_is_listed_in_order_and_read_back(store):
    for name in ["b", "a", "c"]:
        store.create(f"folder/{name}", name.encode())
    assert list(store.names("folder")) == ["a", "b", "c"]
    assert store.read("folder/b") == b"b"


def test_a_range_has_the_bytes_of_the_object_up_to_its_end(store):
    store.create("f/a", b"0123456789")
    assert store.read_range("f/a", 0, 10) == b"0123456789"
    assert store.read_range("f/a", 3, 4) == b"3456"
    assert store.read_range("f/a", 8, 100) == b"89"
    with pytest.raises(KeyError):
        store.read_range("f/b", 0, 1)


def test_create_never_replaces(store):
    store.create("f/a", b"first")
    with pytest.raises(AlreadyExistsError) as caught:
        store.create("f/a", b"second")
    assert caught.value.facts == {"name": "f/a"}
    assert store.read("f/a") == b"first"


def test_a_staged_object_is_seen_only_once_published(store):
    staged_object = store.stage("an object")
    for piece in [b"who", bytearray(b"l"), memoryview(b"e")]:
        staged_object.write(piece)
    token = staged_object.finish("f/a", travels=False)
    assert list(store.names("f")) == []
    store.publish(token, "f/a")
    assert list(store.names("f")) == ["a"]
    assert store.read("f/a") == b"whole"


@pytest.mark.mirror_v3("S3-05")
def test_publish_never_replaces_and_keeps_the_staged_object(store):
    store.create("f/a", b"first")
    token = staged(store, b"second")
    with pytest.raises(AlreadyExistsError) as caught:
        store.publish(token, "f/a")
    assert caught.value.facts == {"name": "f/a"}
    assert store.read("f/a") == b"first"
    store.publish(token, "f/b")
    assert store.read("f/b") == b"second"


def test_a_published_token_is_spent(store):
    token = staged(store, b"x")
    store.publish(token, "f/a")
    with pytest.raises(UnavailableError):
        store.publish(token, "f/b")
    assert list(store.names("f")) == ["a"]


def test_a_discarded_object_cannot_be_published(store):
    token = staged(store, b"x")
    store.discard(token)
    store.discard(token)
    with pytest.raises(UnavailableError):
        store.publish(token, "f/a")
    assert list(store.names("f")) == []


def test_an_aborted_object_takes_no_more_bytes(store):
    staged_object = store.stage("x")
    staged_object.abort()
    staged_object.abort()
    with pytest.raises(InternalError):
        staged_object.write(b"x")
    with pytest.raises(InternalError):
        staged_object.finish("f/a", travels=False)


def test_abort_after_finish_leaves_the_object(store):
    staged_object = store.stage("x")
    staged_object.write(b"x")
    token = staged_object.finish("f/a", travels=False)
    staged_object.abort()
    store.publish(token, "f/a")
    assert store.read("f/a") == b"x"


def test_typed_buffers_are_written_as_bytes(store):
    token = staged(store, memoryview(b"12345678").cast("I").cast("B"))
    store.publish(token, "f/a")
    staged_object = store.stage("x")
    assert staged_object.write(memoryview(b"12345678").cast("I")) == 8
    store.publish(staged_object.finish("f/a", travels=False), "f/b")
    assert store.read("f/a") == store.read("f/b") == b"12345678"


def test_an_object_may_be_empty(store):
    store.publish(staged(store, b""), "f/a")
    assert store.read("f/a") == b""


def test_a_folder_that_does_not_exist_is_empty(store):
    assert list(store.names("nowhere/at/all")) == []


def test_names_are_those_directly_in_the_folder(store):
    for name in ["f/a", "f.b/c", "other/a", ".private/claims/x"]:
        store.create(name, b"")
    assert list(store.names("f")) == ["a"]
    assert list(store.names(".private/claims")) == ["x"]


def test_sizes_are_those_of_the_names(store):
    for name in ["f/b", "f/a", "f.b/c", "f/.hidden"]:
        store.create(name, name.encode() * 3)
    assert store.sizes("f") == {"a": 9, "b": 9}
    assert list(store.sizes("f")) == ["a", "b"]
    assert store.sizes("nowhere") == {}


def test_objects_below_a_folder_have_their_folders_in_their_names(store):
    for name in ["f/b/2", "f/b.c", "f/a", "f/b/10", "f/.d/e", "f.b/c", "g"]:
        store.create(name, name.encode())
    found = list(store.below("f"))
    assert found == [(".d/e", 6), ("a", 3), ("b.c", 5), ("b/10", 6), ("b/2", 5)]
    assert list(store.below("nowhere")) == []


def test_an_object_deleted_while_it_is_open_is_whole_or_a_key_error(store):
    data = bytes(range(256)) * 50_000
    store.create("f/a", data)
    with store.open("f/a") as file:
        store.delete("f/a")
        try:
            found = file.read()
        except KeyError:
            found = data
        assert found == data


def test_dot_names_are_not_listed(store):
    store.create("f/.hidden", b"")
    assert list(store.names("f")) == []


def test_reading_a_missing_name_is_a_key_error(store):
    with pytest.raises(KeyError):
        store.read("f/nobody")
    with pytest.raises(KeyError):
        store.open("f/nobody")


def test_an_open_object_can_be_read_from_anywhere(store):
    store.create("f/a", b"0123456789")
    with store.open("f/a") as file:
        assert file.seek(-3, 2) == 7
        assert file.read(2) == b"78"
        file.seek(0)
        buffer = bytearray(4)
        assert file.readinto(buffer) == 4
        assert buffer == b"0123"


def test_a_deleted_name_is_free_again(store):
    store.create("f/a", b"first")
    store.delete("f/a")
    store.delete("f/a")
    assert list(store.names("f")) == []
    store.create("f/a", b"second")
    assert store.read("f/a") == b"second"


def test_an_object_that_travels_is_published_by_another_process(store):
    token = staged(store, b"whole", travels=True)
    assert list(store.names("f")) == []
    store.publish(token, "f/a")
    assert store.read("f/a") == b"whole"


def test_of_two_objects_that_travel_to_one_name_the_first_stays(store):
    first, second = (staged(store, data, travels=True) for data in (b"first", b"second"))
    store.publish(second, "f/a")
    with pytest.raises(AlreadyExistsError):
        store.publish(first, "f/a")
    assert store.read("f/a") == b"second"
    store.discard(first)


def test_a_travelling_object_that_was_discarded_is_gone(store, request, monkeypatch):
    if "[fake s3" in request.node.name:  # moto fails where a server says NoSuchUpload
        monkeypatch.setattr(s3_calls, "DEADLINE_MS", 100)
        monkeypatch.setattr(s3_calls, "DOWN_MS", 0)
    token = staged(store, b"x", travels=True)
    store.discard(token)
    store.discard(token)
    with pytest.raises((UnavailableError, OutcomeUnknownError)):
        store.publish(token, "f/a")
    assert list(store.names("f")) == []


def test_the_folders_of_a_folder_are_listed(store):
    for name in ("f/2/a", "f/10/b", "f/c", ".hidden/d", "f/.dots/e"):
        store.create(name, b"x")
    assert list(store.folders("f")) == ["10", "2"]
    assert list(store.folders("")) == ["f"]
    assert list(store.folders("nowhere")) == []


@pytest.mark.parametrize("count", [0, 1, 20])
def test_the_tail_of_a_folder_holds_the_names_that_sort_last(store, count):
    names = [f"{number * 7:020d}" for number in range(count)]
    for name in names:
        store.create(f"f/{name}", b"")
    assert store.tail("f") == Tail(names, is_whole=True)
    assert store.tail("f", f"{42:020d}") == Tail(names[7:], is_whole=False)
