"""Goal: a start reads thousands of commits within seconds, and refuses a store that replaces."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kit.fakes.s3_proxy import S3Proxy
from kit.servers.bucket_broker import BucketBroker
from logmirror.broker.bucket.bundles import BUNDLES, Bundler
from logmirror.broker.bucket.chain import COMMITS, commit_name
from logmirror.broker.bucket.commit_format import Commit, Entry, Kind, encode
from logmirror.broker.bucket.recovery import take_over
from logmirror.stores.s3 import S3Store

if TYPE_CHECKING:
    from pathlib import Path

    from kit.servers.s3 import S3Server

COUNT = 5_000
USAGE = 2
READ_CPU_S = 8.0
"""Read one by one, they take 18 s of one core, most of them for the requests."""


def test_five_thousand_commits_are_read_in_seconds(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    root, bundler = s3_server.files(bucket), Bundler()
    for folder in (COMMITS, BUNDLES):
        (root / folder).mkdir(parents=True)
    for number in range(COUNT):
        entry = Entry(Kind.DATA, b"t" * 16, 0, number, number + 1, b"x" * 1_000)
        packed = encode(Commit(number, 1, b"writer-1", (entry,), 0))
        (root / commit_name(number)).write_bytes(packed)
        due = bundler.add(number, packed)
        if due is not None:
            (root / due[0].name).write_bytes(due[1])
    store = S3Store(s3_server.location(bucket))
    (tmp_path / "spool").mkdir()

    began_s = time.process_time()
    owner, found = take_over(store, b"writer-2", tmp_path / "spool")
    assert time.process_time() - began_s < READ_CPU_S

    assert owner.next_sequence == COUNT + 1
    [tail] = found.tails.values()
    assert [piece.first for piece in tail.pieces] == list(range(COUNT))
    counts = store.requests.requests
    assert counts["put"] == 1
    assert counts["get"] + counts["list"] < 200


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replaces", "refuses"])
def test_a_store_without_create_only_writes_is_refused(
    tmp_path: Path, s3_server: S3Server, bucket: str, how: str
) -> None:
    """It replaces objects as if the condition was not there, or does not know the condition."""

    def delete(path: str) -> None:
        place, _, key = path.partition("/")
        s3_server.client().delete_object(Bucket=place, Key=key)

    with S3Proxy(s3_server.endpoint, delete) as proxy:
        proxy.forget_condition, proxy.refuse_condition = how == "replaces", how == "refuses"
        broker = BucketBroker(tmp_path, s3_server, bucket, endpoint=proxy.endpoint)
        broker.start(waits=False)
        try:
            assert broker.wait() == USAGE
        finally:
            broker.__exit__()
    log = broker.log.read_text()
    assert "the store replaces existing objects despite `If-None-Match: *`" in log
    assert "listening on" not in log
    assert "Traceback" not in log
    names = [path.name for path in s3_server.files(bucket).rglob("*") if path.is_file()]
    assert all(name.endswith(("-in-turn", "-at-once", "create-only")) for name in names), names
