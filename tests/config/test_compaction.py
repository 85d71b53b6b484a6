"""`compaction: log` and `snapshots`: their meaning, and where they are refused.

Method: a valid file is changed in one place, and all problems are compared.
"""

import pytest

from kit.runs.configs import (
    complaints,
    folder,
    mirror,
    settings_of,
    shared_destination,
    shared_mirror,
)
from logmirror.app.policy import bucket_policies
from logmirror.app.specs import mirror_specs

LOG = {"compaction": "log"}
BUCKET = {"type": "s3", "bucket": "archive", "prefix": "p", "name": "lake"}
KAFKA = {"type": "kafka", "bootstrap-servers": "other:9092", "name": "k"}


@pytest.mark.parametrize(
    ("snapshots", "kept"),
    [({}, None), ({"snapshots": "keep-all"}, None), ({"snapshots": "keep 3"}, 3)],
)
def test_a_mirror_can_keep_the_latest_record_of_each_key(snapshots, kept):
    for settings in (
        settings_of(mirror(**LOG, **snapshots)),
        settings_of(shared_mirror(), destination=shared_destination(**LOG, **snapshots)),
    ):
        (found,) = settings.mirrors
        assert (found.compaction, found.keep_snapshots, found.format) == ("log", kept, "parquet")
        ((_, spec),) = mirror_specs(settings)[0].destinations
        assert (spec.compaction, spec.keep_snapshots) == ("log", kept)


def test_without_compaction_all_records_are_kept():
    (found,) = settings_of(mirror()).mirrors
    assert (found.compaction, found.keep_snapshots) == (None, None)


@pytest.mark.mirror_v3("CFG-16")
@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        (LOG | {"format": "ndjson"}, ".compaction", "is only for format: parquet"),
        (LOG | {"format": "native"}, ".compaction", "is only for format: parquet"),
        ({"compaction": "compact"}, ".compaction", "must be log"),
        ({"snapshots": "keep 3"}, ".snapshots", "is only for compaction: log"),
        (LOG | {"snapshots": "keep 0"}, ".snapshots", "must be keep-all or, for example, keep 3"),
        (LOG | {"snapshots": "3"}, ".snapshots", "must be keep-all or, for example, keep 3"),
        (
            LOG | {"chain-start": 5},
            ".chain-start",
            "has no effect with compaction: log, which starts at the log start offset",
        ),
        (
            LOG | {"destinations": [KAFKA], "flush": None},
            ".compaction",
            "is only for destinations of type filesystem or s3",
        ),
    ],
)
def test_invalid_settings_are_reported(changes, key, message):
    assert complaints(mirror(**changes)) == {f"mirrors[0]{key}": message}


def test_snapshots_are_allowed_beside_a_replica_in_kafka():
    assert complaints(mirror(destinations=[folder(name="f"), KAFKA], **LOG)) == {}


def test_with_a_shared_destination_compaction_belongs_there():
    found = complaints(shared_mirror(**LOG), destination=shared_destination())
    assert found == {"mirrors[0].compaction": "the file has one destination for all mirrors"}


def test_only_pruning_needs_permission_to_delete():
    def deletes(**changes):
        settings = settings_of(mirror(destinations=[BUCKET], **changes))
        statements = bucket_policies(settings)["archiver"]["Statement"]
        return [s["Resource"] for s in statements if "s3:DeleteObject" in s["Action"]]

    assert deletes() == deletes(**LOG) == []
    assert deletes(**LOG, snapshots="keep 2") == ["arn:aws:s3:::archive/p/lake/*"]
    groups = {"source-alias": "a"}
    assert deletes(groups=groups) == ["arn:aws:s3:::archive/p/.logmirror/groups/lake/*"]
