"""Conditions of a real directory: permissions, space, foreign entries, other processes.

Method: real directories, files, locks and processes; the few kernel errors that cannot be produced
on demand (a full disk, a bad block) come from a substitute for `Syscalls`.
"""

import contextlib
import errno
import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from logmirror import failpoints
from logmirror.clock import Clock
from logmirror.errors import (
    CorruptionError,
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
    UsageError,
)
from logmirror.locations import FolderLocation
from logmirror.stores.base import AlreadyExistsError
from logmirror.stores.filesystem import FilesystemStore
from logmirror.stores.opening import begin_writing
from logmirror.stores.syscalls import Syscalls
from logmirror.stores.writers import FOREIGN_LEFTOVER_AGE_MS


class FailingSyscalls(Syscalls):
    """The call named `call` fails with `code`, from its `nth` time on (0-based)."""

    def __init__(self, call, code, nth=0):
        self.call, self.code, self.left = call, code, nth

    def __getattribute__(self, name):
        if name == super().__getattribute__("call"):
            if self.left == 0:
                return self._fail
            self.left -= 1
        return super().__getattribute__(name)

    def _fail(self, *_arguments):
        raise OSError(self.code, os.strerror(self.code))


def store_in(folder, writer="h.1.a", **options):
    return FilesystemStore(folder, writer_id=writer, **options)


def put(store, name, data=b"x"):
    staged = store.stage("label")
    staged.write(data)
    store.publish(staged.finish("f/a", travels=False), name)


def files_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


KINDS = {
    errno.ENOSPC: UnavailableError,
    errno.EDQUOT: UnavailableError,
    errno.EIO: UnavailableError,
    errno.ESTALE: UnavailableError,
    errno.EACCES: UsageError,
    errno.EPERM: UsageError,
    errno.EROFS: UnavailableError,  # as a disk becomes that has failed: it may be well again
}


@pytest.mark.parametrize("call", ["make_directory", "open_new", "write", "sync_data", "link"])
@pytest.mark.parametrize("code", KINDS, ids=errno.errorcode.get)
def test_a_failing_call_is_an_error_of_the_right_kind_and_nothing_appears(tmp_path, call, code):
    store = store_in(tmp_path, syscalls=FailingSyscalls(call, code))
    with pytest.raises(KINDS[code]) as caught:
        store.create("f/a", b"x")
    assert type(caught.value) is KINDS[code]
    assert caught.value.hint
    assert caught.value.facts["reason"] == os.strerror(code)
    assert str(tmp_path) in str(caught.value.facts["path"])
    assert files_in(tmp_path) == []
    store_in(tmp_path).create("f/a", b"x")


class UnsyncedFolder(Syscalls):
    """Cannot sync the folder `f`."""

    def sync_directory(self, path):
        if path.name == "f":
            raise OSError(errno.EIO, "Input/output error")
        super().sync_directory(path)


def test_a_folder_that_cannot_be_synced_leaves_the_outcome_unknown(tmp_path):
    store_in(tmp_path).create("f/first", b"")
    store = store_in(tmp_path, syscalls=UnsyncedFolder())
    with pytest.raises(OutcomeUnknownError) as caught:
        store.create("f/a", b"x")
    assert caught.value.facts["name"] == "f/a"
    assert list(store.names("f")) == ["a", "first"]
    with pytest.raises(UnavailableError):  # no caller may continue after it
        store.tail("f")


def test_a_failed_sync_spoils_the_staged_object_for_good(tmp_path):
    store = store_in(tmp_path, syscalls=FailingSyscalls("sync_data", errno.EIO))
    staged = store.stage("x")
    staged.write(b"bytes that the kernel may have dropped")
    with pytest.raises(UnavailableError):
        staged.finish("f/a", travels=False)
    assert files_in(tmp_path) == []
    with pytest.raises(LogmirrorError):
        staged.finish("f/a", travels=False)


class ShortWrites(Syscalls):
    """Takes at most three bytes at a time, as a kernel may."""

    def write(self, descriptor, data):
        return super().write(descriptor, data[:3])


def test_short_writes_are_continued(tmp_path):
    store = store_in(tmp_path, syscalls=ShortWrites())
    put(store, "f/a", b"0123456789")
    assert store.read("f/a") == b"0123456789"


