"""Turns of owners of one bucket that a seed draws, and faults of their requests."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from logmirror.broker.bucket.chain import COMMITS
from logmirror.broker.bucket.commit_format import decode
from logmirror.errors import OutcomeUnknownError, UnavailableError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from kit.runs.bucket_owners import Owner
    from logmirror.testing.memory_store import MemoryStore


class Turns:
    """Lets one owner run at a time, up to its next request."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.streak = chance.choice([0, 0.8, 0.98])
        """Probability that the same owner continues while the others are paused."""

        self._main = threading.Semaphore(0)
        self.owners: list[Owner] = []
        self.when_paused: Callable[[], None] = lambda: None
        """Called when all owners are paused."""

    def run(self) -> None:
        """Run all owners to their ends."""
        one = None
        while live := [one for one in self.owners if not one.is_over]:
            free = [one for one in live if one.waits_for is None]
            due = [one for one in live if one.waits_for is not None and one.waits_for()]
            if due:
                one = due[0]
            elif one not in free or self.chance.random() >= self.streak:
                one = self.chance.choice(free or live)
            one.turn.release()
            self._main.acquire()
            self.when_paused()

    def wait(self, owner: Owner) -> None:
        """Let others run."""
        self._main.release()
        owner.turn.acquire()

    def wait_until(self, owner: Owner, is_done: Callable[[], bool]) -> None:
        """Let others run until something has happened, then run at once; or until none can run."""
        owner.waits_for = is_done
        while not is_done() and any(
            not one.is_over and one.waits_for is None for one in self.owners
        ):
            self.wait(owner)
        owner.waits_for = None

    def end(self) -> None:
        """An owner's thread ends."""
        self._main.release()


class OwnStore:
    """The store, as one owner reaches it."""

    def __init__(self, owner: Owner, store: MemoryStore) -> None:
        self._owner, self._store = owner, store

    def __getattr__(self, operation: str) -> Any:
        real = getattr(self._store, operation)
        if operation in {"stage", "discard"}:
            return real

        def call(*args: Any, **more: Any) -> Any:
            if threading.current_thread() is not self._owner.thread:
                return real(*args, **more)
            if operation == "create" and args[0].startswith(f"{COMMITS}/"):
                self._owner.before_commit_object()
            fault = self._owner.before_request()
            if fault == "before":
                raise UnavailableError("not sent")
            found = real(*args, **more)
            self._note(operation, args)
            if operation == "names":
                found = iter(list(found))
            self._owner.after_request()
            if fault == "after" and operation in {"create", "publish", "delete"}:
                raise OutcomeUnknownError("lost")
            return found

        return call

    def _note(self, operation: str, args: tuple[Any, ...]) -> None:
        world = self._owner.world
        if operation == "create" and args[0].startswith(f"{COMMITS}/"):
            commit = decode(args[1])
            world.stored.add(commit, self._owner.number)
            world.note(commit)
        elif operation in {"publish", "delete"}:
            world.object_changes += 1
