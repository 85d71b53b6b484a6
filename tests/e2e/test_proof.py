"""`verify` reports why offsets of real topics are missing in archives, and checks it at the source.

Gaps arise as in practice: from transactions of librdkafka and from Kafka's log cleaner, also after
the copy. librdkafka decides which offsets are missing, with and without read_committed.
"""

from __future__ import annotations

import pytest

from kit.judges.clients import rows_by_librdkafka
from kit.judges.copies import copy, forget_connections
from kit.judges.gaps import COMPACTED, log_bounds, write_duplicated_keys, write_transactions
from kit.runs.cleaning import clean, start_cleaning, stop_cleaning
from kit.runs.commands import FORMATS, logmirror, logmirror_json, mirror, write_config

pytestmark = [pytest.mark.xdist_group("e2e-kafka"), pytest.mark.timeout(900)]

TRANSACTIONS, CLEANED = "proof-transactions", "proof-cleaned"


@pytest.fixture(scope="module")
def archives(own_kafka, tmp_path_factory):
    """The configuration of six archives, two topics in each format; and what was missing then."""
    root, bootstrap = tmp_path_factory.mktemp("proof"), own_kafka.bootstrap
    own_kafka.create_topic(TRANSACTIONS)
    write_transactions(bootstrap, TRANSACTIONS)
    own_kafka.create_topic(CLEANED, config=COMPACTED)
    write_duplicated_keys(bootstrap, CLEANED)
    write_transactions(bootstrap, CLEANED, seed=2, keys=20)
    clean(own_kafka, CLEANED, 1)
    stop_cleaning(own_kafka, CLEANED)
    write_duplicated_keys(bootstrap, CLEANED, seed=3)  # for the cleaner to take after the copy
    mirrors = [
        mirror(topic, bootstrap, root, form=form, name=f"{topic}-{form}", max_offsets=100)
        for topic in (TRANSACTIONS, CLEANED)
        for form in FORMATS
    ]
    copy(*mirrors)
    forget_connections()
    before = {
        (topic, isolation): missing(own_kafka, topic, isolation)
        for topic in (TRANSACTIONS, CLEANED)
        for isolation in ("read_committed", "read_uncommitted")
    }
    return write_config(root / "config.json", *mirrors), before


def missing(own_kafka, topic, isolation):
    first, end = log_bounds(own_kafka.bootstrap, topic, 0)
    rows = rows_by_librdkafka(
        own_kafka.bootstrap, topic, start=first, config={"isolation.level": isolation}
    )
    seen = {row.offset for row in rows}
    return [offset for offset in range(first, end) if offset not in seen]


def offsets_of(report):
    return [o for first, last, _ in report["hole_runs"] for o in range(first, last + 1)]


@pytest.mark.parametrize("topic", [TRANSACTIONS, CLEANED])
@pytest.mark.parametrize("form", FORMATS)
def test_every_missing_offset_is_reported_with_its_cause(archives, topic, form):
    config, before = archives
    [report] = logmirror_json(
        "verify", "--against-source", "--mirror", f"{topic}-{form}", "-c", config
    )
    isolation = "read_uncommitted" if form == "native" else "read_committed"

    assert report["problems"] == []
    assert (report["compared_with_source"], report["gone_at_source"]) == (report["objects"], 0)
    assert offsets_of(report) == before[topic, isolation]
    causes = {"control"} | ({"compacted"} if topic == CLEANED else set())
    if form != "native" and topic == TRANSACTIONS:
        causes |= {"aborted"}
    assert set(report["holes"]) - {"aborted"} == causes - {"aborted"}
    assert sum(report["holes"].values()) == report["hole_offsets"] == len(offsets_of(report))
    assert ("aborted" in report["holes"]) == ("aborted" in causes) or topic == CLEANED


def test_the_text_report_shows_counts_and_the_first_runs(archives):
    result = logmirror("verify", "--deep", "--mirror", f"{TRANSACTIONS}-parquet", "-c", archives[0])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "offsets without a record: " in result.stdout
    assert " aborted, " in result.stdout
    assert "  at 1 control, " in result.stdout
    assert "more runs (--format json has them)" in result.stdout


def test_records_compacted_after_the_copy_are_counted_separately(archives, own_kafka):
    config, before = archives
    start_cleaning(own_kafka, CLEANED)
    clean(own_kafka, CLEANED, 1)
    gone = set(missing(own_kafka, CLEANED, "read_committed")) - set(
        before[CLEANED, "read_committed"]
    )
    assert gone

    for form in FORMATS:
        [report] = logmirror_json(
            "verify", "--against-source", "--mirror", f"{CLEANED}-{form}", "-c", config
        )
        end = report["next_offset"]
        assert report["problems"] == []
        assert report["compared_with_source"] == report["objects"]
        copied = {offset for offset in gone if offset < end} - set(offsets_of(report))
        assert report["compacted_since"] >= len(copied) > 0
        if form != "native":  # where aborted records are gone too
            assert report["compacted_since"] == len(copied)
