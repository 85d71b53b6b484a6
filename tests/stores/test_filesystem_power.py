"""A power loss at any moment leaves an object whole or absent, and every reported object present.

Method: the system calls also record what is durable: the bytes of each file's last sync and the
names of each folder's last sync. A power loss before each call in turn leaves the durable state
plus nothing, all, or some of the later changes: names alone, unflushed bytes as zeros or missing.
The folder is recreated from that state, and another writer opens it.
"""

import contextlib
import random
from pathlib import Path

import pytest

from logmirror.stores.base import AlreadyExistsError
from logmirror.stores.filesystem import FilesystemStore
from logmirror.stores.syscalls import Syscalls

DATA = b"whole" * 2000


class PowerLossError(BaseException):
    """Not an Exception: no handler may run without power."""


class _Folder:
    def __init__(self):
        self.durable, self.now, self.changes = {}, {}, []

    def bind(self, name, found):
        self.changes.append((name, found))
        if found is None:
            self.now.pop(name, None)
        else:
            self.now[name] = found


class _File:
    def __init__(self):
        self.durable, self.path = b"", None


class AccountedCalls(Syscalls):
    """Counts its calls; there is power for `power` of them, or for ever."""

    def __init__(self, root, power=None):
        self.folders, self.files, self.power, self.calls = {root: _Folder()}, {}, power, 0

    def _call(self):
        if self.power is not None and self.calls >= self.power:
            raise PowerLossError
        self.calls += 1

    def make_directory(self, path):
        self._call()
        super().make_directory(path)
        self.folders[path] = _Folder()
        self.folders[path.parent].bind(path.name, self.folders[path])

    def open_new(self, path):
        self._call()
        descriptor = super().open_new(path)
        self.files[descriptor] = file = _File()
        file.path = path
        self.folders[path.parent].bind(path.name, file)
        return descriptor

    def write(self, descriptor, data):
        self._call()
        return super().write(descriptor, data)

    def sync_data(self, descriptor):
        self._call()
        file = self.files[descriptor]
        file.durable = file.path.read_bytes()

    def close(self, descriptor):
        self._call()
        super().close(descriptor)

    def link(self, source, target):
        self._call()
        super().link(source, target)
        self.folders[target.parent].bind(target.name, self.folders[source.parent].now[source.name])

    def unlink(self, path):
        self._call()
        super().unlink(path)
        self.folders[path.parent].bind(path.name, None)

    def sync_directory(self, path):
        self._call()
        if path in self.folders:
            folder = self.folders[path]
            folder.durable, folder.changes = dict(folder.now), []

    def leave(self, folder, target, happens):
        """Write what a power loss leaves of a folder to another one."""
        target.mkdir()
        names = folder.durable | {name: found for name, found in folder.changes if happens()}
        for name, found in names.items():
            if isinstance(found, _Folder):
                self.leave(found, target / name, happens)
            elif found is not None:
                never_flushed = b"\0" * 100 if happens() else b""
                (target / name).write_bytes(found.durable or never_flushed)


def create(store):
    store.create("f/a", DATA)


def stage_and_publish(store):
    staged = store.stage("label")
    staged.write(DATA)
    store.publish(staged.finish("f/a", travels=False), "f/a")


def twice(store):
    """Like a writer that finds its name taken and continues as if it had written the object."""
    create(store)
    with pytest.raises(AlreadyExistsError):
        create(store)


ACTIONS = {"create": create, "stage and publish": stage_and_publish, "twice": twice}


def survivals():
    yield lambda: False
    yield lambda: True
    for seed in range(6):
        chooser = random.Random(seed)
        yield lambda chooser=chooser: chooser.random() < 0.5


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_power_that_goes_before_any_call_leaves_objects_whole_or_absent(action, tmp_path):
    whole = AccountedCalls(tmp_path)
    action(FilesystemStore(tmp_path / "all", writer_id="h.1.a", syscalls=whole))
    for power in range(whole.calls + 1):
        base = tmp_path / str(power)
        base.mkdir()
        calls = AccountedCalls(base, power)
        is_reported = False
        try:
            action(FilesystemStore(base / "root", writer_id="h.1.a", syscalls=calls))
            is_reported = True
        except PowerLossError:
            pass
        for number, happens in enumerate(survivals()):
            left = base / f"left-{number}"
            calls.leave(calls.folders[base], left, happens)
            _check(left / "root", action, is_reported=is_reported)
        assert is_reported == (power == whole.calls)


def _check(root: Path, action, *, is_reported):
    survivor = FilesystemStore(root, writer_id="h.2.b")
    listed = list(survivor.names("f"))
    assert listed in ([], ["a"])
    assert not is_reported or listed == ["a"]
    assert all(survivor.read(f"f/{name}") == DATA for name in listed)
    if not listed:
        action(survivor)
    assert survivor.read("f/a") == DATA


def test_what_a_successor_goes_on_from_survives_power_that_its_dead_writer_never_saw(tmp_path):
    (tmp_path / "all").mkdir()
    whole = AccountedCalls(tmp_path / "all")
    stage_and_publish(FilesystemStore(tmp_path / "all", writer_id="h.1.a", syscalls=whole))
    seen = 0
    for power in range(whole.calls + 1):
        root, left = tmp_path / str(power), tmp_path / f"left-{power}"
        root.mkdir()
        calls = AccountedCalls(root, power)
        with contextlib.suppress(PowerLossError):  # here only the process dies
            stage_and_publish(FilesystemStore(root, writer_id="h.1.a", syscalls=calls))
        calls.power = None
        successor = FilesystemStore(root, writer_id="h.2.b", syscalls=calls)
        named = successor.tail("f").names
        successor.create("f/b", DATA)
        calls.leave(calls.folders[root], left, lambda: False)
        assert list(FilesystemStore(left, writer_id="h.3.c").names("f")) == [*named, "b"]
        seen += bool(named)
    assert 1 < seen < whole.calls
