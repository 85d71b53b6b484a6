"""`verify` reports every damage to an archive: 10,000 cases on a push, 100,000 in a night.

Archives of a real topic with transactions, in every format, are damaged in one way at a time
(kit.runs.damage), with seeds. `verify --deep` must report each case; `verify` alone must report
those that are visible in names. A flip that is not reported must change nothing: DuckDB and pyarrow
read the same rows as before, with and without a filter that uses the footer's statistics, and the
object's metadata is the same except for the name of its checksum.
"""

from __future__ import annotations

import collections
import io
import json
import random
import re
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit.fakes.scripted import archive_spec
from kit.judges.clients import odd_messages, produce
from kit.judges.copies import copy, forget_connections
from kit.judges.gaps import write_transactions
from kit.runs import damage
from kit.runs.commands import EXTENSIONS, FORMATS, mirror
from kit.tiers import NIGHTLY
from logmirror.mirror.ports import FlowId
from logmirror.testing import MemoryStore
from logmirror.verification.archive import verify_content, verify_names

pytestmark = [pytest.mark.xdist_group("e2e-kafka"), pytest.mark.timeout(900)]

ROUNDS = 100_000 if NIGHTLY else 10_000
TOPIC = "corrupted"
KINDS = {
    "bit flip",
    "truncation",
    "zeroed page",
    "swapped",
    "foreign content",
    "wrong name",
    "wrong names that fit",
    "missing",
    "overlap",
    "foreign file",
    "claim",
}


@pytest.fixture(scope="module")
def chains(own_kafka, tmp_path_factory):
    """{(format, partition): files} of one topic with two partitions."""
    root = tmp_path_factory.mktemp("archives")
    own_kafka.create_topic(TOPIC, partitions=2)
    for partition in (0, 1):
        produce(own_kafka.bootstrap, TOPIC, odd_messages(60, seed=partition), partition=partition)
        write_transactions(own_kafka.bootstrap, TOPIC, partition, seed=partition)
    limits = {"max_offsets": 40, "max_bytes": 6_000}
    copy(*(mirror(TOPIC, own_kafka.bootstrap, root, form=form, **limits) for form in FORMATS))
    forget_connections()
    return {
        (form, partition): damage.Chain(
            files(root / form / str(partition)),
            files(root / ".logmirror" / "claims" / form / str(partition)),
        )
        for form in FORMATS
        for partition in (0, 1)
    }


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def verify(form, chain, touched=None):
    """Reports of `verify` and of `verify --deep`, which reads only what was touched."""
    store, spec = MemoryStore(), archive_spec(format=form)
    flow = FlowId(mirror=form, destination=form, topic=TOPIC, partition=0)
    for name, data in chain.objects.items():
        store.objects[f"{flow.folder}/{name}"] = data
    for name, data in chain.claims.items():
        store.objects[f".logmirror/claims/{flow.folder}/{name}"] = data
    names, _ = verify_names(store, flow, spec.extension, chain_start=None)
    deep, objects = verify_names(store, flow, spec.extension, chain_start=None)
    if touched is not None:
        objects = [obj for obj in objects if obj.name in touched]
    for _ in verify_content(deep, objects, store, spec):
        pass
    return names, deep


def is_reported(report):
    return bool(report.problems or report.claimed or report.unwitnessed)


def rows_by_others(data, tmp_path):
    """What pyarrow and DuckDB read, also by offset, and what the footer says of itself."""
    path = tmp_path / "object.parquet"
    path.write_bytes(data)
    table = pq.read_table(io.BytesIO(data))
    low, high = (table["offset"][at].as_py() for at in (0, -1)) if len(table) else (0, 0)
    middle = (low + high) // 2
    select = "SELECT * REPLACE (epoch_ms(timestamp) AS timestamp) FROM read_parquet"
    queries = [
        f"{select}('{path}') {where}"
        for where in ("", f'WHERE "offset" >= {middle}', f'WHERE "offset" = {high}')
    ]
    footer = {
        key: value
        for key, value in pq.read_metadata(io.BytesIO(data)).metadata.items()
        if key.startswith(b"logmirror.") and b"check" not in key and value[:5] != b"xxh3:"
    }
    return table.to_pylist(), [duckdb.sql(query).fetchall() for query in queries], footer


def is_harmless(form, before, after, found, tmp_path):
    """Whether other readers read the same rows as before the damage."""
    if found.kind == "claim":
        return claims_by_others(before) == claims_by_others(after)
    [name] = found.touched
    old, new = before.objects[name], after.objects[name]
    if form == "ndjson":  # \u001f and \u001F are one character
        return [*map(json.loads, old.splitlines())] == [*map(json.loads, new.splitlines())]
    if form == "native":
        return False
    try:
        return rows_by_others(old, tmp_path) == rows_by_others(new, tmp_path)
    except (pa.ArrowException, OSError, duckdb.Error):
        return False


def claims_by_others(chain):
    """The values of each claim but its checksum, by the names that the page lists."""
    page = Path(__file__).parents[2] / "docs" / "formats" / "claim.md"
    names = [
        name
        for name in re.findall(r"^\| `(\w+)`", page.read_text(), re.MULTILINE)
        if name != "check"
    ]
    read = [json.loads(data) for _, data in sorted(chain.claims.items())]
    return [{name: claim.get(name) for name in names} for claim in read]


@pytest.mark.parametrize("form", FORMATS)
def test_an_intact_archive_passes_and_its_gaps_are_reported(chains, form):
    names, deep = verify(form, chains[form, 0])
    assert not is_reported(names)
    assert not is_reported(deep)
    assert len(chains[form, 0].objects) > 8
    assert all(name.endswith(EXTENSIONS[form]) for name in chains[form, 0].objects)
    assert deep.gap_counts["control"] > 5
    if form != "native":  # where aborted records are kept
        assert deep.gap_counts["aborted"] > 50


@pytest.mark.parametrize("form", FORMATS)
def test_every_corruption_is_reported(chains, form, tmp_path, record_property):
    sound, foreign = chains[form, 0], chains[form, 1]
    reported, harmless = collections.Counter(), collections.Counter()
    for number in range(ROUNDS // len(FORMATS)):
        found = damage.draw(random.Random(f"{form} {number}"), sound, foreign)
        names, deep = verify(form, found.chain, found.touched)
        if found.shows_in_names:
            assert is_reported(names), (number, found.kind, sorted(found.chain.objects))
        if is_reported(deep):
            reported[found.kind] += 1
        else:
            where = (number, found.kind, found.touched)
            assert found.kind in {"bit flip", "claim"}, where
            assert is_harmless(form, sound, found.chain, found, tmp_path), where
            harmless[found.kind] += 1
    record_property("reported", dict(reported))
    record_property("harmless", dict(harmless))
    print(form, dict(reported), "harmless:", dict(harmless))  # noqa: T201  # shown with -s, or on failure
    assert reported.keys() == KINDS
    assert harmless.total() < reported.total() / 50
