"""The `keys` and `values` types of a mirror hold in every destination.

Of the checklist: RUN-16.

Method: a real broker, records produced by librdkafka, the product without Spark. Each case is
copied to Parquet, native and NDJSON files and to other topics. DuckDB, json, the reference decoder
and librdkafka read the result. It must hold all records, or all records before the refused one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb
import pytest

from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.copies import copy, forget_connections
from kit.judges.translated import mirror_of, visible
from kit.judges.truth import archive_rows
from kit.runs.commands import mirror
from kit.runs.inline_run import config_text, mirror_to_cluster, run_now
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.runs.commands import BrokerCommand

EMBEDDED = pytest.mark.xdist_group("e2e-embedded")


class Case(NamedTuple):
    """Values of one type; the one that is refused, if there is one, has the offset BAD."""

    kind: str
    good: bytes | None
    bad: bytes | None = None


BAD = 7
CASES = {
    "utf8": Case("utf8", "grüße".encode()),
    "utf8-refused": Case("utf8", b"words", b"\xc0\xaf"),
    "json-not-parsed": Case("json", b"{no json"),
    "json-parseable": Case("json-parseable", b' {"a": [1, null]} '),
    "json-parseable-refused": Case("json-parseable", b"[1]", b"[1"),
    "bytes": Case("bytes", bytes(range(256))),
    "nulls": Case("json-parseable", None),
}
"""RUN-16 of the checklist."""


@pytest.fixture(autouse=True, scope="module")
def closed_in_the_end() -> Iterator[None]:
    """The executor of this process keeps its connections."""
    yield
    forget_connections()


def filled(broker: BrokerCommand, case: Case, topic: str) -> str:
    """A topic with ten records, in batches of which one begins at BAD."""
    broker.create_topic(topic)
    for first, stop in ((0, BAD), (BAD, 10)):
        values = [case.bad if case.bad and n == BAD else case.good for n in range(first, stop)]
        produce(broker.bootstrap, topic, [Message(b"k", value) for value in values])
    return topic


def typed(base: dict[str, object], case: Case) -> dict[str, object]:
    return base | {"keys": {"type": "utf8"}, "values": {"type": case.kind}}


def copied(case: Case, *mirrors: dict[str, object]) -> list[bytes | None]:
    """Copy; returns the values that must be there, having looked at the error if one is due."""
    if case.bad is None:
        copy(*mirrors)
        return [case.good] * 10
    with pytest.raises(UsageError) as caught:
        copy(*mirrors)
    facts = caught.value.facts
    assert (facts["column"], facts["type"], facts["offset"]) == ("value", case.kind, BAD)
    return [case.good] * BAD


@EMBEDDED
@pytest.mark.parametrize("form", ["parquet", "native", "ndjson"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_run_16_an_archive_holds_the_records_before_a_bad_value(
    cli_broker, topic_name, tmp_path, case, form
):
    if form == "ndjson":  # which takes no other type (CFG-19)
        case = case._replace(kind="utf8") if case.kind != "bytes" else Case("utf8", b"text")
        case = case._replace(bad=case.bad and b"\xff")
    filled(cli_broker, case, topic_name)
    base = mirror(topic_name, cli_broker.bootstrap, tmp_path, form=form, name="archive")

    values = copied(case, typed(base, case))

    rows = archive_rows(tmp_path / "archive" / "0", form, topic=topic_name, partition=0)
    assert [(row.offset, row.key, row.value) for row in rows] == [
        (offset, b"k", value) for offset, value in enumerate(values)
    ]


@EMBEDDED
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_run_16_another_topic_holds_the_records_before_a_bad_value(cli_broker, topic_name, case):
    filled(cli_broker, case, topic_name)
    where, there = cli_broker.bootstrap, f"{topic_name}-copy"

    values = copied(case, typed(mirror_to_cluster(topic_name, where, where, topic=there), case))

    assert [(row.offset, row.value) for row in rows_by_librdkafka(where, there)] == list(
        enumerate(values)
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_run_16_a_replica_with_new_offsets_holds_the_records_before_a_bad_value(
    kafka_431, topic_name, case
):
    filled(kafka_431, case, topic_name)

    values = copied(case, typed(mirror_of(kafka_431, topic_name), case))

    assert [row[2] for row in visible(kafka_431, f"{topic_name}-copy")] == values


@EMBEDDED
def test_the_error_names_value_and_offset_and_a_corrected_type_resumes(
    cli_broker, topic_name, tmp_path
):
    case = CASES["json-parseable-refused"]
    filled(cli_broker, case, topic_name)
    base = mirror(topic_name, cli_broker.bootstrap, tmp_path, name="archive")
    config = tmp_path / "logmirror.json"
    config.write_text(config_text(typed(base, case)))

    refused = run_now(config)

    assert refused.returncode == UsageError.exit_code, refused.stderr
    for text in ("a value is not JSON", "column: value", "offset: 7", "byte: 2"):
        assert text in refused.stderr
    config.write_text(config_text(base | {"values": {"type": "json"}}))
    assert run_now(config).returncode == 0
    assert mixed(tmp_path / "archive" / "0") == ["[1]"] * BAD + ["[1"] + ["[1]"] * 2


def mixed(folder: Path) -> list[Any]:
    files = [str(path) for path in sorted(folder.iterdir())]
    assert len(files) == 2
    query = 'SELECT value FROM read_parquet(?) ORDER BY "offset"'
    return [value for (value,) in duckdb.connect().execute(query, [files]).fetchall()]


@EMBEDDED
def test_duckdb_sees_text_and_json_without_a_cast(cli_broker, topic_name, tmp_path):
    case = Case("json-parseable", json.dumps({"name": "größe", "n": 3}).encode())
    filled(cli_broker, case, topic_name)
    base = mirror(topic_name, cli_broker.bootstrap, tmp_path, name="archive")
    copy(typed(base, case))
    query = "SELECT DISTINCT key, value->>'name', (value->'n')::INT FROM read_parquet(?)"
    found = duckdb.connect().execute(query, [f"{tmp_path}/archive/0/*.parquet"]).fetchall()
    assert found == [("k", "größe", 3)]
