"""Blocks that bypass the page cache are written completely, on every kind of disk.

Method: files of sizes around the block size, written in pieces of odd sizes, are read back; also on
disks that refuse direct writes at once (as tmpfs may), that accept the flag and refuse the write,
and that write only a part. The descriptor shows whether direct writes were used, on the filesystem
of the test's folder.
"""

import errno
import fcntl
import os

import pytest

from logmirror.stores.blocks import BLOCK_BYTES, BlockWriter


def content(size):
    return os.urandom(1 << 16) * (size // (1 << 16)) + os.urandom(size % (1 << 16))


def written(path, data, write=os.write, piece=1_000_003):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        writer = BlockWriter(descriptor, write)
        view = memoryview(data)
        for at in range(0, len(data), piece):
            writer.write(view[at : at + piece])
        writer.finish()
    finally:
        os.close(descriptor)
    return path.read_bytes()


SIZES = [
    0,
    1,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    BLOCK_BYTES + 1,
    2 * BLOCK_BYTES,
    3 * BLOCK_BYTES + 511,
]


@pytest.mark.parametrize("size", SIZES)
def test_what_goes_in_comes_out(tmp_path, size):
    data = content(size)
    assert written(tmp_path / "a", data) == data


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def takes_direct_writes(folder):
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_whole_blocks_are_written_directly_and_the_rest_is_not(tmp_path):
    seen = []

    def write(descriptor, data):
        seen.append((len(data), is_direct(descriptor)))
        return os.write(descriptor, data)

    data = content(2 * BLOCK_BYTES + 5)
    assert written(tmp_path / "a", data, write) == data
    assert [size for size, _ in seen] == [BLOCK_BYTES, BLOCK_BYTES, 5]
    assert [direct for _, direct in seen][2] is False
    assert [direct for _, direct in seen[:2]] == [takes_direct_writes(tmp_path)] * 2


def test_a_disk_that_refuses_direct_writes_gets_ordinary_ones(tmp_path):
    def write(descriptor, data):
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, "not here")
        return os.write(descriptor, data)

    data = content(2 * BLOCK_BYTES + 5)
    assert written(tmp_path / "a", data, write) == data


def test_a_disk_that_takes_a_part_is_given_the_rest(tmp_path):
    """A part that is not a whole sector ends direct writing: the next write is not aligned."""
    for part in (4096, 1000):

        def write(descriptor, data, part=part):
            return os.write(
                descriptor, data[: max(len(data) // 2, part) if len(data) > part else None]
            )

        data = content(BLOCK_BYTES + 77)
        assert written(tmp_path / str(part), data, write) == data


def test_a_full_disk_says_so(tmp_path):
    def write(_descriptor, _data):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        written(tmp_path / "a", content(BLOCK_BYTES), write)
