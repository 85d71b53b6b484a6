"""A broker's three databases on a chain in memory, as a hypothesis state machine.

It calls the public methods of the three stores. Their changes go through the real journal into a
store in memory. A process ends before or after any request, COMMIT fails, snapshots are made and
old commits removed; then another owner takes over. The judge is a second set of stores without a
chain, to which exactly the calls were made that the chain holds.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from logmirror.broker.bucket.chain import commit_name
from logmirror.broker.bucket.database_shipping import DatabaseShipping, restore
from logmirror.broker.bucket.journal import Journal
from logmirror.broker.bucket.recovery import take_over
from logmirror.broker.metadata import MetadataStore, TopicRow
from logmirror.broker.security.acls import Acl
from logmirror.broker.security.scram import Credential, Mechanism
from logmirror.broker.security.store import SecurityStore
from logmirror.broker.state_store import Change, StateStore, _Handed
from logmirror.errors import LogmirrorError, UnavailableError
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.broker.database import Database

NAMES = ("broker", "state", "security")
TOPICS = st.sampled_from(("a", "b", "ü\x00\U0001f600"))
OFFSETS = st.integers(0, 2**63 - 1)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
BLOBS = st.binary(max_size=12)
MECHANISMS = st.sampled_from(Mechanism)
ACLS = st.builds(
    Acl,
    st.sampled_from([2, 3]),
    st.sampled_from([3, 4]),
    TOPICS,
    st.sampled_from(["User:x", "User:*"]),
    st.just("*"),
    st.sampled_from([3, 4]),
    st.sampled_from([2, 3]),
)


class Crashed(BaseException):
    """The process has ended."""


class InTurn(Journal):
    """A journal without a thread: what is submitted is committed at once."""

    def submit(self, submission: Any) -> None:
        super().submit(submission)
        if self._waiting:
            self.commit()


class Nowhere:
    """Ships nothing; a database that ships does not flush its file."""

    def ship(self, statements: object) -> None:
        del statements

    def snapshot(self, whole: object, size_bytes: int) -> Callable[[], None]:
        del whole, size_bytes
        return lambda: None


class Stores:
    """The three stores in a folder."""

    def __init__(self, folder: Path, shipping: Callable[[str], Any]) -> None:
        self.folder = folder
        self.metadata = MetadataStore(folder / "broker.sqlite", shipping("broker"))
        self.state = StateStore(folder / "state.sqlite", shipping("state"))
        self.security = SecurityStore(folder / "security.sqlite", shipping("security"))
        self.databases: list[Database] = [
            vars(one)["_database"] for one in (self.metadata, self.state, self.security)
        ]

    def write(self, changes: list[Change]) -> None:
        """As the state store's thread does."""
        error = self.state._commit([_Handed(changes, None)])  # type: ignore[arg-type]  # noqa: SLF001  # without its thread
        if error is not None:
            raise error

    def close(self) -> None:
        for one in (self.metadata, self.state, self.security):
            one.close()


def content(folder: Path, name: str) -> list[str]:
    """Return a database as SQL text."""
    with contextlib.closing(sqlite3.connect(folder / f"{name}.sqlite")) as database:
        return list(database.iterdump())


