"""The judge of the trials finds what a faulty mirror leaves behind, in each kind of replica.

Method: the content of a source and a replica is given, with one fault; the judge reads no broker.
One mirror with a planted bug runs as a process in the trial that it must fail.
"""

from types import SimpleNamespace

import pytest

from logmirror.archive.naming import format_name
from logmirror.model import OffsetRange
from logmirror.simulation.matrix import simulated_points
from logmirror.testing.checker import Row
from logmirror.torture import processes
from logmirror.torture.feeder import RecordMaker, number_of, placed
from logmirror.torture.real import FLOWS, SIMULATED_ONLY, judge, run_trials
from logmirror.torture.session import Session
from logmirror.torture.testbed import Flow
from logmirror.torture.translated import next_offset
from logmirror.torture.trials import failpoints_of

NATIVE, SAME, NEW = Flow("files", "native"), Flow("Kafka", "-"), Flow("Kafka", "translate")


def rows(first, count, *, number):
    """Return single records at the offsets from `first` on, with the numbers from `number` on."""
    maker = RecordMaker("rows", number)
    return [row for at in range(count) for row in placed(maker.batch(1), first + at).values()]


WRITTEN = rows(0, 20, number=1)
ABORTED = rows(20, 3, number=100)
LAST = rows(24, 6, number=200)  # behind a transaction marker
SECOND = rows(26, 8, number=1_000_000_000)
SOURCE = WRITTEN + LAST


def at_new_offsets(copied):
    """Return the records at the offsets that another cluster assigns, with a marker before them."""
    return [row._replace(offset=at) for at, row in enumerate(copied, 1)]


def syncs(*pairs):
    key = b"\x00\x06orders" + bytes(4)
    return [
        Row(0, 0, 0, key, up.to_bytes(8, "big") + down.to_bytes(8, "big")) for up, down in pairs
    ]


def judged(flow, copied, *, at_source=SOURCE, pairs=(), names=None):
    """Return the codes of the anomalies, each with where it was found."""
    testbed = SimpleNamespace(
        source_rows=lambda partition: [] if partition else list(at_source),
        source_end=lambda partition: 0 if partition else 30,
        syncs=lambda _: syncs(*pairs),
        rows=lambda _, partition: [] if partition else copied,
        names=lambda _, partition: [] if partition and names is not None else names,
    )
    feeder = SimpleNamespace(
        count=len(SOURCE),
        acknowledged={0: {row.offset: row for row in SOURCE}, 1: {}},
        aborted={0: {row.offset: row for row in ABORTED}, 1: {}},
    )
    session = Session(testbed, feeder, flows=[flow], seed=1, report=print)
    session.second[0] |= {row.offset: row for row in SECOND}
    judge(session)
    return {(where, anomaly.code) for where, anomaly in session.result.anomalies}


def names(*ends):
    firsts = [0, *(end + 1 for end in ends[:-1])]
    return [
        format_name(OffsetRange(first=first, last=end), "batches")
        for first, end in zip(firsts, ends, strict=True)
    ]


def test_exact_replicas_have_no_anomaly():
    assert judged(NATIVE, SOURCE, names=names(9, 29)) == set()
    assert judged(SAME, SOURCE) == set()
    pairs = [(0, 1), (19, 20), (24, 21)]
    assert judged(NEW, at_new_offsets(SOURCE), pairs=pairs) == set()


@pytest.mark.parametrize("flow", [NATIVE, SAME, NEW])
@pytest.mark.parametrize(
    ("copied", "code"),
    [
        (SOURCE[:3] + SOURCE[4:], "A1"),
        (SOURCE[:-1], "A2"),
        (SOURCE[:4] + SOURCE[3:], "A3"),
        (WRITTEN + ABORTED + LAST, "A5"),
        ([*SOURCE[:3], SOURCE[4], SOURCE[3], *SOURCE[5:]], "A12"),
        ([SOURCE[0]._replace(timestamp_ms=1), *SOURCE[1:]], "A13"),
        ([*SOURCE, *rows(31, 1, number=999)], "A14"),
        (SOURCE[:-4] + SECOND, "A21"),
    ],
)
def test_each_kind_of_anomaly_is_found_in_each_kind_of_replica(flow, copied, code):
    shown = at_new_offsets(copied) if flow is NEW else copied
    found = judged(flow, shown, names=names(9, 29) if flow is NATIVE else None)
    assert (f"{flow.name}/0", code) in found
    assert all(where == f"{flow.name}/0" for where, _ in found)


