"""Mount points: found without touching the file system that is asked about."""

from pathlib import Path

import pytest

from logmirror.stores import mounts
from logmirror.stores.mounts import mount_point

TABLE = r"""
22 1 0:21 / / rw,relatime - ext4 /dev/root rw
36 22 98:0 / /mnt/data rw,noatime master:1 - ext3 /dev/a rw,errors=continue
37 22 98:1 / /mnt/with\040space rw - nfs server:/x rw
38 36 98:2 / /mnt/data/inner rw - nfs server:/y rw
""".strip()


@pytest.fixture(autouse=True)
def _known_mounts(tmp_path, monkeypatch):
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    monkeypatch.setattr(mounts, "_MOUNTS", path)
    mounts._mount_points.cache_clear()  # noqa: SLF001  # it is read once per process
    yield
    mounts._mount_points.cache_clear()  # noqa: SLF001  # as above


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("/archive", "/"),
        ("/mnt/data", "/mnt/data"),
        ("/mnt/data/x/y", "/mnt/data"),
        ("/mnt/data/inner/z", "/mnt/data/inner"),
        ("/mnt/database", "/"),
        ("/mnt/with space/x", "/mnt/with space"),
    ],
)
def test_the_longest_mount_point_that_contains_a_path(root, expected):
    assert mount_point(root) == expected


def test_a_system_without_a_table_of_mounts_knows_none(monkeypatch):
    monkeypatch.setattr(mounts, "_MOUNTS", Path("/no/such/file"))
    mounts._mount_points.cache_clear()  # noqa: SLF001  # as above
    assert mount_point("/archive") == ""