class Databases(RuleBasedStateMachine):
    """One chain, its owner, and the judge."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.store = MemoryStore()
        self.fault = ""
        self.machines = 0
        self.store.before = self._before
        self.journal: Any = None
        self._start()
        reference = self.root / "reference"
        reference.mkdir()
        self._copy_to(reference)
        self.reference = Stores(reference, lambda _: Nowhere())

    def _before(self, operation: str, name: str) -> None:
        if operation != "create":
            return
        if self.fault == "crash before":
            raise Crashed
        if self.fault == "stopping":
            self.journal._closing.set()  # noqa: SLF001  # a stop begins
            raise UnavailableError("away")
        if self.fault == "crash after":
            self.store.objects[name] = self.journal_bytes
            raise Crashed
        if self.fault == "lost":
            self.fault = ""
            self.store.objects[name] = self.journal_bytes
            raise UnavailableError("the response was lost")

    def _start(self) -> None:
        self.machines += 1
        self.folder = self.root / f"machine-{self.machines}"
        spool = self.folder / "spool"
        spool.mkdir(parents=True)
        writer, self.found = take_over(self.store, self.machines.to_bytes(8), spool)
        self.journal = InTurn(writer, self.found.coverage, interval_ms=0)
        self.journal.pause = lambda _: None
        real = writer.create

        def create(data: bytes) -> int:
            self.journal_bytes = data
            return real(data)

        writer.create = create  # type: ignore[method-assign]  # keeps the bytes for a fault
        for name in NAMES:
            restore(self.folder / f"{name}.sqlite", self.found.databases[name])
        self.is_over = self.is_full = False
        if self.machines > 1:
            self._compare()
        self.stores = Stores(self.folder, lambda name: DatabaseShipping(self.journal, name))

    def _copy_to(self, folder: Path) -> None:
        for name in NAMES:
            with (
                contextlib.closing(sqlite3.connect(self.folder / f"{name}.sqlite")) as source,
                contextlib.closing(sqlite3.connect(folder / f"{name}.sqlite")) as target,
            ):
                source.backup(target)

    def _compare(self) -> None:
        for name in NAMES:
            assert content(self.folder, name) == content(self.reference.folder, name)

    def _call(self, call: Callable[[Stores], object]) -> None:
        """Make a call; the judge makes it too if it is in the chain."""
        if self.is_over:
            return
        before = self.journal._writer.next_sequence  # noqa: SLF001  # how much is in the chain
        error: BaseException | None = None
        try:
            call(self.stores)
        except (Crashed, LogmirrorError) as found:
            error = found
        is_shipped = commit_name(before) in self.store.objects
        if error is None or is_shipped:
            call(self.reference)
        if error is not None:
            assert self.fault or type(error) is UnavailableError  # the call was not possible
            self.is_over = bool(self.fault) or self.is_full
            self._reject_more()

    def _reject_more(self) -> None:
        """A database behind the chain is not changed, and never is in a snapshot."""
        if not self.is_full:
            return
        for database in self.stores.databases:
            if database._is_behind:  # noqa: SLF001  # the fault hits one of them
                database._connection.set_authorizer(None)  # noqa: SLF001  # the disk has space again
                for call in (lambda one=database: one.setting("x", "y"), database.snapshot):
                    with contextlib.suppress(UnavailableError):
                        call()
                        raise AssertionError("a database behind the chain is used")

    @rule(fault=st.sampled_from(["crash before", "crash after", "stopping", "lost", "commit"]))
    def plan(self, fault: str) -> None:
        """A later plan replaces an earlier one, but a full disk stays full."""
        if not self.is_over:
            self.fault = fault
            if fault == "commit":
                self.is_full = True
                for database in self.stores.databases:
                    database._connection.set_authorizer(_no_commit)  # noqa: SLF001  # the disk is full

    @rule()
    def restart(self) -> None:
        self.stores.close()
        self.reference.close()
        self.fault = ""
        self._start()
        self.reference = Stores(self.reference.folder, lambda _: Nowhere())

    @rule()
    def snapshot(self) -> None:
        if self.is_over:
            return
        try:
            for one in (self.stores.metadata, self.stores.state, self.stores.security):
                one.snapshot()
        except (Crashed, LogmirrorError):
            assert self.fault or self.is_full
            self.is_over = True
            return
        for sequence in self.found.coverage.take_removable():
            self.store.delete(commit_name(sequence))

    @rule(topic=TOPICS, count=st.integers(1, 9), configs=st.dictionaries(TEXTS, TEXTS, max_size=2))
    def create_topic(self, topic: str, count: int, configs: dict[str, str]) -> None:
        """Fails within its transaction if the topic exists."""
        number = self.journal._writer.next_sequence  # noqa: SLF001  # another one each time
        row = TopicRow(
            name=topic,
            topic_id=uuid.uuid5(uuid.NAMESPACE_DNS, f"{topic}{number}"),
            partition_count=count,
            configs=configs,
        )
        self._call(lambda stores: stores.metadata.create_topic(row))

    @rule(topic=TOPICS)
    def fail_within_a_transaction(self, topic: str) -> None:
        def call(stores: Stores) -> None:
            with stores.databases[0].transaction() as database:
                database.execute("INSERT INTO topic_configs VALUES (?, 'x', ?)", (topic, "y"))
                raise UnavailableError("something else is not possible")

        if not (self.fault or self.is_full):
            self._call(call)

    @rule(topic=TOPICS, configs=st.dictionaries(TEXTS, TEXTS, max_size=3))
    def set_configs(self, topic: str, configs: dict[str, str]) -> None:
        self._call(lambda stores: stores.metadata.set_configs(topic, configs))

    @rule(topic=TOPICS, starts=st.dictionaries(st.integers(0, 3), OFFSETS))
    def set_log_starts(self, topic: str, starts: dict[int, int]) -> None:
        self._call(lambda stores: stores.metadata.set_log_starts(topic, starts))

    @rule(topic=TOPICS, count=st.integers(1, 99))
    def set_partition_count(self, topic: str, count: int) -> None:
        self._call(lambda stores: stores.metadata.set_partition_count(topic, count))

    @rule(partition=st.integers(0, 3), upto=OFFSETS)
    def set_compacted(self, partition: int, upto: int) -> None:
        for row in self.reference.metadata.topics()[:1]:
            key = row.topic_id.bytes
            self._call(lambda stores, key=key: stores.metadata.set_compacted(key, partition, upto))

    @rule(topic=TOPICS, ends=st.booleans())
    def delete(self, topic: str, ends: bool) -> None:
        self._call(lambda stores: stores.metadata.begin_deletion(topic))
        if ends:
            for row in self.reference.metadata.deleting()[:1]:
                key = row.topic_id
                self._call(lambda stores, key=key: stores.metadata.end_deletion(key))

    @rule(
        changes=st.lists(
            st.tuples(TEXTS, TEXTS, st.none() | st.floats(allow_nan=False)),
            max_size=3,
            unique_by=lambda one: one[:2],
        )
    )
    def change_quotas(self, changes: list[tuple[str, str, float | None]]) -> None:
        self._call(lambda stores: stores.metadata.change_quotas(changes))

    @rule(count=st.sampled_from([1, 1001]))
    def producer_ids(self, count: int) -> None:
        for _ in range(count if not self.fault else 1):
            self._call(lambda stores: stores.metadata.next_producer_id())

    @rule(
        changes=st.lists(
            st.builds(Change, st.sampled_from(["group", "offset"]), BLOBS, st.none() | BLOBS),
            max_size=5,
        )
    )
    def write(self, changes: list[Change]) -> None:
        self._call(lambda stores: stores.write(changes))

    @rule(user=TOPICS, mechanism=MECHANISMS, salt=BLOBS, iterations=st.integers(4096, 16384))
    def put_user(self, user: str, mechanism: Mechanism, salt: bytes, iterations: int) -> None:
        stored = [(user, Credential(mechanism, iterations, salt, salt * 2, salt * 3))]
        self._call(lambda stores: stores.security.change_users(stored))

    @rule(user=TOPICS, mechanism=MECHANISMS)
    def remove_user(self, user: str, mechanism: Mechanism) -> None:
        self._call(lambda stores: stores.security.change_users([], [(user, mechanism)]))

    @rule(added=st.lists(ACLS, max_size=3), removed=st.lists(ACLS, max_size=3))
    def change_acls(self, added: list[Acl], removed: list[Acl]) -> None:
        self._call(lambda stores: stores.security.change_acls(added, removed))

    @invariant()
    def what_is_here_is_in_the_chain(self) -> None:
        if not self.is_over and not self.fault:
            self._compare()

    def teardown(self) -> None:
        if not hasattr(self, "reference"):
            return
        try:
            self.restart()
        finally:
            self.stores.close()
            self.reference.close()
            shutil.rmtree(self.root)


def _no_commit(action: int, argument: str | None, *_: object) -> int:
    is_commit = action == sqlite3.SQLITE_TRANSACTION and argument == "COMMIT"
    return sqlite3.SQLITE_DENY if is_commit else sqlite3.SQLITE_OK
