"""What a broker shares out and makes durable before it listens."""

from __future__ import annotations

import resource

import pytest

from logmirror.broker import server
from logmirror.broker.log.disk import Disk
from logmirror.broker.log_dirs import holding


@pytest.mark.parametrize(
    ("limit", "connections", "files"),
    [
        (1024, 448, 448),
        (4096, 1000, 2968),
        (resource.RLIM_INFINITY, 1000, 2**20 - 1128),
        (100, 1, 1),
    ],
)
def test_connections_and_open_segments_share_the_limit_of_open_files(
    monkeypatch, caplog, limit, connections, files
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))

    assert server._share_files(1000) == (connections, files)  # noqa: SLF001  # a decision
    is_lower = f"at most {connections} connections" in caplog.text
    assert is_lower == (connections < 1000)


def test_every_new_folder_and_the_parent_of_the_log_directory_are_made_durable(
    tmp_path, monkeypatch
):
    synced = []
    monkeypatch.setattr(Disk, "sync_folder", lambda _, path: synced.append(path))
    private = tmp_path / "a" / "logs" / ".logmirror"

    for _ in range(2):
        holding._make_durable(private)  # noqa: SLF001  # a decision
        names = {path.name for path in synced}
        assert {"logs", "a"} <= names
        synced.clear()
    assert private.is_dir()


def test_a_parent_that_may_not_be_read_does_not_stop_the_broker(tmp_path, monkeypatch, caplog):
    def refuse(_: Disk, path: object) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Disk, "sync_folder", refuse)

    holding._make_durable(tmp_path / "logs" / ".logmirror")  # noqa: SLF001  # a decision

    assert "could not be made durable" in caplog.text