def test_a_staged_file_is_never_shared(tmp_path, monkeypatch):
    monkeypatch.setattr("logmirror.stores.filesystem.new_nonce", lambda: "0" * 16)
    store = store_in(tmp_path)
    first = store.stage("x")
    first.write(b"first")
    with pytest.raises(UnavailableError):
        store.stage("x")
    store.publish(first.finish("f/a", travels=False), "f/a")
    assert store.read("f/a") == b"first"


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP])
def test_a_filesystem_without_links_is_refused_with_a_hint(tmp_path, code):
    store = store_in(tmp_path, syscalls=FailingSyscalls("link", code))
    with pytest.raises(UsageError, match="cannot link") as caught:
        store.create("f/a", b"x")
    assert "one filesystem with hard links" in caught.value.hint


POWERLESS = """
import os, pathlib, sys
from logmirror.errors import UsageError
from logmirror.stores.filesystem import FilesystemStore
os.chdir(sys.argv[1])
if os.geteuid() == 0:  # a superuser may write anywhere
    os.setgid(65534)
    os.setuid(65534)
try:
    FilesystemStore(pathlib.Path("root"), writer_id="h.1.a").create("f/a", b"x")
except UsageError as error:
    print(error, "|", error.hint)
"""


@pytest.mark.parametrize("made", [False, True])
def test_a_read_only_directory_is_a_usage_error(tmp_path, made):
    if made:
        (tmp_path / "root").mkdir(mode=0o555)
    tmp_path.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", POWERLESS, tmp_path], capture_output=True, text=True, check=True
    )
    tmp_path.chmod(0o755)
    assert "not allowed to stage an object" in done.stdout
    assert "grant this user write permission there" in done.stdout
    assert files_in(tmp_path) == []


def test_a_root_that_is_a_file_is_a_usage_error(tmp_path):
    (root := tmp_path / "root").write_bytes(b"")
    for attempt in [
        lambda: store_in(root).create("f/a", b"x"),
        lambda: list(store_in(root).names("f")),
        lambda: store_in(root).read("f/a"),
    ]:
        with pytest.raises(UsageError):
            attempt()


def test_reading_creates_nothing(tmp_path):
    store = store_in(root := tmp_path / "root")
    assert list(store.names("f/0")) == []
    with pytest.raises(KeyError):
        store.read("f/0/a")
    store.delete("f/0/a")
    assert store.sweep() == 0
    assert not root.exists()


STRANGE = {
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "symbolic link": lambda path: path.symlink_to("/etc/hostname"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_strange_entries_among_objects_are_named(tmp_path, make):
    store = store_in(tmp_path)
    store.create("f/a", b"")
    make(tmp_path / "f" / "b")
    with pytest.raises(CorruptionError) as caught:
        store.names("f")
    assert caught.value.facts["name"] == "f/b"


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_opening_a_strange_entry_neither_blocks_nor_leaks(tmp_path, kind):
    (tmp_path / "f").mkdir()
    STRANGE[kind](tmp_path / "f" / "b")
    with pytest.raises(CorruptionError):
        store_in(tmp_path).open("f/b")


def test_a_strange_entry_is_never_replaced(tmp_path):
    (tmp_path / "f" / "a").mkdir(parents=True)
    with pytest.raises(AlreadyExistsError):
        store_in(tmp_path).create("f/a", b"x")


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "f/../../x", "f//a", "f/.", "f/a\0b"])
def test_a_name_never_leaves_the_root(tmp_path, name):
    store = store_in(tmp_path / "root")
    with pytest.raises(UsageError):
        store.create(name, b"x")
    with pytest.raises(UsageError):
        store.read(name)
    with pytest.raises(UsageError):
        store.publish(name, "f/a")
    assert [n for n in files_in(tmp_path) if "staged" not in n] == []


def test_a_label_never_leaves_the_staging_folder(tmp_path):
    store = store_in(tmp_path)
    staged = store.stage("../../" + "é/\0" * 300)
    staged.write(b"x")
    store.publish(staged.finish("f/a", travels=False), "f/a")
    assert files_in(tmp_path) == ["f/a"]


def test_a_token_works_in_another_process_of_the_same_run(tmp_path):
    staged = store_in(tmp_path).stage("x")
    staged.write(b"x")
    token = pickle.loads(pickle.dumps(staged.finish("f/a", travels=False)))
    store_in(tmp_path).publish(token, "f/a")
    assert store_in(tmp_path).read("f/a") == b"x"


