"""The coordinator of the cluster that receives a copy: transactional ids, and who has them.

It never forgets, and what it has answered is done. Markers are written as it ends a transaction;
that a leader changes while they are on their way is left to real brokers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logmirror.cluster.fence import Owner
from logmirror.cluster.transactions import ProducerIdentity
from logmirror.errors import FencedError, LogmirrorError, UnavailableError
from logmirror.simulation.world import written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logmirror.model import TopicPartition
    from logmirror.simulation.log import Log
    from logmirror.simulation.world import Process

_FIRST_PRODUCER = 1000
_ASKED_AGAIN_MS = 100
_TRIES = 20


@dataclass
class _Id:
    """A transactional id."""

    owner: Owner
    is_joined: bool = False
    """Whether the partition is in its transaction."""


class Transactions:
    """What coordinators know.

    Args:
        log: Of the one partition that is copied.
        now_ms: Wall-clock time.
    """

    def __init__(self, log: Log, now_ms: Callable[[], int]) -> None:
        self._log, self._now_ms = log, now_ms
        self._ids: dict[str, _Id] = {}

    def owner(self, transactional_id: str) -> Owner | None:
        """Who has an id."""
        known = self._ids.get(transactional_id)
        return known.owner if known else None

    def take(
        self, transactional_id: str, expected: Owner | None, *, is_holding: bool
    ) -> Owner | None:
        """InitProducerId; None: it is not the expected owner's any more."""
        known = self._ids.get(transactional_id)
        if known is None:
            known = _Id(Owner(_FIRST_PRODUCER + len(self._ids), -1, is_holding))
            self._ids[transactional_id] = known
        elif expected is not None and known.owner != expected:
            return None
        self._end(known)
        epoch = known.owner.producer_epoch + 1
        known.owner = Owner(known.owner.producer_id, epoch, is_holding)
        return known.owner

    def join(self, transactional_id: str, own: Owner) -> bool:
        """AddPartitionsToTxn; whether the id is still its."""
        known = self._ids[transactional_id]
        if known.owner != own:
            return False
        known.is_joined = True
        return True

    def end(self, transactional_id: str, own: Owner) -> bool:
        """EndTxn, which may be repeated; whether the id is still its."""
        known = self._ids[transactional_id]
        if known.owner != own:
            return False
        self._end(known)
        return True

    def _end(self, known: _Id) -> None:
        if known.is_joined:
            known.is_joined = False
            self._log.append_marker(known.owner.producer_id, 0, 0, self._now_ms())


class _Client:
    """Asks the coordinator about one id, and again where it does not answer."""

    def __init__(
        self,
        process: Process,
        ask: Callable[[str], None],
        transactions: Transactions,
        transactional_id: str,
    ) -> None:
        self._process, self._ask_once = process, ask
        self._transactions, self.transactional_id = transactions, transactional_id

    def _repeat(self, words: str, write: Callable[[], Owner | bool | None]) -> Owner | bool:
        """Do something that can be repeated without doing it twice.

        Raises:
            FencedError: The id is another's.
            UnavailableError: No answer within the budget.
        """

        def failed(error: LogmirrorError) -> LogmirrorError:
            return error

        for _ in range(_TRIES):
            self._ask_once(words)
            answer = written(self._process, write, lambda answer: answer, failed)
            if not isinstance(answer, LogmirrorError):
                if not answer:
                    raise FencedError("another process has taken the transactional id")
                return answer
            self._process.world.schedule.sleep_ms(_ASKED_AGAIN_MS)
        raise UnavailableError("the coordinator did not answer in time")

    def _init(self, expected: Owner | None, *, is_holding: bool) -> Owner:
        own = self._repeat(
            "init producer id",
            lambda: self._transactions.take(self.transactional_id, expected, is_holding=is_holding),
        )
        assert isinstance(own, Owner)  # noqa: S101  # for mypy
        return own


class SimulatedFence(_Client):
    """See `Fence`."""

    _own: Owner | None = None

    def owner(self) -> Owner | None:
        """See `Fence.owner`."""
        self._ask_once("owner")
        return self._transactions.owner(self.transactional_id)

    def take(self, seen: Owner | None) -> bool:
        """See `Fence.take`."""
        own = self._own = self._init(None, is_holding=True)
        if seen is None:
            return own.producer_epoch == 0
        return not seen.is_holding and own.producer_epoch == seen.producer_epoch + 1

    def confirm(self) -> None:
        """See `Fence.confirm`."""
        if self.owner() != self._own:
            raise FencedError("another process has taken the right to write")

    def give_back(self) -> None:
        """See `Fence.give_back`."""
        own, self._own = self._own, None
        if own is not None:
            self._init(own, is_holding=False)


class SimulatedProducer(_Client):
    """See `TransactionalProducer`; it writes nothing but markers."""

    _own: Owner | None = None

    def init(self) -> ProducerIdentity:
        """See `TransactionalProducer.init`."""
        own = self._own = self._init(None, is_holding=True)
        return ProducerIdentity(own.producer_id, own.producer_epoch)

    def add_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """See `TransactionalProducer.add_partitions`."""
        del partitions  # there is one
        own = self._owned()
        self._repeat("add partitions", lambda: self._transactions.join(self.transactional_id, own))

    def end(self, *, commit: bool) -> None:
        """See `TransactionalProducer.end`."""
        del commit
        own = self._owned()
        self._repeat("end transaction", lambda: self._transactions.end(self.transactional_id, own))

    def await_markers(self) -> None:
        """See `TransactionalProducer.await_markers`."""
        self._ask_once("transaction")
        if self._transactions.owner(self.transactional_id) != self._owned():
            raise FencedError("another owner has taken the transactional id")

    def _owned(self) -> Owner:
        if self._own is None:
            raise FencedError("another owner has taken the transactional id")
        return self._own
