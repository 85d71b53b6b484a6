"""Goal: a partition never has two owners, whatever members of KIP-848 groups and crashes do.

Method: a hypothesis state machine. Members as clients implement them: each takes what a response
gives, gives up what it takes away at a later step, and drops everything when it is fenced. Changes
become durable, and responses arrive, later; a crash loses those that are not durable. The model
compares what the members hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kit.runs.group_world import TOPIC_ID, TOPICS, World
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.consumer_state import TopicInfo
from logmirror.broker.groups.coordinator import GroupCoordinator
from logmirror.broker.groups.values import Effects, State

SESSION_MS = 45_000


@dataclass(eq=False)
class Client:
    """A member as it sees itself."""

    member_id: str
    instance_id: str | None
    epoch: int = 0
    held: frozenset[Any] = frozenset()
    wanted: frozenset[Any] = frozenset()
    response: Any = None
    is_waiting: bool = False
    last_ms: int = 0
    """When it last heard from the coordinator. A client gives everything up after its session."""

    is_gone: bool = False


@dataclass
class Handed:
    """Changes, and the response that waits for them."""

    changes: list[Any]
    client: Client | None = None
    result: Any = None


class Lagging(World):
    """A world whose changes become durable later."""

    def __init__(self) -> None:
        super().__init__(max_members=4)
        self.handed: list[Handed] = []

    def take(self, out: Effects) -> None:
        self.handed.append(Handed(out.changes))


class Members(RuleBasedStateMachine):
    """One group."""

    @initialize()
    def begin(self) -> None:
        self.world = Lagging()
        self.clients: list[Client] = []
        self.ids = 0

    @rule(instance=st.sampled_from([None, None, "i"]))
    def new_client(self, instance: str | None) -> None:
        if len(self.clients) < 5:
            self.ids += 1
            self.clients.append(Client(f"m{self.ids}", instance))

    @rule(number=st.integers(0, 4), full=st.booleans())
    def beat(self, number: int, full: bool) -> None:
        if self.clients:
            self._beat(self.clients[number % len(self.clients)], full)

    def _beat(self, client: Client, full: bool) -> None:
        if client.is_waiting or client.is_gone:
            return
        fields: dict[str, Any] = {"instance_id": client.instance_id}
        if client.epoch:
            if full:
                fields |= {"topics": ("orders",), "rebalance_timeout_ms": 20_000}
            fields["owned"] = client.held
        client.is_waiting = True
        found = self.world.beat(client.member_id, client.epoch, **fields)
        handed = self.world.handed[-1]
        handed.client, handed.result = client, found

    @rule(number=st.integers(0, 4))
    def give_up(self, number: int) -> None:
        """The client's listener has handled a revocation."""
        if self.clients:
            client = self.clients[number % len(self.clients)]
            client.held &= client.wanted

    @rule(count=st.integers(1, 6))
    def write(self, count: int) -> None:
        for handed in self.world.handed[:count]:
            World.take(self.world, Effects(handed.changes))
            if handed.client is not None and handed.client.is_waiting:
                self._arrived(handed.client, handed.result)
        del self.world.handed[:count]

    def _arrived(self, client: Client, result: Any) -> None:
        client.is_waiting = False
        if isinstance(result, ErrorCode):
            client.held = client.wanted = frozenset()
            client.epoch = 0
            client.is_gone = result is ErrorCode.FENCED_INSTANCE_ID
            return
        client.epoch, client.last_ms = result.member_epoch, self.world.now_ms
        if result.assignment is not None:
            client.wanted = result.assignment
            client.held |= result.assignment

    @rule(rounds=st.integers(1, 8), gives_up=st.booleans())
    def go_on(self, rounds: int, gives_up: bool) -> None:
        """All members do what a client does next."""
        for _ in range(rounds):
            for client in self.clients:
                if gives_up:
                    client.held &= client.wanted
                self._beat(client, full=False)
            self.write(1_000)
            self.world.advance(1_000)
            self._sessions()

    @rule(number=st.integers(0, 4), moment=st.booleans())
    def leave(self, number: int, moment: bool) -> None:
        if not self.clients:
            return
        client = self.clients[number % len(self.clients)]
        if client.is_waiting or not client.epoch:
            return
        epoch = -2 if moment and client.instance_id else -1
        client.held = client.wanted = frozenset()
        self.world.beat(client.member_id, epoch, instance_id=client.instance_id)
        self.clients.remove(client)

    @rule(number=st.integers(0, 4))
    def die(self, number: int) -> None:
        if self.clients:
            del self.clients[number % len(self.clients)]

    @rule(count=st.integers(1, 8))
    def grow_or_shrink(self, count: int) -> None:
        self.world.topics["orders"] = TopicInfo(TOPIC_ID, count)

    @rule(duration_ms=st.sampled_from([500, 2_000, 21_000, 46_000]))
    def advance(self, duration_ms: int) -> None:
        self.world.advance(duration_ms)
        self._sessions()

    def _sessions(self) -> None:
        """A client without a response for its session gives up; ours do so a little earlier."""
        for client in self.clients:
            if self.world.now_ms - client.last_ms >= 20_000:
                client.held = client.wanted = frozenset()
                client.epoch = 0
                client.is_waiting = False

    @rule(count=st.integers(0, 6))
    def crash(self, count: int) -> None:
        for handed in self.world.handed[:count]:
            World.take(self.world, Effects(handed.changes))
        self.world.handed.clear()
        owned = [
            (client.member_id, partition)
            for client in self.clients
            for partition in client.held
            if not client.is_waiting and partition in self._owned(client.member_id)
        ]
        for client in self.clients:
            client.is_waiting = False
        self.world.coordinator = GroupCoordinator(self.world.settings, self.world.topics.get)
        assert self.world.coordinator.load(self.world.rows, TOPICS, self.world.now) == []
        for member_id, partition in owned:
            assert partition in self._owned(member_id), "a crash took a partition away"

    def _owned(self, member_id: str) -> set[Any]:
        group = self.world.coordinator.groups.get("g")
        member = None if group is None else group.members.get(member_id)
        return set() if member is None else member.assigned | member.revoking

    @invariant()
    def a_partition_has_one_owner(self) -> None:
        owners: dict[Any, str] = {}
        for client in getattr(self, "clients", ()):
            for partition in client.held:
                assert owners.setdefault(partition, client.member_id) == client.member_id

    def teardown(self) -> None:
        """The group comes to rest, with every partition owned."""
        if not hasattr(self, "world"):
            return
        self.clients = [one for one in self.clients if not one.instance_id and not one.is_gone]
        for client in self.clients[4:]:
            client.is_gone = True
        self.world.advance(SESSION_MS + 1)
        self._sessions()
        self.go_on(12, gives_up=True)
        alive = [client for client in self.clients if not client.is_gone]
        if alive:
            group = self.world.group()
            assert group.state is State.STABLE
            held = [one for client in alive for one in client.held]
            count = self.world.topics["orders"].partition_count
            assert sorted(held) == [(TOPIC_ID, number) for number in range(count)]


TestMembers = Members.TestCase
TestMembers.settings = settings(max_examples=100, stateful_step_count=50)