def test_folders_that_vanish_are_made_again(tmp_path):
    store = store_in(tmp_path)
    store.create("f/a", b"x")
    store.delete("f/a")
    (tmp_path / "f").rmdir()
    (tmp_path / ".logmirror/staged/h.1.a").rmdir()
    put(store, "f/a")
    assert list(store.names("f")) == ["a"]


def test_sweep_removes_what_dead_writers_of_this_host_left(tmp_path):
    dead = store_in(tmp_path, "h.1.a")
    with dead.hold_writer_lock():
        token = dead.stage("x").finish("f/a", travels=False)
        store_in(tmp_path, "h.1.a").stage("y")
    assert store_in(tmp_path, "h.2.b").sweep() == 2
    assert files_in(tmp_path) == []
    with pytest.raises(UnavailableError, match="gone") as caught:
        dead.publish(token, "f/a")
    assert caught.value.facts == {"token": token}


def test_sweep_lets_a_worker_be_that_has_outlived_its_driver(tmp_path, monkeypatch):
    with store_in(tmp_path, "h.1.a").hold_writer_lock():
        store_in(tmp_path, "h.1.a").stage("x").finish("f/a", travels=False)
    folder = tmp_path / ".logmirror" / "staged" / "h.1.a"
    unlink, late = Path.unlink, f"x.{9:016x}"

    def beside_a_worker(path, **options):
        unlink(path, **options)
        if path.parent == folder:
            (folder / late).write_bytes(b"still staging")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", beside_a_worker)
        assert store_in(tmp_path, "h.2.b").sweep() == 1
    assert [path.name for path in folder.iterdir()] == [late]

    assert store_in(tmp_path, "h.2.b").sweep() == 1
    assert not folder.exists()


def test_sweep_removes_nothing_that_others_have_put_there(tmp_path):
    dead, staged = store_in(tmp_path, "h.1.a"), tmp_path / ".logmirror" / "staged"
    dead.stage("x").finish("f/a", travels=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    foreign = [staged / "h.1.a" / "notes.txt", staged / "h.1.notes", elsewhere / f"x.{7:016x}"]
    for path in foreign:
        path.write_bytes(b"keep me")
    (staged / "h.1.link").symlink_to(elsewhere)
    (staged / "h.1.a" / "folder").mkdir()

    assert store_in(tmp_path, "h.2.b").sweep() == 1

    assert all(path.read_bytes() == b"keep me" for path in foreign)
    assert store_in(tmp_path, "h.2.b").sweep() == 0


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP])
def test_a_filesystem_without_hard_links_is_refused_before_anything_is_copied(
    tmp_path, monkeypatch, number
):
    """As some FUSE filesystems report it; it is not the disk's space, and retrying is no use."""

    def fail(source, target):
        raise OSError(number, os.strerror(number), source, None, target)

    monkeypatch.setattr(os, "link", fail)
    with contextlib.ExitStack() as stack, pytest.raises(UsageError, match="cannot link") as caught:
        begin_writing(FolderLocation(str(tmp_path)), "h.1.a", stack)
    assert "hard links" in caught.value.hint
    assert files_in(tmp_path) == []
    with pytest.raises(UsageError, match="cannot link"):
        store_in(tmp_path).create("f/a", b"x")


def test_a_start_leaves_nothing_of_its_probe(tmp_path):
    with contextlib.ExitStack() as stack:
        begin_writing(FolderLocation(str(tmp_path)), "h.1.a", stack)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o027, 0o077])
def test_the_modes_of_files_and_folders_are_those_of_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        put(store_in(tmp_path / "root"), "f/a")
    finally:
        os.umask(before)
    modes = {p: stat.S_IMODE((tmp_path / p).stat().st_mode) for p in ("root", "root/f", "root/f/a")}
    assert modes == {"root": 0o777 & ~mask, "root/f": 0o777 & ~mask, "root/f/a": 0o666 & ~mask}


def test_sweep_leaves_the_living_alone(tmp_path):
    living, own = store_in(tmp_path, "h.1.a"), store_in(tmp_path, "h.2.b")
    with living.hold_writer_lock():
        token = living.stage("x").finish("f/a", travels=False)
        own_token = own.stage("y").finish("f/a", travels=False)
        assert own.sweep() == 0
        living.publish(token, "f/a")
        own.publish(own_token, "f/b")


