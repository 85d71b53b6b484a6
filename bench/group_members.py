"""Members of many consumer groups in one process, each with a connection of its own.

    python bench/group_members.py BOOTSTRAP GROUPS MEMBERS PREFIX

It reads a word per line from stdin and prints a line of JSON for each: `join` (all members join
their groups), `rebalance` (every member joins again with a changed subscription), `end`.
"""

from __future__ import annotations

import asyncio
import json
import resource
import struct
import sys
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from logmirror.wire.frames import Cursor, pack_uvarint  # after the path is set

FIND_COORDINATOR, JOIN, HEARTBEAT, SYNC = 10, 11, 12, 14
VERSIONS = {FIND_COORDINATOR: 4, JOIN: 9, HEARTBEAT: 4, SYNC: 5}
TIMEOUT_S = 120
CONNECTING = 200
"""Connections that are opened at the same time."""

RETRY_S = 0.1
HEARTBEAT_S = 0.1
"""While a group has not all its members. A rebalance of members that are known needs none."""

SESSION_MS = 300_000
UNKNOWN_MEMBER = 25
REJOIN = {22, UNKNOWN_MEMBER, 27}
"""ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID, REBALANCE_IN_PROGRESS."""

NOT_READY = {14, 15, 16}
"""The coordinator is loading, not available or another broker: Kafka creates its topic first."""

ID_REQUIRED = 79
_HEADER = struct.Struct(">ihhi")
_CLIENT = struct.pack(">h", 5) + b"bench" + b"\0"
_NULL = b"\0"


def text(value: str) -> bytes:
    return data(value.encode())


def data(value: bytes) -> bytes:
    return pack_uvarint(len(value) + 1) + value


def subscription(number: int) -> bytes:
    """A consumer's subscription, with user data that differ from rebalance to rebalance."""
    topic = b"bench"
    head = struct.pack(">hih", 1, 1, len(topic)) + topic
    return head + struct.pack(">iii", 4, number, 0)


def assignment(member: int) -> bytes:
    topic = b"bench"
    head = struct.pack(">hih", 1, 1, len(topic)) + topic
    return head + struct.pack(">iii", 1, member, 0)


