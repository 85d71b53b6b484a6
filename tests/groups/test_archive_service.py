"""Each archive's groups have a thread of their own: what one waits for, no other waits for."""

import contextlib
import threading

import pytest

from kit.runs.commands import wait_until
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import OutcomeUnknownError, UnavailableError, UsageError
from logmirror.groups import rounds
from logmirror.groups.archive_link import ArchiveRound
from logmirror.groups.archive_service import ArchiveService
from logmirror.groups.archive_spec import ArchiveLinkSpec
from logmirror.monitoring import metrics
from logmirror.monitoring.metrics import Recorder


def spec_of(destination):
    return ArchiveLinkSpec(
        source=None,
        source_alias="primary",
        location=None,
        destination=destination,
        topics=(),
        include=(".*",),
        exclude=(),
        interval_ms=1,
        keep=1,
    )


class Archives:
    """Archives whose rounds are functions, by name."""

    def __init__(self, **rounds):
        self.rounds = rounds
        self.recorder = Recorder()
        specs = [spec_of(name) for name in rounds]
        self.service = ArchiveService(specs, self.open, SYSTEM_CLOCK, self.recorder)

    @contextlib.contextmanager
    def open(self, spec):
        link = type("Link", (), {"round": staticmethod(self.rounds[spec.destination])})
        yield link

    def value(self, metric, name):
        return dict(self.recorder.numbers(metric)).get(("primary", name), 0)


def done():
    return ArchiveRound(groups=3, written=1)


def failing_first(*errors):
    """A round that fails with these errors before it succeeds."""
    left = list(errors)

    def round_():
        if left:
            raise left.pop(0)
        return done()

    return round_


def test_an_archive_that_does_not_respond_delays_no_other_and_not_the_end(monkeypatch):
    monkeypatch.setattr(rounds, "JOIN_MS", 50)
    release = threading.Event()
    archives = Archives(stalled=lambda: release.wait(60) and done(), files=done)
    try:
        with archives.service.running():
            wait_until(
                lambda: archives.value(metrics.SNAPSHOTS, "files") >= 3,
                what=lambda: "rounds",
                timeout_s=60,
            )
            assert archives.value(metrics.GROUPS_ARCHIVED, "files") == 3
        assert archives.value(metrics.SNAPSHOTS, "stalled") == 0
        assert "snapshots-0" in {thread.name for thread in threading.enumerate()}
    finally:
        release.set()


def test_a_failure_is_logged_counted_and_tried_again(monkeypatch, caplog):
    monkeypatch.setattr(rounds, "backoff_ms", lambda failures: failures)
    failing = failing_first(UnavailableError("no response"), UnavailableError("no response"))
    archives = Archives(files=failing)
    with archives.service.running():
        wait_until(
            lambda: archives.value(metrics.SNAPSHOTS, "files") >= 1,
            what=lambda: "a round",
            timeout_s=60,
        )
    assert archives.value(metrics.SNAPSHOT_FAILURES, "files") == 2
    lines = [one for one in caplog.records if "snapshots of groups not written" in one.message]
    assert len(lines) == 1
    assert lines[0].facts == {
        "source": "primary",
        "destination": "files",
        "error": "no response",
    }


def test_what_could_not_be_pruned_is_logged(caplog):
    failed = ArchiveRound(written=1, not_pruned=UsageError("no permission", hint="allow it"))
    Archives(files=lambda: failed).service.run_once()
    (line,) = [one for one in caplog.records if "not deleted" in one.message]
    assert line.facts["hint"] == "allow it"


def test_groups_that_are_not_read_are_logged_once_for_each_change(caplog):
    """An open transaction, only if it lasts."""
    denied, pending = UsageError("no permission"), UnavailableError("pending")
    rounds_ = [
        *[{"g": denied}] * 3,
        {"g": denied, "passing": pending},
        {"g": denied, "open": pending},
        *[{"g": denied, "open": pending}] * 2,
    ]
    left = list(rounds_)
    archives = Archives(files=lambda: ArchiveRound(groups=3, failed=left.pop(0)))
    for _ in rounds_:
        archives.service.run_once()
    lines = [one.facts for one in caplog.records if "groups not read" in one.message]
    assert [(one["groups"], one["reasons"]) for one in lines] == [
        (1, {"g": "no permission"}),
        (2, {"g": "no permission", "open": "pending"}),
    ]


def test_a_group_with_an_open_transaction_is_logged_by_a_single_round(caplog):
    failed = {"g": UnavailableError("pending")}
    Archives(files=lambda: ArchiveRound(groups=1, failed=failed)).service.run_once()
    (line,) = [one for one in caplog.records if "groups not read" in one.message]
    assert line.facts["reasons"] == {"g": "pending"}


def test_that_no_group_is_visible_is_logged(caplog):
    Archives(files=ArchiveRound).service.run_once()
    (line,) = [one for one in caplog.records if "no consumer group" in one.message]
    assert "Describe" in line.facts["hint"]


def test_once_tries_again_what_may_work_soon(monkeypatch):
    monkeypatch.setattr(rounds, "backoff_ms", lambda failures: failures)
    failing = failing_first(UnavailableError("no leader"), OutcomeUnknownError("no response"))
    archives = Archives(files=failing)
    archives.service.run_once()
    assert archives.value(metrics.SNAPSHOTS, "files") == 1


def test_once_is_not_tried_again_after_a_stop():
    left = [UnavailableError("no leader"), UnavailableError("asked again")]
    archives = Archives(files=failing_first(*left))
    archives.service.stop()
    with pytest.raises(UnavailableError, match="no leader"):
        archives.service.run_once()


def test_once_tries_all_archives_and_raises_the_first_error(monkeypatch):
    monkeypatch.setattr(rounds, "ONCE_MS", 0)
    archives = Archives(
        broken=lambda: (_ for _ in ()).throw(UnavailableError("no response")), files=done
    )
    with pytest.raises(UnavailableError):
        archives.service.run_once()
    assert archives.value(metrics.SNAPSHOTS, "files") == 1
