"""Goal: a broker's databases are in the chain as they are locally, whatever ends the process.

Method: the state machine of `kit.runs.bucket_databases`, and planted bugs that it must find.
"""

from __future__ import annotations

import base64
import contextlib
import stat
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kit.runs.bucket_databases import NAMES, Databases, Nowhere
from kit.tiers import PLANTED, all_but, sized
from logmirror.broker import database as database_module
from logmirror.broker.bucket import database_shipping
from logmirror.broker.bucket.commit_format import Kind, decode
from logmirror.broker.bucket.database_shipping import DatabaseShipping
from logmirror.broker.database import Database
from logmirror.broker.security.scram import Credential, Mechanism
from logmirror.broker.security.store import SecurityStore
from logmirror.broker.state_store import Change
from logmirror.errors import InternalError, LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow
EXAMPLES = sized(25, 150, 1_000)


def run(examples: int = EXAMPLES, *, derandomize: bool = False) -> None:
    run_state_machine_as_test(
        Databases,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            database=None,
            derandomize=derandomize,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # shrinking takes minutes: each example writes files
        ),
    )


@pytest.mark.thinned
def test_the_chain_and_the_databases_agree_after_any_end() -> None:
    run()


def _lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that could not be shipped is committed here."""
    real = DatabaseShipping.ship

    def ship(self: Any, statements: Any) -> None:
        with contextlib.suppress(UnavailableError):
            real(self, statements)

    monkeypatch.setattr(DatabaseShipping, "ship", ship)


def _without_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is older than the change before it."""
    real = DatabaseShipping.snapshot
    kept: dict[str, bytes] = {}

    def snapshot(self: Any, whole: Callable[[], bytes], size_bytes: int) -> Any:
        key = f"{id(self._journal)}{self._name}"
        now = whole()
        old, kept[key] = kept.get(key, now), now
        return real(self, lambda: old, size_bytes)

    monkeypatch.setattr(DatabaseShipping, "snapshot", snapshot)


def _not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements of a transaction that was rolled back are shipped with the next one."""
    monkeypatch.setattr(database_module.Recording, "begin", lambda _: None)


def _as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes come back as text."""
    monkeypatch.setattr(
        database_shipping, "_plain", lambda v: v.hex() if isinstance(v, bytes) else v
    )


def _behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that lacks a change of the chain is changed further."""
    monkeypatch.setattr(Database, "_check_not_behind", lambda _: None)


@PLANTED
@pytest.mark.parametrize(
    "plant",
    all_but(
        [_lost, _without_the_last, _not_forgotten, _as_text, _behind],
        *(_lost, _not_forgotten, _as_text),
        reason="rarer: found after hundreds of examples",
    ),
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, LogmirrorError)):
        run(600, derandomize=True)


def test_a_restored_database_is_for_its_owner_only() -> None:
    """The keys that passwords are compared with are in it."""
    machine = Databases()
    machine.begin()
    machine.put_user("a", Mechanism.SHA_256, b"salt", 4096)
    for does_snapshot in (False, True):
        if does_snapshot:
            machine.snapshot()
        machine.restart()
        files = list(machine.folder.glob("*.sqlite*"))
        assert len(files) >= len(NAMES)
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    machine.teardown()


def test_the_keys_of_a_removed_user_leave_the_bucket_with_a_snapshot() -> None:
    machine = Databases()
    machine.begin()
    key = b"a key that is removed"

    def is_in_the_bucket() -> bool:
        whole = b"".join(machine.store.objects.values())
        return key in whole or base64.b64encode(key) in whole

    stored = [("a", Credential(Mechanism.SHA_256, 4096, b"salt", key, key))]
    machine.stores.security.change_users(stored)
    machine.reference.security.change_users(stored)
    machine.snapshot()
    assert is_in_the_bucket()
    machine.remove_user("a", Mechanism.SHA_256)
    assert is_in_the_bucket()
    machine.snapshot()
    assert not is_in_the_bucket()
    machine.teardown()


def test_a_start_without_news_writes_its_fence_only() -> None:
    machine = Databases()
    machine.begin()
    machine.restart()
    before = set(machine.store.objects)
    machine.restart()
    new = [machine.store.read(name) for name in machine.store.objects.keys() - before]
    assert [[entry.kind for entry in decode(data).entries] for data in new] == [[Kind.FENCE]]
    machine.teardown()


class Slow:
    """Ships when the test lets it."""

    def __init__(self) -> None:
        self.reached, self.may_end = threading.Event(), threading.Event()

    def ship(self, statements: object) -> None:
        del statements
        self.reached.set()
        assert self.may_end.wait(30)

    def snapshot(self, whole: Callable[[], bytes], size_bytes: int) -> Callable[[], None]:
        assert len(whole()) == size_bytes
        return lambda: self.ship([])


def test_reads_do_not_wait_for_the_bucket(tmp_path: Path) -> None:
    slow = Slow()
    slow.may_end.set()
    store = SecurityStore(tmp_path / "security.sqlite", slow)
    store.change_users([("a", Credential(Mechanism.SHA_256, 4096, b"s", b"k", b"k"))])
    for wait in (lambda: store.change_users([], [("a", Mechanism.SHA_256)]), store.snapshot):
        before = store.users()
        store.users_if_changed()
        slow.reached.clear()
        slow.may_end.clear()
        thread = threading.Thread(target=wait)
        thread.start()
        assert slow.reached.wait(30)
        assert store.users() == before
        assert store.users_if_changed() is None
        assert store.acls() == []
        store.credential("a", [Mechanism.SHA_256])
        if wait == store.snapshot:  # the next change is behind it, and need not wait for it
            change = threading.Thread(target=store.change_acls, args=([], []))
            change.start()
            change.join(30)
            assert not change.is_alive()
        slow.may_end.set()
        thread.join(30)
        assert not thread.is_alive()
    assert store.users() == {}
    store.close()


def test_a_database_that_is_too_large_stays_in_the_chain_as_its_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database_shipping, "MAX_SNAPSHOT_BYTES", 1000)
    machine = Databases()
    machine.begin()
    machine.write([Change("group", b"a", b"b")])
    with pytest.raises(UnavailableError, match="too large"):
        machine.stores.state.snapshot()
    assert machine.found.coverage.take_removable() == []
    machine.restart()
    machine.teardown()


def test_a_change_that_was_not_recorded_is_refused(tmp_path: Path) -> None:
    """`WITH ... INSERT` begins with another word than those that are recorded."""
    schema = "CREATE TABLE IF NOT EXISTS t (x)"
    database = Database(tmp_path / "x.sqlite", schema, shipping=Nowhere())
    with pytest.raises(InternalError, match="not recorded"), database.transaction() as connection:
        connection.execute("WITH one AS (SELECT 1) INSERT INTO t SELECT * FROM one")
    with database.reading() as connection:
        assert connection.execute("SELECT * FROM t").fetchall() == []
    database.close()
