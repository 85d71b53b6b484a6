"""Fault injection into real processes on loopback: brokers, mirrors, an S3 server, files.

Each trial starts a mirror, injects one fault, and kills the mirror (`trials`). At the end a run
without faults copies the rest, and the checker compares each replica with the source.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from logmirror.clock import SYSTEM_CLOCK
from logmirror.testing.checker import History, Truth
from logmirror.torture.feeder import Feeder, number_of
from logmirror.torture.processes import PARTITIONS, ending_children
from logmirror.torture.session import Session
from logmirror.torture.testbed import TOPIC, Flow, Testbed
from logmirror.torture.translated import with_source_offsets, wrong_pairs
from logmirror.torture.trials import TRIALS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from logmirror.torture.session import RealResult

_FINISH_MS: Final = 120_000
_TRANSACTIONS: Final = 0.1
"""Share of the trials in which the source gets transactions. After a mirror was killed while it
filled offset gaps in a cluster, that replica waits for some 18 seconds (`to_kafka.gap_leases`)."""

FLOWS: Final = (
    Flow("files", "native"),
    Flow("files", "parquet"),
    Flow("files", "ndjson"),
    Flow("S3", "native"),
    Flow("S3", "parquet"),
    Flow("Kafka", "-"),
    Flow("Kafka", "translate"),
    Flow("files", "snapshots"),
)
"""The flows of a run without `-c`."""

SIMULATED_ONLY: Final = {
    "snapshots": "simulated only: `compaction: log` (the topic has records without keys)",
}
"""Formats that the trials with real processes leave out, and why."""


def run_trials(  # noqa: PLR0913  # the options of the command
    folder: Path,
    *,
    flows: Sequence[Flow],
    faults: Sequence[str],
    trials: int,
    seed: int,
    report: Callable[[str], None],
) -> RealResult:
    """Run the trials and a run without faults, then compare.

    Args:
        folder: An empty folder for all files.
        flows: The flows to run.
        faults: Names in `TRIALS`.
        trials: Number of trials.
        seed: Determines the order of faults, failpoints and delays; not the timing of the machine.
        report: Called with one line of progress.
    """
    started_ms = SYSTEM_CLOCK.monotonic_ms()
    with ending_children(), contextlib.ExitStack() as stack:
        testbed = Testbed(folder, flows, stack)
        feeder = stack.enter_context(Feeder(testbed.source.address, TOPIC, PARTITIONS, seed))
        session = Session(testbed, feeder, flows=flows, seed=seed, report=report)
        session.result.left_out += testbed.left_out
        for number in range(trials):
            trial = TRIALS[faults[number % len(faults)]]
            session.result.trials += 1
            report(f"trial {number + 1} of {trials}: {trial.meaning}")
            feeder.transacts = session.chooser.random() < _TRANSACTIONS
            trial.run(session)
        feeder.stop()
        _finish(session)
        judge(session)
    session.result.seconds = (SYSTEM_CLOCK.monotonic_ms() - started_ms) / 1000
    return session.result


def _finish(session: Session) -> None:
    """Copy the rest without faults."""
    session.report("final run without faults")
    session.testbed.s3.faults.clear()
    mirror = session.testbed.start("--until-now")
    code = mirror.end(_FINISH_MS)
    session.kill_and_record(mirror)
    if code != 0:
        session.stuck(session.flows, f"the final run exited with {code}: {mirror.last_line}")


def judge(session: Session) -> None:
    """Compare each replica with the source, and the source with its acknowledgements."""
    testbed, feeder, anomalies = session.testbed, session.feeder, session.result.anomalies
    session.result.records = feeder.count
    for partition in range(PARTITIONS):
        rows = testbed.source_rows(partition)
        written, aborted = feeder.acknowledged[partition], feeder.aborted[partition]
        second = session.second[partition]
        at_source = History().judge(
            Truth(rows=[written[at] for at in sorted(written)], aborted=aborted, later=second),
            [row for row in rows if row.offset in written or row.offset in aborted],
        )
        anomalies += [("source", anomaly) for anomaly in at_source]
        truth = Truth(rows=rows, end=testbed.source_end(partition), aborted=aborted, later=second)
        known = [*second.values(), *aborted.values(), *rows]
        offsets = {number_of(row): row.offset for row in known}
        for flow in session.flows:
            history = session.histories[flow.name, partition]
            copied = testbed.rows(flow, partition)
            if flow.form == "translate":
                for pair in wrong_pairs(testbed.syncs(flow), partition, copied, offsets):
                    history.mistranslated(pair)
                copied = list(with_source_offsets(copied, offsets))
            found = history.judge(truth, copied, names=testbed.names(flow, partition))
            anomalies += [(f"{flow.name}/{partition}", each) for each in found]
