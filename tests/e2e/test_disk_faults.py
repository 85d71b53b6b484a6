"""A disk that fails for a while delays its flows and loses nothing; they resume afterwards.

Method: the whole service runs in this process, over a topic that grows, while the system calls of
its stores fail as those of a faulty disk, one kind after the other. Independent readers check the
result.
"""

import contextlib
import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from kit.judges.copies import forget_connections
from kit.judges.truth import Source
from kit.runs.commands import FORMATS, mirror, wait_until, write_config
from kit.runs.inline_run import InlineRunner
from kit.runs.writer import writing
from logmirror.app.run import build_service
from logmirror.app.specs import mirror_specs
from logmirror.config.settings import load
from logmirror.mirror.lane import lanes_of, seat_count
from logmirror.stores.syscalls import Syscalls

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(900)]

FAULTS = [
    ("write", errno.ENOSPC),
    ("write", errno.EIO),
    ("open_new", errno.EROFS),
    ("sync_data", errno.EIO),
    ("link", errno.EIO),
    ("sync_directory", errno.EIO),
]


class Disk:
    """Fails the calls of a name while `failing` is set."""

    def __init__(self, monkeypatch):
        self.call, self.code, self.is_short = "", 0, False
        self.stalled_root = ""
        self.released, self.reached = threading.Event(), threading.Event()
        for name in sorted({name for name, _ in FAULTS}):
            monkeypatch.setattr(Syscalls, name, self._failing(name, getattr(Syscalls, name)))

    def stall(self, root):
        """Make each call that writes below a directory wait until `released` is set."""
        self.released.clear()
        self.stalled_root = str(root)

    def _waits(self, arguments):
        """Wait if a call is for a stalled file system, as a process in the kernel waits."""
        for argument in arguments:
            path = ""
            if isinstance(argument, int):
                path = str(Path(f"/proc/self/fd/{argument}").readlink())
            elif isinstance(argument, str | Path):
                path = str(argument)
            if self.stalled_root and path.startswith(self.stalled_root):
                self.reached.set()
                self.released.wait()

    def _failing(self, name, call):
        def maybe(syscalls, *arguments):
            self._waits(arguments)
            if name == self.call:
                raise OSError(self.code, os.strerror(self.code))
            if name == "write" and self.is_short:
                descriptor, data = arguments
                return call(syscalls, descriptor, data[: max(len(data) // 3, 1)])
            return call(syscalls, *arguments)

        return maybe


@contextlib.contextmanager
def serving(config):
    """The service, until the block ends; then it flushes and stops."""
    with contextlib.ExitStack() as stack:
        specs = mirror_specs(load(config))
        seats = seat_count(lanes_of(specs, shares_reads=False))
        runner = stack.enter_context(InlineRunner(more_slots=seats - 1))
        service = build_service(specs, runner, stack)
        errors = []

        def run():
            try:
                service.run()
            except BaseException as error:  # noqa: BLE001  # reported below
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            service.stop()
            thread.join(60)
            forget_connections()
        assert errors == []
        assert not thread.is_alive()


def test_each_disk_fault_is_retried_until_it_passes(cli_broker, tmp_path, monkeypatch, caplog):
    topic = cli_broker.create_topic("disk-faults")
    limits = {"max_time_ms": 100, "max_bytes": 15_000}
    mirrors = (mirror(topic, cli_broker.bootstrap, tmp_path, form=f, **limits) for f in FORMATS)
    config = write_config(tmp_path / "config.json", *mirrors)
    disk = Disk(monkeypatch)
    monkeypatch.setattr("logmirror.mirror.repeated.INTERVAL_MS", 0)

    def wait_for(message):
        """Until each flow has said this once more."""
        before = len(caplog.records)

        def said():
            new = [r for r in caplog.records[before:] if r.getMessage().startswith(message)]
            return {r.facts["mirror"] for r in new} == set(FORMATS)

        wait_until(said, what=lambda: f"{message} {disk.call} {disk.code}", timeout_s=60)

    with (
        caplog.at_level(logging.INFO, logger="logmirror"),
        serving(config),
        writing(cli_broker.bootstrap, topic, partitions=1, seed=1),
    ):
        wait_for("flushed")
        for call, code in FAULTS:
            disk.call, disk.code = call, code
            wait_for("flow waits")
            disk.call = ""
            wait_for("flushed")
        disk.is_short = True
        wait_for("flushed")
        wait_for("flushed")

    source = Source(cli_broker.bootstrap, topic)
    for form in FORMATS:
        assert source.anomalies(tmp_path, form) == [], form
    assert [p for p in (tmp_path / ".logmirror" / "staged").rglob("*") if p.is_file()] == []


def test_a_stalled_file_system_holds_up_its_own_flows_only(
    cli_broker, tmp_path, monkeypatch, caplog
):
    """Each directory counts as a file system of its own."""
    topic = cli_broker.create_topic("stalled-disk")
    monkeypatch.setattr("logmirror.app.store_location.mount_point", lambda root: root)
    roots = {name: tmp_path / name for name in ("stalled", "calm")}
    mirrors = [
        mirror(topic, cli_broker.bootstrap, root, form="native", name=name, max_time_ms=200)
        for name, root in roots.items()
    ]
    config = write_config(tmp_path / "config.json", *mirrors)
    disk = Disk(monkeypatch)

    def flushes(name):
        records = [r for r in caplog.records if r.getMessage() == "flushed"]
        return sum(r.facts["mirror"] == name for r in records)

    def wait_for_flush(name):
        before = flushes(name)
        wait_until(lambda: flushes(name) > before, what=lambda: f"flush of {name}", timeout_s=60)

    with (
        caplog.at_level(logging.INFO, logger="logmirror"),
        serving(config),
        writing(cli_broker.bootstrap, topic, partitions=1, seed=1),
    ):
        for name in roots:
            wait_for_flush(name)
        disk.stall(roots["stalled"])
        assert disk.reached.wait(60)
        before = flushes("stalled")
        for _ in range(5):
            wait_for_flush("calm")
        assert flushes("stalled") == before
        disk.stalled_root = ""
        disk.released.set()
        wait_for_flush("stalled")

    source = Source(cli_broker.bootstrap, topic)
    for name, root in roots.items():
        assert source.anomalies(root, "native", name=name) == [], name
