"""Goal: whatever writers do to an archive, and when, a broker that serves it misleads no reader.

Method: mirrors and compactions of the product make histories of an archive, with kills at each of
their changes, failures, lost responses and second writers (`kit.runs.archive_history`). A mount of
the product lists and serves it, in a bucket and in a directory, while these changes happen before
any of its requests (`kit.runs.archive_runs`). Everything that readers get is compared with the
source (`kit.runs.archive_judge`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from kit.runs.archive_history import FOLDER, FORMATS, cleaned, drawn, short
from kit.runs.archive_mount import PLACES, Mount
from kit.runs.archive_runs import (
    Case,
    cases,
    crashed,
    followed,
    interrupted,
    some_cases,
    wandered,
)
from kit.tiers import IS_THIN, NIGHTLY, PLANTED, sized
from logmirror.archive import chain
from logmirror.broker.archives import mounts, objects
from logmirror.broker.log import mounted_log
from logmirror.broker.log.mounted_transactions import TransactionEvents
from logmirror.broker.log.segment import Segment
from logmirror.errors import UnavailableError
from logmirror.stores.filesystem import FilesystemStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.runs.archive_history import History
    from kit.runs.archive_judge import Judge

pytestmark = pytest.mark.slow
_MEMORY = "/dev/shm"  # a new folder is created there


@pytest.fixture
def folder() -> Iterator[Path]:
    place = _MEMORY if Path(_MEMORY).is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as found:
        yield Path(found) / "mount"


@pytest.mark.thinned
@pytest.mark.timeout(sized(600, 600, 7_200))
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMATS)
def test_changes_before_every_request_of_a_start_and_of_a_poll(folder, form, place):
    for seed in sized((1,), (1, 2), (1, 2)):
        history = short(form, seed)
        some = some_cases(history, place, folder, sized(3, 18, 1), f"{seed} {form} {place}")
        errors = records = looked = 0
        for case in cases(history, place, folder) if NIGHTLY else some:
            judge = interrupted(history, place, folder, case, seed)
            assert judge.problems == [], case
            errors, records = errors + judge.errors, records + judge.records
            looked += judge.looked
        assert records
        assert looked
        assert errors or IS_THIN


@pytest.mark.thinned
@pytest.mark.parametrize("form", FORMATS)
def test_a_writer_is_killed_at_each_change_and_another_one_takes_over(folder, form):
    histories = list(crashed(form, sized(6, 1, 1)))
    assert len(histories) >= sized(3, 10, 10)
    for number, history in enumerate(histories):
        judge = followed(history, PLACES[number % 2], folder)
        assert judge.problems == [], history.happened
        assert judge.records


@pytest.mark.thinned
def test_transactions_whose_markers_the_source_has_removed_end_as_there(folder):
    removed = 0
    for seed in range(sized(4, 40, 400)):
        history, count = cleaned(seed)
        judge = followed(history, PLACES[seed % 2], folder)
        assert judge.problems == [], seed
        removed += count
    assert removed


@PLANTED
def test_a_response_beyond_the_end_of_such_a_transaction_is_found(folder):
    with mock.patch.object(mounted_log, "bisect_right", lambda breaks, _: len(breaks)):
        judges = [followed(cleaned(seed)[0], "bucket", folder) for seed in range(10)]
    assert any(judge.problems for judge in judges)


@pytest.mark.thinned
@pytest.mark.timeout(sized(600, 600, 7_200))
def test_drawn_histories_and_drawn_readers(folder):
    happened, failed = set[str](), 0
    for seed in range(sized(6, 40, 3_000)):
        history = drawn(seed)
        judge = wandered(history, PLACES[seed % 2], folder, seed)
        assert judge.problems == [], (seed, history.happened)
        happened |= {word for line in history.happened for word in line.split()}
        failed += judge.errors
    assert {"mirror", "compact", "trim", "died", "refused", "lost"} <= happened
    assert failed


def test_the_beginning_is_not_lost_in_a_listing_of_a_directory(folder):
    """The first objects were merged, and the merged one is where the listing had been before."""
    judge = interrupted(short("parquet", 0), "directory", folder, _HEAD, seed=0)
    assert judge.problems == []


def test_an_object_that_vanishes_while_all_is_listed_has_it_listed_again(folder):
    """Each reader of such an object has one more error, until the next listing."""
    with Mount(short("parquet", 0), "bucket", folder) as mount:
        mount.view.advance(20)
        mount.start()
        [found] = mount._mounts._all  # noqa: SLF001  # what readers cannot see
        partitions = found.topics[FOLDER].values()
        served = [one for one in partitions if one.objects is not None]

        def vanish() -> None:
            for one in served:
                segment = Segment(one.log.folder, 1 << 40, 1 << 41, 0)
                with pytest.raises(UnavailableError, match="listed again"):
                    one.objects.open(segment)

        def all_added(*arguments: Any) -> object:
            result = real(*arguments)
            vanish()
            return result

        real = mounts._all_added  # noqa: SLF001  # the listing
        vanish()
        with mock.patch.object(mounts, "_all_added", all_added):
            mount.poll()
        assert served
        assert all(one.objects.is_outdated for one in served)
        mount.poll()
        assert not any(one.objects.is_outdated for one in served)


_HEAD = Case("start", 15, 14, 6)
_MERGED = Case("poll", 10, 1, 24)
"""The last known object was merged before the next listing."""


_outcome = mounted_log._outcome  # noqa: SLF001  # faults are planted in it


def _one_scan(store: FilesystemStore, folder: str) -> object:
    """A listing that is made once."""
    return store._scanned(folder)  # noqa: SLF001  # the same


def _any_start(names: list[str], *, extension: str, **_: object) -> object:
    """New objects that may begin anywhere."""
    return chain.chain(names, extension=extension, start=None)


def _all_decided(*segments: Any) -> object:
    """Transactions that end with the archive."""
    return _outcome(*segments)._replace(undecided=None)


def _own_markers(segment: Any, _following: object) -> object:
    """Transactions whose markers in later objects are not looked for."""
    return _outcome(segment, ())


_NEVER = property(lambda _: False, lambda _, __: None)
FAULTS = {
    "log start": (0, "parquet", "directory", FilesystemStore, "_entries", _one_scan),
    "0: log start": (0, "native", "bucket", mounts, "chain", _any_start),
    "KAFKA_STORAGE_ERROR": (0, "ndjson", "bucket", objects.Objects, "is_outdated", _NEVER),
    "are not decided": (0, "native", "bucket", mounted_log, "_outcome", _all_decided),
    "has not come to": (0, "native", "directory", mounted_log, "_outcome", _own_markers),
    "last stable offset": (1, "native", "bucket", TransactionEvents, "finish", lambda _: None),
    "high watermark": (0, "parquet", "bucket", mounts, "_added", lambda *_: None),
}


@PLANTED
@pytest.mark.parametrize("problem", FAULTS)
def test_faults_of_a_mount_are_found(folder, problem):
    seed, form, place, part, name, fault = FAULTS[problem]
    with mock.patch.object(part, name, fault, create=True):
        judge = _judged(short(form, seed), place, folder, problem)
    assert judge is not None
    assert _judged(short(form, seed), place, folder, problem) is None


def _judged(history: History, place: str, folder: Path, problem: str) -> Judge | None:
    """Return the first judge that finds a problem."""
    for case in (_HEAD, _MERGED, None):
        judge = (
            followed(history, place, folder)
            if case is None
            else interrupted(history, place, folder, case)
        )
        if any(problem in one for one in judge.problems):
            return judge
    return None
