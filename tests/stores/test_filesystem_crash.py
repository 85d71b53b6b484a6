"""A process that dies between any two system calls leaves an object whole or absent.

Method: count the calls of one undisturbed run, then run it again once per call with a death before
that call, reopen the directory with another writer, and check the contract. No call is assumed to
be harmless, and a retry must always succeed.

This is process death: the kernel keeps everything that was written. Power loss, where unsynced
bytes vanish too, is covered here only by the order of calls: no name is given before the bytes are
synced, and nothing is reported before the folder is.
"""

import inspect

import pytest

from logmirror.stores.filesystem import FilesystemStore
from logmirror.stores.syscalls import Syscalls


class Crash(BaseException):
    """Not an Exception: no handler in the product may swallow the end of the process."""


class CrashingSyscalls(Syscalls):
    """Syscalls that stop the world before call number `at` (0-based); never, if `at` is None."""

    def __init__(self, at=None):
        self.at, self.calls, self.dead = at, [], False

    def __getattribute__(self, name):
        call = super().__getattribute__(name)
        if not inspect.ismethod(call):
            return call
        if self.dead or self.at == len(self.calls):
            self.dead = True  # from here on: `finally` blocks do not run either
            raise Crash
        self.calls.append(name)
        return call


def create(store):
    store.create("f/a", b"whole")


def stage_and_publish(store):
    staged = store.stage("label")
    staged.write(b"who")
    staged.write(b"le")
    store.publish(staged.finish("f/a", travels=False), "f/a")


ACTIONS = {"create": create, "stage and publish": stage_and_publish}

FIRST_TIME = [
    *["make_directory", "sync_directory"] * 4,  # root, .logmirror, staged, the writer's own
    "open_new",
]


def calls_of(action, folder):
    syscalls = CrashingSyscalls()
    action(FilesystemStore(folder, writer_id="h.1.a", syscalls=syscalls))
    return syscalls.calls


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_crash_before_every_call(action, tmp_path):
    total = len(calls_of(action, tmp_path / "probe"))
    for at in range(total):
        folder = tmp_path / str(at)
        with pytest.raises(Crash):
            action(FilesystemStore(folder, writer_id="h.1.a", syscalls=CrashingSyscalls(at)))
        survivor = FilesystemStore(folder, writer_id="h.2.b")
        listed = list(survivor.names("f"))
        assert listed in ([], ["a"])
        assert all(survivor.read(f"f/{name}") == b"whole" for name in listed)
        if not listed:
            action(survivor)  # leftovers never block a retry
        assert survivor.read("f/a") == b"whole"
        survivor.sweep()
        assert survivor.read("f/a") == b"whole"
        assert not list(folder.glob(".logmirror/staged/h.1.a/*"))


def test_a_name_is_given_after_the_bytes_are_durable_and_before_the_folder_is(tmp_path):
    for name, action in ACTIONS.items():
        assert calls_of(action, tmp_path / name) == [
            *FIRST_TIME,
            "write",  # what is less than a block is written at the end
            "sync_data",
            "close",
            *["make_directory", "sync_directory"],  # the object's folder
            "link",
            "sync_directory",
            "unlink",
        ]


def test_a_taken_name_is_durable_before_we_say_so(tmp_path):
    syscalls = CrashingSyscalls()
    store = FilesystemStore(tmp_path, writer_id="h.1.a", syscalls=syscalls)
    create(store)
    syscalls.calls.clear()
    with pytest.raises(Exception, match="object exists"):
        create(store)
    assert syscalls.calls[-3:] == ["link", "sync_directory", "unlink"]
