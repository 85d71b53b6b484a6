"""Operators see offset gaps as metrics, not log lines (R10); every event names its mirror (R11).

Method: real transactions at Apache Kafka, copied to files and to clusters by one run without Spark
in a thread of this process.
"""

import logging

import pytest

from kit.judges.clients import produce_transactions
from kit.judges.copies import forget_connections
from kit.judges.gaps import plain_messages
from kit.runs.commands import logmirror_json, mirror, wait_until, write_config
from kit.runs.inline_run import mirror_to_cluster
from kit.runs.watched import running


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_open():
    yield
    forget_connections()


@pytest.mark.mirror_v3("FSL-02")
def test_r10_and_r11_of_transactions_into_files_and_into_clusters(kafka_431, tmp_path, caplog):
    """Thousands of offsets without a record: figures, not lines; and each line has its mirror."""
    caplog.set_level(logging.DEBUG, logger="logmirror")
    topic = kafka_431.create_topic("seen-gaps")
    transactions = [
        (plain_messages(50, seed=1), True),
        (plain_messages(3000, seed=2), False),
        (plain_messages(50, seed=1), True),
    ]
    produce_transactions(kafka_431.bootstrap, topic, transactions, transactional_id=topic)
    here = kafka_431.bootstrap
    names = ("files", "copy", "new-offsets")
    config = write_config(
        tmp_path / "config.json",
        mirror(topic, here, tmp_path, name="files", max_time_ms=100),
        mirror_to_cluster(topic, here, here, name="copy", topic="seen-gaps-copy"),
        mirror_to_cluster(
            topic, here, here, name="new-offsets", topic="seen-gaps-new", offsets="translate"
        ),
    )

    def records():
        found = run.of("destination_records_total")
        return {labels[0]: count for labels, count in found.items()}

    with running(config, heartbeat_ms=1000) as run:
        wait_until(
            lambda: (
                run.errors
                or (records() == dict.fromkeys(names, 100) and "heartbeat" in caplog.text)
            ),
            what=lambda: f"records: {records()}",
        )

    assert run.errors == []
    shown = logmirror_json("status", "-c", config)  # the log ends with a marker
    assert {(row["mirror"], row["lag"]) for row in shown} == {(name, 0) for name in names}
    assert dict.fromkeys(names, 0) == {
        labels[0]: lag for labels, lag in run.of("mirror_lag_offsets").items()
    }
    batches = {labels[0]: n for labels, n in run.of("destination_batches_total").items()}
    assert batches.keys() == {"copy", "new-offsets"}
    assert all(batches.values())
    gaps = run.of("source_offset_gap_records_total")
    for name in names:
        flow = (name, name, topic, "0")
        assert {cause: gaps[(*flow, cause)] for cause in ("control", "aborted")} == {
            "control": 3,
            "aborted": 3000,
        }, name
    assert len(gaps) == 2 * len(names)
    logged = [r for r in caplog.records if r.name == "logmirror.mirror"]
    # A busy machine may also wait for a while.
    mirrored = [r for r in logged if not r.getMessage().startswith("waiting")]
    assert len([r for r in mirrored if r.getMessage() != "heartbeat"]) <= 20
    assert {r.getMessage().partition(":")[0] for r in mirrored} >= {
        "mirror starts", "flushed", "copied", "heartbeat"
    }  # fmt: skip
    for record in mirrored:
        assert record.facts["mirror"] in names, record
        assert record.facts["topic"] == topic, record
        assert ("partition" in record.facts) == (record.getMessage() in ("flushed", "copied"))
        if record.getMessage() in ("flushed", "copied"):
            assert list(record.facts)[4:] == [
                "path", "from", "to", "count", "bytes", "elapsed_ms", "interval_ms", "trigger"
            ]  # fmt: skip