class Group:
    """A group, and how many of its members are in the generation that has all of them."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.complete = -1
        self.synced: set[int] = set()


class Member(asyncio.Protocol):
    """One member: a state machine without tasks, so that it costs little."""

    def __init__(self, crowd: Crowd, group: Group, number: int) -> None:
        self.crowd, self.group, self.number = crowd, group, number
        self.member_id, self.generation = "", -1
        self.buffer = bytearray()
        self.transport: asyncio.Transport | None = None
        self.handle = self.found_coordinator
        self.is_done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.crowd.is_ending:
            self.crowd.failed(f"{self.group.name}-{self.number}: connection lost: {exc}")

    def send(self, api: int, body: bytes) -> None:
        frame_bytes = 8 + len(_CLIENT) + len(body)
        self.transport.write(_HEADER.pack(frame_bytes, api, VERSIONS[api], 0) + _CLIENT + body)

    def data_received(self, received: bytes) -> None:
        self.buffer += received
        while len(self.buffer) >= 4:
            end = 4 + int.from_bytes(self.buffer[:4])
            if len(self.buffer) < end:
                return
            frame = bytes(self.buffer[4:end])
            del self.buffer[:end]
            cursor = Cursor(memoryview(frame))
            cursor.take(5)  # correlation ID, no tags
            cursor.int32()  # throttle time
            self.handle(cursor)

    def later(self, call: object, wait_s: float) -> None:
        asyncio.get_running_loop().call_later(wait_s, call)

    # Finding the coordinator, which makes Kafka create its topic

    def find_coordinator(self) -> None:
        self.handle = self.found_coordinator
        self.send(FIND_COORDINATOR, b"\0" + pack_uvarint(2) + text(self.group.name) + _NULL)

    def found_coordinator(self, cursor: Cursor) -> None:
        cursor.count(compact=True)
        cursor.name(compact=True)
        cursor.int32()
        cursor.name(compact=True)
        cursor.int32()
        if cursor.int16():
            self.later(self.find_coordinator, RETRY_S)
        else:
            self.crowd.found.set()

    # The classic protocol

    def join(self) -> None:
        self.handle = self.joined
        body = [text(self.group.name), struct.pack(">ii", SESSION_MS, SESSION_MS)]
        body += [text(self.member_id), _NULL, text("consumer"), pack_uvarint(2), text("range")]
        body += [data(subscription(self.crowd.number)), _NULL, _NULL, _NULL]
        self.send(JOIN, b"".join(body))

    def joined(self, cursor: Cursor) -> None:
        error, self.generation = cursor.int16(), cursor.int32()
        cursor.string(compact=True)
        cursor.string(compact=True)
        leader = cursor.name(compact=True)
        cursor.take(1)
        member_id = cursor.name(compact=True)
        if error == ID_REQUIRED:
            self.member_id = member_id
            self.join()
            return
        if error:
            self.retry(error)
            return
        self.member_id = member_id
        self.handle = self.synced
        if leader != member_id:
            self.sync([])
            return
        members = []
        for _ in range(cursor.count(compact=True)):
            members.append(cursor.name(compact=True))
            cursor.string(compact=True)
            cursor.take(cursor.uvarint() - 1)
            cursor.take(1)
        if len(members) == self.group.size:
            self.group.complete, self.group.synced = self.generation, set()
        self.sync(members)

    def sync(self, members: list[str]) -> None:
        body = [text(self.group.name), struct.pack(">i", self.generation), text(self.member_id)]
        body += [_NULL, text("consumer"), text("range"), pack_uvarint(len(members) + 1)]
        for number, member in enumerate(members):
            body += [text(member), data(assignment(number)), _NULL]
        self.send(SYNC, b"".join([*body, _NULL]))

    def synced(self, cursor: Cursor) -> None:
        error = cursor.int16()
        if error:
            self.retry(error)
        elif self.generation == self.group.complete:
            self.group.synced.add(self.number)
            if len(self.group.synced) == self.group.size:
                self.crowd.completed(self.group)
        else:
            self.later(self.heartbeat, HEARTBEAT_S)

    def heartbeat(self) -> None:
        if self.generation == self.group.complete:
            return
        self.handle = self.beaten
        body = text(self.group.name) + struct.pack(">i", self.generation)
        self.send(HEARTBEAT, body + text(self.member_id) + _NULL + _NULL)

    def beaten(self, cursor: Cursor) -> None:
        error = cursor.int16()
        if error:
            self.retry(error)
        else:
            self.later(self.heartbeat, HEARTBEAT_S)

    def retry(self, error: int) -> None:
        self.crowd.errors[error] = self.crowd.errors.get(error, 0) + 1
        if error in NOT_READY:
            self.later(self.join, RETRY_S)
        elif error in REJOIN:
            self.member_id = "" if error == UNKNOWN_MEMBER else self.member_id
            self.join()
        else:
            self.crowd.failed(f"{self.group.name}-{self.number}: error {error}")


class Crowd:
    """All members of all groups."""

    def __init__(self, host: str, port: int, groups: int, size: int, prefix: str) -> None:
        self.host, self.port = host, port
        self.groups = [Group(f"{prefix}-{number}", size) for number in range(groups)]
        self.members: list[Member] = []
        self.number = 0
        """How often all members have joined."""

        self.found = asyncio.Event()
        self.errors: dict[int, int] = {}
        self.left: set[Group] = set()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.group_s: list[float] = []
        self.began_s = 0.0
        self.is_ending = False

    def failed(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(reason))

    def completed(self, group: Group) -> None:
        self.left.discard(group)
        self.group_s.append(time.perf_counter() - self.began_s)
        if not self.left and not self.done.done():
            self.done.set_result(None)

    async def connect(self) -> None:
        loop, limit = asyncio.get_running_loop(), asyncio.Semaphore(CONNECTING)

        async def one(group: Group, number: int) -> Member:
            async with limit:
                made = lambda: Member(self, group, number)  # noqa: E731  # a factory
                return (await loop.create_connection(made, self.host, self.port))[1]

        numbers = [(group, number) for group in self.groups for number in range(group.size)]
        self.members = await asyncio.gather(*(one(*each) for each in numbers))
        self.members[0].find_coordinator()
        await asyncio.wait_for(self.found.wait(), TIMEOUT_S)

    async def all_join(self) -> dict[str, object]:
        """Let every member join; ends when all groups have all members in one generation."""
        self.number += 1
        self.errors, self.group_s, self.left = {}, [], set(self.groups)
        self.done = asyncio.get_running_loop().create_future()
        for group in self.groups:
            group.complete = -1
        cpu_s, self.began_s = time.process_time(), time.perf_counter()
        for member in self.members:
            member.join()
        await asyncio.wait_for(self.done, TIMEOUT_S)
        took = sorted(self.group_s)
        return {
            "all_s": time.perf_counter() - self.began_s,
            "median_s": took[len(took) // 2],
            "client_cpu_s": time.process_time() - cpu_s,
            "errors": self.errors,
        }


async def run(bootstrap: str, groups: int, size: int, prefix: str) -> None:
    host, _, port = bootstrap.rpartition(":")
    crowd = Crowd(host, int(port), groups, size, prefix)
    await crowd.connect()
    loop = asyncio.get_running_loop()
    while (await loop.run_in_executor(None, sys.stdin.readline)).strip() != "end":
        print(json.dumps(await crowd.all_join()), flush=True)
    crowd.is_ending = True


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    bootstrap, groups, size, prefix = sys.argv[1:]
    uvloop.run(run(bootstrap, int(groups), int(size), prefix))


if __name__ == "__main__":
    main()
