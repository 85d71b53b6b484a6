"""Goal: local copies of archive objects stay within their limit, and are made again when needed."""

from __future__ import annotations

import os
from pathlib import Path

from logmirror.broker.archives.copies import LocalCopies
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.segment import Segment
from logmirror.broker.log.segment_cache import SegmentCache

SIZE = 10


def test_the_least_recently_used_copies_are_let_go_of_at_the_limit(tmp_path):
    copies = LocalCopies(tmp_path / "copies", SegmentCache(Disk()), max_bytes=2 * SIZE)
    segments = [Segment(Path("topic/0"), n, n + 1, 0, is_exact=False) for n in range(3)]
    made = []

    def content(number):
        file = copies.open(
            segments[number], lambda out: (made.append(number), out.write(b"%d" % number * SIZE))
        )
        return os.pread(file.fd, 100, 0)

    for number in (0, 1, 0, 2, 0, 1):
        assert content(number) == b"%d" % number * SIZE
        assert copies.held_bytes <= 2 * SIZE
        assert segments[number].size_bytes == SIZE
    assert made == [0, 1, 2, 1]
    assert (copies.hits, copies.misses) == (2, 4)
    copies.reused(segments[1])
    copies.reused(segments[2])  # is not here
    assert (copies.hits, copies.misses) == (3, 4)
    assert list((tmp_path / "copies").iterdir()) == []  # without a name
