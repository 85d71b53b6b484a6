"""Claims are removed if footers hold the same facts; they are kept in buckets and where needed.

Method: two old claims and one young one in a store in memory that records its calls.
"""

from types import SimpleNamespace

import pytest

from kit.fakes.scripted import archive_spec
from logmirror.archive.claims import KEEP_MS, Claim, claim_name, claims_folder
from logmirror.clock import Clock
from logmirror.locations import FolderLocation, S3Location
from logmirror.mirror.ports import FlowId
from logmirror.model import OffsetRange, Trigger
from logmirror.testing import MemoryStore
from logmirror.to_archive.destination import ArchiveDestination

FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)
NOW_MS = 10 * KEEP_MS


class Fixed(Clock):
    def now_ms(self):
        return NOW_MS


def claim_from(first, created_ms):
    return Claim(
        covered=OffsetRange(first=first, last=first + 9),
        digest="xxh3:" + "0" * 32,
        writer="w",
        topic="t",
        topic_id="",
        partition=0,
        created_ms=created_ms,
        record_count=10,
        trigger=Trigger.MAX_BYTES,
    )


@pytest.mark.parametrize(
    ("location", "form", "left"),
    [
        (FolderLocation("/root"), "parquet", [20]),
        (FolderLocation("/root"), "native", [0, 10, 20]),
        (FolderLocation("/root"), "ndjson", [0, 10, 20]),
        (S3Location(bucket="archive"), "parquet", [0, 10, 20]),
    ],
)
def test_old_claims_go_only_where_nothing_depends_on_them(location, form, left):
    asked = []
    store = MemoryStore()
    for first, created_ms in ((0, 0), (10, 0), (20, NOW_MS)):
        store.create(claim_name("d", 0, first), claim_from(first, created_ms).to_bytes())
    store.before = lambda operation, _name: asked.append(operation)
    spec = archive_spec(location=location, format=form)
    copies = ArchiveDestination(spec, lambda _: store, committer=None, clock=Fixed())

    copies.begin(FLOW, SimpleNamespace(position=30))

    assert (asked == []) == (len(left) == 3)
    assert [int(name) for name in store.names(claims_folder("d", 0))] == left
