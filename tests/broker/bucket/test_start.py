"""Goal: a start reads thousands of commits within seconds, and with few requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from logmirror.broker.bucket.bundles import BUNDLES, Bundler
from logmirror.broker.bucket.chain import COMMITS, commit_name
from logmirror.broker.bucket.commit_format import Commit, Entry, Kind, encode
from logmirror.broker.bucket.recovery import take_over
from logmirror.stores.s3 import S3Store

if TYPE_CHECKING:
    from pathlib import Path

    from kit.servers.s3 import S3Server

COUNT = 5_000
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
