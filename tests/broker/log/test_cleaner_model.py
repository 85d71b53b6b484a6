"""Goal: whatever happens to a compacted log, it has the newest record of each key, unchanged.

Method: a model, a dict of the newest record of each key, is compared with the log over random
appends, passes, restarts and power losses. Then power is lost before each system call of a pass.
"""

from __future__ import annotations

import contextlib
import random
from functools import partial
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.log.test_cleaner import (
    _append,
    _bytes,
    _check_whole,
    _clean,
    _open,
    _read,
    _roll,
)
from kit.fakes.faulty_disk import FaultyDisk, PowerLossError
from kit.runs.small_logs import flush
from logmirror.wire.compression import Codec
from logmirror.wire.records import Record, decode_reference

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog

_KEYS = st.one_of(st.none(), st.sampled_from([b"a", b"b", b"c", b"", b"long" * 20]))
_VALUES = st.one_of(st.none(), st.binary(max_size=3))
_BATCH = st.tuples(
    st.lists(st.tuples(_KEYS, _VALUES), min_size=1, max_size=4),
    st.sampled_from(list(Codec)),
    st.sampled_from([-1, 7]),
)
_STEPS = st.lists(
    st.one_of(_BATCH, st.sampled_from(["roll", "clean", "clean small", "restart", "power loss"])),
    max_size=25,
)


class _Model:
    """What the log must hold at least, and at most."""

    def __init__(self) -> None:
        self.appended: list[Record] = []

    def check(self, log: PartitionLog) -> None:
        found = {record.offset: record for record in _read(log)}
        newest = {r.key: r.offset for r in self.appended if r.key is not None}
        for record in self.appended:
            is_newest = record.key is None or newest[record.key] == record.offset
            if is_newest:
                assert found.get(record.offset) == record
        by_offset = {record.offset: record for record in self.appended}
        assert all(by_offset[offset] == record for offset, record in found.items())
        _check_whole(log)

    def check_compacted(self, log: PartitionLog, upto: int) -> None:
        offsets = {record.offset for record in _read(log)}
        below = [r for r in self.appended if r.offset < upto and r.key is not None]
        newest = {record.key: record.offset for record in below}
        assert {r.offset for r in below} & offsets == set(newest.values())


@settings(max_examples=150, deadline=None)
@given(steps=_STEPS, seed=st.integers(0, 2**32))
def test_as_a_dict_of_the_newest_record_says(tmp_path_factory, steps, seed):
    chance = random.Random(seed)
    folder = tmp_path_factory.mktemp("log") / "t" / "0"
    model, sequence, upto, generation = _Model(), 0, 0, 0
    log = _open(folder)
    for step in [*steps, "restart", "roll", "clean"]:
        if isinstance(step, tuple):
            pairs, codec, producer = step
            writer = (
                {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence}
                if producer >= 0
                else {}
            )
            base = _append(log, pairs, chance.randint(0, 10**12), codec=codec, **writer)
            flush(log)
            sequence += len(pairs) if producer >= 0 else 0
            model.appended += decode_reference(_bytes(log, base))
        elif step == "roll":
            _roll(log)
        elif step == "restart":
            log = _open(folder)
        elif step == "power loss":
            generation += 1
            folder, log = _cut_power(log, chance, folder.parent / f"{generation}", upto)
        elif any(segment.is_sealed for segment in log.segments):
            size = 300 if step == "clean small" else 10**6
            upto = _clean(log, dirty_from=upto, segment_bytes=size)
            model.check_compacted(log, upto)
        model.check(log)
    if sequence:
        known = dict(log.producers.items())[7]
        assert known.last_sequence == sequence - 1


def _cut_power(
    log: PartitionLog, chance: random.Random, left: Path, upto: int
) -> tuple[Path, PartitionLog]:
    """Lose power at a random call of a pass, or behind it."""
    disk = FaultyDisk(power_until=chance.randint(0, 12))
    log._disk = disk  # noqa: SLF001  # the same log on a disk that fails
    log._cache._disk = disk  # noqa: SLF001  # the same
    for path in log.folder.iterdir() if log.folder.exists() else ():
        disk._content(path)  # noqa: SLF001  # all of it is durable
    if any(segment.is_sealed for segment in log.segments):
        with contextlib.suppress(PowerLossError):
            _clean(log, disk, dirty_from=upto)
    keep, some = partial(chance.randint, 0), partial(chance.choice, (True, False))
    disk.after_power_loss(log.folder, left, keep=keep, some=some)
    return left, _open(left)


def test_power_loss_before_any_call_keeps_every_newest_record(tmp_path):
    def write(folder: Path) -> PartitionLog:
        log = _open(folder)
        for number in range(12):
            _append(log, [(b"%d" % (number % 5), b"%d" % number), (b"k", b"%d" % number)])
            if number % 3 == 2:
                _roll(log)
        return log

    newest: set[int] = set()
    until = 0
    while True:
        log = write(tmp_path / f"{until}" / "0")
        keys = {record.key: record.offset for record in _read(log)}
        newest = set(keys.values())
        disk = FaultyDisk(power_until=until)
        log._disk = disk  # noqa: SLF001  # the same log on a disk that fails
        log._cache._disk = disk  # noqa: SLF001  # the same
        for path in log.folder.iterdir():
            disk._content(path)  # noqa: SLF001  # all of it is durable
        is_over = True
        try:
            _clean(log, disk, segment_bytes=600)
        except PowerLossError:
            is_over = False
        for seed in range(3):
            chance = random.Random(seed)
            left = tmp_path / f"{until}-{seed}" / "0"
            keep, some = partial(chance.randint, 0), partial(chance.choice, (True, False))
            disk.after_power_loss(log.folder, left, keep=keep, some=some)
            again = _open(left)
            _check_whole(again)
            assert newest <= {record.offset for record in _read(again)}
            assert not list(left.glob(".*.cleaned"))
            _clean(again)
            assert {record.offset for record in _read(again)} == newest
        if is_over:
            break
        until += 1
    assert until > 6