def test_a_chain_with_a_gap_is_found():
    missing = names(9, 19, 29)[::2]
    assert judged(NATIVE, SOURCE, names=missing) == {("files-native/0", "A15")}


@pytest.mark.parametrize("pair", [(1, 1), (24, 20), (23, 21), (3, 40)])
def test_an_offset_sync_of_two_different_records_is_found(pair):
    found = judged(NEW, at_new_offsets(SOURCE), pairs=[(0, 1), pair])
    assert found == {("kafka-translate/0", "A17")}


@pytest.mark.parametrize(
    ("at_source", "code"),
    [
        (SOURCE[:-1], "A2"),
        (WRITTEN + ABORTED + LAST, "A5"),
        (SOURCE[:-4] + SECOND, "A21"),
    ],
)
def test_a_source_that_does_not_hold_what_it_acknowledged_is_found(at_source, code):
    assert ("source", code) in judged(SAME, list(at_source), at_source=at_source)


def test_the_number_of_a_record_is_in_its_value_or_without_one_in_a_header():
    made = [record for _ in range(20) for record in RecordMaker("x", 17 * 3).batch(2)]
    assert {record.value is None for record in made} == {True, False}
    rows_made = [Row(*record) for record in RecordMaker("x", 5).batch(8)]
    assert [number_of(row) for row in rows_made] == list(range(5, 5 + len(rows_made)))
    assert number_of(Row(0, 0, 0, None, b"of another producer")) == -1
    assert number_of(Row(0, 0, 0, None, None)) == -1


def test_the_position_of_a_flow_is_in_its_last_progress_record():
    def progress(kind, mirror, partition, value):
        key = f'["{kind}","{mirror}","orders",{partition},"orders-copy"]'
        return Row(0, 0, 0, key.encode(), value)

    log = [
        progress("owner", "m", 0, b'{"writer":"w"}'),
        progress("next", "m", 0, b'{"next":4}'),
        progress("next", "m", 0, b'{"next":7}'),
        progress("next", "m", 1, b'{"next":9}'),
        progress("next", "n", 0, b'{"next":11}'),
    ]
    assert [next_offset(log, "m", number) for number in range(3)] == [7, 9, 0]


def test_every_failpoint_that_a_trial_can_reach_is_in_a_run():
    flows = [flow for flow in FLOWS if flow.form not in SIMULATED_ONLY]
    found = [point.partition("#")[0] for point in failpoints_of(flows, 1)]
    simulated = {p for flow in flows for p in simulated_points(flow.destination, flow.form)}
    unreachable = {"head.filled", "head.deleted", "hole.joined"}
    unreachable |= {point for point in simulated if point.startswith("compact.")}
    assert sorted(found) == sorted(simulated - unreachable)
    assert {point for point in found if point.startswith("translate.")}


@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_a_mirror_that_joins_two_histories_is_found(tmp_path, monkeypatch):
    """Its archive is continued without a comparison. The product's mirrors pass the same trial."""
    reported = []

    def anomalies(folder):
        folder.mkdir()
        result = run_trials(
            folder, flows=[NATIVE], faults=["regrown"], trials=1, seed=4, report=reported.append
        )
        return {anomaly.code for _, anomaly in result.anomalies}, result.missed

    assert anomalies(tmp_path / "product") == (set(), 0)
    monkeypatch.setattr(processes, "MIRROR", "kit.runs.joining_mirror")
    found, missed = anomalies(tmp_path / "planted")
    assert "A21" in found
    assert missed == 1
    assert "  without effect: not all mirrors refused the second history in time" in reported
