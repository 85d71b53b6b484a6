"""Simulated runs with faults have no anomaly, and runs of a broken product do.

Method: random seeds and cells of the fault matrix, each with a fault at a failpoint and further
ones at random moments; the checker compares the replica with the source. Then one rule of the
product is removed at a time, and a few seeds must show an anomaly. `SEEDS` and `STRIDE` are the
sizes in `make test`, in `make gate` and at night.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pyarrow.compute as pc
import pytest

from kit.tiers import sized
from logmirror.archive import claims
from logmirror.cluster.offset_syncs import Run
from logmirror.cluster.transactions import TransactionalProducer
from logmirror.failpoints import POINTS
from logmirror.mirror import histories
from logmirror.simulation.coordinator import Transactions
from logmirror.simulation.disk import DiskCalls
from logmirror.simulation.faults import Directive
from logmirror.simulation.matrix import Cell, cells, page, random_plan, run_cell
from logmirror.simulation.simulate import Plan, simulate
from logmirror.simulation.world import World
from logmirror.source.partition import KafkaSource
from logmirror.testing import Anomaly
from logmirror.to_archive.commit import Committer
from logmirror.to_archive.snapshot_transfer import SnapshotTransfer
from logmirror.to_kafka.partition_writer import PartitionWriter
from logmirror.to_kafka.translate_progress import PROGRESS
from logmirror.to_kafka.translate_transfer import TranslateTransfer
from logmirror.wire.rebatch import stamp

TRANSLATED = ("Kafka", "translate")
SENT, NOTED = "translate.sent", "translate.noted"

SEEDS = sized(75, 500, 10_000)
STRIDE = sized(13, 3, 1)
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"


def test_the_same_plan_takes_the_same_steps():
    for destination, form in (("files", "parquet"), ("S3", "native"), ("Kafka", "-"), TRANSLATED):
        plan = Plan(
            seed=3,
            destination=destination,
            form=form,
            directive=Directive("fetch.answered", "kill"),
            drawn=("kill", "stop"),
        )
        first, second = simulate(plan), simulate(plan)
        assert first.trace == second.trace
        assert first.happened == second.happened
        assert first.records > 10


@pytest.mark.thinned
@pytest.mark.timeout(2400)  # at night
def test_no_seed_shows_an_anomaly():
    found = [simulate(random_plan(seed)) for seed in range(SEEDS)]
    assert [(str(r.plan), r.anomalies) for r in found if r.anomalies] == []
    assert sum(len(result.happened) >= 3 for result in found) > 0.8 * SEEDS


def _no_claims(monkeypatch):
    monkeypatch.setattr(claims, "_claim", lambda *_: None)


def _no_flush_of_folders(monkeypatch):
    monkeypatch.setattr(DiskCalls, "sync_directory", lambda *_: None)


def _no_flush_of_files(monkeypatch):
    monkeypatch.setattr(DiskCalls, "sync_data", lambda *_: None)


def _positions_run_ahead(monkeypatch):
    accept = Committer._accept  # noqa: SLF001  # the rule that is broken

    def ahead(self, work, position, receipt):
        covered = accept(self, work, position, receipt)
        return type(covered)(first=covered.first, last=covered.last + 1)

    monkeypatch.setattr(Committer, "_accept", ahead)


def _errors_of_responses_are_ignored(monkeypatch):
    def ignore_error(self, response, _now_ms):
        sent = self._in_flight.popleft()
        self.verified = sent.base_offset + sent.records

    monkeypatch.setattr(PartitionWriter, "record_response", ignore_error)


def _progress_outside_of_transactions(monkeypatch):
    transmit = TranslateTransfer._transmit  # noqa: SLF001  # the rule that is broken

    def without_transaction(self, copy, where, batch, sequence):
        if where != PROGRESS:
            transmit(self, copy, where, batch, sequence)
            return
        stamp(batch, producer_id=-1, producer_epoch=-1, sequence=-1, transactional=False)
        copy.session.pipeline.send([(where, batch)])

    monkeypatch.setattr(TranslateTransfer, "_transmit", without_transaction)


def _responses_of_two_leaders_mixed_up(monkeypatch):
    def collect(self, copy, *, block):
        for response in copy.session.pipeline.collect(block=block):
            if response.error is not None:
                self._fail(copy, response.error)
            elif copy.in_flight:
                piece = copy.in_flight.popleft()
                copy.written.append(Run(piece.base_offset, response.base_offset, piece.count))

    monkeypatch.setattr(TranslateTransfer, "_collect", collect)


def _snapshots_forget(monkeypatch):
    monkeypatch.setattr(SnapshotTransfer, "_before", lambda *_: iter(()))


def _tombstones_remove_nothing(monkeypatch):
    def read(self, view, covered, **options):
        add = view.add
        view.add = lambda batch: add(batch.filter(pc.is_valid(batch["value"])))
        return read_source(self, view, covered, **options)

    read_source = SnapshotTransfer._read_source  # noqa: SLF001  # the rule that is broken
    monkeypatch.setattr(SnapshotTransfer, "_read_source", read)


def _histories_are_not_compared(monkeypatch):
    monkeypatch.setattr(KafkaSource, "_epoch_before", lambda *_: -1)
    monkeypatch.setattr(histories, "compared", lambda *_, **__: (-1, True))


def _commits_after_an_error(monkeypatch):
    monkeypatch.setattr(TranslateTransfer, "_fail", lambda *_: None)


BROKEN = {
    "no claims": (_no_claims, "files", "native", "pause", "claim.created"),
    "no fsync of folders": (_no_flush_of_folders, "files", "ndjson", "power", "publish.done"),
    "no fsync of files": (_no_flush_of_files, "files", "native", "power", "publish.done"),
    "the position runs ahead": (_positions_run_ahead, "S3", "ndjson", "kill", "commit.done"),
    "ignored errors": (
        _errors_of_responses_are_ignored,
        "Kafka",
        "-",
        "refused",
        "produce.prepared",
    ),
    "snapshots without their predecessor": (
        _snapshots_forget,
        "S3",
        "snapshots",
        "kill",
        "publish.done",
    ),
    "ignored tombstones": (_tombstones_remove_nothing, "files", "snapshots", "kill", "commit.done"),
    "progress outside the transaction": (
        _progress_outside_of_transactions,
        *TRANSLATED,
        "kill",
        NOTED,
    ),
    "responses of two leaders mixed up": (
        _responses_of_two_leaders_mixed_up,
        *TRANSLATED,
        "kill",
        SENT,
    ),
    "no comparison of histories": (
        _histories_are_not_compared,
        *("files", "parquet", "regrown", "commit.done"),
    ),
    "commit after an error": (_commits_after_an_error, *TRANSLATED, "refused", SENT),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_a_removed_rule_causes_an_anomaly(case, monkeypatch):
    broken, destination, form, fault, point = case
    broken(monkeypatch)
    cell = Cell(point, fault, destination, form)
    for seed in range(12):
        if run_cell(cell, 100 * seed).result.anomalies:
            return
    pytest.fail("no run had an anomaly")


@pytest.mark.parametrize("is_broken", [False, True], ids=["unchanged", "without the rule"])
def test_a_late_end_txn_does_not_end_the_next_transaction(monkeypatch, is_broken):
    """Each EndTxn whose response is lost is performed again after the next records were sent."""
    ended, lost = [], []
    end, take, reached = Transactions.end, World.take, World.reached

    def remember(self, *request):
        ended[:] = [(self, *request)]
        return end(self, *request)

    def lose(self, kind):
        is_taken = take(self, kind)
        if is_taken and kind == "losses":
            lost[:] = ended
        ended.clear()
        return is_taken

    def repeat(self, point):
        reached(self, point)
        if point == SENT and lost:
            end(*lost.pop())

    monkeypatch.setattr(Transactions, "end", remember)
    monkeypatch.setattr(World, "take", lose)
    monkeypatch.setattr(World, "reached", repeat)
    if is_broken:
        monkeypatch.setattr(TransactionalProducer, "has_stray", False)
    found = [run_cell(Cell(NOTED, "lost-answer", *TRANSLATED), n) for n in range(8)]
    codes = {anomaly.code for each in found for anomaly in each.result.anomalies}
    assert codes >= {"A3"} if is_broken else not codes


@pytest.mark.thinned
@pytest.mark.timeout(2400)  # at night
def test_cells_of_the_matrix_are_covered_without_an_anomaly():
    """A part of the cells includes each failpoint, fault, destination and format; see `STRIDE`."""
    chosen = cells()[::STRIDE]
    found = [run_cell(cell, 0) for cell in chosen]
    assert [r for r in found if r.result.anomalies] == []
    assert [str(r.cell) for r in found if not r.is_covered] == []
    for name in ("point", "fault", "destination", "form"):
        assert {getattr(c, name) for c in chosen} == {getattr(c, name) for c in cells()}


def test_the_page_is_the_matrix():
    text = PAGE.read_text()
    assert text == page()
    of_the_broker = "transaction."
    mirrors = [point for point in POINTS if not point.startswith(of_the_broker)]
    assert all(f"`{point}`" in text for point in mirrors)
    assert text.count("| ok ") == len(cells()) + 1  # and once in the legend


@pytest.mark.parametrize("is_covered", [True, False])
def test_the_page_is_not_written_after_a_failed_run(tmp_path, monkeypatch, is_covered):
    """A cell fails by an anomaly, or because its fault did not happen."""
    cell = cells()[0]
    anomalies = (Anomaly(code="A1", count=1, example="a record is missing"),) if is_covered else ()
    result = SimpleNamespace(plan="seed 1", anomalies=anomalies)
    spec = importlib.util.spec_from_file_location("w", ROOT / "scripts" / "write_faults.py")
    write_faults = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_faults)
    failed = SimpleNamespace(cell=cell, result=result, is_covered=is_covered)
    monkeypatch.setattr(write_faults, "PAGE", tmp_path / "faults.md")
    monkeypatch.setattr(write_faults, "cells", lambda: [cell])
    monkeypatch.setattr(write_faults, "run_cell", lambda *_: failed)
    assert write_faults.main() == 1
    assert not (tmp_path / "faults.md").exists()
