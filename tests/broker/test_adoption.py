"""Goal: the databases of a broker that gets a bucket reach it, whole, or stay where they are."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

from logmirror.broker.adoption import adopt
from logmirror.broker.log_dirs.placement import database_path
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.state_store import StateStore
from logmirror.errors import UnavailableError, UsageError


class Chain:
    """What a bucket has of databases; it fails when it gets the one that counts."""

    def __init__(self) -> None:
        self.databases: dict[str, bytes] = {}
        self.fails = True

    def has_database(self, name: str) -> bool:
        return name in self.databases

    def adopt(self, name: str, whole: bytes) -> None:
        if self.fails and name == "broker":
            message = "the power is off"
            raise OSError(message)
        self.databases[name] = whole


def test_a_database_that_did_not_reach_the_bucket_is_taken_at_the_next_start(tmp_path):
    private = tmp_path / ".logmirror"
    private.mkdir()
    names = ("broker.sqlite", "state.sqlite", "security.sqlite")
    paths = [tmp_path / "work" / name for name in names]
    with contextlib.closing(MetadataStore(private / names[0])) as store:
        cluster_id = store.cluster_id
    with contextlib.closing(StateStore(private / names[1])):
        pass
    chain = Chain()
    with pytest.raises(OSError, match="the power is off"):
        adopt(chain, [tmp_path], paths)  # type: ignore[arg-type]  # what it uses of a bucket
    assert chain.databases.keys() == {"state"}
    with pytest.raises(UsageError, match="without the one that has the broker's database"):
        database_path([tmp_path])
    chain.fails = False
    for _ in range(2):
        adopt(chain, [tmp_path], paths)  # type: ignore[arg-type]  # as above
    assert chain.databases.keys() == {"broker", "state"}
    whole = tmp_path / "whole.sqlite"
    whole.write_bytes(chain.databases["broker"])
    with contextlib.closing(MetadataStore(whole)) as store:
        assert store.cluster_id == cluster_id
        assert store.is_placed_explicitly
    with contextlib.closing(sqlite3.connect(whole)) as database:
        select = "SELECT value FROM settings WHERE name = 'schema'"
        assert database.execute(select).fetchone() == ("3",), "earlier versions refuse it"
    with contextlib.closing(MetadataStore(whole)) as store:
        assert store.has_disks


def test_a_database_that_cannot_be_read_is_not_adopted(tmp_path):
    private = tmp_path / ".logmirror"
    private.mkdir()
    with contextlib.closing(MetadataStore(private / "broker.sqlite")):
        pass
    (private / "state.sqlite").mkdir()
    chain, paths = Chain(), [tmp_path / name for name in ("broker.sqlite", "state.sqlite")]
    with pytest.raises(UnavailableError, match="cannot be read"):
        adopt(chain, [tmp_path], paths)  # type: ignore[arg-type]  # what it uses of a bucket
    assert chain.databases == {}
    assert (private / "broker.sqlite").exists()