class Later(Clock):
    """This many milliseconds after the machine's clock."""

    def __init__(self, later_ms):
        self.later_ms = later_ms

    def now_ms(self):
        return super().now_ms() + self.later_ms


def test_leftovers_of_another_host_are_swept_only_when_they_are_old(tmp_path):
    store_in(tmp_path, "elsewhere.1.a").stage("x").finish("f/a", travels=False)
    assert store_in(tmp_path).sweep() == 0
    almost = FOREIGN_LEFTOVER_AGE_MS - 60_000
    assert store_in(tmp_path, clock=Later(almost)).sweep() == 0
    assert store_in(tmp_path, clock=Later(FOREIGN_LEFTOVER_AGE_MS + 60_000)).sweep() == 1


def test_one_writer_id_lives_once(tmp_path):
    first, second = store_in(tmp_path), store_in(tmp_path)
    with first.hold_writer_lock(), pytest.raises(UsageError), second.hold_writer_lock():
        raise AssertionError
    with store_in(tmp_path).hold_writer_lock():
        pass


HOLDER = """
import sys, pathlib, time
from logmirror.stores.filesystem import FilesystemStore
store = FilesystemStore(pathlib.Path(sys.argv[1]), writer_id="h.9.z")
with store.hold_writer_lock():
    store.stage("x").write(b"half")
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_is_dead_and_a_stopped_one_is_not(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGSTOP)
        assert store_in(tmp_path).sweep() == 0
        holder.kill()
    assert store_in(tmp_path).sweep() == 1


CRASHER = """
import sys, pathlib
from logmirror.stores.filesystem import FilesystemStore
store = FilesystemStore(pathlib.Path(sys.argv[1]), writer_id="h.9.z")
store.create("claims/0", b"claim")
staged = store.stage("x")
staged.write(b"whole")
store.publish(staged.finish("f/a", travels=False), "f/a")
"""

OUTCOMES = {
    "stage.opened": [],
    "stage.written": [],
    "stage.finished": [],
    "publish.linked": ["a"],
    "publish.done": ["a"],
}


@pytest.mark.parametrize("point", OUTCOMES)
def test_every_named_crash_point_of_a_store_kills_where_it_says(tmp_path, point):
    environment = os.environ | {failpoints.VARIABLE: point}
    died = subprocess.run([sys.executable, "-c", CRASHER, tmp_path], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    store = store_in(tmp_path)
    assert store.read("claims/0") == b"claim"
    assert list(store.names("f")) == OUTCOMES[point]
    assert store.sweep() == (0 if point == "publish.done" else 1)
    assert all(store.read(f"f/{name}") == b"whole" for name in store.names("f"))


def test_ten_thousand_names_are_listed_quickly(tmp_path):
    (tmp_path / "f").mkdir()
    for number in range(10_000):
        (tmp_path / "f" / f"{number:020d}").touch()
    began = time.process_time()
    assert len(list(store_in(tmp_path).names("f"))) == 10_000
    assert time.process_time() - began < 2


def test_a_folder_that_cannot_be_read_is_no_empty_listing(tmp_path):
    (tmp_path / "f").touch()
    with pytest.raises(UsageError):
        store_in(tmp_path).below("f")


@pytest.mark.parametrize("listing", ["names", "sizes"])
def test_a_merged_object_is_listed_though_a_scan_has_missed_it(tmp_path, monkeypatch, listing):
    """It was created behind the scan, and the first objects were deleted before it came to them."""

    class Torn(list):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    store, scan = store_in(tmp_path), os.scandir
    for name in ("00-09.batches", "10-19.batches", "20-29.batches"):
        put(store, f"d/0/{name}")
    scans = 0

    def torn(path):
        nonlocal scans
        scans += 1
        if scans > 1:
            return scan(path)
        put(store, "d/0/00-19.batches")
        with scan(path) as entries:
            seen = [entry for entry in entries if entry.name == "20-29.batches"]
        for name in ("00-09.batches", "10-19.batches"):
            store.delete(f"d/0/{name}")
        return Torn(seen)

    monkeypatch.setattr("logmirror.stores.filesystem.os.scandir", torn)
    assert sorted(getattr(store, listing)("d/0")) == ["00-19.batches", "20-29.batches"]
