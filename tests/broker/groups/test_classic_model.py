"""Goal: the coordinator of classic groups keeps its promises whatever members and crashes do.

Method: a hypothesis state machine. Members join, sync, commit, leave and fall silent in any order;
time passes; the coordinator crashes and restarts with a prefix of the changes that it handed over
(those whose responses were sent are always among them). Invariants:

- In a generation each partition has one owner.
- A commit of a member that was fenced, left or missed a generation is never accepted.
- A commit that got its response is there until a later commit replaces it, also after a crash.
- Each JoinGroup and SyncGroup gets one response in bounded time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kit.runs.group_world import TOPICS, World
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.coordinator import GroupCoordinator
from logmirror.broker.groups.values import Effects

PARTITIONS = 6
BOUND_MS = 60_000
"""More than the longest rebalance timeout, the initial delay and a session together."""


@dataclass(eq=False)
class Client:
    """A member as it sees itself."""

    instance_id: str | None
    member_id: str = ""
    generation: int = -1
    joined: Any = None
    share: bytes | None = None
    waiting: str | None = None
    since_ms: int = 0
    is_gone: bool = False


@dataclass
class Handed:
    """Changes that were handed over together, and what happens once they are durable."""

    changes: list[Any]
    replies: list[Any] = field(default_factory=list)
    commit: tuple[int, int] | None = None


class Lagging(World):
    """A world whose changes become durable later."""

    def __init__(self) -> None:
        super().__init__(initial_rebalance_delay_ms=500, max_members=5)
        self.handed: list[Handed] = []
        self.acknowledged = [-1] * PARTITIONS

    def take(self, out: Effects) -> None:
        self.handed.append(Handed(out.changes, out.replies))

    def write(self, count: int) -> None:
        """Make the first changes durable; their responses, and those in between, arrive."""
        for handed in self.handed[:count]:
            super().take(Effects(handed.changes, handed.replies))
            if handed.commit is not None:
                partition, offset = handed.commit
                self.acknowledged[partition] = offset
        del self.handed[:count]

    def crash(self, count: int) -> None:
        """Restart; the first changes were written although no response was sent."""
        for handed in self.handed[:count]:
            super().take(Effects(handed.changes))
            if handed.commit is not None:  # durable, so it must not be lost later either
                partition, offset = handed.commit
                self.acknowledged[partition] = offset
        self.handed.clear()
        self.replies.clear()
        self.coordinator = GroupCoordinator(self.settings, self.topics.get)
        out = Effects()
        out.changes += self.coordinator.load(self.rows, TOPICS, self.now)
        assert out.changes == []


class Groups(RuleBasedStateMachine):
    """One group, its members, and what they know."""

    @initialize()
    def begin(self) -> None:
        self.world = Lagging()
        self.clients: list[Client] = []
        self.owners: dict[int, dict[int, str]] = {}
        """Owner by partition, by generation."""

        self.newest = 0
        """The newest generation that a member knows, and that cannot be forgotten."""

        self.fenced: set[str] = set()
        self.offset = 0

    def _client(self, number: int) -> Client | None:
        return self.clients[number % len(self.clients)] if self.clients else None

    @rule(instance=st.sampled_from([None, None, None, "a", "b"]))
    def new_client(self, instance: str | None) -> None:
        if len(self.clients) < 8:
            self.clients.append(Client(instance))

    @rule(number=st.integers(0, 7), changed=st.booleans())
    def join(self, number: int, changed: bool) -> None:
        client = self._client(number)
        if client is not None and not client.is_gone and not client.waiting:
            self._join(client, b"new" if changed else b"old")

    def _join(self, client: Client, subscription: bytes) -> None:
        client.share = client.joined = None
        found = self.world.join(
            client.member_id,
            instance_id=client.instance_id,
            protocols=(("range", subscription), ("sticky", b"")),
            requires_known_id=client.instance_id is None,
            session_timeout_ms=10_000,
            rebalance_timeout_ms=15_000,
        )
        self._wait(client, found)

    @rule(number=st.integers(0, 7))
    def sync(self, number: int) -> None:
        client = self._client(number)
        if client is not None and client.joined is not None and not client.waiting:
            self._sync(client)

    def _sync(self, client: Client) -> None:
        joined = client.joined
        shares: dict[str, list[int]] = {one: [] for one, _, _ in joined.members}
        for partition in range(PARTITIONS if shares and not joined.skips_assignment else 0):
            shares[sorted(shares)[partition % len(shares)]].append(partition)
        data = {name.replace("-", "_"): bytes(found) for name, found in shares.items()}
        self._wait(client, self.world.sync(joined, **data))

    @rule(rounds=st.integers(1, 12), written=st.booleans())
    def go_on(self, rounds: int, written: bool) -> None:
        """All members do what a client does next."""
        for _ in range(rounds):
            for client in self.clients:
                if client.waiting or client.is_gone:
                    continue
                if client.joined is None:
                    self._join(client, b"old")
                elif client.share is None:
                    self._sync(client)
                elif self.world.heartbeat(client.joined) is not ErrorCode.NONE:
                    client.joined = None
            if written:
                self.write(100)
            self.world.advance(500)

    def _wait(self, client: Client, found: Any) -> None:
        """A refusal arrives at once, and everything else once the changes are durable."""
        if isinstance(found, str):
            client.waiting, client.since_ms = found, self.world.now_ms
        else:
            self._arrived(client, found)

    def _arrived(self, client: Client, result: Any) -> None:
        is_join = hasattr(result, "member_id")
        if result.error is ErrorCode.MEMBER_ID_REQUIRED:
            client.member_id = result.member_id
        elif result.error is ErrorCode.UNKNOWN_MEMBER_ID:
            client.member_id, client.joined, client.share = "", None, None
        elif result.error is ErrorCode.FENCED_INSTANCE_ID:
            client.is_gone = True
        elif result.error is not ErrorCode.NONE:
            client.joined = None
        elif is_join:
            self._replaced(client, result.member_id)
            client.member_id, client.generation = result.member_id, result.generation
            client.joined = result
        else:
            client.share = result.assignment
            owners = self.owners.setdefault(client.generation, {})
            name = client.instance_id or client.member_id
            for partition in result.assignment:
                assert owners.setdefault(partition, name) == name, "a partition has two owners"
            self.newest = max(self.newest, client.generation)

    def _replaced(self, client: Client, member_id: str) -> None:
        """A static member got a new ID: the members with the instance's old IDs are fenced."""
        if client.instance_id is None:
            return
        for other in self.clients:
            if other.instance_id == client.instance_id and other.member_id not in {"", member_id}:
                self.fenced.add(other.member_id)

    @rule(number=st.integers(0, 7))
    def heartbeat(self, number: int) -> None:
        client = self._client(number)
        if client is None or client.joined is None or client.waiting:
            return
        code = self.world.heartbeat(client.joined)
        if code is ErrorCode.NONE:
            assert client.member_id not in self.fenced

    @rule(number=st.integers(0, 7), partition=st.integers(0, PARTITIONS - 1), old=st.booleans())
    def commit(self, number: int, partition: int, old: bool) -> None:
        client = self._client(number)
        if client is None or client.joined is None:
            return
        who = client.joined
        if old:
            who = who._replace(generation=who.generation - 1)
        self.offset += 1
        code = self.world.commit(who, self.offset, partition)
        if code is ErrorCode.NONE:
            assert who.member_id not in self.fenced, "a fenced member committed"
            assert who.generation >= self.newest, "a member of an older generation committed"
            self.world.handed[-1].commit = partition, self.offset

    @rule(number=st.integers(0, 7))
    def leave(self, number: int) -> None:
        client = self._client(number)
        if client is None or not client.member_id or client.waiting:
            return
        code = self.world.leave(client.member_id, client.instance_id)
        if code is ErrorCode.NONE:
            self.fenced.add(client.member_id)
        self.clients.remove(client)

    @rule(duration_ms=st.sampled_from([1, 400, 3_000, 9_000, 20_000]))
    def advance(self, duration_ms: int) -> None:
        self.world.advance(duration_ms)

    @rule(count=st.integers(1, 5))
    def write(self, count: int) -> None:
        self.world.write(count)
        for client in self.clients:
            if client.waiting in self.world.replies:
                result = self.world.replies[client.waiting]
                client.waiting = None
                self._arrived(client, result)

    @precondition(lambda self: self.clients)
    @rule(count=st.integers(0, 5))
    def crash(self, count: int) -> None:
        self.world.crash(count)
        for client in self.clients:
            client.waiting = None
        generation = self.world.coordinator.groups.get("g")
        kept = generation.generation if generation is not None else 0
        assert kept >= self.newest, "a generation that members had is lost"
        self.owners = {number: one for number, one in self.owners.items() if number <= kept}

    @invariant()
    def no_commit_is_lost(self) -> None:
        if hasattr(self, "world"):
            pending = {h.commit[0]: h.commit[1] for h in self.world.handed if h.commit}
            for partition, offset in enumerate(self.world.acknowledged):
                assert self.world.committed(partition) == pending.get(partition, offset)

    @invariant()
    def every_request_gets_its_response_in_time(self) -> None:
        if not hasattr(self, "world"):
            return
        handed = {token for one in self.world.handed for token, _ in one.replies}
        for client in self.clients:
            if client.waiting and client.waiting not in handed | self.world.replies.keys():
                assert self.world.now_ms - client.since_ms <= BOUND_MS

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.advance(BOUND_MS)
            self.write(10_000)
            assert all(client.waiting is None for client in self.clients)


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=100, stateful_step_count=60)
